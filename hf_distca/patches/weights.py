"""Counts of the active parameters of a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_distca.plan import AttentionKind

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names of the number of a layer's experts in configs."""


def weights_met(model: PreTrainedModel) -> dict[nn.Parameter, float]:
    """Return for each parameter how many of its numbers are active for a token.

    Embedding and output head, which may be tied, are left out. Experts count by the share of experts that a token
    uses.
    """
    share = share_of_experts(model.config.get_text_config(decoder=True))
    tables = {id(m.weight) for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m is not None}
    return {
        parameter: _count(parameter) * (share if ".experts." in name else 1.0)
        for name, parameter in model.named_parameters()
        if id(parameter) not in tables
    }


def _count(parameter: Any) -> int:
    """Return the numbers of a parameter, even if ZeRO-3 divided it or bitsandbytes packed two into a byte."""
    if hasattr(parameter, "ds_numel"):
        return int(parameter.ds_numel)
    state = getattr(parameter, "quant_state", None)
    return int(state.shape.numel() if state is not None else parameter.numel())


def share_of_experts(config: PreTrainedConfig) -> float:
    """Return the share of experts that a token uses."""
    every = next((count for name in EXPERTS if (count := getattr(config, name, None))), 1)
    return float(getattr(config, "num_experts_per_tok", None) or every) / every


@dataclass(frozen=True)
class MatrixWeights:
    """Active parameters in matrices.

    Attributes:
        before: weights before core attention, the mean over layers.
        after: weights after core attention, the mean over layers.
    """

    hidden: int
    before: int
    after: int
    head: int


def matrix_weights(model: PreTrainedModel, layers: Mapping[AttentionKind, int]) -> MatrixWeights:
    """Count a model's weights before and after core attention.

    Args:
        model: a transformers model; its weights may be on the meta device.
    """
    hidden = model.config.get_text_config(decoder=True).hidden_size
    met = sum(weights_met(model).values())
    before = sum(
        count * hidden * (kind.q_heads * kind.dim_qk + kind.kv_heads * (kind.dim_qk + kind.dim_v))
        for kind, count in layers.items()
    )
    depth = sum(layers.values())
    head = model.get_output_embeddings()
    return MatrixWeights(
        hidden, before // depth, int(met - before) // depth, 0 if head is None else _count(head.weight)
    )
