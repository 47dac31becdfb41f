"""Forward and backward of padded batches of rollouts on CPU ranks: padded, packed, and packed and
balanced.

64 rollouts of lognormal lengths with median 300 and at most 4,096 tokens, a quarter as long
(--scale 4). The model is a LLaMA with two layers and a quarter of the width of a Qwen3-0.6B, so
that attention has about the same share of a layer; float32, gradient checkpointing. Each rank has
its share of the rollouts and calls the model with eight at a time, as TRL's trainers do with a
generation batch. Rows with a target get logits, no others. Gradients are not reduced over ranks,
which takes equally long in all strategies. A step ends when all ranks are done. Strategies:

  padded to all      stock model, sdpa: eight sequences, padded to the longest of the rank's, as
                     TRL's GRPO pads
  padded to eight    stock model, sdpa: eight sequences, padded to the longest of the eight
  packed             pack_padded on each rank by itself: the rank packs its own sequences, and
                     nothing moves
  hf_distca          pack_padded on all ranks: tokens and core attention are balanced

A round runs all strategies once in shuffled order. Reading the batches, exchanging lengths,
planning and binding are part of a step. Every round has other lengths, so that no plan is made
before. Memory is the most that a rank held in a step above what it held before, each strategy in
fresh processes, with the lengths of the first round.

A round also times what comes before the model, for 64 sequences with 16,384 tokens together and
plans for a model of the sizes of Qwen3-0.6B by costs of an H200. Reading the mask and planning are
CPU time of one rank, in milliseconds; exchanging lengths over gloo is the time that passes.
Planning is timed for 1, 2 and 8 ranks.

Run: python benchmarks/padded.py [--rounds 12] [--rollouts 64] [--scale 4]
"""

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from harness import (
    Ranks,
    Round,
    begin_peak,
    follow_tensors,
    keep_freed_memory,
    over,
    peak,
    report,
    rounds_parser,
    run_ranks,
    slowest,
    take_rounds,
)
from harness.models import QUARTER_OF_600M, VOCABULARY, llama
from harness.padded import (
    LONGEST,
    Batch,
    forward_backward,
    keep_only_inputs_of_layers,
    lengths_that_add_up,
    norm_of_gradients,
    padded_batches,
    rollout_lengths,
)
from harness.simulated import simulated_run
from torch import nn

from hf_distca import Dispatcher, DistCAConfig, pack_padded
from hf_distca.batches.limits import Limits
from hf_distca.dispatch.padded_rows import PaddedBatch, read_sequences
from hf_distca.planner.padding import plan_padded
from hf_distca.planner.settings import PlanSettings
from hf_distca.predict.device_profile import DeviceProfile
from hf_distca.predict.shapes import ModelShape

CPU = torch.device("cpu")
RANKS = 2
STRATEGIES = ("padded to all", "padded to eight", "packed", "hf_distca")
WITHOUT_PLANS = STRATEGIES[:2]
QWEN3_600M = ModelShape.llama(28, 1024, 3072, 16, 8, 151936)
SEQUENCES, TOKENS = 64, 16384
"""Sequences and tokens for which the host's time before the model is counted."""
PLANNED_RANKS = (1, 2, 8)


@dataclass(frozen=True)
class Case:
    """Rollouts of all ranks, and by which their lengths are divided."""

    rollouts: int
    scale: int

    def lengths(self, seed: int) -> list[int]:
        return rollout_lengths(self.rollouts, self.scale, seed)

    def batches(self, seed: int, *, to_all: bool) -> list[Batch]:
        """Batches of this rank."""
        return padded_batches(
            self.lengths(seed)[dist.get_rank() :: RANKS], VOCABULARY, CPU, to_all=to_all
        )

    def targets(self, seed: int) -> int:
        return sum(self.lengths(seed)) - self.rollouts


def model_of(case: Case, strategy: str) -> tuple[nn.Module, Dispatcher | None]:
    """The model of a strategy, and its dispatcher if it has one. A collective call."""
    positions = LONGEST // case.scale
    model = llama(positions, "sdpa" if strategy in WITHOUT_PLANS else "distca", **QUARTER_OF_600M)
    keep_only_inputs_of_layers(model)
    if strategy in WITHOUT_PLANS:
        return model, None
    alone = (
        [dist.new_group([rank]) for rank in range(RANKS)][dist.get_rank()]
        if strategy == "packed"
        else None
    )
    # All sequences of a call fit at once.
    config = DistCAConfig(tokens_per_rank=8 * positions)
    return model, pack_padded(model, config, CPU, mesh=alone)


def step_of(case: Case, strategy: str, model: nn.Module, seed: int) -> Callable[[], float]:
    """Forward and backward of this rank's batches, which are made before; the call returns the loss
    of the rank.
    """
    batches = case.batches(seed, to_all=strategy == "padded to all")
    return partial(forward_backward, model, batches, case.targets(seed))


class Exchanges:
    """Counts exchanges, and the bytes that this rank sends to others, while it is entered."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> "Exchanges":
        self._before = dist.all_to_all_single, dist.all_gather_object
        dist.all_to_all_single = self._rows
        dist.all_gather_object = self._objects
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_to_all_single, dist.all_gather_object = self._before

    def _rows(
        self, received: torch.Tensor, sent: torch.Tensor, to: Any, of: list[int], **options: Any
    ) -> Any:
        row_bytes = sent[0].nbytes if len(sent) else 0
        hidden_bytes = QUARTER_OF_600M["hidden_size"] * 4
        kind = "tokens" if row_bytes < hidden_bytes else "hidden states and their gradients"
        if options.get("async_op"):
            kind = "core attention"
        others = sum(rows for rank, rows in enumerate(of) if rank != dist.get_rank())
        self.counts[f"{kind}: exchanges"] += 1
        self.counts[f"{kind}: bytes"] += others * row_bytes
        return self._before[0](received, sent, to, of, **options)

    def _objects(self, *args: Any, **options: Any) -> None:
        self.counts["lengths: exchanges"] += 1
        self._before[1](*args, **options)


def checked(case: Case) -> dict[str, Any]:
    """Losses and norms of gradients of all strategies, and what hf_distca exchanges, for the first
    lengths.
    """
    found: dict[str, Any] = {}
    for strategy in STRATEGIES:
        model, _ = model_of(case, strategy)
        with Exchanges() as exchanges:
            loss = torch.tensor(step_of(case, strategy, model, seed=0)())
        dist.all_reduce(loss)
        counts: list[Any] = [None] * RANKS
        dist.all_gather_object(counts, dict(exchanges.counts))
        found[strategy] = {"loss": loss.item(), "norm of gradients": norm_of_gradients(model)}
        if strategy == "hf_distca":
            names = dict.fromkeys(name for of_rank in counts for name in of_rank)
            found["exchanged"] = {
                # Every rank takes part in every exchange; bytes are those of all ranks.
                name: counts[0][name]
                if name.endswith("exchanges")
                else sum(of.get(name, 0) for of in counts)
                for name in names
            }
    return found


def memory_of(case: Case, strategy: str) -> float:
    """MiB above the start in a step, in a process that has done nothing else."""
    follow_tensors()
    model, _ = model_of(case, strategy)
    warm = padded_batches([8, 4], VOCABULARY, CPU, to_all=True)
    forward_backward(model, warm, 20)  # what is made once, such as threads, and code that is loaded
    model.zero_grad()
    step = step_of(case, strategy, model, seed=0)
    dist.barrier()
    before = begin_peak()
    step()
    return (peak() - before) / 2**20


def host_times(dispatcher: Dispatcher, seed: int) -> Round:
    """Milliseconds before the model runs, for 64 sequences with 16,384 tokens on all ranks."""
    lengths = lengths_that_add_up(SEQUENCES, TOKENS, seed)
    (own,) = padded_batches(lengths[dist.get_rank() :: RANKS], VOCABULARY, CPU, at_once=SEQUENCES)
    figures = {}
    begin = time.thread_time()
    read = read_sequences(PaddedBatch({"input_ids": own.input_ids}, own.attention_mask), Limits())
    figures["reading the mask, ms"] = time.thread_time() - begin
    dist.barrier()
    begin = time.perf_counter()
    dispatcher.groups.all_gather_in_pod(
        dispatcher.pod,
        lambda: tuple(read.lengths.tolist()),
        lambda _: None,
        contents="lengths of sequences",
    )
    figures["exchanging lengths, ms"] = time.perf_counter() - begin
    for ranks in PLANNED_RANKS:
        settings = settings_of_h200(ranks)
        of_ranks = [lengths[rank::ranks] for rank in range(ranks)]
        begin = time.thread_time()
        plan_padded(of_ranks, settings)
        figures[f"planning, ranks: {ranks}, ms"] = time.thread_time() - begin
    return {name: seconds * 1e3 for name, seconds in figures.items()}


def settings_of_h200(ranks: int) -> PlanSettings:
    """Settings of plans as training has them."""
    profile = DeviceProfile.load("h200")
    return simulated_run(QWEN3_600M, ranks, TOKENS, min(ranks, 8), profile).plans


def prepare(case: Case) -> Callable[[], Round]:
    """Make the models on this rank, and a round: every strategy once, in an order that is the same
    on all ranks.
    """
    keep_freed_memory()
    models = {strategy: model_of(case, strategy) for strategy in STRATEGIES}
    balanced = models["hf_distca"][1]
    assert balanced is not None
    order = random.Random(0)
    seeds = iter(range(1 << 30))

    def take() -> Round:
        seed = next(seeds)
        steps = {
            strategy: step_of(case, strategy, model, seed)
            for strategy, (model, _) in models.items()
        }
        seconds = {}
        for strategy in order.sample(STRATEGIES, len(STRATEGIES)):
            dist.barrier()
            begin = time.perf_counter()
            steps[strategy]()
            dist.barrier()
            seconds[strategy] = time.perf_counter() - begin
            models[strategy][0].zero_grad()
        figures = {f"{strategy}, s": seconds[strategy] for strategy in STRATEGIES}
        return {**figures, **host_times(balanced, seed), "load average": os.getloadavg()[0]}

    take()  # warms up
    return take


def largest_differences(found: dict[str, Any]) -> dict[str, float]:
    """The largest relative difference of loss and norm from the first strategy's, by strategy."""
    want = found[STRATEGIES[0]]
    differences = {}
    for strategy in STRATEGIES[1:]:
        differences[strategy] = max(
            abs(found[strategy][name] - figure) / abs(figure) for name, figure in want.items()
        )
    return differences


def rows_of(case: Case) -> dict[str, int]:
    """Rows that the model computes in each strategy for the lengths of the first round, on all
    ranks.
    """
    lengths = case.lengths(0)

    def padded(to_all: bool) -> int:
        by_rank = [
            padded_batches(lengths[rank::RANKS], VOCABULARY, CPU, to_all=to_all)
            for rank in range(RANKS)
        ]
        return sum(batch.input_ids.numel() for batches in by_rank for batch in batches)

    packed = dict.fromkeys(STRATEGIES[2:], sum(lengths))
    return dict(zip(WITHOUT_PLANS, (padded(True), padded(False)), strict=True)) | packed


def ratios() -> dict[str, Callable[[Round], float]]:
    return {
        f"{strategy} / hf_distca": over(f"{strategy}, s", "hf_distca, s")
        for strategy in STRATEGIES[:-1]
    }


def main() -> None:
    parser = rounds_parser(
        __doc__,
        rounds=12,
        rollouts=(64, "of all ranks"),
        scale=(4, "divides the lengths of rollouts"),
    )
    options = parser.parse_args()
    case = Case(options.rollouts, options.scale)
    found = run_ranks(RANKS, checked, case)[0]
    memory = {strategy: max(run_ranks(RANKS, memory_of, case, strategy)) for strategy in STRATEGIES}
    with Ranks(RANKS, prepare, case) as ranks:
        measured = take_rounds(options, lambda: slowest(ranks.take()))
    report(
        measured,
        ratios(),
        exchanged=found.pop("exchanged"),
        largest_difference=largest_differences(found),
        memory_mib=memory,
        rows=rows_of(case),
    )


if __name__ == "__main__":
    main()
