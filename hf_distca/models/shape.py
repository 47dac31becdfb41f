"""Shape of a model: its active parameters, before and after core attention."""

from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_distca.models.decoder import base_model
from hf_distca.models.kinds import layers_by_kind
from hf_distca.sim.model import ModelShape

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names of the number of a layer's experts in configs."""


def weights_met(model: PreTrainedModel) -> dict[nn.Parameter, float]:
    """Return for each parameter how many of its numbers are active for a token.

    Embedding and output head, which may be tied, are left out. Experts count by the share of experts that a token
    uses.
    """
    share = _share_of_experts(model.config.get_text_config(decoder=True))
    tables = {id(m.weight) for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m is not None}
    return {
        parameter: count_of(parameter) * (share if ".experts." in name else 1.0)
        for name, parameter in model.named_parameters()
        if id(parameter) not in tables
    }


def count_of(parameter: Any) -> int:
    """Return the numbers of a parameter, even if ZeRO-3 divided it or bitsandbytes packed two into a byte."""
    if hasattr(parameter, "ds_numel"):
        return int(parameter.ds_numel)
    state = getattr(parameter, "quant_state", None)
    return int(state.shape.numel() if state is not None else parameter.numel())


def _share_of_experts(config: PreTrainedConfig) -> float:
    """Return the share of experts that a token uses."""
    every = next((count for name in EXPERTS if (count := getattr(config, name, None))), 1)
    return float(getattr(config, "num_experts_per_tok", None) or every) / every


def model_shape(model: nn.Module) -> ModelShape:
    """Return the shape of a model for simulations: its active parameters before and after core attention.

    Args:
        model: a transformers model, or a PEFT model around one; its weights may be on the meta device.
    """
    base, layers = base_model(model), layers_by_kind(model)
    hidden = base.config.get_text_config(decoder=True).hidden_size
    before = sum(
        count * hidden * (kind.q_heads * kind.dim_qk + kind.kv_heads * (kind.dim_qk + kind.dim_v))
        for kind, count in layers.items()
    )
    after = int(sum(weights_met(base).values()) - before)
    depth = sum(layers.values())
    head = base.get_output_embeddings()
    of_head = 0 if head is None else count_of(head.weight)
    return ModelShape(layers, hidden, before // depth, after // depth, of_head, base.num_parameters())
