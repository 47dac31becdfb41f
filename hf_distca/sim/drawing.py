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
    "encoder": ("#2a8c8c", "#58b8b8"),
    "attention": ("#2f6fb5", "#6aa5e3"),
    "other": ("#8590a1", "#77828f"),
    "waits": ("#c06a12", "#e39a45"),
    "idle": ("#f3c9c0", "#6b3a33"),
    "planned": ("#1f7a4d", "#4fbf87"),
    "plain": ("#7d5fb2", "#a98fdd"),
}
"""Colours on light and on dark pages.

From "encoder" on, the names are classes of marks: encoders of images, core attention, other layers,
waits for exchanges, idle time, planned strategies, and strategies without plans.
"""
MARKS = list(COLOURS)[list(COLOURS).index("encoder") :]
FILE_STYLE = """svg { max-width: 100%; height: auto; }
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
    light = " ".join(f"--{name}: {colour};" for name, (colour, _) in COLOURS.items())
    dark = " ".join(f"--{name}: {colour};" for name, (_, colour) in COLOURS.items())
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
        css_class = f' class="{style}"' if style else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{css_class}>{escape(text)}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str = "rule") -> None:
        """Draw a line."""
        self._parts.append(f'<path class="{style}" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>')

    def arrow(self, x1: float, x2: float, y: float, style: str) -> None:
        """Draw an arrow along a line from x1 to x2."""
        head_x = x2 + (6.0 if x2 < x1 else -6.0)
        head = f"M{head_x:.1f} {y - 4:.1f}L{x2:.1f} {y:.1f}L{head_x:.1f} {y + 4:.1f}"
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
        left_x: float,
        right_x: float,
        top_y: float,
        bottom_y: float,
        suffix: str,
    ) -> None:
        """Draw lines across the picture at round numbers, from 0 at the bottom."""
        for mark in marks:
            y = bottom_y - (bottom_y - top_y) * mark / marks[-1]
            self.line(left_x, y, right_x, y)
            if suffix:
                self.text(left_x - 8, y + 4, f"{mark:,.10g}{suffix}", "end", "axis")

    def file(self, label: str) -> str:
        """Return the text of a separate file, with its own background for light and dark pages."""
        ground = f'<rect class="ground" width="{self.width:g}" height="{self.height:g}" rx="6"/>'
        prologue = f"<style>\n{style_sheet()}{FILE_STYLE}</style>{ground}"
        return self.markup(label, 'xmlns="http://www.w3.org/2000/svg" ', prologue) + "\n"

    def markup(self, label: str, namespace: str = "", prologue: str = "") -> str:
        """Return the SVG element; the label is for readers who do not see the picture.

        Args:
            prologue: elements before those that were drawn.
        """
        return (
            f'<svg {namespace}viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}"'
            f' height="{self.height:g}" role="img"'
            f' aria-label="{escape(label)}">{prologue}{"".join(self._parts)}</svg>'
        )


def lengths_picture(bins: Sequence[Mapping[str, Any]]) -> Drawing:
    """Draw shares of documents and of tokens by length, on a logarithmic axis.

    The bins are those of `histogram`.
    """
    left_x, top_y, bottom_y = 44, 12, 196
    drawing = Drawing(WIDTH, 240)
    highest_share = max(
        max(length_bin["document_share"], length_bin["token_share"]) for length_bin in bins
    )
    # 1. The scale of shares.
    marks = ticks(100 * highest_share)
    drawing.scale(marks, left_x, WIDTH, top_y, bottom_y, "%")
    # 2. Two bars for each bin, and a label for as many bins as there is room: 34 pixels each.
    bin_width = (WIDTH - left_x) / len(bins)
    bins_a_label = ceil(34 / bin_width)
    for index, length_bin in enumerate(bins):
        x = left_x + index * bin_width
        for place, unit in ((0.1, "documents"), (0.5, "tokens")):
            share = length_bin[f"{unit[:-1]}_share"]
            if not share:
                continue
            height = (bottom_y - top_y) * share * 100 / marks[-1]
            label = (
                f"{length_bin['shortest']:,} to {length_bin['longest']:,} tokens: "
                f"{length_bin[unit]:,} {unit}, {share:.1%}"
            )
            drawing.bar(
                x + bin_width * place, bottom_y - height, bin_width * 0.4 - 1, height, unit, label
            )
        if index % bins_a_label == 0:
            drawing.line(x, bottom_y, x, bottom_y + 4)
            anchor = "middle" if index else "start"
            drawing.text(x, bottom_y + 18, short(length_bin["shortest"]), anchor, "axis")
    drawing.text((left_x + WIDTH) / 2, 236, "tokens of a document", "middle", "axis")
    return drawing


def loads_picture(panels: Sequence[tuple[str, Sequence[float], str]], unit: str) -> Drawing:
    """Draw values of each rank in panels of one scale, side by side, with the mean of each panel.

    Args:
        panels: title, [ranks] values, and the class that colours them.
    """
    left_x = 60.0
    gap = 28.0
    top_y = 44.0
    height = 140.0
    bottom_y = top_y + height
    panel_width = (WIDTH - left_x - gap * (len(panels) - 1)) / len(panels)
    drawing = Drawing(WIDTH, bottom_y + 22)
    marks = ticks(max(max(values) for _, values, _ in panels))
    for index, (title, rank_values, style) in enumerate(panels):
        # 1. The title and the scale of the panel.
        values = np.array(rank_values)
        mean = float(values.mean())
        over_mean = values.max() / mean if mean else 1
        x = left_x + (panel_width + gap) * index
        right_x = x + panel_width
        drawing.scale(marks, x, right_x, top_y, bottom_y, "" if index else unit)
        drawing.text(x, top_y - 28, title, style="strong")
        drawing.text(x, top_y - 12, f"busiest rank {over_mean:.2f}× the mean", style="axis")
        # 2. A bar for each rank, or for several neighbours.
        ranks_of_bars = np.array_split(np.arange(len(values)), min(len(values), MOST_BARS))
        pitch = panel_width / len(ranks_of_bars)
        bar_width = pitch - min(1.0, pitch / 4)
        for place, ranks in enumerate(ranks_of_bars):
            value = float(values[ranks].max())
            bar_height = height * value / marks[-1]
            names = f"ranks {ranks[0]} to {ranks[-1]}, at most"
            if len(ranks) == 1:
                names = f"rank {ranks[0]}"
            label = f"{title}, {names}: {value:,.3f}{unit}"
            drawing.bar(
                x + place * pitch, bottom_y - bar_height, bar_width, bar_height, style, label
            )
        # 3. The mean, and the axis.
        mean_y = top_y + height * (1 - mean / marks[-1])
        drawing.line(x, mean_y, right_x, mean_y, "mean")
        drawing.text(x, bottom_y + 16, "rank 0", "start", "axis")
        drawing.text(right_x, bottom_y + 16, f"rank {len(values) - 1}", "end", "axis")
    return drawing


def stacks_picture(
    rows: Mapping[str, Sequence[tuple[float, str, str]]], unit: str, strong: Sequence[str] = ()
) -> Drawing:
    """Draw horizontal bars made of parts.

    Args:
        rows: of each bar, by name, the parts: size, class that colours it, and name.
        strong: names that stand out. Bars far longer than theirs are broken off.
    """
    pitch, bar_height = 28.0, 18.0
    totals = {}
    for name, parts in rows.items():
        totals[name] = sum(size for size, _, _ in parts)
    limit = CUT_OFF * max((totals[name] for name in strong), default=0.0) or inf
    marks = ticks(min(max(totals.values()), limit), 5)
    left_x = max(map(len, rows)) * LETTER + 10
    longest_label = max(len(f"{total:,.3f}{unit}") for total in totals.values())
    right_x = WIDTH - longest_label * LETTER - 12
    bottom_y = pitch * len(rows)
    pixels_a_unit = (right_x - left_x) / marks[-1]
    drawing = Drawing(WIDTH, bottom_y + 22)
    # 1. The scale.
    for mark in marks:
        x = left_x + mark * pixels_a_unit
        drawing.line(x, 0, x, bottom_y)
        anchor = "middle" if mark else "start"
        drawing.text(x, bottom_y + 16, f"{mark:,.10g}{unit}", anchor, "axis")
    for index, (name, parts) in enumerate(rows.items()):
        # 2. The parts of a bar, up to the limit.
        x = left_x
        y = index * pitch
        text_y = y + bar_height - 4
        drawable = limit
        style = "strong" if name in strong else "name"
        drawing.text(left_x - 10, text_y, name, "end", style)
        for size, colour, part in parts:
            width = min(size, drawable) * pixels_a_unit
            drawable = max(drawable - size, 0.0)
            if width > 0:
                label = f"{name}, {part}: {size:,.3f}{unit}"
                drawing.bar(x, y, width, bar_height, colour, label)
            x += width
        # 3. Two strokes where a bar is broken off.
        if totals[name] > limit:
            for place in (10.0, 5.0):
                drawing.line(x - place - 3, y + bar_height + 1, x - place + 3, y - 1, "break")
        drawing.text(x + 6, text_y, f"{totals[name]:,.3f}{unit}", "start", style)
    return drawing


def ticks(greatest: float, about: int = 4) -> list[float]:
    """Return round numbers from 0 to the first one at or above `greatest`.

    Args:
        about: how many numbers above 0 there are, more or less.
    """
    if greatest <= 0:
        return [0.0, 1.0]
    power = 10.0 ** floor(log10(greatest / about))
    step = next(
        factor * power
        for factor in (1, 2, 2.5, 5, 10)
        if factor * power >= greatest / about * 0.999
    )
    return [index * step for index in range(ceil(greatest / step - 0.001) + 1)]


def short(count: float) -> str:
    """Return a count of tokens in short form: 512, 8K, 1M, in powers of 1024."""
    for size, letter in ((2**30, "G"), (2**20, "M"), (2**10, "K")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:g}"
