"""The kinds of attention of a transformers model: what it tells of them in its config and its attention modules."""

import inspect
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_distca.kernels import AttentionParams
from hf_distca.patches.tensor_parallel import kind_on_a_rank
from hf_distca.plan import AttentionKind

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""The name under which transformers' modules ask for their attention function."""
ROWWISE = ("moe", "mlp", "sparse", "dense")
"""Types of layers that compute each row by itself."""
MIXING = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
"""Types of layers that mix along the row otherwise than by attention, the hybrid ones besides it."""


class Reach(NamedTuple):
    """Which of the rows before it a row attends to in a layer, see `AttentionKind`; None for all."""

    window: int | None = None
    chunk: int | None = None


def decoder_attentions(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The attention layers of a model's decoder by name, as transformers names them."""
    of_decoder = _attentions(model.get_decoder())  # those of towers for images or sound are others
    return of_decoder or _attentions(model)  # some models call another module their decoder


def _attentions(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if is_attention(module)}


def is_attention(module: nn.Module) -> bool:
    """Whether a module is an attention layer of a decoder whose core attention a plan can move."""
    return is_named_attention(module) and calls_interface(module)


def is_named_attention(module: nn.Module) -> bool:
    """Whether a module is an attention layer of a decoder, as transformers names them."""
    return type(module).__name__.endswith(("Attention", "MLA")) and hasattr(module, "layer_idx")


def calls_interface(module: nn.Module) -> bool:
    """Whether a module computes attention by the function that transformers' AttentionInterface has for it."""
    forwards = (vars(cls).get("forward") for cls in type(module).__mro__)
    return any(
        INTERFACE in inspect.unwrap(forward).__code__.co_names for forward in forwards if inspect.isroutine(forward)
    )


def attention_kinds(model: PreTrainedModel, attentions: dict[str, nn.Module]) -> tuple[AttentionKind, ...]:
    """The different kinds of attention of a model's layers, in the order of the first layer of each.

    Where tensor parallelism divides the model, each has the heads of one rank.

    Args:
        model: a transformers model.
        attentions: its attention layers, see `decoder_attentions`.

    Raises:
        ValueError: a layer is of a type that is not known, such as one whose rows choose the rows that they attend
            to: its result for a document cut across ranks would be wrong. Or there is no layer, or
            tensor parallelism cannot divide its heads.
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
            f"{type(model).__name__} has no attention layers that can be found by transformers' names: a class "
            "...Attention with a layer_idx. Train it with stock attention and transformers' Trainer"
        )
    return tuple(kinds)


def attention_reaches(config: PreTrainedConfig) -> list[Reach]:
    """How far the attention of each layer reaches, or a single one that all layers have.

    Raises:
        ValueError: see `attention_kinds`.
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
            f"{type(config).__name__} has layers of type {unknown}, but a planned step is exact only for layers of "
            f"the types {sorted(known)}. Choose a model with these types only, or train this model with stock "
            "attention and transformers' Trainer"
        )
    return [known[layer_type] for layer_type in layer_types]


def hands_on(module: nn.Module, name: str) -> bool:
    """Whether an attention layer's forward names an argument of the attention function."""
    forward: Any = next(vars(cls)["forward"] for cls in type(module).__mro__ if "forward" in vars(cls))
    constants = inspect.unwrap(forward).__code__.co_consts
    return any(name in (constant if isinstance(constant, tuple) else (constant,)) for constant in constants)


def _kind(config: PreTrainedConfig, module: nn.Module, reach: Reach) -> AttentionKind:
    """The kind of one attention layer, whose own config this is."""
    window, chunk = reach
    if not hands_on(module, "sliding_window"):  # Moshi's config has one that its layers do not use
        window = None
    q_heads = getattr(config, "num_attention_heads", None)
    if q_heads is None:
        raise ValueError(
            f"{type(config).__name__} has no num_attention_heads, so the heads of {type(module).__name__} are unknown "
            "and its attention cannot be planned; train this model with stock attention and transformers' Trainer"
        )
    if getattr(config, "qk_nope_head_dim", None) is not None:  # latent attention: keys and values for every head
        dim_qk = config.qk_nope_head_dim + config.qk_rope_head_dim
        return AttentionKind(window, q_heads, q_heads, dim_qk, config.v_head_dim, chunk)
    kv_heads = q_heads // getattr(module, "num_key_value_groups", 1)  # so often does eager attention repeat them
    head_dim = getattr(module, "head_dim", None) or config.hidden_size // q_heads
    return AttentionKind(window, q_heads, kv_heads, head_dim, getattr(config, "v_head_dim", None) or head_dim, chunk)


def attention_params(config: PreTrainedConfig, kind: AttentionKind) -> AttentionParams:
    """What the model's layers of one kind ask of a kernel."""
    softcap = getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    return AttentionParams(scale=1.0, window=kind.window, softcap=softcap)
