"""What a transformers model tells about its attention: windows, sizes, and whether it can be planned."""

import inspect
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_distca.kernels.contract import AttentionParams
from hf_distca.patches.adapters import check_adapters
from hf_distca.planner.cost import RowBytes
from hf_distca.planner.micro_batch import PlanSettings

ATTENTION_NAME = "distca"


def attention_windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    """The attention windows of a model's layers; None stands for full causal attention.

    Raises:
        ValueError: a layer is neither full nor sliding-window attention (chunked or linear attention,
            state space): its result for a document cut across ranks would be wrong.
    """
    config = config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    layer_types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if layer_types is None:
        return (window,)
    known = {"full_attention": None, "attention": None, "sliding_attention": window}
    unknown = sorted(set(layer_types) - set(known))
    if unknown:
        raise ValueError(
            f"{type(config).__name__} has layers of type {unknown}; core attention can be moved between "
            f"ranks only where every layer is one of {sorted(known)}"
        )
    return tuple(dict.fromkeys(known[layer_type] for layer_type in layer_types))


def head_dims(config: PreTrainedConfig) -> tuple[int, int]:
    """Head dim of queries and keys, and that of values (another one with latent attention)."""
    config = config.get_text_config(decoder=True)
    if getattr(config, "qk_nope_head_dim", None) is not None:
        return config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return head_dim, head_dim


def attention_params(config: PreTrainedConfig, window: int | None) -> AttentionParams:
    """What the model's layers of one window ask of a kernel."""
    softcap = getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    return AttentionParams(scale=1.0, window=window, softcap=softcap)


def row_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> RowBytes:
    """Bytes of a row of Q, K and V, and O in one layer of the model, at the given dtype."""
    qk_dim, v_dim = head_dims(config)
    config = config.get_text_config(decoder=True)
    q_heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or q_heads
    size = dtype.itemsize
    return RowBytes(q=q_heads * qk_dim * size, kv=kv_heads * (qk_dim + v_dim) * size, o=q_heads * v_dim * size)


def plan_settings(
    model: PreTrainedModel, ranks: int, tokens_per_rank: int, dtype: torch.dtype | None = None, **options: Any
) -> PlanSettings:
    """The settings of plans that fit a model, once it is known that it can be planned.

    Args:
        model: a model with attn_implementation="distca".
        ranks: ranks that train together.
        tokens_per_rank: the most rows that a rank holds in a micro-batch.
        dtype: what core attention is computed in; None for the model's own. Under autocast give autocast's.
        options: the other fields of PlanSettings.

    Raises:
        ValueError: the model cannot be planned, see `check_model`.
    """
    check_model(model)
    return PlanSettings(
        ranks=ranks,
        tokens_per_rank=tokens_per_rank,
        windows=attention_windows(model.config),
        row_bytes=row_bytes(model.config, model.dtype if dtype is None else dtype),
        **options,
    )


def check_model(model: PreTrainedModel) -> None:
    """Raise unless a planned step of the model would be right, before any work starts.

    Args:
        model: a transformers model, or a PEFT model around one.

    Raises:
        ValueError: the model has no attention interface, does not use attn_implementation="distca", drops
            attention weights in training, does not hand the plan to its attention layers, or has an adapter of a
            kind that packed rows cannot train.
    """
    check_adapters(model)
    inner: Any = model
    model = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    config = model.config.get_text_config(decoder=True)
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(
            f"{type(model).__name__} does not run its attention through transformers' AttentionInterface, or drops "
            f"what is passed on to it; it can train with {_other_implementations(model)}, but not with planned "
            "attention"
        )
    name = config._attn_implementation
    if name != ATTENTION_NAME:
        raise ValueError(
            f"{type(model).__name__} runs attn_implementation={name!r}; load it with "
            f'attn_implementation="{ATTENTION_NAME}" or call model.set_attn_implementation("{ATTENTION_NAME}")'
        )
    dropout = getattr(config, "attention_dropout", 0.0) or 0.0
    if dropout > 0:
        raise ValueError(
            f"attention_dropout is {dropout}; dropped attention weights cannot be drawn alike on every worker. "
            "Set model.config.attention_dropout = 0.0 (and that of the attention modules)"
        )
    attention_windows(model.config)
    for module_name, module in model.named_modules():
        if is_attention(module) and not _takes_keywords(module):
            raise ValueError(
                f"{type(model).__name__} does not pass extra keywords on to {module_name} "
                f"({type(module).__name__}.forward has no **kwargs), so the plan would not reach its attention; "
                f"this model can train with {_other_implementations(model)}, but not with planned attention"
            )


def is_attention(module: nn.Module) -> bool:
    """Whether a module is an attention layer of a decoder, as transformers names them."""
    return type(module).__name__.endswith("Attention") and hasattr(module, "layer_idx")


def _takes_keywords(module: nn.Module) -> bool:
    parameters = inspect.signature(module.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def _other_implementations(model: PreTrainedModel) -> list[str]:
    """The stock attention implementations that the model says it supports."""
    supported = {
        "sdpa": "_supports_sdpa",
        "flash_attention_2": "_supports_flash_attn",
        "flex_attention": "_supports_flex_attn",
    }
    return ["eager", *(name for name, flag in supported.items() if getattr(model, flag, False))]
