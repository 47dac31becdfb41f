"""Makes attn_implementation="distca" known to transformers."""

from transformers import AttentionInterface, AttentionMaskInterface

from hf_distca.patches.attention import distca_attention
from hf_distca.patches.masks import distca_mask
from hf_distca.patches.model import ATTENTION_NAME


def register() -> None:
    """Register the attention function and its mask function; doing it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, distca_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, distca_mask)
