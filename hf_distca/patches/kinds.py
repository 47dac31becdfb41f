"""Kinds of attention of a transformers model, read from its config and its attention modules."""

import inspect
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_distca.kernels import AttentionParams
from hf_distca.patches.tensor_parallel import kind_on_a_rank
from hf_distca.plan import AttentionKind

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""Name under which transformers' modules look up their attention function."""
ROWWISE = ("moe", "mlp", "sparse", "dense")
"""Types of layers that compute each row independently."""
MIXING = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
"""Types of layers that mix along the row without attention; hybrid layers also have attention."""


class Reach(NamedTuple):
    """Earlier rows that a row attends to in a layer, see `AttentionKind`; None for all."""

    window: int | None = None
    chunk: int | None = None


def decoder_attentions(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the attention layers of a model's decoder by name."""
    of_decoder = _attentions(model.get_decoder())  # leave out towers for images or sound
    return of_decoder or _attentions(model)  # in some models get_decoder() returns another module


def _attentions(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if is_attention(module)}


def is_attention(module: nn.Module) -> bool:
    """Return whether a module is a decoder's attention layer whose core attention a plan can move."""
    return is_named_attention(module) and calls_interface(module)


def is_named_attention(module: nn.Module) -> bool:
    """Return whether a module is named as transformers names a decoder's attention layers."""
    return type(module).__name__.endswith(("Attention", "MLA")) and hasattr(module, "layer_idx")


def calls_interface(module: nn.Module) -> bool:
    """Return whether a module computes attention through transformers' AttentionInterface."""
    forwards = (vars(cls).get("forward") for cls in type(module).__mro__)
    return any(
        INTERFACE in inspect.unwrap(forward).__code__.co_names for forward in forwards if inspect.isroutine(forward)
    )


def attention_kinds(model: PreTrainedModel, attentions: dict[str, nn.Module]) -> tuple[AttentionKind, ...]:
    """Return the distinct kinds of attention of a model's layers, in layer order.

    Under tensor parallelism a kind has the heads of one rank.

    Raises:
        ValueError: there is no layer, a layer's type is unknown, or tensor parallelism cannot divide its heads.
            Unknown types, such as attention to chosen rows, would be wrong for documents cut across ranks.
    """
    config = model.config.get_text_config(decoder=True)
    reaches = attention_reaches(config)
    kinds: dict[AttentionKind, None] = {}
    for module in attentions.values():
        layer: Any = module.layer_idx
        own = config.per_layer_config[layer] if getattr(config, "is_heterogeneous", False) else config
        kind = _kind(own, module, reaches[(layer or 0) % len(reaches)])
        kinds[kind_on_a_rank(kind, model, module)] = None
    if not kinds:
        raise ValueError(
            f"{type(model).__name__} has no attention layers that are named as transformers names them: of a class "
            "...Attention and with a layer_idx; train it with stock attention and transformers' Trainer"
        )
    return tuple(kinds)


def attention_reaches(config: PreTrainedConfig) -> list[Reach]:
    """Return the reach of each layer's attention, or a single reach that all layers share.

    Raises:
        ValueError: a layer's type is unknown, see `attention_kinds`.
    """
    config = config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    layer_types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if layer_types is None:
        return [Reach(window)]
    everywhere = ("full_attention", "attention", "hybrid", "linear_attention", "conv", *ROWWISE)
    known = dict.fromkeys(everywhere, Reach())
    known |= dict.fromkeys(("sliding_attention", "hybrid_sliding"), Reach(window))
    known["chunked_attention"] = Reach(chunk=getattr(config, "attention_chunk_size", None))
    unknown = sorted(set(layer_types) - set(known))
    if unknown:
        raise ValueError(
            f"{type(config).__name__} has layers of type {unknown}; a planned step is exact only where every layer is "
            f"one of {sorted(known)}. Choose a model of these, or train this one with stock attention and "
            "transformers' Trainer"
        )
    return [known[layer_type] for layer_type in layer_types]


def hands_on(module: nn.Module, name: str) -> bool:
    """Return whether an attention layer's forward names an argument of the attention function."""
    forward: Any = next(vars(cls)["forward"] for cls in type(module).__mro__ if "forward" in vars(cls))
    constants = inspect.unwrap(forward).__code__.co_consts
    return any(name in (constant if isinstance(constant, tuple) else (constant,)) for constant in constants)


def _kind(config: PreTrainedConfig, module: nn.Module, reach: Reach) -> AttentionKind:
    """Return the kind of one attention layer, given its own config."""
    window, chunk = reach
    if not hands_on(module, "sliding_window"):  # Moshi's config has a window that its layers ignore
        window = None
    q_heads = getattr(config, "num_attention_heads", None)
    if q_heads is None:
        raise ValueError(
            f"{type(config).__name__} does not say how many heads {type(module).__name__} has (num_attention_heads), "
            "so its attention cannot be planned; train it with stock attention and transformers' Trainer"
        )
    if getattr(config, "qk_nope_head_dim", None) is not None:  # latent attention: keys and values for every head
        dim_qk = config.qk_nope_head_dim + config.qk_rope_head_dim
        return AttentionKind(window, q_heads, q_heads, dim_qk, config.v_head_dim, chunk)
    kv_heads = q_heads // getattr(module, "num_key_value_groups", 1)  # eager attention repeats K/V this often
    head_dim = getattr(module, "head_dim", None) or config.hidden_size // q_heads
    return AttentionKind(window, q_heads, kv_heads, head_dim, getattr(config, "v_head_dim", None) or head_dim, chunk)


def attention_params(config: PreTrainedConfig, kind: AttentionKind) -> AttentionParams:
    """Return the kernel parameters of a model's layers of one kind."""
    softcap = getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    return AttentionParams(scale=1.0, window=kind.window, softcap=softcap)
