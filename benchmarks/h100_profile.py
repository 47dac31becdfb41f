"""Writes the profile of an H100 that comes with the package, from times that the authors of DistCA
published.

    PYTHONPATH=. python benchmarks/h100_profile.py hf_distca/predict/profiles/h100.json

What they did not publish is named in the profile's source.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hf_distca.plan import AttentionKind
from hf_distca.plan.nodes import EXCHANGE_BANDWIDTH, NETWORK_BANDWIDTH
from hf_distca.predict.device_profile import Accuracy, DeviceProfile, held_out
from hf_distca.predict.seconds import KernelCost, LinkCost, Links, Tasks

DATA = Path(__file__).parent / "data" / "h100.json"
MEASURED = AttentionKind(None, 64, 4, 128, 128)
BACKWARD = 2.5
"""Backward of core attention over its forward, in operations: it computes five products, the
forward two."""
NORM_VALUES = 2
"""A norm reads a value and writes one."""
HIDDEN, QUERIES, MLP = 8192, 8192, 22016
"""Sizes of the 34B model whose layers were measured."""
TOKENS = 8192
"""Tokens for which the published times of matrices are possible; for 32768 they would be 2900
TFLOP/s."""
SOURCE = (
    "Kernel, matrices and links in a node: published by the authors of DistCA "
    "(github.com/hao-ai-lab/DistCA, Apache-2.0) for the H100 in bfloat16. The kernel's backward "
    "is taken as 2.5 forwards, links between nodes as 400 Gbit/s for each GPU, the exchange "
    "inside a node as 100 GB/s, by 8 thread blocks; these were not published."
)


def attention(rows: list[list[float]]) -> tuple[KernelCost, Accuracy]:
    """Cost of the kernel, and how well it predicts those lengths that a first fit has not seen."""
    ordered = sorted(rows, key=lambda row: (row[1], row[0]))

    def measured(chosen: list[list[float]]) -> tuple[Tasks, Any]:
        length, parts, ms = np.array(chosen, float).T  # of all heads, a part of them was measured
        pairs = length * (length + 1) / 2 / parts
        ones = np.ones_like(length)
        none = np.zeros_like(length)
        # Every call has one task with as many keys as queries, so a fit cannot separate the costs
        # of keys and of queries, nor those of calls and of tasks.
        return Tasks(length / parts, none, pairs, calls=ones, diagonal=none, tasks=none), ms / 1e3

    fitted, others = held_out(len(ordered))
    first = KernelCost.fitted(*measured([ordered[index] for index in fitted]))
    unseen, seconds = measured([ordered[index] for index in others])
    return KernelCost.fitted(*measured(ordered)), Accuracy.of(first.seconds(unseen), seconds)


def main() -> None:
    raw = json.loads(DATA.read_text())
    forward, accuracy = attention(raw["attention"])
    _, _, _, output, norm, _, _ = next(row for row in raw["linear"] if row[1] == 1)
    links = np.array(
        [(size / 8 * 7, size / 8 * 7 / speed / 1e9) for _, _, size, speed in raw["links"]]
    )
    within = LinkCost.fitted(links[:, 0], links[:, 1])
    between = LinkCost(3e-5, NETWORK_BANDWIDTH * 1e9)
    profile = DeviceProfile(
        name="H100, bfloat16",
        source=SOURCE,
        dtype="bfloat16",
        measured=MEASURED,
        forward=forward,
        backward=KernelCost(*(BACKWARD * cost for cost in vars(forward).values())),
        flops_per_second=2.0 * TOKENS * HIDDEN * QUERIES / (output / 1e3),
        bytes_per_second=2.0 * NORM_VALUES * TOKENS * HIDDEN / (norm / 1e3),
        peak_flops=989e12,
        links=Links(within, between),
        exchange=Links(replace(within, bandwidth=EXCHANGE_BANDWIDTH * 1e9), between),
        accuracy=accuracy,
    )
    profile.save(Path(sys.argv[1]))
    print(
        f"R² {accuracy.r2:.5f}, worst ratio {accuracy.worst_ratio:.3f}, of {accuracy.count} "
        "held out"
    )


if __name__ == "__main__":
    main()
