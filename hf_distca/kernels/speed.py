"""Measure how fast a worker computes core attention.

Shape suffixes: T rows of the task, H query heads, G key/value heads, D head dim.
"""

import statistics
import time
from dataclasses import dataclass

import torch

from .contract import AttentionParams, Kernel, TaskShapes

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "H800": 989e12, "A100": 312e12, "B200": 2250e12}
"""Operations a second of dense products in bfloat16, from the data sheets, by a part of the device's name."""


def peak_flops(name: str) -> float | None:
    """Return the most operations a second of a device of this name; None if unknown."""
    return next((peak for model, peak in PEAK_FLOPS.items() if model in name), None)


@dataclass(frozen=True)
class Work:
    """One causal task that is computed to measure."""

    tokens: int
    q_heads: int
    kv_heads: int
    head_dim: int

    @property
    def pairs(self) -> float:
        """Query-key pairs, each counted as its cost beside a pair of COLUMNS."""
        return self.tokens * (self.tokens + 1) / 2 * self.q_heads * self.head_dim / COLUMNS


COLUMNS = 512
"""Query heads times head dim of the pairs in which speeds are given: speeds compare whatever work was measured."""
USUAL_WORK = Work(tokens=2048, q_heads=8, kv_heads=2, head_dim=64)
FILLING_WORK = Work(tokens=16384, q_heads=32, kv_heads=8, head_dim=128)
"""For GPUs: 4096 blocks of 128 rows, many times as many as a GPU has room for. Little work would measure launches."""


def work_for(device: torch.device) -> Work:
    """Return the work that is measured on a device."""
    return FILLING_WORK if device.type == "cuda" else USUAL_WORK


def measure_speed(
    kernel: Kernel,
    device: torch.device,
    dtype: torch.dtype | None = None,
    *,
    work: Work | None = None,
    seconds: float = 0.5,
) -> float:
    """Return the query-key pairs per second of a forward and backward, the median of at least three.

    Args:
        dtype: None: bfloat16 on CUDA, float32 elsewhere.
        work: None: see `work_for`.
        seconds: duration of the measurement, after one forward and backward to warm up.
    """
    work = work or work_for(device)
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    heads = (work.q_heads, work.kv_heads, work.kv_heads, work.q_heads)
    q_THD, k_TGD, v_TGD, do_THD = (
        torch.full((work.tokens, count, work.head_dim), 0.1, dtype=dtype, device=device) for count in heads
    )
    shapes = TaskShapes.build([work.tokens], [work.tokens], device)
    params = AttentionParams(scale=work.head_dim**-0.5)

    def seconds_of_one() -> float:
        begin = time.perf_counter()
        o_THD, lse_TH = kernel.forward(q_THD, k_TGD, v_TGD, shapes, params)
        kernel.backward(do_THD, q_THD, k_TGD, v_TGD, o_THD, lse_TH, shapes, params)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    seconds_of_one()  # warms up
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        times.append(seconds_of_one())
    return work.pairs / statistics.median(times)
