"""How many of a model's weights a token meets."""

from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""How configs name the number of experts of a layer."""


def weights_met(model: PreTrainedModel) -> dict[nn.Parameter, float]:
    """For each parameter how many of its numbers a token is multiplied with; the embedding and the output head, which
    may be the same, are left out, and of experts those count that a token goes to."""
    share = share_of_experts(model.config.get_text_config(decoder=True))
    tables = {id(m.weight) for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m is not None}
    return {
        parameter: _count(parameter) * (share if ".experts." in name else 1.0)
        for name, parameter in model.named_parameters()
        if id(parameter) not in tables
    }


def _count(parameter: Any) -> int:
    """Numbers of a parameter, also where ZeRO-3 has divided it, or bitsandbytes packs two into a byte."""
    if hasattr(parameter, "ds_numel"):
        return int(parameter.ds_numel)
    state = getattr(parameter, "quant_state", None)
    return int(state.shape.numel() if state is not None else parameter.numel())


def share_of_experts(config: PreTrainedConfig) -> float:
    """To how many of the experts a token goes, as a share of all."""
    every = next((count for name in EXPERTS if (count := getattr(config, name, None))), 1)
    return float(getattr(config, "num_experts_per_tok", None) or every) / every
