"""How fast a worker computes core attention.

Shape suffixes: T rows of the task, H query heads, G key/value heads, D head dim.
"""

import statistics
import time

import torch

from hf_distca.kernels.contract import AttentionParams, Kernel, TaskShapes


def measure_speed(
    kernel: Kernel,
    device: torch.device,
    dtype: torch.dtype | None = None,
    *,
    tokens: int = 2048,
    q_heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 64,
    seconds: float = 0.5,
) -> float:
    """Query-key pairs per second of a forward and backward on one causal task, the median of a few.

    Speeds of workers compare if all are measured with the same numbers.

    Args:
        kernel: what computes.
        device: where.
        dtype: of the tensors; None: bfloat16 on CUDA, float32 elsewhere.
        tokens: rows of the task.
        q_heads: query heads.
        kv_heads: key-value heads.
        head_dim: size of a head.
        seconds: how long to measure, after one call to warm up; three calls at least.
    """
    if dtype is None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    heads = (q_heads, kv_heads, kv_heads, q_heads)
    q_THD, k_TGD, v_TGD, do_THD = (
        torch.full((tokens, count, head_dim), 0.1, dtype=dtype, device=device) for count in heads
    )
    shapes = TaskShapes.build([tokens], [tokens], device)
    params = AttentionParams(scale=head_dim**-0.5)

    def once() -> float:
        begin = time.perf_counter()
        o_THD, lse_TH = kernel.forward(q_THD, k_TGD, v_TGD, shapes, params)
        kernel.backward(do_THD, q_THD, k_TGD, v_TGD, o_THD, lse_TH, shapes, params)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    once()
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        times.append(once())
    return tokens * (tokens + 1) / 2 / statistics.median(times)
