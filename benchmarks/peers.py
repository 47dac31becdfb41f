"""Beside peers: the same documents in every optimizer step, on 2 and 4 CPU ranks, by five ways to train on them.

Each way is a trainer (transformers' Trainer, or DistCATrainer) of the same 2-layer LLaMA of hidden size 256, float32,
AdamW, gradients clipped at 1, one thread a rank, gloo. A step has 16 documents, by default of 16384 tokens together:
one of half of the tokens with short ones, or a long tail. It takes loading, collating, planning, both passes, the
update and its log; it is an epoch where documents are shuffled, and else one of an epoch's equal steps.

  flattened           DDP, DataCollatorWithFlattening; a rank gets its share of the documents at random, the default
  rebalanced          the same with train_sampling_strategy="batch_rebalance"
  rebalanced, padded  batch_rebalance with rows padded to the longest of a rank, as its cost model has it; sdpa
  Ulysses             DeepSpeed's sequence parallelism through accelerate, ZeRO off; all documents in one row, packed
                      beforehand, on all ranks
  hf_distca           DistCATrainer with its defaults, tokens_per_rank as small as holds the documents

Packed rows are computed by one CPU kernel in all ways, which skips what documents do not attend to, as FlashAttention
does; "sdpa" alone would build a mask of all tokens by all tokens there. Every way takes the mean over all targets of
a step; Ulysses does where a step is one row, and else takes the mean of the means of rows, which is shown for two.
Losses of every step are compared.

Time on this machine says little about balance on 4 ranks: 2 cores are shared by 4 ranks, so that work on all of them
adds up and a rank that waits costs nothing. `imbalance` does not depend on that: query-key pairs of the busiest rank
over the mean, padding counted where it is computed; Ulysses divides heads, which are alike. Memory is the most that a
rank's process held in a step above what it held before it, of the rank with the most, without weights and optimizer
states.

Run: OMP_NUM_THREADS=1 python benchmarks/peers.py [--rounds 6] [--tokens 16384]
"""

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from harness import Ranks, Round, over, report
from harness.rounds import Measured
from peer_trainers import Case, Halted, flattened, planned, rebalanced, rebalanced_padded, ulysses

RANKS = (2, 4)
MIXES = {
    "one long": [8192, *[544] * 14, 576],
    "long tail": [5248, 2816, 1792, 1408, 1024, 832, 768, 608, 480, 384, 288, 224, 192, 128, 96, 96],
}
"""Tokens of the documents of a step, of TOKENS in all; multiples of 32."""
TOKENS = 16384
OURS, ULYSSES = "hf_distca", "Ulysses"
DATA_PARALLEL = {
    "flattened": flattened,
    "rebalanced": rebalanced,
    "rebalanced, padded": rebalanced_padded,
    OURS: planned,
}
"""Ways that share processes; Ulysses replaces attention in the whole process, so each training has its own."""

Figures = dict[str, dict[str, Any]]
"""Of a rank, by mix and way."""


def enter(rank: int) -> None:
    """Tell accelerate of the rank."""
    os.environ["LOCAL_RANK"] = str(rank)


def prepare(
    makers: dict[str, Callable[[Case, int], Halted]], cases: dict[str, Case], ranks: int
) -> Callable[[], Figures]:
    """Make the trainers of this rank, and a round: every way once, in shuffled order, the same on all ranks.

    The last of the steps that a case has is taken for its memory.
    """
    trainers = {f"{mix}, {way}": make(case, ranks) for mix, case in cases.items() for way, make in makers.items()}
    order, steps = random.Random(0), next(iter(cases.values())).steps
    left = iter(range(steps))

    def take() -> Figures:
        measures_memory = next(left) == steps - 1
        names = order.sample(list(trainers), len(trainers))
        return {name: memory(trainers[name]) if measures_memory else step(trainers[name]) for name in names}

    return take


def step(halted: Halted) -> dict[str, Any]:
    """A step's figures on this rank."""
    seconds, log = halted.step()
    found = {"seconds": seconds, "loss": log["loss"]}
    if halted.computed is not None:
        found["pairs"] = halted.computed.take()
    if "distca/imbalance_degree" in log:
        found["imbalance"] = log["distca/imbalance_degree"]
    return found


def memory(halted: Halted) -> dict[str, Any]:
    """What a step takes on this rank."""
    return {"MiB": halted.step_memory()}


def together(of_ranks: Sequence[Figures]) -> Figures:
    """Figures of all ranks as those of the whole."""
    found: Figures = {}
    for name, first in of_ranks[0].items():
        each = [rank[name] for rank in of_ranks]
        found[name] = {key: value for key, value in first.items() if key != "pairs"}
        if "pairs" in first:
            found[name]["imbalance"] = imbalance([rank["pairs"] for rank in each])
        if "MiB" in first:
            found[name]["MiB"] = max(rank["MiB"] for rank in each)
    return found


def imbalance(pairs: Sequence[float]) -> float:
    """Of the busiest rank over the mean."""
    return max(pairs) * len(pairs) / sum(pairs)


def largest_difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """Between losses of the same steps, relative."""
    return max(abs(a / b - 1) for a, b in zip(losses, others, strict=True))


def measure(ranks: int, rounds: int, lengths: dict[str, list[int]], folder: str) -> list[Figures]:
    """Figures of every step of every way: one to warm up, the rounds, and one for memory."""
    cases = {mix: Case(of_mix, rounds + 2, folder) for mix, of_mix in lengths.items()}
    order = random.Random(0)
    with ExitStack() as stack:
        pools = [stack.enter_context(Ranks(ranks, prepare, DATA_PARALLEL, cases, ranks, enter=enter))]
        pools += [
            stack.enter_context(Ranks(ranks, prepare, {ULYSSES: ulysses}, {mix: case}, ranks, enter=enter))
            for mix, case in cases.items()
        ]
        steps = []
        for _ in range(rounds + 2):
            of_step: Figures = {}
            for pool in order.sample(pools, len(pools)):
                of_step |= together(pool.take())
            steps.append(of_step)
            print(".", end="", flush=True, file=sys.stderr)
    print(file=sys.stderr)
    return steps


def first_loss(case: Case, **settings: Any) -> float:
    """Loss of the first step by Ulysses on two ranks with other settings."""
    makers = {ULYSSES: partial(ulysses, **settings)}
    with Ranks(2, prepare, makers, {"packed": case}, 2, enter=enter) as ranks:
        loss: float = together(ranks.take())[f"packed, {ULYSSES}"]["loss"]
    return loss


def summary(steps: Sequence[Figures], name: str, ours: str) -> dict[str, Any]:
    """Of a mix and way: what is not timed."""
    losses = [each[name]["loss"] for each in steps[:-1]]
    found = {
        "first_loss": f"{losses[0]:.7f}",
        "largest_difference_of_losses": largest_difference(losses, [each[ours]["loss"] for each in steps[:-1]]),
        "MiB": steps[-1][name]["MiB"],
    }
    return found


def main() -> None:
    """Measure, print tables and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="how many (default: 6)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"of a step (default: {TOKENS})")
    options = parser.parse_args()
    lengths = {mix: [length * options.tokens // TOKENS for length in of_mix] for mix, of_mix in MIXES.items()}
    rounds: list[Round] = [{} for _ in range(options.rounds)]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        case = Case(lengths["one long"], 2, folder)
        masks_dropped = first_loss(case, attention="sdpa")
        two_rows = first_loss(case, in_two_rows=True)
        for ranks in RANKS:
            steps = measure(ranks, options.rounds, lengths, folder)
            for mix in lengths:
                for way in (*DATA_PARALLEL, ULYSSES):
                    name = f"{mix}, {way}"
                    found[f"{ranks} ranks, {name}"] = summary(steps, name, f"{mix}, {OURS}")
                    for index, timed in enumerate(steps[1:-1]):
                        rounds[index] |= {
                            f"{ranks} ranks, {name}, tokens/s": sum(lengths[mix]) / timed[name]["seconds"],
                            f"{ranks} ranks, {name}, imbalance": timed[name].get("imbalance", 1.0),
                        }
    ratios = {
        f"{ranks} ranks, {mix}: {OURS} / {way}": over(
            f"{ranks} ranks, {mix}, {OURS}, tokens/s", f"{ranks} ranks, {mix}, {way}, tokens/s"
        )
        for ranks in RANKS
        for mix in lengths
        for way in (*DATA_PARALLEL, ULYSSES)
        if way != OURS
    }
    report(
        Measured(rounds),
        ratios,
        lengths=lengths,
        ways=found,
        ulysses_sdpa_first_loss=f"{masks_dropped:.7f}",
        ulysses_two_rows_first_loss=f"{two_rows:.7f}",
    )


if __name__ == "__main__":
    main()
