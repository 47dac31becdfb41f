"""Rotary embeddings of a planned step: each document has the frequencies of its own length.

For some types of RoPE (longrope, dynamic NTK) transformers chooses the frequencies of a call by its
longest position, and for dynamic NTK by earlier calls too. In a planned step a call has rows of
many documents, and other ranks have other rows of the same documents. `plan_rotary` gives such a
module a subclass, which computes the rows of a document as a new module would compute them for the
whole document alone. The module itself stays as it is.

A rotary embedding is called without keywords, so that no plan reaches it. The module that owns it
gets a subclass too, which makes the plan known while the owner's forward runs.

Shape suffixes: T rows, D head dim.
"""

import inspect
from copy import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_distca.checks.run_rules import STOCK_TRAINER
from hf_distca.checks.step_rules import PlannedStep
from hf_distca.dispatch.bound import BoundPlan
from hf_distca.models.decoder import base_model, stock_forward
from hf_distca.models.rotary_types import SCALING_BY_LENGTH, depends_on_length, rotary_modules
from hf_distca.patches.modules import KnowsPlan, running_plan, subclass, uncompiled
from hf_distca.patches.split import Parts, join_results

DOCUMENTS: Parts = ("the rotary embedding", STOCK_TRAINER)
"""Whose rows are divided, and the remedy if they cannot be divided, for error messages."""


def plan_rotary(model: PreTrainedModel) -> None:
    """Let rotary embeddings that depend on the longest position treat each document alone.

    The model is changed in place.
    """
    base = base_model(model)
    for name, module in rotary_modules(base).items():
        if isinstance(module, _PlannedRotary):
            continue
        module.__class__ = subclass(type(module), _PlannedRotary)
        owner = _owner(base, name)
        if not isinstance(owner, KnowsPlan):
            owner.__class__ = subclass(type(owner), KnowsPlan)


def _owner(model: nn.Module, name: str) -> nn.Module:
    """Return the module whose forward calls a module.

    A list of modules has no forward, so this is the nearest module around the list.
    """
    owner: nn.Module = nn.ModuleList()
    while isinstance(owner, nn.ModuleList | nn.ModuleDict):
        name = name.rpartition(".")[0]
        owner = model.get_submodule(name)
    return owner


class _PlannedRotary(nn.Module):
    """Base that precedes a rotary embedding's own class."""

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        plan = running_plan.get()
        options = {} if layer_type is None else {"layer_type": layer_type}
        if plan is None:
            return super().forward(x, position_ids, **options)
        return self._planned_forward(plan, x, position_ids, options)

    @uncompiled("documents have lengths that are new with each micro-batch")
    @torch.no_grad()
    def _planned_forward(
        self, plan: BoundPlan, x: Tensor, position_ids: Tensor, options: dict[str, str]
    ) -> Any:
        if position_ids.shape[-1] != plan.rows:
            raise PlannedStep.POSITIONS.error_here(
                module=type(self).__name__, positions=position_ids.shape[-1], rows=plan.rows
            )
        plan.ran.rotations += 1
        # 1. Join neighbouring segments whose documents have the same frequencies.
        chosen_lengths: list[int | None] = []
        sizes: list[int] = []
        for rows, document_length in plan.segments:
            chosen_length = _chosen_length(self, document_length, **options)
            if chosen_lengths and chosen_lengths[-1] == chosen_length:
                sizes[-1] += rows
            else:
                chosen_lengths.append(chosen_length)
                sizes.append(rows)
        # 2. Compute the rows of each of these segments with a copy of this module that has the
        #    segment's frequencies.
        forward = inspect.unwrap(stock_forward(self))  # without the choice of frequencies
        results: list[Any] = []
        positions_of_segments = position_ids.split(sizes, -1)
        for chosen_length, positions in zip(chosen_lengths, positions_of_segments, strict=True):
            rotary = _with_frequencies(self, chosen_length, x.device, **options)
            results.append(forward(rotary, x, positions, **options))
        if len(results) == 1:
            return results[0]
        return join_results("result", tuple(results), tuple(sizes), DOCUMENTS)


def _chosen_length(module: Any, length: int, layer_type: str | None = None) -> int | None:
    """Return the length by which a document's frequencies are chosen.

    Documents with the same result have the same frequencies. None stands for the frequencies of
    short documents.

    Args:
        module: the rotary embedding.
        length: tokens of the document.
        layer_type: type of the layers whose frequencies are asked for, if the module has several.
    """
    rope_type = _rope_type(module, layer_type)
    parameters = module.config.rope_parameters
    if layer_type is not None:
        parameters = parameters[layer_type]
    # Longrope has two sets of frequencies, and all long documents have the same.
    if type(module).__name__ in SCALING_BY_LENGTH or rope_type == "longrope":
        longest_short = parameters["original_max_position_embeddings"]
        return longest_short + 1 if length > longest_short else None
    if not depends_on_length(rope_type):
        return None
    return length if length > module.original_max_seq_len else None


def _rope_type(module: Any, layer_type: str | None) -> Any:
    """Return the type of RoPE of a rotary embedding, for a type of layers if it has several."""
    return module.rope_type if layer_type is None else module.rope_type[layer_type]


def _with_frequencies(
    module: Any, chosen_length: int | None, device: torch.device, layer_type: str | None = None
) -> Any:
    """Return a copy of a rotary embedding with the frequencies of documents of one length.

    Args:
        chosen_length: see `_chosen_length`.
    """
    rotary = copy(module)
    if type(module).__name__ in SCALING_BY_LENGTH:
        frequencies_D, _ = module.rope_init_fn(module.config)
        factor_name = "short_mscale" if chosen_length is None else "long_mscale"
        factor = module.config.rope_parameters[factor_name]
        # With this type the forward takes the factor that comes with the frequencies.
        rotary.config = SimpleNamespace(rope_parameters={"rope_type": "default"})
        rotary.rope_init_fn = lambda _: (frequencies_D, factor)
        return rotary
    prefix = "" if layer_type is None else f"{layer_type}_"
    if chosen_length is None:
        frequencies_D = getattr(module, f"{prefix}original_inv_freq")
    else:
        rope_type = _rope_type(module, layer_type)
        # transformers computes dynamic NTK with a tensor in float32; a branch on a fake tensor
        # would fail.
        seq_len = chosen_length if rope_type == "longrope" else torch.tensor(chosen_length)
        compute: Any = ROPE_INIT_FUNCTIONS[rope_type]
        frequencies_D, _ = compute(
            module.config, torch.device("cpu"), seq_len=seq_len, layer_type=layer_type
        )
    frequencies_D = frequencies_D.to(device, non_blocking=True)
    rotary._buffers = {**module._buffers, f"{prefix}inv_freq": frequencies_D}
    return rotary
