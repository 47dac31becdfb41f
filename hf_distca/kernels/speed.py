"""How fast a worker computes core attention.

Shape suffixes: T rows of the task, H query heads, G key/value heads, D head dim.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .contract import Kernel
from .params import AttentionParams
from .shapes import TaskShapes

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "H800": 989e12, "A100": 312e12, "B200": 2250e12}
"""Of matrices in bfloat16 a second, as the maker names them for a dense product, by what is in a device's name."""


def peak_flops(name: str) -> float | None:
    """What a device of this name does at most; None where that is not known."""
    return next((peak for model, peak in PEAK_FLOPS.items() if model in name), None)


@dataclass(frozen=True)
class Work:
    """What is computed to measure: one causal task.

    Attributes:
        tokens: its rows.
        q_heads: query heads.
        kv_heads: key-value heads.
        head_dim: size of a head.
    """

    tokens: int
    q_heads: int
    kv_heads: int
    head_dim: int

    @property
    def pairs(self) -> float:
        """Its query-key pairs, each counted as what it costs beside a pair of COLUMNS."""
        return self.tokens * (self.tokens + 1) / 2 * self.q_heads * self.head_dim / COLUMNS


COLUMNS = 512
"""Query heads times their size of the pairs in which speeds are told: they compare whatever work was measured."""
USUAL_WORK = Work(tokens=2048, q_heads=8, kv_heads=2, head_dim=64)
FILLING_WORK = Work(tokens=16384, q_heads=32, kv_heads=8, head_dim=128)
"""For GPUs: 4096 blocks of 128 rows, many times as many as a GPU has room for. Little work would measure launches."""


def work_for(device: torch.device) -> Work:
    """What is measured on a device."""
    return FILLING_WORK if device.type == "cuda" else USUAL_WORK


def measure_speed(
    kernel: Kernel,
    device: torch.device,
    dtype: torch.dtype | None = None,
    *,
    work: Work | None = None,
    seconds: float = 0.5,
) -> float:
    """Query-key pairs per second of a forward and backward, the median of a few.

    Args:
        kernel: what computes.
        device: where.
        dtype: of the tensors; None: bfloat16 on CUDA, float32 elsewhere.
        work: what to compute; None: what suits the device.
        seconds: how long to measure, after one forward and backward to warm up; three at least.
    """
    work = work_for(device) if work is None else work
    if dtype is None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    heads = (work.q_heads, work.kv_heads, work.kv_heads, work.q_heads)
    q_THD, k_TGD, v_TGD, do_THD = (
        torch.full((work.tokens, count, work.head_dim), 0.1, dtype=dtype, device=device) for count in heads
    )
    shapes = TaskShapes.build([work.tokens], [work.tokens], device)
    params = AttentionParams(scale=work.head_dim**-0.5)

    def once() -> None:
        o_THD, lse_TH = kernel.forward(q_THD, k_TGD, v_TGD, shapes, params)
        kernel.backward(do_THD, q_THD, k_TGD, v_TGD, o_THD, lse_TH, shapes, params)

    seconds_of = _seconds_on_gpu if device.type == "cuda" else _seconds_on_host
    once()
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        times.append(seconds_of(once))
    return work.pairs / statistics.median(times)


def _seconds_on_host(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _seconds_on_gpu(work: Callable[[], None]) -> float:
    """By the clock of the current GPU: between events before and behind the work on its stream."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3
