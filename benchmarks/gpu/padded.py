"""Padded batches of rollouts, forward and backward with gradient checkpointing: stock "sdpa", and
packed by a plan.

A model of the sizes of Qwen3-0.6B with random weights, in the dtype of core attention, on one rank.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.models import new_model
from benchmarks.gpu.setting import Setting
from benchmarks.harness.padded import (
    AT_ONCE,
    Batch,
    forward_backward,
    keep_only_inputs_of_layers,
    padded_batches,
    rollout_lengths,
)
from hf_distca import Dispatcher, DistCAConfig, pack_padded
from hf_distca.dispatch.padded_rows import PaddedBatch, PaddedBatches

STOCK = "padded to all"
"""Eight sequences at a time, padded to the longest of all, as TRL's GRPO pads."""
PACKED = "packed, all at once"
STRATEGIES = {
    STOCK: ("sdpa", AT_ONCE, True),
    "padded to eight": ("sdpa", AT_ONCE, False),
    "packed, eight at a time": ("distca", AT_ONCE, False),
    PACKED: ("distca", None, False),
}
"""By name: the attention, sequences in a call of the model (None for all), and whether all have the
same columns."""
BOUNDS = {"loss": 5e-3, "norm of gradients": 2e-2}
"""Largest differences between strategies and the first one, over the value."""
LEAST_SPEED_UP = 2.5
"""Of packed over stock; an H200 had 9."""
MOST_BEFORE = 0.03
"""Most time before the model, of a step: reading the mask, planning, and moving row numbers to the
device."""


def check_padded(setting: Setting) -> Findings:
    """Steps of the same rollouts by each strategy; losses, gradients, times, memory, and the time
    before the model.

    The figure `over_packed` is the time of a step over that of packed rollouts, all at once.
    """
    findings = Findings()
    lengths = rollout_lengths(setting.rollouts, setting.rollout_scale)
    findings.figures |= {"sequences": len(lengths), "tokens": sum(lengths), "longest": max(lengths)}
    found: dict[str, dict[str, float]] = {}
    findings.figures["strategies"] = found
    for name, (attention, at_once, to_all) in STRATEGIES.items():
        free()
        with findings.trying(name):
            model = make_model(setting, attention)
            dispatcher = None
            if attention == "distca":
                config = DistCAConfig(tokens_per_rank=sum(lengths))
                dispatcher = pack_padded(model, config, setting.device, dtype=setting.dtype)
            batches = padded_batches(
                lengths, setting.rollout_model["vocab_size"], setting.device,
                to_all=to_all, at_once=at_once or len(lengths),
            )  # fmt: skip
            found[name] = measured(setting, model, batches, sum(lengths) - len(lengths))
            if dispatcher is not None:
                found[name] |= before_model(setting, dispatcher, batches, found[name]["step_s"])
            del model
    compare_strategies(findings, found, on_cuda=setting.on_cuda)
    return findings


def make_model(setting: Setting, attention: str) -> PreTrainedModel:
    config = {**setting.rollout_model, "max_position_embeddings": 65536, "use_cache": False}
    model = new_model(setting, attention, "qwen3", setting.dtype, config)
    keep_only_inputs_of_layers(model)
    return model


def measured(
    setting: Setting, model: PreTrainedModel, batches: Sequence[Batch], targets: int
) -> dict[str, float]:
    """Loss and norm of the gradients of a step, its median time, and the most memory of a step."""
    loss = forward_backward(model, batches, targets)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.stack([gradient.float().norm() for gradient in gradients]).norm().item()
    del gradients
    if setting.on_cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(setting.rollout_repeats):
        model.zero_grad()
        seconds.append(seconds_of(setting, lambda: forward_backward(model, batches, targets)))
    figures = {"loss": loss, "norm of gradients": norm, "step_s": statistics.median(seconds)}
    if setting.on_cuda:
        figures["memory_peak"] = torch.cuda.max_memory_allocated()
    return figures


def before_model(
    setting: Setting, dispatcher: Dispatcher, batches: Sequence[Batch], step_s: float
) -> dict[str, float]:
    """Seconds that packing and binding take, of batches that were not planned before, and their
    share of a step.
    """
    padded = [
        PaddedBatch({"input_ids": batch.input_ids}, batch.attention_mask) for batch in batches
    ]

    def pack() -> None:
        fresh = PaddedBatches(dispatcher)  # no plan is known
        for batch in padded:
            fresh.pack(lambda batch=batch: batch)

    seconds = statistics.median(
        seconds_of(setting, pack) for _ in range(setting.rollout_repeats + 1)
    )
    return {"before_model_s": seconds, "share_before_model": seconds / step_s}


def seconds_of(setting: Setting, call: Callable[[], Any]) -> float:
    setting.synchronize()
    begin = time.perf_counter()
    call()
    setting.synchronize()
    return time.perf_counter() - begin


def compare_strategies(
    findings: Findings, found: dict[str, dict[str, float]], *, on_cuda: bool
) -> None:
    """Compare all strategies with stock.

    Times are compared on a GPU only: a CPU's say nothing about a GPU.
    """
    if STOCK not in found or PACKED not in found:
        return
    stock, packed_s = found[STOCK], found[PACKED]["step_s"]
    for name, figures in found.items():
        figures["over_packed"] = figures["step_s"] / packed_s
        for what, bound in BOUNDS.items():
            difference = abs(figures[what] - stock[what]) / abs(stock[what])
            findings.at_most(difference, bound, f"{name}: difference of the {what}")
    if on_cuda:
        findings.at_most(
            1 / stock["over_packed"], 1 / LEAST_SPEED_UP, f"time of packed over {STOCK}"
        )
        findings.at_most(
            found[PACKED]["share_before_model"], MOST_BEFORE, "share of a step before the model"
        )


def free() -> None:
    """Give the memory of models that are gone back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
