"""Makes attn_implementation="distca" known to transformers."""

from collections.abc import Callable
from typing import Any

# Nothing of transformers or of what uses it is imported before it is needed: `register` is first called in the middle
# of imports, of this module or of others.
ATTENTION_NAME = "distca"


def _attention(*args: Any, **kwargs: Any) -> Any:
    from hf_distca.patches.attention import distca_attention

    return distca_attention(*args, **kwargs)


def _mask(*args: Any, **kwargs: Any) -> Any:
    from hf_distca.patches.masks import distca_mask

    return distca_mask(*args, **kwargs)


def register(attention: Callable[..., Any] = _attention, mask: Callable[..., Any] = _mask) -> None:
    """Register the attention function and its mask function; doing it again changes nothing.

    Args:
        attention: as transformers calls it; by default `distca_attention` is imported when it is called.
        mask: as transformers calls it; by default `distca_mask`, likewise.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, attention)
    AttentionMaskInterface.register(ATTENTION_NAME, mask)
