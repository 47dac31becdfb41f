"""Kinds of attention of a transformers model, read from its config and its attention modules."""

from collections import Counter
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedConfig

from hf_distca.checks.model_rules import Models
from hf_distca.models.decoder import base_model, decoder_attentions, hands_on
from hf_distca.models.tensor_parallel import kind_on_a_rank
from hf_distca.plan import AttentionKind

ROWWISE = ("moe", "mlp", "sparse", "dense")
"""Types of layers that compute each row independently."""
MIXING = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
"""Types of layers that mix along the row without attention; hybrid layers also have attention."""
UNLIMITED = ("full_attention", "attention", "hybrid", "linear_attention", "conv", *ROWWISE)
"""Types of layers whose attention, if they have any, sees all earlier rows."""
WINDOWED = ("sliding_attention", "hybrid_sliding")
"""Types of layers whose attention sees the rows of a window."""


class Reach(NamedTuple):
    """Earlier rows that a row attends to in a layer, see `AttentionKind`; None for all."""

    window: int | None = None
    chunk: int | None = None


def layers_by_kind(model: nn.Module) -> Counter[AttentionKind]:
    """Return the number of attention layers of each kind, in layer order.

    Under tensor parallelism a kind has the heads of one rank.

    Raises:
        ValueError: a layer's type is unknown, or tensor parallelism cannot divide its heads.
            Unknown types, such as attention to chosen rows, would be wrong for documents cut across
            ranks.
    """
    model = base_model(model)
    config = model.config.get_text_config(decoder=True)
    reaches = attention_reaches(config)
    kinds: Counter[AttentionKind] = Counter()
    for module in decoder_attentions(model).values():
        layer: Any = module.layer_idx
        reach = reaches[(layer or 0) % len(reaches)]
        if not hands_on(module, "sliding_window"):
            # Moshi's config has a window that its layers ignore.
            reach = reach._replace(window=None)
        is_heterogeneous = getattr(config, "is_heterogeneous", False)
        layer_config = config.per_layer_config[layer] if is_heterogeneous else config
        kind = _kind_of_layer(module, layer_config, reach)
        kinds[kind_on_a_rank(kind, model, module)] += 1
    return kinds


def _kind_of_layer(attention: nn.Module, config: Any, reach: Reach) -> AttentionKind:
    """Return the kind of an attention layer with all heads. Raise ValueError without their number.

    Args:
        config: config of the layer.
    """
    q_heads = getattr(config, "num_attention_heads", None)
    if q_heads is None:
        config_class = type(config).__name__
        raise Models.NO_HEADS.error(config=config_class, attention=type(attention).__name__)
    if getattr(config, "qk_nope_head_dim", None) is not None:
        # Latent attention has keys and values for every head.
        kv_heads = q_heads
        dim_qk = config.qk_nope_head_dim + config.qk_rope_head_dim
        dim_v = config.v_head_dim
    else:
        # Eager attention repeats K and V so many times.
        repeats = getattr(attention, "num_key_value_groups", 1)
        kv_heads = q_heads // repeats
        dim_qk = getattr(attention, "head_dim", None) or config.hidden_size // q_heads
        dim_v = getattr(config, "v_head_dim", None) or dim_qk
    return AttentionKind(reach.window, q_heads, kv_heads, dim_qk, dim_v, reach.chunk)


def layer_types(config: PreTrainedConfig) -> list[str]:
    """Return the type of each decoder layer; empty if the config names none."""
    types: list[str] | None = getattr(config, "layer_types", None) or getattr(
        config, "layers_block_type", None
    )
    return types or []


def attention_reaches(config: PreTrainedConfig) -> list[Reach]:
    """Return the reach of each layer's attention, or a single reach that all layers share."""
    config = config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    types = layer_types(config)
    if not types:
        return [Reach(window)]
    reaches = dict.fromkeys(UNLIMITED, Reach())
    reaches |= dict.fromkeys(WINDOWED, Reach(window))
    reaches["chunked_attention"] = Reach(chunk=getattr(config, "attention_chunk_size", None))
    unknown_types = sorted(set(types) - set(reaches))
    if unknown_types:
        raise Models.UNKNOWN_LAYERS.error(
            config=type(config).__name__, types=unknown_types, known=sorted(reaches)
        )
    return [reaches[layer_type] for layer_type in types]
