"""Copies of rows that a GPU makes beside what it computes.

Shape suffixes: N rows; what follows a row's N is free.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class SideCopies:
    """Copies from and into a GPU's memory on a stream of their own.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def start(self, copies: Iterable[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        """Copy rows as they are when the current stream has come here.

        Args:
            copies: [N, …] where rows go and [N, …] the rows, which may be dropped at once.

        Returns:
            What returns when the rows are in their place; may be called by another thread.
        """
        self._follow()
        with torch.cuda.stream(self._stream):
            for to_N, x_N in copies:
                to_N.copy_(x_N, non_blocking=True)
                x_N.record_stream(self._stream)
        wait: Callable[[], None] = self._stream.record_event().synchronize
        return wait

    def fence(self) -> Callable[[], bool]:
        """What tells whether the GPU has done all that has been asked of it here and on the current stream so far."""
        self._follow()
        is_done: Callable[[], bool] = self._stream.record_event().query
        return is_done

    def _follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
