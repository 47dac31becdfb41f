"""Time of a training step on CPU ranks: hf_distca as it comes, beside the best that whole documents
allow.

Forward, backward and AdamW of a 2-layer LLaMA of hidden size 256 under DistributedDataParallel,
float32, one thread a rank. Six mixes of documents, all of the same number of tokens. In a round the
strategies of each mix run once, one after another in shuffled order:

  auto       hf_distca as it comes: plans chosen by costs that the ranks measure, and correct in the
             first steps
  as set     hf_distca with the planner's layout, a tolerance of 0.01 and ping-pong
  no turns   the same without ping-pong
  fixed      hf_distca, documents placed as "whole" has them, with ping-pong
  whole      DDP without hf_distca: whole documents, divided over the ranks so that the largest
             number of query-key pairs is as small as the longest-first rule finds it; what
             batch_rebalance aims at. Packed, one call of the same attention kernel a layer
  packed     DDP without hf_distca: whole documents, packed in order into rows of about as many
             tokens

Every strategy may hold as many rows on a rank as any of them needs for these documents: all have
the same memory. Freed memory stays with its process, as GPUs' allocators keep it. A step ends when
all ranks are done; binding the plan is part of it, planning is not. Ratios are formed within a
round: the best of all other strategies over auto is by the other strategy's median. On a busy
machine the best of many is partly best by chance. With --finalists 2, six rounds of all strategies
choose the two fastest others of each mix. Only auto and these two run in the later rounds, and only
the later rounds count.

With --rate-mbit the ranks are two hosts behind a link of that rate (needs root; see hosts.py).

Run: python benchmarks/step_time.py [--rounds 12] [--tokens 4096] [--ranks 2] [--finalists 2]
     sudo python benchmarks/step_time.py --rate-mbit 100
     python benchmarks/step_time.py --against OTHER_CHECKOUT      two checkouts in turns
"""

import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from harness import Ranks, Round, keep_freed_memory, over, report, rounds_parser, take_rounds
from harness.models import PlainAttention, documents_of, llama, rows_of_documents, rows_of_rank
from hosts import Hosts
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerState

from hf_distca import Dispatcher, DistCAConfig, make_dispatcher
from hf_distca.kernels import TaskShapes, get_kernel
from hf_distca.plan import MicroBatchPlan
from hf_distca.plan.cost import pairs
from hf_distca.planner.micro_batch import plan_micro_batch, plan_placed
from hf_distca.profiling.costs import EARLY_STEPS, WATCHED_STEPS, LearnedCosts

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
MIXES = {
    "equal": [1024] * 16,
    "mild": [2048, 1920, 1824, 1760, 1696, 1632, 1568, 1408, 1344, 1184],
    "long tail": [5248, 2816, 1792, 1408, 1024, 832, 768, 608, 512, 448, 352, 256, 192, 128],
    "one long": [8192, *[512] * 16],
    "chats": [
        1600,
        1280,
        1024,
        *[800] * 3,
        *[640] * 4,
        *[480] * 6,
        *[320] * 9,
        *[160] * 9,
        *[64] * 5,
    ],
    "rollouts": [4096, 3584, 2048, 1536, 1280, 1024, 768, *[512] * 2, *[256] * 4],
}
"""Lengths of the documents of a micro-batch.

They add up to LENGTHS_FOR; another number of tokens scales them.
"""
LENGTHS_FOR = 2 * 8192
STRATEGIES = ("auto", "as set", "no turns", "fixed", "whole", "packed")
ROUNDS_BEFORE = 6
"""Rounds that choose finalists."""


def whole_rows(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Whole documents on ranks, the longest first, each to the rank with the fewest pairs."""
    rows: list[list[int]] = [[] for _ in range(ranks)]
    for length in sorted(lengths, reverse=True):
        min(rows, key=lambda row: sum(pairs(0, each) for each in row)).append(length)
    return rows


def packed_rows(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Whole documents on ranks, in shuffled order, each rank filled to its share of the tokens."""
    rows: list[list[int]] = [[] for _ in range(ranks)]
    order = random.Random(0).sample(list(lengths), len(lengths))
    share = sum(lengths) / ranks
    rank = 0
    for length in order:
        if rows[rank] and sum(rows[rank]) + length / 2 > share and rank < ranks - 1:
            rank += 1
        rows[rank].append(length)
    return rows if all(rows) else whole_rows(lengths, ranks)


class Models:
    """The same model with distca and with plain packed attention, trained under DDP with AdamW;
    makes steps.
    """

    def __init__(self, positions: int) -> None:
        PlainAttention("plain", get_kernel("auto", CPU))
        self.distca = llama(positions, "distca", **SIZES)
        self._models = {"distca": self.distca, "plain": llama(positions, "plain", **SIZES)}

    @cached_property
    def _trained(self) -> dict[str, tuple[nn.Module, torch.optim.Optimizer]]:
        return {
            name: (DistributedDataParallel(model), torch.optim.AdamW(model.parameters(), lr=1e-5))
            for name, model in self._models.items()
        }

    def plain(self, rows: Sequence[Sequence[int]]) -> Callable[[], None]:
        """A step on whole documents, those of each rank."""
        own = list(rows[dist.get_rank()])
        batch = rows_of_documents(documents_of(own), CPU)
        lengths = [length for row in rows for length in row]
        return partial(
            self._step,
            "plain",
            batch,
            lambda: {"plain_shapes": TaskShapes.build(own, own, "cpu")},
            lengths,
        )

    def planned(
        self, plan: MicroBatchPlan, lengths: Sequence[int], dispatcher: Dispatcher
    ) -> Callable[[], None]:
        """A step on documents of these lengths by a plan; binding it is part of the step."""
        batch = rows_of_rank(plan, dist.get_rank(), documents_of(lengths), CPU)
        return partial(
            self._step, "distca", batch, lambda: {"distca_plan": dispatcher.bind(plan)}, lengths
        )

    def _step(
        self,
        name: str,
        batch: dict[str, Tensor],
        extra: Callable[[], dict[str, Any]],
        lengths: Sequence[int],
    ) -> None:
        model, optimizer = self._trained[name]
        targets = sum(length - 1 for length in lengths)
        model(**batch, **extra(), num_items_in_batch=targets).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def scaled(lengths: Sequence[int], tokens: int) -> list[int]:
    """Lengths of a mix for so many tokens."""
    return [length * tokens // LENGTHS_FOR for length in lengths]


def as_set(*, ping_pong: bool) -> dict[str, Any]:
    """Settings of which none is "auto"."""
    planning = {"balance_tolerance": 0.01, "ping_pong": ping_pong}
    return {"document_layout": "fixed", "planning": planning}


def steps_of(ranks: int, tokens: int) -> tuple[dict[str, Callable[[], None]], dict[str, str]]:
    """Steps of all mixes in all strategies by name, and what "auto" chose, by mix."""
    models = Models(ranks * tokens)
    strategies = {
        "auto": {},
        "as set": as_set(ping_pong=True),
        "no turns": as_set(ping_pong=False),
    }
    dispatchers = {
        strategy: make_dispatcher(
            models.distca, DistCAConfig(tokens_per_rank=tokens, **settings), CPU
        )
        for strategy, settings in strategies.items()
    }
    mixes = {mix: scaled(lengths, ranks * tokens) for mix, lengths in MIXES.items()}
    correct_costs(models, dispatchers["auto"], list(mixes.values()))
    steps = {}
    chosen = {}
    for mix, lengths in mixes.items():
        held = {"whole": whole_rows(lengths, ranks), "packed": packed_rows(lengths, ranks)}
        most = max(tokens, *(sum(row) for rows in held.values() for row in rows))
        for strategy, dispatcher in dispatchers.items():
            # No setting of the others is "auto", so that they choose nothing by costs.
            settings = replace(dispatcher.settings, rows_per_rank=most, document_layout="auto")
            plan = plan_micro_batch(lengths, settings)
            steps[f"{mix}, {strategy}"] = models.planned(plan, lengths, dispatcher)
            if (choice := plan.choice) is not None:
                chosen[mix] = (
                    f"groups of {choice.group}, {choice.nano_batches} nano-batches, tolerance "
                    f"{choice.tolerance:g}, {plan.summary.exchange.bytes_total} bytes a layer"
                )
        fixed = plan_placed(held["whole"], dispatchers["as set"].settings)
        in_order = [length for row in held["whole"] for length in row]
        steps[f"{mix}, fixed"] = models.planned(fixed, in_order, dispatchers["as set"])
        steps |= {f"{mix}, {strategy}": models.plain(rows) for strategy, rows in held.items()}
    return steps, chosen


def correct_costs(models: Models, auto: Dispatcher, mixes: Sequence[Sequence[int]]) -> None:
    """Correct the measured costs in the first steps, as a trainer does."""
    learned = LearnedCosts(auto)
    for number in range(EARLY_STEPS[-1] + WATCHED_STEPS):
        lengths = mixes[number % len(mixes)]
        plan = plan_micro_batch(lengths, auto.settings)
        learned.on_step_begin(None, TrainerState(global_step=number), None)
        learned.count(plan)
        models.planned(plan, lengths, auto)()
        learned.on_step_end()


def medians_of(rounds: Sequence[Round], mix: str) -> dict[str, float]:
    """Median seconds of the strategies of a mix other than auto."""
    names = {strategy: f"{mix}, {strategy}, s" for strategy in STRATEGIES[1:]}
    return {
        strategy: median(taken[name] for taken in rounds)
        for strategy, name in names.items()
        if name in rounds[0]
    }


def prepare(
    ranks: int, tokens: int, finalists: int | None, hosts: Hosts | None, rate_mbit: float | None
) -> Callable[[], Round]:
    """Make the models on this rank, and a round: every step once, in an order that is the same on
    all ranks.

    The strategies of a mix follow each other: what is compared runs within seconds.
    """
    keep_freed_memory()
    if hosts is not None:
        hosts.limit(dist.get_rank(), rate_mbit)
    (steps, chosen) = steps_of(ranks, tokens)
    order = random.Random(0)
    if dist.get_rank() == 0:
        for mix, choice in chosen.items():
            print(f"{mix}: {choice}", flush=True)
    running = dict.fromkeys(MIXES, STRATEGIES)

    def take() -> Round:
        figures = {}
        mixes = order.sample(list(MIXES), len(MIXES))
        for name in [
            f"{mix}, {of}" for mix in mixes for of in order.sample(running[mix], len(running[mix]))
        ]:
            dist.barrier()
            begin = time.perf_counter()
            steps[name]()
            dist.barrier()
            figures[f"{name}, s"] = time.perf_counter() - begin
        return {name: figures[name] for name in sorted(figures)}

    take()  # warms up
    if finalists is not None:
        before = [take() for _ in range(ROUNDS_BEFORE)]
        medians = {mix: medians_of(before, mix) for mix in MIXES}
        fastest = {
            mix: ("auto", *sorted(of, key=of.__getitem__)[:finalists])
            for mix, of in medians.items()
        }
        agreed = [fastest]
        dist.broadcast_object_list(agreed)  # each rank has its own clock
        running = agreed[0]
    return take


def main() -> None:
    parser = rounds_parser(__doc__, rounds=12, tokens=(4096, "of a rank"), ranks=(2, "processes"))
    parser.add_argument(
        "--rate-mbit", type=float, help="of the link between two hosts (default: one host)"
    )
    parser.add_argument(
        "--finalists", type=int, help="others of a mix that go on after six rounds (default: all)"
    )
    options = parser.parse_args()
    limited = options.rate_mbit is not None
    with Hosts(options.ranks // 2) if limited else nullcontext() as hosts:
        enter = hosts.move_in if limited else None
        arguments = (options.ranks, options.tokens, options.finalists, hosts, options.rate_mbit)
        with Ranks(options.ranks, prepare, *arguments, enter=enter) as ranks:
            measured = take_rounds(options, lambda: ranks.take()[0])
    ratios: dict[str, Callable[[Round], float]] = {}
    for mix in MIXES:
        medians = medians_of(measured.ours, mix)
        best = min(medians, key=medians.__getitem__)
        ratios[f"{mix}: best other / auto"] = over(f"{mix}, {best}, s", f"{mix}, auto, s")
        for strategy in medians:
            ratios[f"{mix}: {strategy} / auto"] = over(f"{mix}, {strategy}, s", f"{mix}, auto, s")
    report(measured, ratios)


if __name__ == "__main__":
    main()
