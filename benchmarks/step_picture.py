"""README's picture: one step of 8 ranks, packed as by TRL's packing=True and planned, simulated.

An 8B model on 8 H100 with 32768 tokens each, documents with ProLong's lengths: the micro-batches of
typical_data.py. The picture shows the one whose gain is the median, so their number is odd. Writes
docs/step.svg; prints the numbers that are drawn.

Run: PYTHONPATH=. python benchmarks/step_picture.py [--batches 199]
"""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from harness import options_parser, print_json, spread
from harness.simulated import simulated_run

from hf_distca.predict.shapes import LLAMA_8B
from hf_distca.sim.drawing import Drawing
from hf_distca.sim.lengths import corpora, micro_batches
from hf_distca.sim.strategies import StepTime, plain, planned

RANKS, TOKENS_PER_RANK = 8, 32768
PICTURE = Path(__file__).parents[1] / "docs" / "step.svg"
WIDTH = 860
LEFT = 76
RIGHT = 140
ROW = 15
BAR = 12
"""Pixels: of the picture, beside its bars, of a rank's line and of its bar."""
PARTS = (
    ("other", "everything else"),
    ("attention", "core attention"),
    ("idle", "idle until the slowest rank is done"),
)


Panel = dict[str, Any]
"""A step as it is drawn: title, seconds of the step, of all but core attention, and of core
attention by rank."""


def panel_of(title: str, step: StepTime) -> Panel:
    """A simulated step, to the millisecond; ranks have equally many tokens."""
    attention = [round(seconds, 3) for seconds in step.attention.tolist()]
    return {
        "title": title,
        "seconds": round(step.seconds, 3),
        "other": round(float(step.other.mean()), 3),
        "attention": attention,
    }


def picture(steps: Sequence[Panel]) -> str:
    """Draw panels on one scale, a line a rank, and label the gain of the last over the first."""
    panel = RANKS * ROW + 44
    drawing = Drawing(WIDTH, 44 + panel * len(steps))
    scale = (WIDTH - LEFT - RIGHT) / max(step["seconds"] for step in steps)
    for index, (style, name) in enumerate(PARTS):
        drawing.bar(LEFT + index * 170, 14, 12, 12, style, name)
        drawing.text(LEFT + index * 170 + 18, 25, name)
    for index, step in enumerate(steps):
        top = 64 + index * panel
        drawing.text(LEFT, top - 6, step["title"], style="strong")
        for rank, attention in enumerate(step["attention"]):
            y = top + rank * ROW
            drawing.text(LEFT - 8, y + 11, f"rank {rank}", "end")
            x = float(LEFT)
            sizes = (step["other"], attention, step["seconds"] - step["other"] - attention)
            for (style, name), seconds in zip(PARTS, sizes, strict=True):
                drawing.bar(
                    x, y, seconds * scale, BAR, style, f"rank {rank}, {name}: {seconds:.2f} s"
                )
                x += seconds * scale
        end = LEFT + step["seconds"] * scale
        drawing.line(end, top - 4, end, top + RANKS * ROW, "ink")
        drawing.text(end + 6, top + 11, f"{step['seconds']:.2f} s", style="strong")
    before = steps[0]["seconds"]
    after = steps[-1]["seconds"]
    middle = 64 + panel * (len(steps) - 1) + RANKS * ROW / 2
    end = LEFT + after * scale
    drawing.arrow(LEFT + before * scale, end + 2, middle, "gain")
    drawing.text(
        LEFT + before * scale + 6, middle + 5, f"{before / after:.2f}× speed", style="gain"
    )
    label = ", ".join(f"{step['title']}: {step['seconds']:.2f} s" for step in steps)
    return drawing.file(
        f"One step of {RANKS} ranks. {label}. {before / after:.2f} times the speed."
    )


def main() -> None:
    count = (
        options_parser(__doc__, batches=(199, "micro-batches to take the median of"))
        .parse_args()
        .batches
    )
    run = simulated_run(LLAMA_8B, RANKS, TOKENS_PER_RANK, RANKS)
    drawn = micro_batches(corpora()["prolong"], RANKS * TOKENS_PER_RANK, seed=0)
    pairs = []
    for lengths in islice(drawn, count):
        packed = plain(lengths, run)
        balanced = planned(lengths, run)[0]
        pairs.append((packed.seconds / balanced.seconds, packed, balanced))
    gains = [gain for gain, _, _ in pairs]
    middle = float(np.median(gains))
    gain, packed, balanced = min(pairs, key=lambda pair: abs(pair[0] - middle))
    steps = (
        panel_of("plain packing (TRL's packing=True): equal tokens on every rank", packed),
        panel_of(
            "planned by hf_distca: nearly equal tokens and core attention on every rank", balanced
        ),
    )
    PICTURE.write_text(picture(steps), encoding="utf-8")
    print_json(steps=list(steps), gain=gain, gains=spread(gains))


if __name__ == "__main__":
    main()
