"""Shape of a model: its active parameters, before and after core attention."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_distca.models.decoder import base_model, has_attention, mixing_layers, mixing_modules
from hf_distca.models.kinds import layers_by_kind
from hf_distca.models.mixing import LIGHTNING, RECURRENCES, SCAN, functions
from hf_distca.predict.shapes import MixingShape, ModelShape

LAST = ("out_proj", "o_proj")
"""Names of the last matrix of a mixing module."""

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names of the number of a layer's experts in configs."""


def weights_met(model: PreTrainedModel) -> dict[nn.Parameter, float]:
    """Return for each parameter how many of its numbers are active for a token.

    Embedding and output head, which may be tied, are left out. Experts count by the share of
    experts that a token uses.
    """
    config = model.config.get_text_config(decoder=True)
    experts = next((count for name in EXPERTS if (count := getattr(config, name, None))), 1)
    share = float(getattr(config, "num_experts_per_tok", None) or experts) / experts
    tables = {
        id(m.weight)
        for m in (model.get_input_embeddings(), model.get_output_embeddings())
        if m is not None
    }
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


def model_shape(model: nn.Module) -> ModelShape:
    """Return the shape of a model for simulations: its active parameters before and after core attention."""
    base, layers = base_model(model), layers_by_kind(model)
    hidden = base.config.get_text_config(decoder=True).hidden_size
    weights, mixing = weights_met(base), mixing_shape(base)
    before = sum(
        count * hidden * (kind.q_heads * kind.dim_qk + kind.kv_heads * (kind.dim_qk + kind.dim_v))
        for kind, count in layers.items()
    )
    after = int(sum(weights.values()) - before)
    if mixing is not None:
        after -= mixing.layers * (mixing.before + mixing.after)
    depth = sum(layers.values())
    head = base.get_output_embeddings()
    of_head = 0 if head is None else count_of(head.weight)
    return ModelShape(
        layers, hidden, before // depth, after // depth, of_head, base.num_parameters(), mixing
    )


def mixing_shape(model: PreTrainedModel) -> MixingShape | None:
    """Return the sizes of a model's layers that mix rows in order; None if it has none."""
    weights: Mapping[Any, float] = weights_met(model)

    def active(module: nn.Module) -> float:
        return sum(weights.get(parameter, 0.0) for parameter in module.parameters())

    found: list[Any] = []
    before = after = 0.0
    for layer in mixing_layers(model):
        modules = mixing_modules(layer)
        own = sum(map(active, modules))
        last = sum(
            active(getattr(each, name)) for each in modules for name in LAST if hasattr(each, name)
        )
        before += own - last
        # Beside attention a module's own matrices count; in a layer of its own all of the layer's.
        after += last if has_attention(layer) else last + active(layer) - own
        found += modules
    if not found:
        return None
    module = found[0]
    convolution = next((inner for inner in module.modules() if isinstance(inner, nn.Conv1d)), None)
    channels, width = (
        (convolution.out_channels, convolution.kernel_size[0] - 1) if convolution else (0, 0)
    )
    sizes = len(found), round(before / len(found)), round(after / len(found)), channels, width
    names = functions(module) or ()
    if not RECURRENCES.intersection(names):  # no recurrence, or one of which nothing is known
        return MixingShape(*sizes)
    if LIGHTNING in names:
        return MixingShape(*sizes, module.num_attention_heads, (module.head_dim, module.head_dim))
    heads = getattr(module, "num_v_heads", None) or module.num_heads
    if SCAN in names:
        return MixingShape(*sizes, heads, (module.ssm_state_size, module.head_dim))
    rows, columns = (
        getattr(module, name, None) or module.head_dim for name in ("head_k_dim", "head_v_dim")
    )
    return MixingShape(*sizes, heads, (rows, columns), delta_rule=True)
