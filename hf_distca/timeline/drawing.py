"""A step as ranks × time: text for a terminal, SVG for a page."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

from hf_distca.timeline.steps import Doing, RankStep, cells, runs

SIGNS: dict[Doing | None, str] = {"attention": "█", "waits": ".", "other": "░", None: " "}
"""What stands for what a rank does in text."""
COLUMNS = 80
"""Of text."""
COLORS: dict[Doing, str] = {"attention": "#2f6fb5", "waits": "#d9822b", "other": "#b8bfc6"}
"""What stands for it in pictures; told apart by their brightness too, on light and dark ground."""
WIDTH, ROW, LEFT, TOP = 1000, 18, 80, 40
"""Of a picture: columns of the time, height of a rank, and what is left and above, in pixels."""
GREY = "#808890"
"""Of what is written: readable on light and dark ground."""


def text_of(name: str, steps: Sequence[RankStep], clock_error: int) -> str:
    """A step as text, a line a rank, with totals.

    Args:
        name: of the step.
        steps: of each rank.
        clock_error: of the trace, in nanoseconds.
    """
    begin, end = _time_of(steps)
    clocks = f", clocks within {clock_error / 1e6:.2g} ms" if len(steps) > 1 else ""
    lines = [
        f"{name}: {(end - begin) / 1e6:.1f} ms, {len(steps)} ranks{clocks}",
        "   ".join(f"{SIGNS[doing]} {doing}" for doing in COLORS),
        f"{'':9}{'':{COLUMNS}}" + "".join(f"{doing:>12}" for doing in COLORS) + "   ms",
    ]
    for step in steps:
        drawn = "".join(SIGNS[doing] for doing in cells(step, begin, end, COLUMNS))
        totals = step.totals()
        lines.append(f"rank {step.rank:<4}{drawn}" + "".join(f"{totals[doing] / 1e6:12.1f}" for doing in COLORS))
    return "\n".join(lines)


def svg_of(name: str, steps: Sequence[RankStep]) -> str:
    """A step as a picture, a row a rank; what a rank did in all is told where the pointer rests on its row.

    Args:
        name: of the step.
        steps: of each rank.
    """
    begin, end = _time_of(steps)
    height = TOP + ROW * len(steps) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{height}" '
        f'font-family="sans-serif" font-size="12" fill="{GREY}">',
        f'<text x="{LEFT}" y="14">{escape(name)}: {(end - begin) / 1e6:.1f} ms</text>',
    ]
    for place, (doing, color) in enumerate(COLORS.items()):
        x = LEFT + 300 + 120 * place
        parts.append(f'<rect x="{x}" y="5" width="10" height="10" fill="{color}"/>')
        parts.append(f'<text x="{x + 16}" y="14">{doing}</text>')
    for row, step in enumerate(steps):
        y = TOP + ROW * row
        told = ", ".join(f"{doing} {time / 1e6:.1f} ms" for doing, time in step.totals().items())
        parts.append(f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">rank {step.rank}</text>')
        parts.append(f"<g><title>rank {step.rank}: {told}</title>")
        for first, last, doing in runs(cells(step, begin, end, WIDTH)):
            box = f'x="{LEFT + first}" y="{y}" width="{last - first}" height="{ROW - 3}"'
            parts.append(f'<rect {box} fill="{COLORS[doing]}"/>')
        parts.append("</g>")
    for tenth in range(0, 11, 2):
        x, ms = LEFT + WIDTH * tenth // 10, (end - begin) / 1e6 * tenth / 10
        parts.append(f'<text x="{x}" y="{height - 6}" text-anchor="middle">{ms:.4g} ms</text>')
    return "\n".join([*parts, "</svg>\n"])


def _time_of(steps: Sequence[RankStep]) -> tuple[int, int]:
    """From the first rank's begin to the last one's end."""
    return min(step.begin for step in steps), max(step.end for step in steps)
