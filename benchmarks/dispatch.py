"""What dispatching costs besides computing: CPU time of the calling thread, per layer, with a
kernel that does none.

Two CPU ranks with a few short documents and a LLaMA of 4 layers of hidden size 8, so that what
remains of a layer, forward and backward, is Python, gathering and scattering a few rows, and the
exchanges. Per layer, on the rank that takes longer:

  plain        the model with the same kernel as a single autograd node without dispatch
  default      the model as users get it: decoder layers whose two nano-batches take turns
  no turns     without ping-pong: one nano-batch
  collectives  the part of either that torch.distributed takes to start the exchanges and to wait
               for them
  dispatch     default - collectives - plain: ours, with the cold caches that a wait leaves behind;
               it has the second nano-batch's share of the layer's own launches in it. In "no turns"
               there is no such share

Run: python benchmarks/dispatch.py [--rounds 100]
     python benchmarks/dispatch.py --against OTHER_CHECKOUT      two checkouts in turns
"""

import time
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from harness import Ranks, Round, over, report, rounds_parser, take_rounds
from harness.models import (
    PlainAttention,
    documents_of,
    llama,
    rows_of_documents,
    rows_of_rank,
    settings_of,
)
from torch import Tensor

from hf_distca import Dispatcher
from hf_distca.kernels import AttentionParams, TaskShapes
from hf_distca.patches.layers import plan_layers
from hf_distca.planner.micro_batch import plan_micro_batch, plan_placed

ROWS = [[96, 32], [16] * 8]
TOKENS = 128
LAYERS = 4
LAYOUTS = ("auto", "fixed")
SIZES = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 1,
    "vocab_size": 16,
}


class NoKernel:
    """Gives results of the right shapes without computing them."""

    name = "none"
    row_overhead = 0
    gather_cost = 0.0

    def check(self, *_: object) -> None:
        pass

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, shapes: TaskShapes, params: AttentionParams
    ) -> tuple:
        return torch.zeros_like(q), q.new_zeros(q.shape[:2])

    def backward(self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


class Exchanges:
    """Counts the CPU time of `dist.all_to_all_single` and of waiting for what it starts."""

    def __init__(self) -> None:
        self.spent_ms = 0.0
        self._exchange, dist.all_to_all_single = dist.all_to_all_single, self._counted

    def _counted(self, *args: Any, **kwargs: Any) -> SimpleNamespace:
        begin = time.thread_time()
        work = self._exchange(*args, **kwargs)
        self.spent_ms += (time.thread_time() - begin) * 1000
        return SimpleNamespace(wait=partial(self._wait, work))

    def _wait(self, work: Any) -> None:
        begin = time.thread_time()
        work.wait()
        self.spent_ms += (time.thread_time() - begin) * 1000


def prepare() -> Callable[[], Round]:
    """Make the models on this rank, and a round of all figures in milliseconds."""
    device = torch.device("cpu")
    PlainAttention("plain", NoKernel())
    models = {name: llama(2 * TOKENS, name, **SIZES) for name in ("distca", "plain")}
    plan_layers(models["distca"])
    exchanges = Exchanges()
    documents = [length for row in ROWS for length in row]
    own = ROWS[dist.get_rank()]
    plain_batch = rows_of_documents(documents_of(own, 16), device)
    plain_shapes = TaskShapes.build(own, own, device)
    runs: dict[str, Callable[[], Any]] = {}
    for way, ping_pong in (("default", True), ("no turns", False)):
        settings = settings_of(
            models["distca"], 2, TOKENS, device, balance_block_size=8, ping_pong=ping_pong
        )
        dispatcher = Dispatcher(settings, device)
        dispatcher.kernel = NoKernel()
        for layout, make, lengths in (
            ("auto", plan_micro_batch, documents),
            ("fixed", plan_placed, ROWS),
        ):
            plan = make(lengths, settings)
            batch = rows_of_rank(plan, dist.get_rank(), documents_of(documents, 16), device)
            bound = dispatcher.bind(plan)
            runs[f"{layout}, {way}"] = partial(
                models["distca"].model, **without_targets(batch), distca_plan=bound
            )
    plain_step = partial(
        models["plain"].model, **without_targets(plain_batch), plain_shapes=plain_shapes
    )

    def layer(step: Callable[[], Any]) -> float:
        """Milliseconds of this thread a layer, forward and backward."""
        begin = time.thread_time()  # the engine runs a backward on the CPU on the calling thread
        step().last_hidden_state.sum().backward()
        return (time.thread_time() - begin) * 1000 / LAYERS

    def take() -> Round:
        figures = {"plain, ms": layer(plain_step)}
        for name, step in runs.items():
            exchanges.spent_ms = 0.0
            whole = layer(step)
            collectives = exchanges.spent_ms / LAYERS
            figures[f"{name}, ms"] = whole
            figures[f"{name}: collectives, ms"] = collectives
            figures[f"{name}: dispatch, ms"] = whole - collectives - figures["plain, ms"]
            dist.barrier()
        return figures

    for _ in range(5):
        take()  # warms up
    return take


def without_targets(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: batch[name] for name in ("input_ids", "position_ids")}


def main() -> None:
    options = rounds_parser(__doc__, rounds=100).parse_args()
    with Ranks(2, prepare) as ranks:

        def take() -> Round:
            by_rank = ranks.take()
            return {name: max(map(itemgetter(name), by_rank)) for name in by_rank[0]}

        measured = take_rounds(options, take)
    report(
        measured,
        {
            f"{layout}: default / no turns": over(
                f"{layout}, default, ms", f"{layout}, no turns, ms"
            )
            for layout in LAYOUTS
        },
    )


if __name__ == "__main__":
    main()
