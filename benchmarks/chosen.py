"""Plans chosen by seconds, beside all other strategies and beside every candidate: an 8B model on H100, simulated.

Two parts:

  networks   16 GPUs with 16384 tokens each, 1 and 8 of them in a node, networks from 1 to 50 GB/s a GPU, five kinds
             of documents: the best strategy that keeps the context of every document over the chosen plan
  data sets  8 and 64 GPUs with 32768 tokens each in nodes of 8, each data set: the same ratio

A ratio above 1 says that the chosen plan is faster. Strategies that hold more than the tokens of a GPU on one of them
are left out: they need the memory for that.

Run: PYTHONPATH=. python benchmarks/chosen.py [--batches 8] [--batches-of-data-sets 200]
"""

import argparse
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

import numpy as np
from harness import print_json, print_rows
from numpy.typing import NDArray

from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.seconds import LinkCost
from hf_distca.planner.settings import Choices, PlanSettings
from hf_distca.sim.costs import DeviceProfile
from hf_distca.sim.lengths import Draw, corpora, cut_at, lognormal, micro_batches
from hf_distca.sim.model import LLAMA_8B
from hf_distca.sim.strategies import Setup, all_strategies, planned

IntArray = NDArray[np.int64]
H100 = DeviceProfile.load("h100")
NETWORKS = (1.0, 1.5, 3.0, 12.0, 50.0)
"""GB/s that a GPU sends, and receives, between nodes."""
FAST_ENOUGH = 0.99
"""Ratio below which a micro-batch counts as slower than the best other strategy."""


def grid_documents(tokens: int) -> Iterator[tuple[str, Draw, IntArray | None]]:
    """Kinds of documents; what every micro-batch of `tokens` tokens begins with."""
    yield "chats", lognormal(900, 1.0), None
    yield "equal", lambda random, count: np.full(count, 4096), None
    yield "nearly equal", lambda random, count: random.integers(1500, 2500, count), None
    yield "rollouts", cut_at(lognormal(4000, 1.4), 65536), None
    yield "one long", lognormal(2048, 1.0), np.array([tokens // 2])


def data_sets() -> Iterator[tuple[str, Draw]]:
    """Data sets."""
    yield "chats", lognormal(800, 1.0)
    yield "code and papers", lognormal(3000, 1.5)
    yield from corpora().items()


def setup_of(ranks: int, tokens: int, ranks_per_node: int, network: float | None) -> tuple[Setup, PlanSettings]:
    """Who trains, and the settings of plans.

    Args:
        ranks: GPUs.
        tokens: of each.
        ranks_per_node: GPUs of a node.
        network: GB/s a GPU between nodes; None for the profile's.
    """
    profile = H100
    if network is not None:
        between = LinkCost(H100.exchange.between.latency, network * 1e9)
        profile = replace(
            H100, links=replace(H100.links, between=between), exchange=replace(H100.exchange, between=between)
        )
    setup = Setup(LLAMA_8B, profile, ranks, tokens, ranks_per_node)
    settings = PlanSettings(ranks, tokens, tuple(LLAMA_8B.layers), ping_pong=True, ranks_per_node=ranks_per_node)
    return setup, replace(settings, choices=Choices(setup.costs))


def compared(lengths: IntArray, setup: Setup, settings: PlanSettings) -> tuple[float, float]:
    """Time of the best other strategy over the chosen plan's, inf where none fits; CPU milliseconds of planning."""
    others = []
    for way in all_strategies(setup, replace(settings, choices=None), 0):
        if way.document_layout is None:
            step, _ = way.step(lengths)
            if not step.documents_cut and step.tokens_most <= setup.tokens_per_rank:
                others.append(step.seconds)
    began = time.process_time()
    plan_micro_batch(lengths.tolist(), settings)
    took = time.process_time() - began
    chosen, _ = planned(lengths, setup, settings)
    return min(others, default=np.inf) / chosen.seconds, took * 1e3


def summary(batches: Iterable[IntArray], setup: Setup, settings: PlanSettings) -> dict[str, float]:
    """What many micro-batches come to."""
    ratios, took = np.array([compared(lengths, setup, settings) for lengths in batches]).T
    fair = ratios[np.isfinite(ratios)] if np.isfinite(ratios).any() else ratios
    return {
        "median": float(np.median(fair)),
        "worst": float(fair.min()),
        "share below 0.99": float((fair < FAST_ENOUGH).mean()),
        "planning, ms": float(np.median(took)),
        "planning, 95 %, ms": float(np.quantile(took, 0.95)),
    }


def networks(count: int) -> list[dict[str, float | str]]:
    """The first part."""
    ranks, tokens, rows = 16, 16384, []
    for ranks_per_node in (1, 8):
        for network in NETWORKS:
            setup, settings = setup_of(ranks, tokens, ranks_per_node, network)
            for name, draw, first in grid_documents(ranks * tokens):
                batches = islice(micro_batches(draw, ranks * tokens, 0, first), count)
                found = summary(batches, setup, settings)
                rows.append({"GPUs a node": ranks_per_node, "GB/s": network, "documents": name, **found})
    return rows


def of_data_sets(count: int) -> list[dict[str, float | str]]:
    """The second part."""
    rows = []
    for ranks in (8, 64):
        setup, settings = setup_of(ranks, 32768, 8, None)
        for name, draw in data_sets():
            batches = islice(micro_batches(draw, ranks * 32768, 0), count)
            rows.append({"GPUs": ranks, "documents": name, **summary(batches, setup, settings)})
    return rows


def main() -> None:
    """Simulate, print tables and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=8, help="micro-batches of each network (default: 8)")
    parser.add_argument("--batches-of-data-sets", type=int, default=200, help="of each data set (default: 200)")
    options = parser.parse_args()
    by_network = networks(options.batches)
    print_rows(by_network)
    by_data_set = of_data_sets(options.batches_of_data_sets)
    print_rows(by_data_set)
    print_json(networks=by_network, data_sets=by_data_set)


if __name__ == "__main__":
    main()
