"""Clocks for waits and kernels, on the CPU and on CUDA."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Adds up the time of what runs under it.

    On the CPU that is the caller's time. On CUDA the work is queued and the caller does not wait for it: events
    around it tell how long the stream took. As many events are kept as the stream is behind, whether or not
    anybody asks for the seconds.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._queued: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._free: list[torch.cuda.Event] = []

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Count the time of what is done inside on a device."""
        if device.type == "cuda":
            while self._queued and self._queued[0][1].query():
                self._count_first()
            before, after = self._event(), self._event()
            before.record()
            yield
            after.record()
            self._queued.append((before, after))
        else:
            begin = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begin

    def seconds(self) -> float:
        """Seconds so far. On CUDA it waits for the counted work to be over."""
        while self._queued:
            self._queued[0][1].synchronize()
            self._count_first()
        return self._seconds

    def _event(self) -> torch.cuda.Event:
        return self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)

    def _count_first(self) -> None:
        """Count the oldest pair, which is over."""
        before, after = self._queued.popleft()
        self._seconds += before.elapsed_time(after) / 1000
        self._free += (before, after)
