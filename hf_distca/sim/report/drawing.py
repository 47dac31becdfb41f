"""SVG pictures for pages and for files: every colour has one meaning, and every mark has a label."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, log10

WIDE, NARROW = 860, 330
"""Widths of a picture, in pixels, on a desktop or paper and on a phone; letters have the same size in both."""


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

From "attention" on, the names are classes of marks: core attention, other layers, waits for exchanges, idle time,
planned strategies, and strategies without plans.
"""
MARKS = list(COLOURS)[list(COLOURS).index("attention") :]


def style_sheet() -> str:
    """Return the CSS at the start of every page and picture file; paper has the colours of light pages."""
    light, dark = (" ".join(f"--{name}: {pair[i]};" for name, pair in COLOURS.items()) for i in (0, 1))
    marks = " ".join(f".{name} {{ --key: var(--{name}); }}" for name in MARKS)
    return (
        f":root {{ {light} }}\n@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{marks}\n"
        "svg .mark { fill: var(--key); } svg .rule { stroke: var(--rule); fill: none; }\n"
    )


OF_FILES = """text { font: 13px system-ui, sans-serif; fill: var(--muted); font-variant-numeric: tabular-nums; }
.strong { fill: var(--ink); font-weight: 600; } .ground { fill: var(--page); } .ink { stroke: var(--ink); fill: none; }
.gain { fill: var(--planned); font-size: 17px; font-weight: 600; }
.arrow { fill: none; stroke: var(--planned); stroke-width: 2; }
"""


@dataclass
class Drawing:
    """Picture under construction; width and height are in pixels."""

    width: float
    height: float
    _parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, text: str, anchor: str = "start", style: str = "") -> None:
        """Write on a line at height y, from, to or around x."""
        named = f' class="{style}"' if style else ""
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}>{escape(text)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str = "rule") -> None:
        """Draw a line."""
        self._parts.append(f'<path class="{style}" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>')

    def arrow(self, x1: float, x2: float, y: float, style: str) -> None:
        """Draw an arrow along a line from x1 to x2."""
        back = x2 + (6.0 if x2 < x1 else -6.0)
        head = f"M{back:.1f} {y - 4:.1f}L{x2:.1f} {y:.1f}L{back:.1f} {y + 4:.1f}"
        shape = f"M{x1:.1f} {y:.1f}L{x2:.1f} {y:.1f}{head}"
        self._parts.append(f'<path class="{style} arrow" d="{shape}"/>')

    def bar(self, x: float, y: float, width: float, height: float, style: str, label: str) -> None:
        """Draw a rectangle that stands for a value; the label names the value."""
        self._parts.append(
            f'<rect class="mark {style}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" '
            f'height="{max(height, 0.5):.1f}"><title>{escape(label)}</title></rect>'
        )

    def point(self, x: float, y: float, style: str, label: str) -> None:
        """Draw a point that stands for a value."""
        self._parts.append(
            f'<circle class="mark {style}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escape(label)}</title></circle>'
        )

    def curve(self, points: Sequence[tuple[float, float]], style: str) -> None:
        """Join points by a line."""
        self._parts.append(f'<path class="{style}" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>')

    def markup(self, label: str) -> str:
        """Return the SVG element; the label is for readers who do not see the picture."""
        return self._element("", label, "")

    def file(self, label: str) -> str:
        """Return the text of a separate file, with its own background for light and dark pages."""
        ground = f'<rect class="ground" width="{self.width:g}" height="{self.height:g}" rx="6"/>'
        first = f"<style>\n{style_sheet()}{OF_FILES}</style>{ground}"
        return self._element('xmlns="http://www.w3.org/2000/svg" ', label, first) + "\n"

    def _element(self, namespace: str, label: str, first: str) -> str:
        return (
            f'<svg {namespace}viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}" '
            f'height="{self.height:g}" role="img" aria-label="{escape(label)}">{first}{"".join(self._parts)}</svg>'
        )


def in_both_widths(draw: Callable[[int], Drawing], label: str) -> str:
    """Return a wide and a narrow picture, of which the style sheet shows one."""
    wide, narrow = draw(WIDE).markup(label), draw(NARROW).markup(label)
    return f'<div class="picture wide">{wide}</div><div class="picture narrow">{narrow}</div>'


def ticks(most: float, about: int = 4, least: float = 0.0) -> list[float]:
    """Return round numbers from `least` to the first one at or above `most`."""
    if most <= least:
        return [least, least + 1.0]
    rough = (most - least) / about
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    count = ceil((most - least) / step - 0.001)
    return [least + index * step for index in range(count + 1)]


def number(value: float) -> str:
    """Return a tick's number without trailing zeros."""
    return f"{value:,.10g}"
