"""Makes attn_implementation="distca" known to transformers."""

from typing import Any

# Nothing of transformers or of what uses it is imported before it is needed: `register` is called in the middle of
# imports, of this module or of others.
ATTENTION_NAME = "distca"


def register() -> None:
    """Register the attention function and its mask function; doing it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _mask)


def _attention(*args: Any, **kwargs: Any) -> Any:
    from hf_distca.patches.attention import distca_attention

    return distca_attention(*args, **kwargs)


def _mask(*args: Any, **kwargs: Any) -> Any:
    from hf_distca.patches.masks import distca_mask

    return distca_mask(*args, **kwargs)
