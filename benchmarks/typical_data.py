"""What to expect for four kinds of documents: an 8B model on 8 and 64 H100, simulated.

PYTHONPATH=. python benchmarks/typical_data.py [--batches 16]
"""

import argparse
from collections.abc import Iterator

from harness import print_json, table

from hf_distca.planner.settings import PlanSettings
from hf_distca.sim.costs import DeviceProfile
from hf_distca.sim.lengths import Draw, corpora, lognormal, micro_batches
from hf_distca.sim.model import LLAMA_8B
from hf_distca.sim.simulate import simulate
from hf_distca.sim.ways import Setup

RANKS, RANKS_PER_NODE, TOKENS_PER_RANK = (8, 64), 8, 32768


def data() -> Iterator[tuple[str, Draw]]:
    """Kinds of documents, and how their lengths are drawn."""
    yield "chats: median 800 tokens, lognormal with σ = 1", lognormal(800, 1.0)
    yield "code and papers: median 3000 tokens, lognormal with σ = 1.5", lognormal(3000, 1.5)
    yield "ProLong's lengths", corpora()["prolong"]
    yield "pretraining mix of WLB-LLM's lengths", corpora()["wlbllm"]


def main() -> None:
    """Simulate, print a table and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=16, help="micro-batches of each setting (default: 16)")
    count = parser.parse_args().batches
    profile, found = DeviceProfile.load("h100"), []
    for name, draw in data():
        for ranks in RANKS:
            setup = Setup(LLAMA_8B, profile, ranks, TOKENS_PER_RANK, RANKS_PER_NODE)
            settings = PlanSettings(
                ranks,
                TOKENS_PER_RANK,
                kinds=tuple(LLAMA_8B.layers),
                ping_pong=True,
                ranks_per_node=RANKS_PER_NODE if ranks > RANKS_PER_NODE else 1,
            )
            result = simulate(micro_batches(draw, ranks * TOKENS_PER_RANK, seed=0), setup, settings, count)
            ways = {way.name: way for way in result.ways}
            plain, best = ways["plain packing"], ways[result.best_plain]
            joint = ways["hf_distca, joint"]
            found.append(
                {
                    "documents": name,
                    "ranks": ranks,
                    "imbalance": result.imbalance,
                    "attention_share": joint.attention_mean_seconds / joint.step_seconds,
                    "over_plain": plain.step_seconds / joint.step_seconds,
                    "plain_cuts": plain.documents_cut,
                    "best_other": best.name,
                    "over_best_other": best.step_seconds / joint.step_seconds,
                    "best_other_cuts": best.documents_cut,
                }
            )
    columns = tuple(found[0])
    table(columns, [tuple(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()) for row in found])
    print_json(batches=count, settings=found)


if __name__ == "__main__":
    main()
