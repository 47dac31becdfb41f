"""Measure how fast a worker computes core attention.

Shape suffixes: T rows of the task, H query heads, G key/value heads, D head dim.
"""

import statistics
import time

import torch

from .contract import AttentionParams, Kernel, Need, TaskShapes

PEAK_FLOPS = {
    # Cards with fewer units or a lower clock come before those whose name is a part of their own.
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "B200": 2250e12,
    "L40S": 362e12,
}
"""Operations a second of dense products in bfloat16, by a part of the device's name; the first that
fits counts.

The figures are those of NVIDIA's data sheets, which give twice as much where they count with
sparsity.
"""


def peak_flops(name: str) -> float | None:
    """Return the most operations a second of a device of this name; None if unknown."""
    return next((peak for model, peak in PEAK_FLOPS.items() if model in name), None)


COLUMNS = 512
"""Query heads times head dim of the pairs in which speeds are given: speeds of different work can
be compared."""
USUAL_WORK = 2048, 8, 2, 64
"""Rows, query heads, key/value heads and head dim of the causal task that is computed."""
FILLING_WORK = 16384, 32, 8, 128
"""For GPUs: 4096 blocks of 128 rows, many times as many as a GPU has room for.

Little work would measure launches.
"""
MEASURED_S = 0.5


def measured_need(device: torch.device) -> Need:
    """Return what a kernel must do to be measured on a device by `measure_speed`."""
    on_cuda = device.type == "cuda"
    *_, head_dim = FILLING_WORK if on_cuda else USUAL_WORK
    return Need(
        torch.bfloat16 if on_cuda else torch.float32,
        head_dim,
        head_dim,
        AttentionParams(scale=head_dim**-0.5),
    )


def measure_speed(kernel: Kernel, device: torch.device) -> float:
    """Return the query-key pairs per second of a forward and backward.

    The rate is the median of at least three.
    """
    on_cuda = device.type == "cuda"
    need = measured_need(device)
    tokens, q_heads, kv_heads, head_dim = FILLING_WORK if on_cuda else USUAL_WORK
    q_THD, k_TGD, v_TGD, do_THD = (
        torch.full((tokens, heads, head_dim), 0.1, dtype=need.dtype, device=device)
        for heads in (q_heads, kv_heads, kv_heads, q_heads)
    )
    shapes = TaskShapes.build([tokens], [tokens], device)
    params = need.params
    times: list[float] = []
    while len(times) < 4 or sum(times[1:]) < MEASURED_S:
        begin = time.perf_counter()
        o_THD, lse_TH = kernel.forward(q_THD, k_TGD, v_TGD, shapes, params)
        kernel.backward(do_THD, q_THD, k_TGD, v_TGD, o_THD, lse_TH, shapes, params)
        if on_cuda:
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    pairs = tokens * (tokens + 1) / 2 * q_heads * head_dim / COLUMNS
    return pairs / statistics.median(times[1:])  # the first warms up
