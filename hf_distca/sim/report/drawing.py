"""SVG that stands in a page: its colours are classes of the page's style sheet, its marks say what they are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from math import floor, log10

WIDE, NARROW = 860, 330
"""Pixels of a picture on a desktop or paper, and on a phone: each is drawn for both, with letters of the same size."""


@dataclass
class Drawing:
    """A picture as it grows.

    Attributes:
        width: in pixels.
        height: in pixels.
    """

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

    def bar(self, x: float, y: float, width: float, height: float, style: str, label: str) -> None:
        """Draw a rectangle that stands for a value; the label says what value, of what."""
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
        """The element; the label is for those who do not see it."""
        return self._element("", label, "")

    def file(self, label: str, style: str) -> str:
        """A picture that stands in a file of its own, with its style sheet."""
        return self._element('xmlns="http://www.w3.org/2000/svg" ', label, f"<style>{style}</style>") + "\n"

    def _element(self, namespace: str, label: str, first: str) -> str:
        return (
            f'<svg {namespace}viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}" '
            f'height="{self.height:g}" role="img" aria-label="{escape(label)}">{first}{"".join(self._parts)}</svg>'
        )


def in_both_widths(draw: Callable[[int], Drawing], label: str) -> str:
    """A picture for wide screens and one for narrow ones, of which the style sheet shows one."""
    wide, narrow = draw(WIDE).markup(label), draw(NARROW).markup(label)
    return f'<div class="picture wide">{wide}</div><div class="picture narrow">{narrow}</div>'


def ticks(most: float, about: int = 4) -> list[float]:
    """Round numbers from 0 to the first one at or above the largest value."""
    if most <= 0:
        return [0.0, 1.0]
    rough = most / about
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    count = 1
    while count * step < most * 0.999:
        count += 1
    return [index * step for index in range(count + 1)]


def number(value: float) -> str:
    """A tick's number, without zeros behind it."""
    return f"{value:,.10g}"
