"""Timing single calls, and telling how fast a core is at the moment."""

import statistics
import time
from collections.abc import Callable

import torch


class Probe:
    """A small kernel, whose time shows how fast a core is at the moment.

    A virtual core shares its processor with strangers: the same kernel was seen to run at one speed for seconds and
    at two thirds of it for the next ones.
    """

    def __init__(self) -> None:
        self._qkv = torch.randn(3, 1, 4, 512, 64)

    def take(self) -> float:
        """Median seconds of the kernel."""
        times = []
        for _ in range(7):
            begin = time.perf_counter()
            torch.nn.functional.scaled_dot_product_attention(*self._qkv, is_causal=True)
            times.append(time.perf_counter() - begin)
        return statistics.median(times)


def median_seconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of a call, after one to warm up; on CUDA by the device's own clock."""
    call()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return statistics.median(times)
