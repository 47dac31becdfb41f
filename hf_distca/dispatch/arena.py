"""Buffers that all layers reuse, so that exchanges whose sizes change with each plan do not fragment memory."""

from collections.abc import Hashable

import torch
from torch import Tensor

STEPS_PER_OCTAVE = 4
"""Buffer sizes per doubling: at most a fifth of a buffer is unused, and buffers rarely grow."""


class Arena:
    """One buffer per role, as large as the largest that was asked for.

    One exchange uses a role at a time: taking a role again invalidates its previous tensor. On CUDA all users are on
    the stream that waits for the exchanges, so the order of calls is the order of use.
    """

    def __init__(self) -> None:
        self._buffers: dict[Hashable, Tensor] = {}

    def take(self, role: Hashable, rows: int, row_bytes: int, device: torch.device) -> Tensor:
        """Return a [rows, row_bytes] uint8 tensor with undefined contents; a role is always on the same device."""
        size = rows * row_bytes
        if not self.holds(role, size):
            # Free the old buffer first: both at once would raise the peak.
            self._buffers.pop(role, None)
            self._buffers[role] = torch.empty(rounded_up(size), dtype=torch.uint8, device=device)
        return self._buffers[role][:size].view(rows, row_bytes)

    def holds(self, role: Hashable, size: int) -> bool:
        """Return whether the role's buffer has at least `size` bytes."""
        return role in self._buffers and self._buffers[role].numel() >= size

    def size(self) -> int:
        """Return the bytes of all buffers."""
        return sum(buffer.numel() for buffer in self._buffers.values())


def rounded_up(size: int) -> int:
    """Round up to the next of STEPS_PER_OCTAVE equally spaced sizes between powers of two, at least 4096 bytes.

    >>> [rounded_up(size) for size in (0, 4096, 4097, 6000, 8192, 8193)]
    [4096, 4096, 5120, 6144, 8192, 10240]
    """
    size = max(size, 4096)
    step = max(1, (1 << (size - 1).bit_length()) // (2 * STEPS_PER_OCTAVE))
    return -(-size // step) * step
