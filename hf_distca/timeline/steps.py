"""Read and join the traces of ranks, find each rank's activities in each step, and draw a step."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hf_distca.checks.trace_rules import Traces
from hf_distca.sim.drawing import LETTER, Drawing, ticks
from hf_distca.units import counted

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
MOST_SHOWN = 64
"""Most ranks of a table or picture."""
WIDTH = 810
ROW = 18
LEFT = 70
RIGHT = 320
TOP = 64
BOTTOM = 40
COLUMN = 76
"""Sizes of the picture in pixels: time axis, row of a rank, margins, and column of the totals on
the right."""


@dataclass
class RankStep:
    """Step of one rank, in nanoseconds since the common zero of all ranks."""

    rank: int
    begin: int
    end: int
    activities: list[tuple[int, int, Activity]] = field(default_factory=list)
    """(begin, end, activity) of attention and waits, by begin; the rest of the step is other."""
    # Duration of each section.
    sections: dict[str, int] = field(default_factory=dict)
    # The part of each section's duration that is neither attention nor waits.
    others: dict[str, int] = field(default_factory=dict)
    section: str = ""  # that began last, while slices are read

    def add(self, category: str, name: str, begin: int, duration: int) -> None:
        """Add a slice that begins within the step; slices come in order of time."""
        if category in CATEGORIES:
            self.activities.append((begin, begin + duration, CATEGORIES[category]))
            if self.others:  # the slice lies in the section that began last
                self.others[self.section] -= duration
        elif category == "section":
            self.section = name
            self.sections[name] = self.sections.get(name, 0) + duration
            self.others[name] = self.others.get(name, 0) + duration

    def totals(self) -> dict[Activity, int]:
        """Return the nanoseconds of each activity; their sum is the step."""
        totals = dict.fromkeys(NAMES, 0)
        for begin, end, activity in self.activities:
            totals[activity] += end - begin
        return totals | {"other": self.end - self.begin - sum(totals.values())}


def read_traces(paths: Sequence[Path]) -> dict[str, Any]:
    """Join traces, each of one or several ranks, into one trace that json.dump can write.

    Raises:
        ValueError: a file is not a trace from training, two files have the same rank, or trainings
            differ.
        OSError: a file cannot be read.
    """
    all_events: list[dict[str, Any]] = []
    worlds: set[int] = set()
    paths_by_rank: dict[int, Path] = {}
    clock_error_us = 0.0
    for path in paths:
        try:
            content = json.loads(path.read_bytes())
            events = content["traceEvents"]
            header = content["otherData"]
            worlds.add(header["ranks"])
            clock_error_us = max(clock_error_us, float(header["clock_error_us"]))
            ranks = sorted({event["pid"] for event in events})
            steps_of(content)  # reads all that a trace must have
        except (ValueError, KeyError, TypeError) as error:
            raise Traces.NOT_A_TRACE.error(path=path, why=repr(error)) from error
        for rank in ranks:
            if rank in paths_by_rank:
                raise Traces.SAME_RANK.error(path=path, other=paths_by_rank[rank], rank=rank)
            paths_by_rank[rank] = path
        all_events += events
    if len(worlds) != 1:
        raise Traces.OTHER_TRAININGS.error(ranks=sorted(worlds))
    header = {"ranks": worlds.pop(), "clock_error_us": clock_error_us}
    return {"traceEvents": all_events, "displayTimeUnit": "ms", "otherData": header}


def steps_of(trace: dict[str, Any]) -> dict[str, list[RankStep]]:
    """Return the steps that all ranks share, by name, in order of time.

    `trace` comes from `read_traces`.
    """
    steps: dict[int, dict[str, RankStep]] = {event["pid"]: {} for event in trace["traceEvents"]}
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    # A slice belongs to the last step that began before it. A step comes before slices that begin
    # at the same time.
    for event in sorted(slices, key=lambda event: (event["ts"], event["cat"] != "step")):
        rank_steps = steps[event["pid"]]
        category, name = event["cat"], event["name"]
        begin, duration = round(event["ts"] * 1000), round(event["dur"] * 1000)
        if category == "step":
            rank_steps[name] = RankStep(event["pid"], begin, begin + duration)
        elif rank_steps:
            step = next(reversed(rank_steps.values()))
            if begin < step.end:
                step.add(category, name, begin, duration)
    steps_by_rank = [steps[rank] for rank in sorted(steps)]
    shared: dict[str, list[RankStep]] = {}
    for name in steps_by_rank[0] if steps_by_rank else ():
        if all(name in rank_steps for rank_steps in steps_by_rank):
            shared[name] = [rank_steps[name] for rank_steps in steps_by_rank]
    return shared


def runs(
    step: RankStep, begin: int, end: int, count: int
) -> Iterator[tuple[int, int, Activity | None]]:
    """Divide a time into `count` equal cells, and join neighbours with the same activity.

    The activity of a cell is what the rank does in the cell's middle. Yields the first cell, one
    past the last cell, and the activity; None outside the rank's step.
    """
    activities = (*NAMES, None)
    middles = begin + (np.arange(count) + 0.5) * (end - begin) / count
    cells = np.full(count, activities.index(None))
    for start, stop, activity in [(step.begin, step.end, "other"), *step.activities]:
        first_cell, last_cell = np.searchsorted(middles, (start, stop))
        cells[first_cell:last_cell] = activities.index(activity)
    ends = [0, *(np.flatnonzero(np.diff(cells)) + 1).tolist(), count]
    for first_cell, last_cell in pairwise(ends):
        yield first_cell, last_cell, activities[cells[first_cell]]


def shown(steps: Sequence[RankStep]) -> tuple[list[RankStep], str]:
    """Return the ranks that tables and pictures show, and words that say which ranks they are.

    Of many ranks these are the ranks that wait the least, for which the others wait, and those that
    wait the most.
    """
    ranks = counted(len(steps), "rank")
    if len(steps) <= MOST_SHOWN:
        return list(steps), ranks
    steps_by_waits = sorted(steps, key=lambda step: step.totals()["waits"])
    half = MOST_SHOWN // 2
    chosen = {step.rank for step in (*steps_by_waits[:half], *steps_by_waits[-half:])}
    words = f"{ranks}; shown are {half} that wait the least and {half} that wait the most"
    return [step for step in steps if step.rank in chosen], words


def svg_of(name: str, steps: Sequence[RankStep]) -> str:
    """Return a step as SVG, one row for each rank that is shown, with totals."""
    rows, ranks = shown(steps)
    begin = min(step.begin for step in steps)
    duration_ms = (max(step.end for step in steps) - begin) / 1e6
    marks = ticks(duration_ms, 8)
    end = begin + round(marks[-1] * 1e6)  # the axis ends at a round number
    bottom = TOP + ROW * len(rows)
    drawing = Drawing(LEFT + WIDTH + RIGHT, bottom + BOTTOM)
    drawing.text(LEFT, 24, f"{name}: {duration_ms:.1f} ms, {ranks}", style="strong")
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
    for row, step in enumerate(rows):
        y = TOP + ROW * row
        drawing.text(LEFT - 8, y + 12, f"rank {step.rank}", "end")
        for first, last, main in runs(step, begin, end, WIDTH):
            if main is not None:
                drawing.bar(
                    LEFT + first, y, last - first, ROW - 3, main, f"rank {step.rank}, {NAMES[main]}"
                )
        for column, time in enumerate((step.end - step.begin, *step.totals().values())):
            drawing.text(right + COLUMN * column, y + 12, f"{time / 1e6:,.1f}", "end")
    return drawing.file(f"{name}: what ranks did in {duration_ms:.1f} ms, {ranks}")
