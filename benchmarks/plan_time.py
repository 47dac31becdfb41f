"""Time of planning a global micro-batch of documents whose lengths have a long tail, by layout and number of ranks.

Each rank holds at most 32768 tokens; lengths are drawn from a log-normal distribution, the same every time. Plans are
those of users who set nothing: Llama-3-8B's attention in bfloat16, ping-pong, the default tolerance. What they achieve
is for `planner.py` to say.

With --choices the plans of five kinds of documents are chosen by the seconds of an H100 instead, on nodes of 8.

Run: python benchmarks/plan_time.py [--rounds 12] [--ranks 8 64 256] [--ranks-per-node 8] [--choices]
     python benchmarks/plan_time.py --against OTHER_CHECKOUT      two checkouts in turns
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np
from harness import Round, report, rounds_parser, take_rounds

from hf_distca import PlanSettings
from hf_distca.planner.build import plan_placed
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import Choices
from hf_distca.sim.costs import DeviceProfile
from hf_distca.sim.lengths import corpora, cut_at, lognormal, micro_batches, of_documents
from hf_distca.sim.model import LLAMA_8B
from hf_distca.sim.strategies import Setup

TOKENS = 32768
"""Of a rank."""
NODE = 8
"""Ranks of a node where plans are chosen by seconds."""
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


def chosen(ranks: int) -> Iterator[tuple[str, list[Callable[[], object]]]]:
    """Planning by seconds, for each kind of documents."""
    kinds = {"chats": lognormal(800, 1.0), "equal": of_documents(np.array([4096]))}
    kinds |= {"rollouts": cut_at(lognormal(6000, 1.3), 65536), **corpora()}
    costs = Setup(LLAMA_8B, DeviceProfile.load("h100"), ranks, TOKENS, NODE).costs
    plain = PlanSettings(ranks, TOKENS, tuple(LLAMA_8B.layers), ping_pong=True, ranks_per_node=NODE)
    settings = replace(plain, choices=Choices.beside(plain, costs))
    for name, draw in kinds.items():
        batches = islice(micro_batches(draw, ranks * TOKENS, seed=1), BATCHES)
        yield name, [partial(plan_micro_batch, lengths.tolist(), settings) for lengths in batches]


def main() -> None:
    """Measure, print tables and one JSON object."""
    parser = rounds_parser(__doc__, rounds=12)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256], help="how many (default: 8 64 256)")
    parser.add_argument("--ranks-per-node", type=int, default=1, help="of each node (default: 1, links all alike)")
    parser.add_argument("--choices", action="store_true", help="plans chosen by seconds")
    options = parser.parse_args()
    ways: dict[str, list[Callable[[], object]]] = {}
    for ranks in options.ranks:
        if options.choices:
            ways |= {f"chosen, {ranks} ranks, {name}, ms": plans for name, plans in chosen(ranks)}
            continue
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
