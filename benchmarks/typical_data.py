"""Expected speed-up for five kinds of documents: an 8B model on 8 and 64 H100, 32768 tokens each,
simulated.

Every micro-batch is simulated with hf_distca's defaults and with every other strategy. These
comparisons come of it:

  best other     the fastest strategy that keeps every document whole, so that all compute the same;
                 taken for each micro-batch, with hindsight
  best fitting   the same, of the strategies that hold at most 32768 tokens on each GPU
  best fixed     as best other, but one strategy for all micro-batches, as a launch sets it
  transformers   best other and best fixed of the strategies that transformers, accelerate or TRL
                 run on packed documents
  plain packing  documents packed by tokens, as TRL does with packing=True. What a rank cannot hold
                 is cut, which drops attention across the cuts

Beside plain packing the gain is (t · r + m) / (r + 1 + w). The unit of r, m and w is the mean core
attention of a rank in the planned step:

  r  everything else that a rank computes
  m  core attention of the busiest rank, as packed
  t  tokens of that rank over the mean: 1 where documents fill all rows alike
  w  what a plan leaves: waits for rows, and the imbalance that is cheaper than moving more of them

Run: PYTHONPATH=. python benchmarks/typical_data.py [--batches 64] [--ranks 8 64]
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from harness import options_parser, print_json, print_rows, spread
from harness.simulated import simulated_run
from numpy.typing import NDArray

from hf_distca.predict.shapes import LLAMA_8B
from hf_distca.run import RunSpec
from hf_distca.sim.lengths import Draw, corpora, lognormal, micro_batches
from hf_distca.sim.strategies import CHOSEN, PLAIN, StepTime, all_strategies, on_ranks, packed_rows

RANKS = (8, 64)
RANKS_PER_NODE = 8
TOKENS_PER_RANK = 32768
BUSIEST = "busiest packed rank"
FAST_ENOUGH = 0.99
"""Ratio below which a micro-batch counts as slower than the best fitting strategy."""


def data() -> Iterator[tuple[str, Draw]]:
    yield "chats", lognormal(800, 1.0)
    yield "agent traces", corpora()["agents"]
    yield "code and papers", lognormal(3000, 1.5)
    yield "ProLong", corpora()["prolong"]
    yield "pretraining mix", corpora()["wlbllm"]


Steps = Mapping[str, Sequence[StepTime]]
"""[micro-batches] steps of each strategy by its name."""


def simulated(draw: Draw, ranks: int, count: int) -> tuple[Steps, list[str]]:
    """What every strategy, and the busiest packed rank, take for the same micro-batches; and the
    names of the strategies that transformers, accelerate or TRL run.
    """
    run = simulated_run(LLAMA_8B, ranks, TOKENS_PER_RANK, RANKS_PER_NODE)
    ways = [way for way in all_strategies(run) if way.document_layout is None or way.name == CHOSEN]
    runs = [way.name for way in ways if way.in_transformers]
    batches = list(islice(micro_batches(draw, run.plans.micro_batch_tokens, seed=0), count))
    busiest = {BUSIEST: [busiest_packed(lengths, run) for lengths in batches]}
    return busiest | {way.name: [way.step(lengths)[0] for lengths in batches] for way in ways}, runs


def busiest_packed(lengths: NDArray[np.int64], run: RunSpec) -> StepTime:
    """Return what the rank takes that plain packing gives the most to compute, as a step of this
    rank alone.
    """
    rows, _ = packed_rows(lengths, run)
    return max((on_ranks([row], run) for row in rows), key=lambda step: step.seconds)


def mean(steps: Sequence[StepTime], of_step: Callable[[StepTime], float]) -> float:
    return float(np.mean([of_step(step) for step in steps]))


def best_of_batches(
    steps: Steps, names: Iterable[str], fits: Callable[[StepTime], bool] = lambda step: True
) -> list[tuple[str, float]]:
    """The fastest strategy of those that cut the fewest documents of each micro-batch, and its
    seconds.
    """
    best = []
    for of_batch in zip(*(steps[name] for name in names), strict=True):
        fitting = [pair for pair in zip(names, of_batch, strict=True) if fits(pair[1])]
        name, step = min(fitting, key=lambda pair: (pair[1].documents_cut, pair[1].seconds))
        best.append((name, step.seconds))
    return best


def best_fixed(steps: Steps, names: Iterable[str]) -> float:
    """The mean seconds of the fastest strategy of those that cut the fewest documents in all."""
    cut_and_seconds = (
        (
            sum(step.documents_cut for step in steps[name]),
            mean(steps[name], lambda step: step.seconds),
        )
        for name in names
    )
    return min(cut_and_seconds)[1]


def comparison(steps: Steps, in_transformers: Sequence[str]) -> dict[str, Any]:
    """The figures of one kind of documents, from the steps of every strategy of the same
    micro-batches.
    """
    planned = steps[CHOSEN]
    plain = steps[PLAIN]
    busiest = steps[BUSIEST]
    own = np.array([step.seconds for step in planned])
    seconds = float(own.mean())

    def over_planned(others: Iterable[float]) -> list[float]:
        """Gains of the micro-batches over other strategies."""
        return [float(other / mine) for other, mine in zip(others, own, strict=True)]

    names = [name for name in steps if name not in (CHOSEN, BUSIEST)]
    best = best_of_batches(steps, names)
    fitting = over_planned(
        taken
        for _, taken in best_of_batches(
            steps, names, lambda step: step.tokens_most <= TOKENS_PER_RANK
        )
    )
    today = best_of_batches(steps, in_transformers)
    unit = mean(planned, lambda step: step.attention.mean())
    return {
        "attention_share": unit / seconds,
        "best_other": Counter(name for name, _ in best).most_common(1)[0][0],
        "over_best_other": float(np.mean([taken for _, taken in best])) / seconds,
        "over_best_other_of_batches": spread(over_planned(taken for _, taken in best)),
        "over_best_fitting": {"median": float(np.median(fitting)), "worst": min(fitting)},
        "slower_than_best_fitting": float(np.mean(np.array(fitting) < FAST_ENOUGH)),
        "over_best_fixed": best_fixed(steps, names) / seconds,
        "over_transformers_of_batches": spread(over_planned(taken for _, taken in today)),
        "over_fixed_in_transformers": best_fixed(steps, in_transformers) / seconds,
        "over_plain": mean(plain, lambda step: step.seconds) / seconds,
        "over_plain_of_batches": spread(over_planned(step.seconds for step in plain)),
        "plain_drops": 1 - mean(plain, lambda step: step.attention.mean()) / unit,
        "m": mean(busiest, lambda step: step.attention.max()) / unit,
        "t": mean(busiest, lambda step: step.other.max())
        / mean(planned, lambda step: step.other.mean()),
        "r": mean(planned, lambda step: step.other.mean()) / unit,
        "w": (seconds - mean(planned, lambda step: step.other.mean())) / unit - 1,
    }


def main() -> None:
    parser = options_parser(__doc__, batches=(64, "micro-batches of each setting"))
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="GPUs (default: 8 64)")
    options = parser.parse_args()
    count = options.batches
    found = [
        {"documents": name, "ranks": ranks, **comparison(*simulated(draw, ranks, count))}
        for name, draw in data()
        for ranks in options.ranks
    ]
    print_rows(found)
    print_json(batches=count, settings=found)


if __name__ == "__main__":
    main()
