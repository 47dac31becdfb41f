"""Attention function that transformers calls under attn_implementation="distca".

Shape suffixes: B batch, H query heads, G key/value heads, T rows, S key/value rows, D head dim of queries and keys, E
head dim of values.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from hf_distca.dispatch.attention import disaggregated_attention
from hf_distca.dispatch.bound import BoundPlan
from hf_distca.kernels import AttentionParams
from hf_distca.patches.kinds import Reach, attention_reaches
from hf_distca.patches.masks import DeferredMask
from hf_distca.patches.row_numbers import scaled_by_position
from hf_distca.patches.uncompiled import uncompiled


def distca_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | DeferredMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    distca_plan: BoundPlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute core attention of one layer: as planned if the batch carries a plan, else as "sdpa" does.

    Args:
        query: [B, H, T, D], after position embedding.
        key: [B, G, S, D].
        value: [B, G, S, E].
        scaling: factor on the scores; None for 1/√D.
        sliding_window: rows of the layer's window; None for full attention.
        s_aux: [H] learned attention sinks (gpt-oss).
        distca_plan: the micro-batch's plan, under PLAN_KEY; None outside a planned step.

    Returns:
        [B, T, H, E], and None for the attention weights, which are never materialised.

    Raises:
        ValueError: a planned step asks for an attention that a plan cannot express.
    """
    if distca_plan is None:
        mask = attention_mask.tensor() if isinstance(attention_mask, DeferredMask) else attention_mask
        if softcap is None and s_aux is None:
            kwargs["sliding_window"] = sliding_window
            return sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, **kwargs)
        return _eager_attention(module, query, key, value, mask, dropout, scaling, softcap, s_aux), None

    planned = _planned_attention(
        module,
        (query, key, value),
        attention_mask,
        dropout,
        scaling,
        sliding_window,
        softcap,
        s_aux,
        distca_plan,
        kwargs,
    )
    return planned, None


@uncompiled("core attention follows a plan that is new with each micro-batch")
def _planned_attention(
    module: nn.Module,
    states: tuple[Tensor, Tensor, Tensor],
    attention_mask: Tensor | DeferredMask | None,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: Tensor | None,
    plan: BoundPlan,
    kwargs: dict[str, Any],
) -> Tensor:
    """Compute core attention of one layer as planned: [B, T, H, E].

    Args: see `distca_attention`; states are query, key and value.
    """
    query, key, value = states
    if getattr(module, "attn_temperature_tuning", False):
        query = scaled_by_position(module, query, plan)
    chunk = attention_chunk(module)
    _check_planned(module, query, attention_mask, dropout, Reach(sliding_window, chunk), kwargs)
    plan.ran.attentions += 1
    dtype = _compute_dtype(query, value)
    # Not x[0], whose backward copies the gradient into zeros.
    q_THD, k_TGD, v_TGE = (x.squeeze(0).transpose(0, 1).to(dtype) for x in (query, key, value))
    params = AttentionParams(
        scale=q_THD.shape[-1] ** -0.5 if scaling is None else scaling, window=sliding_window, softcap=softcap
    )
    return disaggregated_attention(q_THD, k_TGD, v_TGE, s_aux, plan, params, module, chunk=chunk).unsqueeze(0)


def attention_chunk(module: nn.Module) -> int | None:
    """Return the rows of an attention layer's chunks; None for no chunks."""
    config: Any = getattr(module, "config", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None or "chunked_attention" not in layer_types:
        return None
    reaches: dict[Any, Reach] = dict(enumerate(attention_reaches(config)))
    return reaches[module.layer_idx].chunk


def _compute_dtype(query: Tensor, value: Tensor) -> torch.dtype:
    """Return one dtype for Q, K and V: autocast leaves rotated queries and keys in float32, values not."""
    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return value.dtype


def _check_planned(
    module: nn.Module,
    query: Tensor,
    attention_mask: Tensor | DeferredMask | None,
    dropout: float,
    reach: Reach,
    kwargs: dict[str, Any],
) -> None:
    """Raise, alike on every rank, if a planned step cannot compute the attention that the model asks for."""
    layer = f"{type(module).__name__} (layer {getattr(module, 'layer_idx', '?')})"
    if dropout > 0:
        raise ValueError(
            f"{layer} asks for attention dropout {dropout} in a planned step; set model.config.attention_dropout = 0.0"
        )
    if query.shape[0] != 1:
        raise ValueError(
            f"a planned step has batch size 1 (rows packed without padding), got {query.shape[0]}; put all documents "
            "into one row"
        )
    if isinstance(attention_mask, Tensor):
        raise ValueError(
            f"{layer} got an attention_mask of shape {list(attention_mask.shape)} in a planned step; pack documents "
            "without padding and leave attention_mask out"
        )
    if isinstance(attention_mask, DeferredMask):
        if attention_mask.added_by_model:
            raise ValueError(
                f"{layer} lays a mask of its own over the causal one, which a plan cannot express; train this model "
                "with stock attention and transformers' Trainer"
            )
        if attention_mask.local_size not in (None, *reach):
            raise ValueError(
                f"{layer} masks by a local size of {attention_mask.local_size}, but has "
                f"sliding_window={reach.window} and chunks of {reach.chunk} rows; a plan knows full, sliding-window "
                "and chunked attention only, so this model cannot train with planned attention"
            )
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise ValueError(
            f"{layer} is not causal; a plan knows causal attention only: train this model with stock attention and "
            "transformers' Trainer"
        )
    for name in ("position_bias", "cache"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{layer} passes {name}, which a planned step cannot use; train this model with stock attention and "
                "transformers' Trainer"
            )


def _eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Compute attention with soft-capped scores or sinks outside a planned step.

    "sdpa" refuses or ignores both.

    Args: see `distca_attention`; mask is boolean [B, 1, T, S], or None for plain causal attention.

    Returns:
        [B, T, H, E].
    """
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scores_BHTS = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores_BHTS = softcap * torch.tanh(scores_BHTS / softcap)
    if mask is None and query.shape[2] > 1:
        mask = torch.ones(scores_BHTS.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores_BHTS = scores_BHTS.masked_fill(~mask, torch.finfo(scores_BHTS.dtype).min)
    if s_aux is not None:
        sinks_BHT1 = s_aux.view(1, -1, 1, 1).expand(scores_BHTS.shape[0], -1, scores_BHTS.shape[2], 1)
        scores_BHTS = torch.cat([scores_BHTS, sinks_BHT1], dim=-1)
    weights_BHTS = scores_BHTS.softmax(-1, dtype=torch.float32).to(query.dtype)[..., : key.shape[2]]
    weights_BHTS = nn.functional.dropout(weights_BHTS, dropout, training=module.training)
    return (weights_BHTS @ value).transpose(1, 2).contiguous()
