"""Draw a step as ranks × time: text for a terminal, SVG for a page."""

from collections.abc import Sequence

from hf_distca.sim.report.drawing import Drawing, number, ticks
from hf_distca.timeline.steps import Doing, RankStep, runs

SIGNS: dict[Doing | None, str] = {"attention": "█", "waits": ".", "other": "░", None: " "}
"""Characters for the activities of a rank."""
NAMES: dict[Doing, str] = {"attention": "core attention", "waits": "waits for rows of other ranks", "other": "other"}
"""Labels of a rank's activities; the keys are also classes of SVG marks."""
COLUMNS = 80
"""Width of the text drawing."""
WIDTH, ROW, LEFT, RIGHT, TOP, BOTTOM = 1000, 18, 80, 240, 64, 40
"""Sizes of the picture in pixels: time axis, row of a rank, and margins."""


def text_of(name: str, steps: Sequence[RankStep], clock_error: float) -> str:
    """Return a step as text, one line for each rank, with totals; `clock_error` is in milliseconds."""
    begin, end = _time_of(steps)
    clocks = f", clocks within {clock_error:.2g} ms" if len(steps) > 1 else ""
    lines = [
        f"{name}: {(end - begin) / 1e6:.1f} ms, {len(steps)} ranks{clocks}",
        "   ".join(f"{SIGNS[doing]} {doing}" for doing in NAMES),
        f"{'':9}{'':{COLUMNS}}" + "".join(f"{doing:>12}" for doing in NAMES) + "   ms",
    ]
    for step in steps:
        drawn = "".join(SIGNS[doing] * (last - first) for first, last, doing in runs(step, begin, end, COLUMNS))
        totals = step.totals()
        lines.append(f"rank {step.rank:<4}{drawn}" + "".join(f"{totals[doing] / 1e6:12.1f}" for doing in NAMES))
    return "\n".join(lines)


def svg_of(name: str, steps: Sequence[RankStep]) -> str:
    """Return a step as SVG, one row for each rank, with totals."""
    begin, end = _time_of(steps)
    took = (end - begin) / 1e6
    marks = ticks(took, 8)
    end = begin + round(marks[-1] * 1e6)  # the axis ends at a round number
    bottom = TOP + ROW * len(steps)
    drawing = Drawing(LEFT + WIDTH + RIGHT, bottom + BOTTOM)
    drawing.text(LEFT, 24, f"{name}: {took:.1f} ms, {len(steps)} ranks", style="strong")
    x = float(LEFT)
    for doing, words in NAMES.items():
        drawing.bar(x, 36, 12, 12, doing, words)
        drawing.text(x + 18, 47, words)
        x += 48 + 8 * len(words)
    for mark in marks:
        x = LEFT + WIDTH * mark / marks[-1]
        drawing.line(x, TOP - 4, x, bottom)
        drawing.text(x, bottom + 18, f"{number(mark)} ms", "middle")
    drawing.text(LEFT + WIDTH + 24, TOP - 8, " + ".join(NAMES))
    for row, step in enumerate(steps):
        y = TOP + ROW * row
        drawing.text(LEFT - 8, y + 12, f"rank {step.rank}", "end")
        for first, last, doing_there in runs(step, begin, end, WIDTH):
            if doing_there is not None:
                label = f"rank {step.rank}, {NAMES[doing_there]}"
                drawing.bar(LEFT + first, y, last - first, ROW - 3, doing_there, label)
        totals = " + ".join(f"{time / 1e6:.1f}" for time in step.totals().values())
        drawing.text(LEFT + WIDTH + 24, y + 12, f"{totals} ms")
    return drawing.file(f"{name}: what each of {len(steps)} ranks did in {took:.1f} ms")


def _time_of(steps: Sequence[RankStep]) -> tuple[int, int]:
    """Return the first begin and the last end of all ranks."""
    return min(step.begin for step in steps), max(step.end for step in steps)
