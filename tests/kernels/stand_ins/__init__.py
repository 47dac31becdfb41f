"""Stand-ins for FlashAttention in its versions, on CPU tensors, around the reference.

They have the signatures of the real ones and behave as their sources have it, at their least friendly: head dims that
are multiples of 8 and mostly equal, aligned rows, [H, Q] log-sum-exp, +inf for rows without keys, results unset where
no pair is. Each counts its calls.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from .aten import Aten
from .flash_attn_2 import FlashAttn2
from .flash_attn_3 import FlashAttn3, hub
from .flash_attn_4 import FlashAttn4

__all__ = ["Aten", "FlashAttn2", "FlashAttn3", "FlashAttn4", "hub", "removed_afterwards"]


@contextmanager
def removed_afterwards(stand_in) -> Iterator:
    """Leave a stand-in registered with torch for as long as a test needs it."""
    try:
        yield stand_in
    finally:
        stand_in.remove()
