"""Makes attn_implementation="distca" known to transformers."""

from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface

ATTENTION_NAME = "distca"


def register() -> None:
    """Register the attention function and its mask function; doing it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _mask)


# What they call is imported when it is called: its modules import many of transformers', one of which may be in the
# middle of its own import when `register` is called.


def _attention(*args: Any, **kwargs: Any) -> Any:
    from hf_distca.patches.attention import distca_attention

    return distca_attention(*args, **kwargs)


def _mask(*args: Any, **kwargs: Any) -> Any:
    from hf_distca.patches.masks import distca_mask

    return distca_mask(*args, **kwargs)
