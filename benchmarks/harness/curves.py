"""Curves of two ways by seed: their distances, and a picture with a line for each."""

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise

import numpy as np

from hf_distca.sim.drawing import Drawing

WIDTH, HEIGHT = 860, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 40, 40
STYLES = """<style>
.curve-0, .curve-1 { fill: none; stroke-width: 1.6; }
.curve-0 { stroke: var(--plain); }
.curve-1 { stroke: var(--planned); stroke-dasharray: 5 4; }
</style>"""


def distances(curves: Mapping[str, Sequence[np.ndarray]]) -> tuple[list[float], list[float]]:
    """Return mean absolute differences: of both ways for each seed, and of any two seeds of a way.

    Args:
        curves: for each of two ways, [steps] values of each seed.
    """

    def distance(one: np.ndarray, other: np.ndarray) -> float:
        return float(np.mean(np.abs(one - other)))

    of_ways = [distance(*pair) for pair in zip(*curves.values(), strict=True)]
    of_seeds = [distance(*pair) for way in curves.values() for pair in combinations(way, 2)]
    return of_ways, of_seeds


def smoothed(curve: np.ndarray, over: int) -> np.ndarray:
    """Return the means of so many steps each."""
    means: np.ndarray = curve.reshape(-1, over).mean(1)
    return means


def curves_picture(
    title: str, curves: Mapping[str, Sequence[np.ndarray]], smoothed_over: int
) -> str:
    """Return the SVG file of two ways' curves of one value a step, averaged over a few steps.

    Args:
        curves: for each of two ways, [steps] values of each seed.
        smoothed_over: steps that a point of a curve is the mean of.
    """
    drawing = Drawing(WIDTH, HEIGHT)
    points = {
        way: [smoothed(curve, smoothed_over) for curve in of_way] for way, of_way in curves.items()
    }
    values = np.concatenate([curve for of_way in points.values() for curve in of_way])
    lowest, highest = np.floor(values.min() * 2) / 2, np.ceil(values.max() * 2) / 2
    count = len(next(iter(points.values()))[0])

    def x_of(index: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * index / max(count - 1, 1)

    def y_of(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - lowest) / (highest - lowest)

    for mark in np.arange(lowest, highest + 0.25, 0.5):
        drawing.line(LEFT, y_of(mark), WIDTH - RIGHT, y_of(mark))
        drawing.text(LEFT - 8, y_of(mark) + 4, f"{mark:g}", "end")
    for index in range(0, count, max(count // 5, 1)):
        drawing.text(x_of(index), HEIGHT - 22, str((index + 1) * smoothed_over), "middle")
    drawing.text(WIDTH / 2, HEIGHT - 6, "steps", "middle")
    for number, (way, of_way) in enumerate(points.items()):
        x = LEFT + 330 * number
        drawing.line(x, 20, x + 26, 20, f"curve-{number}")
        drawing.text(x + 32, 24, f"{way}, {len(of_way)} seeds")
        for curve in of_way:
            for index, (one, other) in enumerate(pairwise(curve.tolist())):
                drawing.line(
                    x_of(index), y_of(one), x_of(index + 1), y_of(other), f"curve-{number}"
                )
    return drawing.file(title).replace("</style>", "</style>" + STYLES, 1)
