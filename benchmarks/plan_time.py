"""Time of planning a global micro-batch of documents whose lengths have a long tail, by layout and number of ranks.

Each rank holds at most 32768 tokens; lengths are drawn from a log-normal distribution, the same every time. Plans are
those of users who set nothing: Llama-3-8B's attention in bfloat16, ping-pong, the default tolerance. What they achieve
is for `planner.py` to say.

Run: python benchmarks/plan_time.py [--rounds 12] [--ranks 8 64 256] [--ranks-per-node 8]
     python benchmarks/plan_time.py --against OTHER_CHECKOUT      two checkouts in turns
"""

import time
from functools import partial

import numpy as np
from harness import Round, report, rounds_parser, take_rounds

from hf_distca import PlanSettings
from hf_distca.planner.build import plan_placed
from hf_distca.planner.micro_batch import plan_micro_batch

TOKENS = 32768
"""Of a rank."""
BATCHES = 4
"""Planned one after another; their times are added up."""


def documents(ranks: int, seed: int) -> list[list[int]]:
    """Lengths of the documents of each rank, TOKENS in all; the last one of a rank is cut to fit."""
    drawn = np.random.default_rng(seed)
    rows = []
    for _ in range(ranks):
        row, left = [], TOKENS
        while left:
            length = min(int(drawn.lognormal(7.5, 1.5)) + 16, left)
            row.append(length)
            left -= length
        rows.append(row)
    return rows


def main() -> None:
    """Measure, print tables and one JSON object."""
    parser = rounds_parser(__doc__, rounds=12)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256], help="how many (default: 8 64 256)")
    parser.add_argument("--ranks-per-node", type=int, default=1, help="of each node (default: 1, links all alike)")
    options = parser.parse_args()
    ways = {}
    for ranks in options.ranks:
        settings = PlanSettings(ranks, TOKENS, ping_pong=True, ranks_per_node=options.ranks_per_node)
        batches = [documents(ranks, seed) for seed in range(BATCHES)]
        whole = [[length for row in rows for length in row] for rows in batches]
        ways[f"joint, {ranks} ranks, ms"] = [partial(plan_micro_batch, lengths, settings) for lengths in whole]
        ways[f"fixed, {ranks} ranks, ms"] = [partial(plan_placed, rows, settings) for rows in batches]

    def take() -> Round:
        figures = {}
        for name, plans in ways.items():
            begin = time.process_time()
            for plan in plans:
                plan()
            figures[name] = (time.process_time() - begin) * 1000 / BATCHES
        return figures

    take()  # warms up
    report(take_rounds(options, take), {})


if __name__ == "__main__":
    main()
