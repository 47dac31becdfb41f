"""Registration of attn_implementation="distca" with transformers."""

from collections.abc import Callable
from typing import Any

# transformers and its users are imported as late as possible: `register` is first called in the middle of imports.
ATTENTION_NAME = "distca"


def _attention(*args: Any, **kwargs: Any) -> Any:
    from hf_distca.patches.attention import distca_attention

    return distca_attention(*args, **kwargs)


def _mask(*args: Any, **kwargs: Any) -> Any:
    from hf_distca.patches.masks import distca_mask

    return distca_mask(*args, **kwargs)


def register(attention: Callable[..., Any] = _attention, mask: Callable[..., Any] = _mask) -> None:
    """Register the attention function and its mask function; further calls are harmless.

    By default `distca_attention` and `distca_mask` are imported at their first call.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, attention)
    AttentionMaskInterface.register(ATTENTION_NAME, mask)
