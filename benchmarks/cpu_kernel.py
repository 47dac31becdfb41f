"""The CPU kernel against torch's attention: forward and backward of the same tasks, one thread, in turns.

torch's attention is called once per task, as a model that knows its documents would at best. Where a task has keys
before its rows there is no such call without a mask, and the kernel stands alone.

Run: python benchmarks/cpu_kernel.py [--rounds 5] [--dtype float32]
     python benchmarks/cpu_kernel.py --against OTHER_CHECKOUT      two checkouts in turns
"""

import random
import time
from collections.abc import Callable
from functools import partial

import torch
from harness import Ranks, Round, over, report, rounds_parser, take_rounds
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_distca.kernels import AttentionParams, Kernel, TaskShapes, get_kernel

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


def sdpa(lens: list[int], do: Tensor, *qkv: Tensor) -> None:
    """torch's attention and its backward, one task after another; tensors [rows, heads, head dim]."""
    for do_task, *task in zip(*(x.split(lens) for x in (do, *qkv)), strict=True):
        leaves = [x.transpose(0, 1).unsqueeze(0).requires_grad_() for x in task]
        o = scaled_dot_product_attention(*leaves, is_causal=True)
        o.backward(do_task.transpose(0, 1).unsqueeze(0))


def prepare(dtype_name: str) -> Callable[[], Round]:
    """Make the tensors, and a round: each case once, the kernel and torch's attention one after another."""
    kernel, dtype = get_kernel("cpu", torch.device("cpu")), getattr(torch, dtype_name)
    ways: dict[str, Callable[[], None]] = {}
    for name, (q_lens, k_lens, params) in cases().items():
        q, do = (torch.randn(sum(q_lens), HEADS, HEAD_DIM, dtype=dtype) for _ in range(2))
        k, v = (torch.randn(sum(k_lens), HEADS, HEAD_DIM, dtype=dtype) for _ in range(2))
        shapes = TaskShapes.build(q_lens, k_lens, "cpu")
        ways[f"{name}: kernel, s"] = partial(both_ways, kernel, do, q, k, v, shapes, params)
        if has_sdpa(q_lens, k_lens, params):
            ways[f"{name}: torch, s"] = partial(sdpa, q_lens, do, q, k, v)

    def take() -> Round:
        figures = {}
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            figures[name] = time.perf_counter() - begin
        return figures

    take()  # warms up
    return take


def has_sdpa(q_lens: list[int], k_lens: list[int], params: AttentionParams) -> bool:
    """Whether torch's attention does it without a mask."""
    return q_lens == k_lens and params.window is None and params.softcap is None


def both_ways(
    kernel: Kernel, do: Tensor, q: Tensor, k: Tensor, v: Tensor, shapes: TaskShapes, params: AttentionParams
) -> None:
    """The kernel's forward and backward."""
    o, lse = kernel.forward(q, k, v, shapes, params)
    kernel.backward(do, q, k, v, o, lse, shapes, params)


def main() -> None:
    """Measure all cases, print tables and one JSON object."""
    parser = rounds_parser(__doc__, rounds=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    with Ranks(1, prepare, options.dtype) as ranks:
        measured = take_rounds(options, lambda: ranks.take()[0])
    both = [name for name, case in cases().items() if has_sdpa(*case)]
    report(measured, {f"{name}: torch / kernel": over(f"{name}: torch, s", f"{name}: kernel, s") for name in both})


if __name__ == "__main__":
    main()
