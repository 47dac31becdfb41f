"""Time of planning a micro-batch of six kinds of documents, by number of ranks.

An 8B model, nodes of 8 H100, at most 32768 tokens on each rank; lengths are the same every time.
Without --choices the settings decide the plans. With --choices the planner chooses them by
predicted seconds, as in training. What they achieve is for `planner.py` and `chosen.py` to say.

Run: python benchmarks/plan_time.py [--rounds 12] [--ranks 8 64 256] [--choices]
     python benchmarks/plan_time.py --against OTHER_CHECKOUT      two checkouts in turns
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np
from harness import Round, report, rounds_parser, take_rounds
from harness.simulated import simulated_run

from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.predict.shapes import LLAMA_8B
from hf_distca.sim.lengths import corpora, cut_at, lognormal, micro_batches, of_documents

TOKENS, NODE, BATCHES = 32768, 8, 4
"""Tokens of a rank, ranks of a node, and micro-batches that are planned one after another."""
KINDS = {
    "chats": lognormal(800, 1.0),
    "equal": of_documents(np.array([4096])),
    "rollouts": cut_at(lognormal(6000, 1.3), 65536),
    **corpora(),
}


def plans(ranks: int, choices: bool) -> dict[str, list[Callable[[], object]]]:
    """Return what plans the micro-batches of each kind of documents, by the name of the figure."""
    settings = simulated_run(LLAMA_8B, ranks, TOKENS, NODE).plans
    if not choices:
        settings = replace(settings, costs=None)
    found = {}
    for name, draw in KINDS.items():
        batches = islice(micro_batches(draw, ranks * TOKENS, seed=1), BATCHES)
        planning = [partial(plan_micro_batch, lengths.tolist(), settings) for lengths in batches]
        found[f"{'chosen' if choices else 'as set'}, {ranks} ranks, {name}, ms"] = planning
    return found


def main() -> None:
    parser = rounds_parser(__doc__, rounds=12)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[8, 64, 256], help="how many (default: 8 64 256)"
    )
    parser.add_argument("--choices", action="store_true", help="plans chosen by seconds")
    options = parser.parse_args()
    planning = {
        name: each
        for ranks in options.ranks
        for name, each in plans(ranks, options.choices).items()
    }

    def take() -> Round:
        figures = {}
        for name, calls in planning.items():
            begin = time.process_time()
            for call in calls:
                call()
            figures[name] = (time.process_time() - begin) * 1000 / BATCHES
        return figures

    take()  # warms up
    report(take_rounds(options, take), {})


if __name__ == "__main__":
    main()
