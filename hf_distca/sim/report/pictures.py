"""Pictures of a report, drawn for a width in pixels; their values are also in tables beside them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, inf
from typing import Any

import numpy as np

from hf_distca.sim.report.drawing import WIDE, Drawing, number, ticks
from hf_distca.sim.report.units import Unit, short

LETTER = 7.4
"""Approximate width of a letter, in pixels."""
CUT_OFF = 2.0
"""Ratio to the longest important bar, above which a bar is broken off."""
LEAST_SPEED_UP = 0.9
"""Start of the axis of speed-ups, unless a speed-up is smaller."""
MOST_BARS = 128
"""Maximum number of bars; with more ranks, several ranks share a bar as high as the highest of them."""


@dataclass(frozen=True)
class Part:
    """Part of a bar: its size, the class that colours it, and its name."""

    size: float
    style: str
    name: str


@dataclass(frozen=True)
class Panel:
    """Values of all ranks under one strategy: title, values, and the class that colours them."""

    title: str
    values: Sequence[float]
    style: str


@dataclass(frozen=True)
class Series:
    """Line of a picture: name, values, and the class that colours them."""

    name: str
    values: Sequence[float]
    style: str


def lengths(bins: Sequence[dict[str, Any]], width: int) -> Drawing:
    """Draw shares of documents and of tokens by length, on a logarithmic axis.

    Args:
        bins: `LengthBin`s as in JSON.
    """
    height, left, top, bottom = 240, 44, 12, 196
    drawing = Drawing(width, height)
    marks = ticks(100 * max(max(each["document_share"], each["token_share"]) for each in bins))
    _across(drawing, marks, left, width, top, bottom, "%")
    step = (width - left) / len(bins)
    every = max(1, int(np.ceil(34 / step)))
    for index, each in enumerate(bins):
        x = left + index * step
        between = f"{each['shortest']:,} to {each['longest']:,} tokens"
        for part, (share, style, name) in enumerate(
            (
                (each["document_share"], "documents", f"{each['documents']:,} documents"),
                (each["token_share"], "tokens", f"{each['tokens']:,} tokens"),
            )
        ):
            size = (bottom - top) * share * 100 / marks[-1]
            if share:
                wide = step * 0.4
                label = f"{between}: {name}, {share:.1%}"
                drawing.bar(x + step * 0.1 + part * wide, bottom - size, wide - 1, size, style, label)
        if index % every == 0:
            drawing.line(x, bottom, x, bottom + 4)
            drawing.text(x, bottom + 18, short(each["shortest"]), "middle" if index else "start", "axis")
    drawing.text((left + width) / 2, height - 4, "tokens of a document", "middle", "axis")
    return drawing


def loads(panels: Sequence[Panel], unit: Unit, suffix: str, what: str, width: int) -> Drawing:
    """Draw values of each rank in panels of one scale, with the mean of each panel.

    Args:
        panels: panels before and after; narrow pictures have them below one another.
        what: name of the values, for labels.
    """
    beside = width >= WIDE
    columns = len(panels) if beside else 1
    left, gap, top, body = 52.0, 28.0, 44.0, 140.0
    cell = (width - left - gap * (columns - 1)) / columns
    block = top + body + (22 if beside else 40)
    drawing = Drawing(width, block * (1 if beside else len(panels)))
    marks = ticks(max(max(panel.values) for panel in panels) / unit.scale)
    for index, panel in enumerate(panels):
        x = left + (cell + gap) * (index if beside else 0)
        y = top + block * (0 if beside else index)
        _across(drawing, marks, x, x + cell, y, y + body, suffix, labelled=not beside or index == 0)
        values = np.array(panel.values) / unit.scale
        mean = float(values.mean())
        drawing.text(x, y - 28, panel.title, style="strong")
        drawing.text(x, y - 12, f"busiest rank {values.max() / mean if mean else 1:.2f}× the mean", style="axis")
        parts = np.array_split(values, min(len(values), MOST_BARS))
        step, first = cell / len(parts), 0
        for place, part in enumerate(parts):
            most = float(part.max())
            size = body * most / marks[-1]
            named = f"rank {first}" if len(part) == 1 else f"ranks {first} to {first + len(part) - 1}, at most"
            label = f"{panel.title}, {named}: {unit.text(most * unit.scale)}{suffix} {what}"
            drawing.bar(x + place * step, y + body - size, step - min(1.0, step / 4), size, panel.style, label)
            first += len(part)
        level = y + body * (1 - mean / marks[-1])
        drawing.line(x, level, x + cell, level, "mean")
        drawing.text(x, y + body + 16, "rank 0", "start", "axis")
        drawing.text(x + cell, y + body + 16, f"rank {len(values) - 1}", "end", "axis")
    return drawing


def stacks(
    rows: Sequence[tuple[str, Sequence[Part]]], unit: Unit, suffix: str, width: int, strong: Sequence[str] = ()
) -> Drawing:
    """Draw horizontal bars made of parts.

    Args:
        rows: name and parts of each bar; in narrow pictures names stand above bars.
        strong: names that stand out.
    """
    beside = width >= WIDE
    left = max(len(name) for name, _ in rows) * LETTER + 10 if beside else 0.0
    totals = {name: sum(part.size for part in parts) for name, parts in rows}
    limit = longest_shown(totals, strong)
    most = min(max(totals.values()), limit) / unit.scale
    marks = ticks(most, 5 if beside else 3)
    right = width - (len(unit.text(max(totals.values()))) + len(suffix)) * LETTER - 12
    pitch, thick = (28.0, 18.0) if beside else (42.0, 16.0)
    head = 0.0 if beside else 18.0
    bottom = pitch * len(rows)
    drawing = Drawing(width, bottom + 22)
    across = (right - left) / max(marks[-1], 1e-12)
    for mark in marks:
        drawing.line(left + mark * across, 0, left + mark * across, bottom)
        drawing.text(
            left + mark * across, bottom + 16, f"{number(mark)}{suffix}", "middle" if mark else "start", "axis"
        )
    for index, (name, parts) in enumerate(rows):
        y, x, left_over = index * pitch + head, left, limit
        style = "strong" if name in strong else "name"
        if beside:
            drawing.text(left - 10, y + thick - 4, name, "end", style)
        else:
            drawing.text(0, y - 5, name, "start", style)
        for part in parts:
            size = min(part.size, left_over) / unit.scale * across
            left_over = max(left_over - part.size, 0.0)
            if size > 0:
                drawing.bar(x, y, size, thick, part.style, f"{name}, {part.name}: {unit.text(part.size)}{suffix}")
            x += size
        if totals[name] > limit:
            for place in (10.0, 5.0):
                drawing.line(x - place - 3, y + thick + 1, x - place + 3, y - 1, "break")
        drawing.text(x + 6, y + thick - 4, f"{unit.text(totals[name])}{suffix}", "start", style)
    return drawing


def longest_shown(totals: Mapping[str, float], strong: Sequence[str]) -> float:
    """Return the length above which bars are broken off, so that important bars stay readable.

    Args:
        totals: length of every bar, by name.
        strong: names of important bars; empty if all are important.
    """
    return CUT_OFF * max(totals[name] for name in strong) if any(map(totals.get, strong)) else inf


def lines(places: Sequence[int], series: Sequence[Series], unit: Unit, what: str, width: int) -> Drawing:
    """Draw speed-ups over numbers of ranks, which stand at equal distances."""
    left, top, bottom, right = 52.0, 12.0, 190.0, width - 24.0
    drawing = Drawing(width, 232)
    values = [value for each in series for value in each.values]
    # Speed-ups lie close to 1: an axis from 0 would hide them.
    marks = ticks(max(1.1, *values), least=min(LEAST_SPEED_UP, floor(10 * min(values)) / 10))
    _across(drawing, marks, left, width, top, bottom, unit.suffix)
    step = (right - left - 24) / max(len(places) - 1, 1)

    def height(value: float) -> float:
        return bottom - (bottom - top) * (value - marks[0]) / (marks[-1] - marks[0])

    drawing.line(left, height(1.0), width, height(1.0), "mean")
    every = max(1, int(np.ceil(34 / step)))
    for index, place in enumerate(places):
        if (len(places) - 1 - index) % every == 0:
            drawing.text(left + 24 + index * step, bottom + 18, f"{place:,}", "middle", "axis")
    for each in series:
        points = [(left + 24 + index * step, height(value)) for index, value in enumerate(each.values)]
        drawing.curve(points, f"curve {each.style}")
        for (x, y), place, value in zip(points, places, each.values, strict=True):
            drawing.point(x, y, each.style, f"{each.name}, {place} {what}: {unit.text(value)}")
    drawing.text((left + width) / 2, 228, what, "middle", "axis")
    return drawing


def _across(
    drawing: Drawing,
    marks: Sequence[float],
    left: float,
    right: float,
    top: float,
    bottom: float,
    suffix: str,
    labelled: bool = True,
) -> None:
    """Draw lines across a picture at round numbers."""
    for mark in marks:
        y = bottom - (bottom - top) * (mark - marks[0]) / (marks[-1] - marks[0])
        drawing.line(left, y, right, y)
        if labelled:
            drawing.text(left - 8, y + 4, f"{number(mark)}{suffix}", "end", "axis")
