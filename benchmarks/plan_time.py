"""Time of planning a micro-batch of six kinds of documents, by number of ranks.

An 8B model, nodes of 8 H100, at most 32768 tokens on each rank; lengths are the same every time.
Without --choices the settings decide the plans. With --choices the planner chooses them by
predicted seconds, as in training: documents are dealt to pods, and rank 0 plans its own pod, which
is the one with the longest document if pods differ in size. --memory also reports the most memory
that a plan takes. What plans achieve is for `planner.py`, `chosen.py` and `pods.py` to say.

Run: python benchmarks/plan_time.py [--rounds 12] [--ranks 8 64 256] [--choices] [--memory]
     python benchmarks/plan_time.py --against OTHER_CHECKOUT      two checkouts in turns
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np
from harness import Round, most_megabytes, report, rounds_parser, take_rounds
from harness.simulated import simulated_run

from hf_distca.planner.micro_batch import plan_pod
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
        batches = islice(micro_batches(draw, settings.micro_batch_tokens, seed=1), BATCHES)
        planning = [partial(plan_pod, lengths, settings, rank=0) for lengths in batches]
        found[f"{'chosen' if choices else 'as set'}, {ranks} ranks, {name}, ms"] = planning
    return found


def main() -> None:
    parser = rounds_parser(__doc__, rounds=12)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[8, 64, 256], help="how many (default: 8 64 256)"
    )
    parser.add_argument("--choices", action="store_true", help="plans chosen by seconds")
    parser.add_argument("--memory", action="store_true", help="the most memory of a plan, too")
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
    memory = {
        name.removesuffix(", ms"): round(most_megabytes(calls), 1)
        for name, calls in (planning.items() if options.memory else ())
    }
    report(take_rounds(options, take), {}, memory_mb=memory)


if __name__ == "__main__":
    main()
