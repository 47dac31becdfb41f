"""Mask function that goes with the attention function.

In a planned step the plan replaces the mask, and a [T, T] mask of a long row would not fit in memory. Only the
attention function knows whether a step is planned, so that it makes the mask if needed.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

CHANGING_MASKS = ("doge",)
"""Model types whose layers derive a mask of their own from the given mask."""


class DeferredMask:
    """Boolean attention mask [1, 1, T, T], made when an attention layer first asks for it.

    Attributes:
        local_size: rows of the layers' window or chunk; None for full attention.
        added_by_model: whether the model adds a mask of its own, beyond causality, windows and packing.
    """

    def __init__(self, local_size: int | None, added_by_model: bool, make: Callable[..., Tensor | None]) -> None:
        self.local_size = local_size
        self.added_by_model = added_by_model
        self._make = make
        self._made = False
        self._mask: Tensor | None = None

    def tensor(self) -> Tensor | None:
        """Return the mask as "sdpa" takes it: True where a row attends; None for plain causal attention."""
        if not self._made:
            self._mask, self._made = self._make(), True
        return self._mask

    def __getitem__(self, index: tuple[slice, ...]) -> "DeferredMask | Tensor":
        """Return the mask of selected rows, made now (for Gemma 4's logits); the mask of all rows stays deferred."""
        if all(part in (slice(None), slice(0, None)) for part in index):
            return self
        whole = self._make(allow_is_causal_skip=False)
        assert whole is not None
        return whole[index]

    def contiguous(self) -> "DeferredMask":
        """Return the mask itself: generation calls it, and the mask will be contiguous."""
        return self


def distca_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Tensor | DeferredMask | None:
    """Return the mask that "sdpa" uses, deferred if the step may be planned.

    A planned step has batch size 1, no padding and no cache. Other steps get their mask at once, and so do models that
    compute with the mask.

    Args: see `transformers.masking_utils.sdpa_mask`.
    """

    def make(**changed: Any) -> Tensor | None:
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            use_vmap=use_vmap,
            **{**kwargs, **changed},
        )

    if getattr(kwargs.get("config"), "model_type", None) in CHANGING_MASKS:
        return make()
    may_be_planned = batch_size == 1 and attention_mask is None and q_length == kv_length
    if not may_be_planned or isinstance(q_offset, Tensor) or q_offset != 0:
        return make()
    return DeferredMask(local_size, added_by_model=use_vmap, make=make)
