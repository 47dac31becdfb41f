"""What dispatching costs besides computing: CPU time of the calling thread, per layer, with a kernel that does none.

Two CPU ranks with a few short documents, one head of 8 numbers. What remains of one layer's attention, forward and
backward, is Python, gathering and scattering a few rows, and the exchanges:

  forward, backward  all of it
  collectives        the part of both that torch.distributed takes to start the exchanges and to wait for them
  plain              the same kernel in both directions as a single autograd node without dispatch
  dispatch           forward + backward - collectives - plain: ours, with the cold caches that a wait leaves behind
  python             the same with exchanges that carry nothing, so that no wait comes between
  bind               making the index tensors, once per micro-batch
  plan               the planner's part

Run: python benchmarks/dispatch.py [--rounds 200]
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from harness import print_json, run_ranks, table
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from hf_distca import Dispatcher, PlanSettings
from hf_distca.dispatch.attention import disaggregated_attention
from hf_distca.kernels import AttentionParams, TaskShapes
from hf_distca.plan import AttentionKind
from hf_distca.planner.micro_batch import plan_micro_batch, plan_placed

ROWS = [[96, 32], [16] * 8]


class NoKernel:
    """Gives results of the right shapes without computing them."""

    name = "none"
    row_overhead = 0
    gather_cost = 0.0

    def check(self, **kwargs: object) -> None:
        """Anything goes."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, shapes: TaskShapes, params: AttentionParams) -> tuple:
        """O and LSE."""
        return torch.empty_like(q), q.new_empty(q.shape[:2])

    def backward(self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple:
        """Gradients of Q, K and V."""
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class PlainAttention(torch.autograd.Function):
    """The kernel as an autograd node, without dispatch."""

    @staticmethod
    def forward(ctx: FunctionCtx, *qkv: Tensor) -> Tensor:
        """O."""
        ctx.save_for_backward(*qkv)
        return NoKernel().forward(*qkv, None, None)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, do: Tensor) -> tuple[Tensor, ...]:
        """Gradients of Q, K and V."""
        return NoKernel().backward(do, *ctx.saved_tensors)


def timed(times: list[float], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function; note the CPU time of this thread in milliseconds."""
    begin = time.thread_time()
    result = function(*args, **kwargs)
    times.append((time.thread_time() - begin) * 1000)
    return result


def both_ways(attention: Callable[..., Tensor], rows: int) -> list[float]:
    """CPU time in milliseconds of an attention of q, k and v, and of its backward."""
    times: list[float] = []
    output = timed(times, attention, *(torch.randn(rows, 1, 8, requires_grad=True) for _ in range(3)))
    # The engine runs a backward on the CPU on the calling thread.
    timed(times, output.sum().backward)
    return times


def measure(layout: str, rounds: int) -> dict[str, float]:
    """Medians in milliseconds, on this rank."""
    settings = PlanSettings(
        ranks=2, tokens_per_rank=128, kinds=(AttentionKind(None, 1, 1, 8, 8),), balance_block_size=8
    )
    dispatcher = Dispatcher(settings, torch.device("cpu"))
    dispatcher.kernel = NoKernel()
    make, documents = (
        (plan_placed, ROWS) if layout == "fixed" else (plan_micro_batch, [length for row in ROWS for length in row])
    )
    plan = make(documents, settings)
    bound = dispatcher.bind(plan).for_layer()
    rows = int(plan.tokens[dist.get_rank()])
    params = AttentionParams(scale=1.0)
    attention = partial(disaggregated_attention, sinks_H=None, plan=bound, params=params)
    times: dict[str, list[float]] = defaultdict(list)
    spent: list[float] = []
    all_to_all_single = dist.all_to_all_single

    def timed_exchange(*args: Any, **kwargs: Any) -> SimpleNamespace:
        work = timed(spent, all_to_all_single, *args, **kwargs)
        return SimpleNamespace(wait=partial(timed, spent, work.wait))

    def no_exchange(*args: Any, **kwargs: Any) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: None)

    for _ in range(rounds):
        spent.clear()
        plain = sum(both_ways(PlainAttention.apply, rows))
        dist.all_to_all_single = timed_exchange
        forward, backward = both_ways(attention, rows)
        collectives = sum(spent)
        dist.all_to_all_single = no_exchange
        without = sum(both_ways(attention, rows))
        times["forward"].append(forward)
        times["backward"].append(backward)
        times["collectives"].append(collectives)
        times["plain"].append(plain)
        times["dispatch"].append(forward + backward - collectives - plain)
        times["python"].append(without - plain)
        timed(times["bind"], dispatcher.bind, plan)
        timed(times["plan"], make, documents, settings)
        dist.barrier()
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Measure, print a table and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="calls of each kind")
    rounds = parser.parse_args().rounds
    results = {layout: run_ranks(2, measure, layout, rounds) for layout in ("joint", "fixed")}
    busiest = {
        layout: {name: max(rank[name] for rank in ranks) for name in ranks[0]} for layout, ranks in results.items()
    }
    names = list(busiest["joint"])
    table(
        ["", *names], [[layout, *(f"{figures[name]:.3f} ms" for name in names)] for layout, figures in busiest.items()]
    )
    print_json(
        **{f"{layout}_{name}_ms": value for layout, figures in busiest.items() for name, value in figures.items()}
    )


if __name__ == "__main__":
    main()
