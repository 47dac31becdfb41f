"""The mask function that goes with the attention function.

In a planned step the plan says which rows attend to which, and a [T, T] mask of a long row of documents
would not even fit in memory. Whether a step is planned is known in the attention function only, so a mask
that may not be needed is made there.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

CHANGING_MASKS = ("doge",)
"""Types of models whose layers compute a mask of their own from the one they get."""


class DeferredMask:
    """A boolean attention mask [1, 1, T, T] that is made when an attention layer first asks for it.

    Attributes:
        local_size: size of the window or chunk of the layers it is for; None for full attention.
        added_by_model: the model overlays a mask of its own, beyond causality, windows and packing.
    """

    def __init__(self, local_size: int | None, added_by_model: bool, make: Callable[..., Tensor | None]) -> None:
        self.local_size = local_size
        self.added_by_model = added_by_model
        self._make = make
        self._made = False
        self._mask: Tensor | None = None

    def tensor(self) -> Tensor | None:
        """The mask as "sdpa" takes it: True where a row attends; None for plain causal attention."""
        if not self._made:
            self._mask, self._made = self._make(), True
        return self._mask

    def __getitem__(self, index: tuple[slice, ...]) -> "DeferredMask | Tensor":
        """The mask of some rows, made now (Gemma 4: those whose logits are asked for); that of all stays deferred."""
        if all(part in (slice(None), slice(0, None)) for part in index):
            return self
        whole = self._make(allow_is_causal_skip=False)
        assert whole is not None
        return whole[index]

    def contiguous(self) -> "DeferredMask":
        """As it is: generation asks for it, and the mask will be contiguous when it is made."""
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
    """The mask that "sdpa" uses, made later where the step may be a planned one.

    A planned step has one row of whole tokens: batch size 1, no padding, no cache. Everything else gets
    its mask at once, and so does a model that goes on computing with it.

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
