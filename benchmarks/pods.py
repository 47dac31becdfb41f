"""What pods cost: predicted steps with pods over one plan of all ranks, an 8B model on H100.

Nodes of 8, 32768 tokens on each rank, and the documents of `plan_time.py`. A ratio is the predicted
step of the slowest pod over the step of one plan of all ranks, for the same micro-batch. Below 1
the pods are faster: they exchange less.

Run: PYTHONPATH=. python benchmarks/pods.py [--batches 4] [--ranks 128 256 512]
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
from harness import options_parser, print_json, print_rows
from harness.simulated import simulated_run
from plan_time import KINDS, NODE, TOKENS

from hf_distca.planner.micro_batch import plan_micro_batch, plan_pods
from hf_distca.predict.shapes import LLAMA_8B
from hf_distca.sim.lengths import micro_batches


def costs(ranks: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield the ratios of some micro-batches of each kind of documents."""
    settings = simulated_run(LLAMA_8B, ranks, TOKENS, NODE).plans
    for name, draw in KINDS.items():
        ratios, largest, pods_of_batches = [], [], []
        for lengths in islice(micro_batches(draw, settings.micro_batch_tokens, seed=1), count):
            pods = plan_pods(lengths.tolist(), settings)
            whole = plan_micro_batch(lengths.tolist(), settings)
            slowest = max(plan.choice.seconds for plan in pods if plan.choice)
            assert whole.choice is not None
            ratios.append(slowest / whole.choice.seconds)
            largest.append(max(len(plan.ranks) for plan in pods))
            pods_of_batches.append(len(pods))
        yield {
            "ranks": ranks,
            "documents": name,
            "median": float(np.median(ratios)),
            "worst": max(ratios),
            "pods": float(np.mean(pods_of_batches)),
            "largest pod": max(largest),
        }


def main() -> None:
    parser = options_parser(__doc__, batches=(4, "micro-batches of each kind of documents"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[128, 256, 512], help="how many")
    options = parser.parse_args()
    found = [row for ranks in options.ranks for row in costs(ranks, options.batches)]
    print_rows(found)
    print_json(batches=options.batches, pods=found)


if __name__ == "__main__":
    main()
