"""The CPU kernel against torch's attention: forward and backward of the same tasks, interleaved.

    python benchmarks/cpu_kernel.py [--threads 1] [--repeats 5] [--dtype float32]

torch's attention is called once per task, as a model that knows its documents would at best. Where a task
has keys before its rows there is no such call without a mask, and the kernel stands alone. Prints a table,
and as its last line one JSON object: seconds (medians) by case.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_distca.kernels import AttentionParams, TaskShapes, get_kernel

HEADS, HEAD_DIM = 4, 64


def cases() -> dict[str, tuple[list[int], list[int], AttentionParams]]:
    """Query and key lengths of each case, and its options."""
    plain = AttentionParams(HEAD_DIM**-0.5)
    rng = random.Random(0)
    short = [rng.randint(10, 80) for _ in range(200)]
    medium = [rng.randint(300, 700) for _ in range(16)]
    return {
        "1 x 8192 rows": ([8192], [8192], plain),
        "4 x 2048 rows": ([2048] * 4, [2048] * 4, plain),
        "16 x 512 rows": ([512] * 16, [512] * 16, plain),
        "200 x 40 rows": ([40] * 200, [40] * 200, plain),
        "16 of 300-700 rows": (medium, medium, plain),
        "200 of 10-80 rows": (short, short, plain),
        "last 4096 of 8192 rows": ([4096], [8192], plain),
        "window 1024": ([8192], [8192], AttentionParams(HEAD_DIM**-0.5, window=1024)),
        "softcap": ([4096], [4096], AttentionParams(HEAD_DIM**-0.5, softcap=50.0)),
    }


def median_seconds(calls: list[Callable[[], None]], repeats: int) -> list[float]:
    """Time the calls in turn, so that a busy machine slows all of them down alike."""
    seconds: list[list[float]] = [[] for _ in calls]
    for repeat in range(repeats + 1):
        for call, times in zip(calls, seconds, strict=True):
            start = time.perf_counter()
            call()
            if repeat:
                times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in seconds]


def sdpa(lens: list[int], do: Tensor, *qkv: Tensor) -> None:
    """torch's attention and its backward, one task after another; tensors [rows, heads, head dim]."""
    for do_task, *task in zip(*(x.split(lens) for x in (do, *qkv)), strict=True):
        leaves = [x.transpose(0, 1).unsqueeze(0).requires_grad_() for x in task]
        o = scaled_dot_product_attention(*leaves, is_causal=True)
        o.backward(do_task.transpose(0, 1).unsqueeze(0))


def main() -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kernel, dtype = get_kernel("cpu", torch.device("cpu")), getattr(torch, options.dtype)

    results = {}
    print(f"{'forward + backward':<24}{'kernel':>12}{'torch':>12}{'torch/kernel':>14}")
    for name, (q_lens, k_lens, params) in cases().items():
        q, do = (torch.randn(sum(q_lens), HEADS, HEAD_DIM, dtype=dtype) for _ in range(2))
        k, v = (torch.randn(sum(k_lens), HEADS, HEAD_DIM, dtype=dtype) for _ in range(2))
        shapes = TaskShapes.build(q_lens, k_lens, "cpu")

        def ours(q=q, k=k, v=v, do=do, shapes=shapes, params=params) -> None:
            o, lse = kernel.forward(q, k, v, shapes, params)
            kernel.backward(do, q, k, v, o, lse, shapes, params)

        calls: list[Callable[[], None]] = [ours]
        if q_lens == k_lens and params.window is None and params.softcap is None:
            calls.append(lambda q=q, k=k, v=v, do=do, lens=q_lens: sdpa(lens, do, q, k, v))
        seconds = median_seconds(calls, options.repeats)
        results[name] = dict(zip(("kernel_s", "sdpa_s"), seconds, strict=False))
        row = f"{name:<24}{seconds[0] * 1e3:>9.1f} ms"
        print(row + (f"{seconds[1] * 1e3:>9.1f} ms{seconds[1] / seconds[0]:>14.2f}" if len(seconds) > 1 else ""))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
