"""SVG pictures for pages and for files.

Every colour has one meaning, and every mark has a label.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, inf, log10
from typing import Any

import numpy as np

WIDTH = 860
"""Width of a page's pictures, in pixels."""
LETTER = 7.4
"""Approximate width of a letter, in pixels."""
CUT_OFF = 2.0
"""Ratio to the longest important bar, above which a bar is broken off."""
MOST_BARS = 128
"""Maximum number of bars; with more ranks, several ranks share a bar as high as the highest of
them."""
COLOURS = {
    "page": ("#fdfdfc", "#14171b"),
    "panel": ("#f5f5f2", "#1c2026"),
    "ink": ("#191d24", "#e7e9ec"),
    "muted": ("#59616e", "#a2abb8"),
    "rule": ("#e0e2e4", "#2b3038"),
    "edge": ("#c9ccd1", "#414853"),
    "attention": ("#2f6fb5", "#6aa5e3"),
    "other": ("#8590a1", "#77828f"),
    "waits": ("#c06a12", "#e39a45"),
    "idle": ("#f3c9c0", "#6b3a33"),
    "planned": ("#1f7a4d", "#4fbf87"),
    "plain": ("#7d5fb2", "#a98fdd"),
}
"""Colours on light and on dark pages.

From "attention" on, the names are classes of marks: core attention, other layers, waits for
exchanges, idle time, planned strategies, and strategies without plans.
"""
MARKS = list(COLOURS)[list(COLOURS).index("attention") :]
OF_FILES = """svg { max-width: 100%; height: auto; }
text { font: 13px system-ui, sans-serif; fill: var(--muted); font-variant-numeric: tabular-nums; }
.strong { fill: var(--ink); font-weight: 600; }
.ground { fill: var(--page); }
.ink { stroke: var(--ink); fill: none; }
.gain { fill: var(--planned); font-size: 17px; font-weight: 600; }
.arrow { fill: none; stroke: var(--planned); stroke-width: 2; }
"""


def style_sheet() -> str:
    """Return the CSS at the start of every page and picture file.

    Paper has the colours of light pages.
    """
    light, dark = (
        " ".join(f"--{name}: {pair[i]};" for name, pair in COLOURS.items()) for i in (0, 1)
    )
    marks = " ".join(f".{name} {{ --key: var(--{name}); }}" for name in MARKS)
    return (
        f":root {{ {light} }}\n@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} "
        f"}} }}\n{marks}\nsvg .mark {{ fill: var(--key); }} svg .rule {{ stroke: var(--rule); "
        "fill: none; }\n"
    )


@dataclass
class Drawing:
    """Picture under construction; width and height are in pixels."""

    width: float
    height: float
    _parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, text: str, anchor: str = "start", style: str = "") -> None:
        """Write on a line at height y, from, to or around x."""
        named = f' class="{style}"' if style else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}>{escape(text)}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str = "rule") -> None:
        """Draw a line."""
        self._parts.append(f'<path class="{style}" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>')

    def arrow(self, x1: float, x2: float, y: float, style: str) -> None:
        """Draw an arrow along a line from x1 to x2."""
        back = x2 + (6.0 if x2 < x1 else -6.0)
        head = f"M{back:.1f} {y - 4:.1f}L{x2:.1f} {y:.1f}L{back:.1f} {y + 4:.1f}"
        self._parts.append(
            f'<path class="{style} arrow" d="M{x1:.1f} {y:.1f}L{x2:.1f} {y:.1f}{head}"/>'
        )

    def bar(self, x: float, y: float, width: float, height: float, style: str, label: str) -> None:
        """Draw a rectangle that stands for a value; the label names the value."""
        self._parts.append(
            f'<rect class="mark {style}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" '
            f'height="{max(height, 0.5):.1f}"><title>{escape(label)}</title></rect>'
        )

    def scale(
        self,
        marks: Sequence[float],
        left: float,
        right: float,
        top: float,
        bottom: float,
        suffix: str,
    ) -> None:
        """Draw lines across the picture at round numbers, from 0 at the bottom."""
        for mark in marks:
            y = bottom - (bottom - top) * mark / marks[-1]
            self.line(left, y, right, y)
            if suffix:
                self.text(left - 8, y + 4, f"{mark:,.10g}{suffix}", "end", "axis")

    def file(self, label: str) -> str:
        """Return the text of a separate file, with its own background for light and dark pages."""
        ground = f'<rect class="ground" width="{self.width:g}" height="{self.height:g}" rx="6"/>'
        first = f"<style>\n{style_sheet()}{OF_FILES}</style>{ground}"
        return self.markup(label, 'xmlns="http://www.w3.org/2000/svg" ', first) + "\n"

    def markup(self, label: str, namespace: str = "", first: str = "") -> str:
        """Return the SVG element; the label is for readers who do not see the picture."""
        return (
            f'<svg {namespace}viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}"'
            f' height="{self.height:g}" role="img"'
            f' aria-label="{escape(label)}">{first}{"".join(self._parts)}</svg>'
        )


def lengths_picture(bins: Sequence[Mapping[str, Any]]) -> Drawing:
    """Draw shares of documents and of tokens by length, on a logarithmic axis.

    The bins are those of `histogram`.
    """
    left, top, bottom = 44, 12, 196
    drawing = Drawing(WIDTH, 240)
    marks = ticks(100 * max(max(each["document_share"], each["token_share"]) for each in bins))
    drawing.scale(marks, left, WIDTH, top, bottom, "%")
    step = (WIDTH - left) / len(bins)
    every = ceil(34 / step)
    for index, each in enumerate(bins):
        x = left + index * step
        for place, what in ((0.1, "documents"), (0.5, "tokens")):
            if share := each[f"{what[:-1]}_share"]:
                size = (bottom - top) * share * 100 / marks[-1]
                label = (
                    f"{each['shortest']:,} to {each['longest']:,} tokens: {each[what]:,} {what}, "
                    f"{share:.1%}"
                )
                drawing.bar(x + step * place, bottom - size, step * 0.4 - 1, size, what, label)
        if index % every == 0:
            drawing.line(x, bottom, x, bottom + 4)
            drawing.text(
                x, bottom + 18, short(each["shortest"]), "middle" if index else "start", "axis"
            )
    drawing.text((left + WIDTH) / 2, 236, "tokens of a document", "middle", "axis")
    return drawing


def loads_picture(panels: Sequence[tuple[str, Sequence[float], str]], unit: str) -> Drawing:
    """Draw values of each rank in panels of one scale, side by side, with the mean of each panel.

    Args:
        panels: title, [ranks] values, and the class that colours them.
    """
    left, gap, top, body = 60.0, 28.0, 44.0, 140.0
    across = (WIDTH - left - gap * (len(panels) - 1)) / len(panels)
    drawing = Drawing(WIDTH, top + body + 22)
    marks = ticks(max(max(values) for _, values, _ in panels))
    for index, (title, of_ranks, style) in enumerate(panels):
        x, values = left + (across + gap) * index, np.array(of_ranks)
        mean = float(values.mean())
        drawing.scale(marks, x, x + across, top, top + body, "" if index else unit)
        drawing.text(x, top - 28, title, style="strong")
        drawing.text(
            x,
            top - 12,
            f"busiest rank {values.max() / mean if mean else 1:.2f}× the mean",
            style="axis",
        )
        parts = np.array_split(np.arange(len(values)), min(len(values), MOST_BARS))
        step = across / len(parts)
        for place, ranks in enumerate(parts):
            most = float(values[ranks].max())
            size = body * most / marks[-1]
            named = (
                f"rank {ranks[0]}"
                if len(ranks) == 1
                else f"ranks {ranks[0]} to {ranks[-1]}, at most"
            )
            label = f"{title}, {named}: {most:,.3f}{unit}"
            drawing.bar(
                x + place * step, top + body - size, step - min(1.0, step / 4), size, style, label
            )
        level = top + body * (1 - mean / marks[-1])
        drawing.line(x, level, x + across, level, "mean")
        drawing.text(x, top + body + 16, "rank 0", "start", "axis")
        drawing.text(x + across, top + body + 16, f"rank {len(values) - 1}", "end", "axis")
    return drawing


def stacks_picture(
    rows: Mapping[str, Sequence[tuple[float, str, str]]], unit: str, strong: Sequence[str] = ()
) -> Drawing:
    """Draw horizontal bars made of parts.

    Args:
        rows: of each bar, by name, the parts: size, class that colours it, and name.
        strong: names that stand out. Bars far longer than theirs are broken off.
    """
    pitch, thick = 28.0, 18.0
    totals = {name: sum(size for size, _, _ in parts) for name, parts in rows.items()}
    limit = CUT_OFF * max((totals[name] for name in strong), default=0.0) or inf
    marks = ticks(min(max(totals.values()), limit), 5)
    left = max(map(len, rows)) * LETTER + 10
    right = WIDTH - max(len(f"{total:,.3f}{unit}") for total in totals.values()) * LETTER - 12
    bottom, across = pitch * len(rows), (right - left) / marks[-1]
    drawing = Drawing(WIDTH, bottom + 22)
    for mark in marks:
        drawing.line(left + mark * across, 0, left + mark * across, bottom)
        drawing.text(
            left + mark * across,
            bottom + 16,
            f"{mark:,.10g}{unit}",
            "middle" if mark else "start",
            "axis",
        )
    for index, (name, parts) in enumerate(rows.items()):
        x, y, left_over = left, index * pitch, limit
        style = "strong" if name in strong else "name"
        drawing.text(left - 10, y + thick - 4, name, "end", style)
        for size, colour, what in parts:
            shown = min(size, left_over) * across
            left_over = max(left_over - size, 0.0)
            if shown > 0:
                drawing.bar(x, y, shown, thick, colour, f"{name}, {what}: {size:,.3f}{unit}")
            x += shown
        if totals[name] > limit:
            for place in (10.0, 5.0):
                drawing.line(x - place - 3, y + thick + 1, x - place + 3, y - 1, "break")
        drawing.text(x + 6, y + thick - 4, f"{totals[name]:,.3f}{unit}", "start", style)
    return drawing


def ticks(most: float, about: int = 4) -> list[float]:
    """Return round numbers from 0 to the first one at or above `most`."""
    if most <= 0:
        return [0.0, 1.0]
    power = 10.0 ** floor(log10(most / about))
    step = next(
        factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= most / about * 0.999
    )
    return [index * step for index in range(ceil(most / step - 0.001) + 1)]


def short(count: float) -> str:
    """Return a count of tokens in short form: 512, 8K, 1M, in powers of 1024."""
    for size, letter in ((2**30, "G"), (2**20, "M"), (2**10, "K")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:g}"
