"""Clocks for waits and kernels, on the CPU and on CUDA."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Adds up the time of what runs under it.

    On the CPU that is the caller's time. On CUDA the work is queued and the caller does not wait for it: events
    around it tell how long the stream took.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Count the time of what is done inside on a device."""
        if device.type == "cuda":
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            yield
            after.record()
            self._events.append((before, after))
        else:
            begin = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begin

    def seconds(self) -> float:
        """Seconds so far. On CUDA it waits for the last counted work to be over."""
        if self._events:
            self._events[-1][1].synchronize()
            self._seconds += sum(before.elapsed_time(after) for before, after in self._events) / 1000
            self._events.clear()
        return self._seconds
