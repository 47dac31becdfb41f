"""Buffers that every layer uses again: exchanges whose sizes change with each plan do not fragment memory."""

from collections.abc import Hashable

import torch
from torch import Tensor

STEPS_PER_OCTAVE = 4
"""Sizes are rounded up to one of so many per doubling: at most a fifth is unused, and growing is rare."""


class Arena:
    """One buffer per role, as large as the largest that was asked for.

    A role is in use by one exchange at a time: whoever takes it again ends the life of what it gave before.
    On CUDA all users are on the stream that waits for the exchanges, so the order of calls is the order of use.
    """

    def __init__(self) -> None:
        self._buffers: dict[Hashable, Tensor] = {}

    def take(self, role: Hashable, rows: int, row_bytes: int, device: torch.device) -> Tensor:
        """A [rows, row_bytes] uint8 tensor with undefined contents.

        Args:
            role: what the buffer is for.
            rows: number of rows.
            row_bytes: bytes of a row.
            device: where it lies; a role always has the same.
        """
        size = rows * row_bytes
        if not self.holds(role, size):
            # The old one goes back first: both at once would be the peak.
            self._buffers.pop(role, None)
            self._buffers[role] = torch.empty(rounded_up(size), dtype=torch.uint8, device=device)
        return self._buffers[role][:size].view(rows, row_bytes)

    def holds(self, role: Hashable, size: int) -> bool:
        """Whether the role's buffer has so many bytes already."""
        return role in self._buffers and self._buffers[role].numel() >= size

    def size(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() for buffer in self._buffers.values())


def rounded_up(size: int) -> int:
    """The next of STEPS_PER_OCTAVE equally spaced sizes between two powers of two; at least 4096 bytes.

    >>> [rounded_up(size) for size in (0, 4096, 4097, 6000, 8192, 8193)]
    [4096, 4096, 5120, 6144, 8192, 10240]
    """
    size = max(size, 4096)
    step = max(1, (1 << (size - 1).bit_length()) // (2 * STEPS_PER_OCTAVE))
    return -(-size // step) * step
