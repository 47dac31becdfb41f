"""Table of modules that mix rows in order and whose documents may be cut between ranks.

Rows of these modules depend on each other only in functions that the modules look up under global
names. A planned step gives a module other functions in their place, and runs the module once on all
rows. Of any other module nothing is known: it runs document by document, on whole documents.
"""

import inspect
from typing import Any

from torch import nn

from hf_distca.models.decoder import mixing_layers, mixing_modules, stock_forward

CONVOLUTION = "causal_conv1d_fn"
DELTA_RULE = "torch_chunk_gated_delta_rule"
KIMI_DELTA_RULE = "chunk_kimi_delta_attention"
SCAN = "mamba2_chunk_scan"
CONVOLUTION_AND_SCAN = "mamba2_split_conv1d_scan_combined"
"""One kernel for a whole Mamba-2 module; it returns None where the kernel is not installed."""
LIGHTNING = "lightning attention"
"""Not a function: a recurrence inside the module's forward."""
LIGHTNING_PARTS = {"qkv_proj", "act_fn", "norm", "output_gate", "out_proj"}
"""Modules around the recurrence, by which a planned step knows the forward."""
RECURRENCES = {DELTA_RULE, KIMI_DELTA_RULE, SCAN, LIGHTNING}
"""Names that carry a state from row to row."""

FUNCTIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"), (CONVOLUTION,)),
    **dict.fromkeys(
        (
            "Qwen3NextGatedDeltaNet",
            "Qwen3_5GatedDeltaNet",
            "Qwen3_5MoeGatedDeltaNet",
            "OlmoHybridGatedDeltaNet",
        ),
        (CONVOLUTION, DELTA_RULE),
    ),
    **dict.fromkeys(
        ("KimiLinearDeltaAttention", "BailingHybridDeltaAttention"), (CONVOLUTION, KIMI_DELTA_RULE)
    ),
    **dict.fromkeys(
        (
            "BambaMixer",
            "FalconH1Mixer",
            "GraniteMoeHybridMambaLayer",
            "NemotronHMamba2Mixer",
            "Zamba2MambaMixer",
        ),
        (CONVOLUTION, SCAN),
    ),
    "MiniMaxLightningAttention": (LIGHTNING,),
}
"""Functions in which rows of a module depend on each other, by the module's class; each is called
once, in order."""

WHOLE = {
    "JambaMambaMixer": "Mamba-1 decays each state by a number of its own",
    "ZambaMambaMixer": "Mamba-1 decays each state by a number of its own",
    "RecurrentGemmaRecurrentBlock": "its recurrence runs token by token inside the module",
    "ZayaCCAProjection": "its convolutions and its delayed values are written into its forward",
}
"""Reasons why documents of a module stay whole."""


def functions(module: nn.Module) -> tuple[str, ...] | None:
    """Return the functions in which a module's rows depend on each other.

    None if that is not known.
    """
    names = FUNCTIONS.get(type(module).__name__)
    if names is None:
        return None
    forward: Any = inspect.unwrap(stock_forward(module))
    if LIGHTNING in names:
        is_known = {name for name, _ in module.named_children()} == LIGHTNING_PARTS
    else:
        is_known = all(name in forward.__globals__ for name in names)
    return names if is_known and forward.__module__.startswith("transformers.") else None


def all_mixing_modules(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules of a model's decoder layers that mix along the row."""
    return [module for layer in mixing_layers(model) for module in mixing_modules(layer)]


def halo_widths(model: nn.Module) -> set[int]:
    """Return how many rows before a row the convolutions of a model's mixing modules read."""
    return {
        convolution.kernel_size[0] - 1
        for module in all_mixing_modules(model)
        for convolution in module.modules()
        if isinstance(convolution, nn.Conv1d)
    }


def uncuttable(model: nn.Module) -> nn.Module | None:
    """Return a mixing module of a model whose documents must stay whole; None if there is none."""
    modules = all_mixing_modules(model)
    return next((module for module in modules if functions(module) is None), None)
