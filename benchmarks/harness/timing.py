"""Time and memory of single calls."""

import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterable

import torch


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


def most_megabytes(calls: Iterable[Callable[[], object]]) -> float:
    """Return the most MB that one of the calls takes beside what there was before."""
    tracemalloc.start()
    peaks = []
    for call in calls:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        call()
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    return max(peaks) / 1e6
