"""Read and join the traces of ranks, find each rank's activities in each step, and draw a step."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hf_distca.sim.drawing import LETTER, Drawing, ticks

Activity = Literal["attention", "waits", "other"]
"""Activity of a rank: core attention, waits for rows of other ranks, or anything else."""

CATEGORIES: dict[str, Activity] = {"kernel": "attention", "wait": "waits"}
"""Activity for each category of slices."""
NAMES: dict[Activity, str] = {
    "attention": "core attention",
    "waits": "waits for rows of other ranks",
    "other": "other: projections, MLPs, loss, gradients, optimizer",
}
"""Labels of a rank's activities; the keys are also classes of SVG marks."""
WIDTH, ROW, LEFT, RIGHT, TOP, BOTTOM, COLUMN = 810, 18, 70, 320, 64, 40, 76
"""Sizes of the picture in pixels: time axis, row of a rank, margins, and column of the totals on
the right."""


@dataclass
class RankStep:
    """Step of one rank, in nanoseconds since the common zero of all ranks."""

    rank: int
    begin: int
    end: int
    stretches: list[tuple[int, int, Activity]] = field(default_factory=list)
    """(begin, end, activity) of attention and waits, by begin; the rest of the step is other."""
    sections: dict[str, int] = field(default_factory=dict)  # duration of each
    others: dict[str, int] = field(
        default_factory=dict
    )  # of each section, the duration that is other
    section: str = ""  # that began last, while slices are read

    def totals(self) -> dict[Activity, int]:
        """Return the nanoseconds of each activity; their sum is the step."""
        totals = dict.fromkeys(NAMES, 0)
        for begin, end, activity in self.stretches:
            totals[activity] += end - begin
        return totals | {"other": self.end - self.begin - sum(totals.values())}


def read_traces(paths: Sequence[Path]) -> dict[str, Any]:
    """Join traces, each of one or several ranks, into one trace that json.dump can write.

    Raises:
        ValueError: a file is not a trace from training, two files have the same rank, or trainings
            differ.
        OSError: a file cannot be read.
    """
    joined: list[dict[str, Any]] = []
    worlds: set[int] = set()
    seen: dict[int, Path] = {}
    error = 0.0
    for path in paths:
        try:
            content = json.loads(path.read_bytes())
            events, about = content["traceEvents"], content["otherData"]
            worlds.add(about["ranks"])
            error = max(error, float(about["clock_error_us"]))
            ranks = sorted({event["pid"] for event in events})
            steps_of(content)  # which reads all that a trace must have
        except (ValueError, KeyError, TypeError) as wrong:
            raise ValueError(
                f"{path} is not a trace that training wrote with trace_steps: {wrong!r}"
            ) from wrong
        for rank in ranks:
            if rank in seen:
                raise ValueError(
                    f"{path} and {seen[rank]} are both of rank {rank}; give one file per rank"
                )
            seen[rank] = path
        joined += events
    if len(worlds) != 1:
        raise ValueError(
            f"the traces come from trainings with {sorted(worlds)} ranks, which cannot be joined; "
            "give the files of one training"
        )
    about = {"ranks": worlds.pop(), "clock_error_us": error}
    return {"traceEvents": joined, "displayTimeUnit": "ms", "otherData": about}


def steps_of(joined: dict[str, Any]) -> dict[str, list[RankStep]]:
    """Return the steps that all ranks share, by name, in order of time.

    `joined` comes from `read_traces`.
    """
    steps: dict[int, dict[str, RankStep]] = {event["pid"]: {} for event in joined["traceEvents"]}
    slices = [event for event in joined["traceEvents"] if event["ph"] == "X"]
    # A step comes before what begins with it.
    for event in sorted(slices, key=lambda event: (event["ts"], event["cat"] != "step")):
        of_rank, category, name = steps[event["pid"]], event["cat"], event["name"]
        begin, took = round(event["ts"] * 1000), round(event["dur"] * 1000)
        if category == "step":
            of_rank[name] = RankStep(event["pid"], begin, begin + took)
        elif of_rank and begin < (step := next(reversed(of_rank.values()))).end:
            if category in CATEGORIES:
                step.stretches.append((begin, begin + took, CATEGORIES[category]))
                if step.others:  # slices lie in the section that began last
                    step.others[step.section] -= took
            elif category == "section":
                step.section = name
                step.sections[name] = step.sections.get(name, 0) + took
                step.others[name] = step.others.get(name, 0) + took
    of_ranks = [steps[rank] for rank in sorted(steps)]
    return {
        name: [of_rank[name] for of_rank in of_ranks]
        for name in (of_ranks[0] if of_ranks else ())
        if all(name in of_rank for of_rank in of_ranks)
    }


def runs(
    step: RankStep, begin: int, end: int, count: int
) -> Iterator[tuple[int, int, Activity | None]]:
    """Divide a time into `count` equal cells and join neighbours in whose middle the rank does the same.

    Yields the first cell, one past the last cell, and the activity; None outside the rank's step.
    """
    activities = (*NAMES, None)
    middles = begin + (np.arange(count) + 0.5) * (end - begin) / count
    found = np.full(count, activities.index(None))
    for start, stop, activity in [(step.begin, step.end, "other"), *step.stretches]:
        first, last = np.searchsorted(middles, (start, stop))
        found[first:last] = activities.index(activity)
    ends = [0, *(np.flatnonzero(np.diff(found)) + 1).tolist(), count]
    for first, last in pairwise(ends):
        yield first, last, activities[found[first]]


def svg_of(name: str, steps: Sequence[RankStep]) -> str:
    """Return a step as SVG, one row for each rank, with totals."""
    begin = min(step.begin for step in steps)
    took = (max(step.end for step in steps) - begin) / 1e6
    marks = ticks(took, 8)
    end = begin + round(marks[-1] * 1e6)  # the axis ends at a round number
    bottom = TOP + ROW * len(steps)
    drawing = Drawing(LEFT + WIDTH + RIGHT, bottom + BOTTOM)
    drawing.text(LEFT, 24, f"{name}: {took:.1f} ms, {len(steps)} ranks", style="strong")
    x = float(LEFT)
    for activity, words in NAMES.items():
        drawing.bar(x, 36, 12, 12, activity, words)
        drawing.text(x + 18, 47, words)
        x += 42 + LETTER * len(words)
    for mark in marks:
        x = LEFT + WIDTH * mark / marks[-1]
        drawing.line(x, TOP - 4, x, bottom)
        drawing.text(x, bottom + 18, f"{mark:,.10g} ms", "middle")
    columns = ("step", *NAMES)  # as on the console
    right = LEFT + WIDTH + RIGHT - 10 - COLUMN * (len(columns) - 1)  # where the first column ends
    for column, title in enumerate(columns):
        drawing.text(right + COLUMN * column, TOP - 8, title, "end")
    drawing.text(right + COLUMN * (len(columns) - 1), TOP - 26, "milliseconds of each rank", "end")
    for row, step in enumerate(steps):
        y = TOP + ROW * row
        drawing.text(LEFT - 8, y + 12, f"rank {step.rank}", "end")
        for first, last, main in runs(step, begin, end, WIDTH):
            if main is not None:
                drawing.bar(
                    LEFT + first, y, last - first, ROW - 3, main, f"rank {step.rank}, {NAMES[main]}"
                )
        for column, time in enumerate((step.end - step.begin, *step.totals().values())):
            drawing.text(right + COLUMN * column, y + 12, f"{time / 1e6:,.1f}", "end")
    return drawing.file(f"{name}: what each of {len(steps)} ranks did in {took:.1f} ms")
