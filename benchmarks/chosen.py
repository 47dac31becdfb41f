"""Plans chosen by seconds, beside all other strategies: an 8B model on H100, simulated.

16 GPUs with 16384 tokens each, 1 and 8 of them in a node, networks from 1 to 50 GB/s a GPU, five
kinds of documents. The ratio is the best strategy that keeps the context of every document over the
chosen plan; above 1 the chosen plan is faster. Strategies that hold more than 16384 tokens on a GPU
are left out: they need the memory for that.

Run: PYTHONPATH=. python benchmarks/chosen.py [--batches 8]
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import numpy as np
from harness import options_parser, print_json, print_rows
from harness.simulated import simulated_run

from hf_distca.plan.arrays import IntArray
from hf_distca.predict.device_profile import DeviceProfile
from hf_distca.predict.seconds import LinkCost
from hf_distca.predict.shapes import LLAMA_8B
from hf_distca.run import RunSpec
from hf_distca.sim.lengths import Draw, cut_at, lognormal, micro_batches
from hf_distca.sim.strategies import all_strategies, planned

H100 = DeviceProfile.load("h100")
NETWORKS = (1.0, 1.5, 3.0, 12.0, 50.0)
"""GB/s that a GPU sends, and receives, between nodes."""
RANKS, TOKENS = 16, 16384
"""GPUs, and tokens of each."""


def grid_documents(tokens: int) -> Iterator[tuple[str, Draw, IntArray | None]]:
    """Kinds of documents; what every micro-batch of `tokens` tokens begins with."""
    yield "chats", lognormal(900, 1.0), None
    yield "equal", lambda random, count: np.full(count, 4096), None
    yield "nearly equal", lambda random, count: random.integers(1500, 2500, count), None
    yield "rollouts", cut_at(lognormal(4000, 1.4), 65536), None
    yield "one long", lognormal(2048, 1.0), np.array([tokens // 2])


def profile_with(network: float) -> DeviceProfile:
    """Return the costs of an H100 with `network` GB/s between nodes."""
    between = LinkCost(H100.exchange.between.latency, network * 1e9)
    return replace(
        H100,
        links=replace(H100.links, between=between),
        exchange=replace(H100.exchange, between=between),
    )


def run_of(ranks_per_node: int, network: float) -> RunSpec:
    return simulated_run(LLAMA_8B, RANKS, TOKENS, ranks_per_node, profile_with(network))


def compared(lengths: IntArray, run: RunSpec) -> float:
    """Time of the best other strategy over the chosen plan's, inf where none fits."""
    others = []
    for way in all_strategies(run):
        if way.document_layout is None:
            step, _ = way.step(lengths)
            if not step.documents_cut and step.tokens_most <= TOKENS:
                others.append(step.seconds)
    chosen, _ = planned(lengths, run)
    return min(others, default=np.inf) / chosen.seconds


def networks(count: int) -> Iterator[dict[str, float | str]]:
    for ranks_per_node in (1, 8):
        for network in NETWORKS:
            run = run_of(ranks_per_node, network)
            for name, draw, first in grid_documents(RANKS * TOKENS):
                batches = islice(micro_batches(draw, RANKS * TOKENS, 0, first), count)
                ratios = np.array([compared(lengths, run) for lengths in batches])
                fair = ratios[np.isfinite(ratios)] if np.isfinite(ratios).any() else ratios
                figures = {"median": float(np.median(fair)), "worst": float(fair.min())}
                yield {"GPUs a node": ranks_per_node, "GB/s": network, "documents": name, **figures}


def main() -> None:
    parser = options_parser(__doc__, batches=(8, "micro-batches of each network"))
    found = list(networks(parser.parse_args().batches))
    print_rows(found)
    print_json(networks=found)


if __name__ == "__main__":
    main()
