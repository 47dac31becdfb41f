"""Attention and mask functions that transformers calls under attn_implementation="distca".

In a planned step the plan replaces the mask: a [T, T] mask of a long row would not fit in memory.
Only the attention function knows whether a step is planned. It therefore makes the mask, where one
is needed.

Shape suffixes: B batch, H query heads, G key/value heads, T rows, S key/value rows, D head dim of
queries and keys, E head dim of values.
"""

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils.logging import get_logger

from hf_distca.checks.refusal import Refusal
from hf_distca.checks.step_rules import PlannedStep
from hf_distca.dispatch.bound import BoundPlan
from hf_distca.dispatch.core_attention import disaggregated_attention
from hf_distca.kernels import AttentionParams
from hf_distca.models.kinds import Reach, attention_reaches
from hf_distca.models.model_facts import CHANGING_MASKS
from hf_distca.models.rotary_types import config_depends_on_length
from hf_distca.patches.modules import uncompiled
from hf_distca.plan import PLAN_KEY

UNPLANNED = (
    "a model with attn_implementation='distca' trains on {ranks} ranks without plans, so nothing "
    "is balanced: train it with DistCATrainer or another trainer of hf_distca, call "
    "make_dispatcher or pack_padded in a custom loop, or load it with attn_implementation='sdpa'"
)
"""Warning about a training that plans nothing, such as one by transformers' own Trainer."""
PREPARED = "distca_prepared"
"""Attribute of modules whose model was prepared for planned steps."""

logger = get_logger(__name__)


class DeferredMask:
    """Boolean attention mask [1, 1, T, T], made when an attention layer first asks for it.

    Attributes:
        local_size: rows of the layers' window or chunk; None for full attention.
        added_by_model: whether the model adds a mask of its own, beyond causality, windows and
            packing.
    """

    def __init__(
        self, local_size: int | None, added_by_model: bool, make: Callable[..., Tensor | None]
    ) -> None:
        self.local_size = local_size
        self.added_by_model = added_by_model
        self._make = make

    @cached_property
    def tensor(self) -> Tensor | None:
        """Mask as "sdpa" takes it: True where a row attends; None for plain causal attention."""
        return self._make()

    def __getitem__(self, index: tuple[slice, ...]) -> "DeferredMask | Tensor":
        """Return the mask of selected rows, made now (for Gemma 4's logits).

        The mask of all rows stays deferred.
        """
        if all(part in (slice(None), slice(0, None)) for part in index):
            return self
        mask = self._make(allow_is_causal_skip=False)
        assert mask is not None
        return mask[index]

    def contiguous(self) -> "DeferredMask":
        """Return the mask itself: generation calls it, and the mask will be contiguous."""
        return self


Mask = Tensor | DeferredMask | None


def distca_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute core attention of one layer.

    It is computed as planned if the batch carries a plan, and otherwise as "sdpa" computes it.

    Args:
        query: [B, H, T, D], after position embedding.
        key: [B, G, S, D].
        value: [B, G, S, E].
        scaling: factor on the scores; None for 1/√D.
        kwargs: sliding_window, rows of the layer's window; softcap; s_aux, [H] learned attention
            sinks (gpt-oss); and in a planned step the micro-batch's plan.

    Returns:
        [B, T, H, E], and None for the attention weights, which are never materialised.

    Raises:
        ValueError: a planned step asks for an attention that a plan cannot express.
    """
    plan = kwargs.pop(PLAN_KEY, None)
    if plan is not None:
        return _planned_attention(
            module, query, key, value, attention_mask, plan, dropout, scaling, **kwargs
        ), None
    if module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        _warn_if_unplanned(module)
    mask = attention_mask.tensor if isinstance(attention_mask, DeferredMask) else attention_mask
    softcap = kwargs.get("softcap")
    sinks_H = kwargs.get("s_aux")
    if softcap is None and sinks_H is None:
        return sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, **kwargs)
    # "sdpa" refuses soft-capped scores and ignores sinks.
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    weights_BHTS = _attention_weights(query, key, mask, scale, softcap, sinks_H)
    weights_BHTS = nn.functional.dropout(weights_BHTS, dropout, training=module.training)
    value_BHSE = repeat_kv(value, query.shape[1] // value.shape[1])
    return (weights_BHTS @ value_BHSE).transpose(1, 2).contiguous(), None


def _attention_weights(
    query_BHTD: Tensor,
    key_BGSD: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Return attention weights [B, H, T, S] with soft-capped scores and learned sinks.

    Args:
        mask: True where a row attends; None for plain causal attention.
    """
    batch, heads, rows, _ = query_BHTD.shape
    key_BHSD = repeat_kv(key_BGSD, heads // key_BGSD.shape[1])
    key_rows = key_BHSD.shape[2]
    scores_BHTS = query_BHTD @ key_BHSD.transpose(2, 3) * scale
    if softcap is not None:
        scores_BHTS = softcap * torch.tanh(scores_BHTS / softcap)
    # A single row is the newest one, which attends to all rows.
    if mask is None and rows > 1:
        mask = torch.ones((rows, key_rows), dtype=torch.bool, device=query_BHTD.device).tril()
    if mask is not None:
        scores_BHTS = scores_BHTS.masked_fill(~mask, torch.finfo(scores_BHTS.dtype).min)
    if sinks_H is not None:
        # A sink takes part in the softmax as one more column.
        sinks_BHT1 = sinks_H.view(1, -1, 1, 1).expand(batch, -1, rows, 1)
        scores_BHTS = torch.cat([scores_BHTS, sinks_BHT1], dim=-1)
    weights_BHTS = scores_BHTS.softmax(-1, dtype=torch.float32).to(query_BHTD.dtype)
    return weights_BHTS[..., :key_rows]


def _warn_if_unplanned(module: nn.Module) -> None:
    """Warn once if several ranks train a model that was never prepared for planned steps."""
    if hasattr(module, PREPARED) or not (dist.is_available() and dist.is_initialized()):
        return
    ranks = dist.get_world_size()
    if ranks > 1 and dist.get_rank() == 0:
        logger.warning_once(UNPLANNED.format(ranks=ranks))


@uncompiled("core attention follows a plan that is new with each micro-batch")
def _planned_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    plan: BoundPlan,
    dropout: float,
    scaling: float | None,
    /,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute core attention [1, T, H, E] as planned. The arguments are those of the model."""
    reach = Reach(sliding_window, attention_chunk(module))
    problem = next(_problems(module, query, mask, plan, dropout, reach, kwargs), None)
    if problem is not None:  # on every rank
        layer = getattr(module, "layer_idx", "?")
        refusal, values = problem
        raise refusal.error_here(module=f"{type(module).__name__} (layer {layer})", **values)
    plan.ran.attentions += 1
    if getattr(module, "attn_temperature_tuning", False):
        query = scaled_by_position(module, query, plan)
    # Autocast leaves rotated queries and keys in float32, values not.
    device_type = query.device.type
    autocast = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if autocast else value.dtype
    q_THD = _rows_first(query).to(dtype)
    k_TGD = _rows_first(key).to(dtype)
    v_TGE = _rows_first(value).to(dtype)
    scale = q_THD.shape[-1] ** -0.5 if scaling is None else scaling
    params = AttentionParams(scale=scale, window=sliding_window, softcap=softcap)
    o_THE = disaggregated_attention(
        q_THD, k_TGD, v_TGE, s_aux, plan, params, module, chunk=reach.chunk
    )
    return o_THE.unsqueeze(0)


def _rows_first(states_1HTD: Tensor) -> Tensor:
    """Return queries, keys or values as [T, H, D]."""
    # Not states_1HTD[0], whose backward copies the gradient into zeros.
    return states_1HTD.squeeze(0).transpose(0, 1)


def attention_chunk(module: Any) -> int | None:
    """Return the rows of an attention layer's chunks; None for no chunks."""
    config: Any = getattr(module, "config", None)
    is_chunked = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    return attention_reaches(config)[module.layer_idx].chunk if is_chunked else None


def _problems(
    module: Any,
    query: Tensor,
    mask: Mask,
    plan: BoundPlan,
    dropout: float,
    reach: Reach,
    kwargs: dict[str, Any],
) -> Iterator[tuple[Refusal, dict[str, Any]]]:
    """Yield why a planned step cannot compute the attention that a model asks for.

    With the values of the refusal's texts.
    """
    if dropout > 0:
        yield PlannedStep.DROPOUT, {"dropout": dropout}
    if query.shape[0] != 1:
        yield PlannedStep.SEVERAL_ROWS, {"rows": query.shape[0]}
    if isinstance(mask, Tensor):
        yield PlannedStep.MASK, {"shape": list(mask.shape)}
    elif mask is not None and mask.added_by_model:
        yield PlannedStep.ADDED_MASK, {}
    elif mask is not None and mask.local_size not in (None, *reach):
        yield PlannedStep.LOCAL_MASK, {"size": mask.local_size, **reach._asdict()}
    if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        yield PlannedStep.NOT_CAUSAL, {}
    if plan.ran.rotations == 0 and _needs_lengths(module):
        yield PlannedStep.LONGEST_OF_ROWS, {}
    for name in ("position_bias", "cache"):
        if kwargs.get(name) is not None:
            yield PlannedStep.OTHER_INPUT, {"name": name}


def _needs_lengths(module: Any) -> bool:
    """Return whether an attention layer's rotary embedding depends on the lengths of documents.

    Found out once.
    """
    if not hasattr(module, "rotates_by_length"):
        module.rotates_by_length = config_depends_on_length(getattr(module, "config", None))
    rotates_by_length: bool = module.rotates_by_length
    return rotates_by_length


def scaled_by_position(module: Any, query_BHTD: Tensor, plan: BoundPlan) -> Tensor:
    """Return queries of Llama 4, scaled by their positions in their documents.

    Layers without a rotary embedding scale queries. The model has scaled them by positions that it
    counts from the first row of the call, across documents.
    """
    longest = max(plan.rows, plan.last_position + 1)
    if module.use_rope or longest < module.floor_scale:  # every factor is 1
        return query_BHTD

    def factors(positions_T: Tensor) -> Any:
        steps_T = torch.floor((positions_T.float() + 1.0) / module.floor_scale)
        return torch.log1p(steps_T) * module.attn_scale + 1.0

    positions_of_call_T = torch.arange(plan.rows, device=query_BHTD.device)
    factor_T = factors(plan.positions) / factors(positions_of_call_T)
    scaled: Tensor = (query_BHTD * factor_T[:, None]).to(query_BHTD.dtype)
    return scaled


def distca_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Mask:
    """Return the mask that "sdpa" uses, deferred if the step may be planned.

    A planned step has batch size 1, no padding and no cache. Other steps get their mask at once,
    and so do models that compute with the mask.
    """
    make = partial(
        sdpa_mask,
        batch_size,
        q_length,
        kv_length,
        q_offset=q_offset,
        attention_mask=attention_mask,
        **kwargs,
    )
    config = kwargs.get("config")
    may_be_planned = batch_size == 1 and attention_mask is None and q_length == kv_length
    changes_masks = getattr(config, "model_type", None) in CHANGING_MASKS
    if changes_masks or not may_be_planned or isinstance(q_offset, Tensor) or q_offset != 0:
        # Layers that share keys (Gemma 4) select rows of a prompt's mask, and None would let rows
        # see unused cache.
        selects_rows = q_length > 1 and getattr(config, "num_kv_shared_layers", None)
        return make(allow_is_causal_skip=False) if selects_rows else make()
    return DeferredMask(kwargs.get("local_size"), kwargs.get("use_vmap", False), make)
