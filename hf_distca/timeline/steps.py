"""Read and join the traces of ranks, find each rank's activities in each step, and draw a step."""

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hf_distca.sim.drawing import Drawing, ticks

Activity = Literal["attention", "waits", "other"]
"""Activity of a rank: core attention, waits for rows of other ranks, or anything else."""

CATEGORIES: dict[str, Activity] = {"kernel": "attention", "wait": "waits"}
"""Activity for each category of slices."""
NAMES: dict[Activity, str] = {
    "attention": "core attention",
    "waits": "waits for rows of other ranks",
    "other": "other",
}
"""Labels of a rank's activities; the keys are also classes of SVG marks."""
WIDTH, ROW, LEFT, RIGHT, TOP, BOTTOM = 1000, 18, 80, 240, 64, 40
"""Sizes of the picture in pixels: time axis, row of a rank, and margins."""


@dataclass
class RankStep:
    """Step of one rank, in nanoseconds since the common zero of all ranks.

    Attributes:
        stretches: (begin, end, activity) of attention and waits, by begin; the rest of the step is other.
        sections: duration of each section.
    """

    rank: int
    begin: int
    end: int
    stretches: list[tuple[int, int, Activity]] = field(default_factory=list)
    sections: dict[str, int] = field(default_factory=dict)

    def totals(self) -> dict[Activity, int]:
        """Return the nanoseconds of each activity; their sum is the step."""
        totals: dict[Activity, int] = {"attention": 0, "waits": 0, "other": self.end - self.begin}
        for begin, end, activity in self.stretches:
            totals[activity] += end - begin
            totals["other"] -= end - begin
        return totals


def read_traces(paths: Sequence[Path]) -> dict[str, Any]:
    """Join traces, each of one or several ranks, into one trace that json.dump can write.

    Raises:
        ValueError: a file is not a trace from training, two files have the same rank, or trainings differ.
        OSError: a file cannot be read.
    """
    joined: dict[str, Any] = {"traceEvents": [], "displayTimeUnit": "ms"}
    worlds: set[int] = set()
    seen: dict[int, Path] = {}
    error = 0.0
    for path in paths:
        try:
            content = json.loads(path.read_bytes())
            events, about = content["traceEvents"], content["otherData"]
            worlds.add(about["ranks"])
            error = max(error, float(about["clock_error_us"]))
            found = {event["pid"] for event in events}
            steps_of(content)  # which reads all that a trace must have
        except (ValueError, KeyError, TypeError) as wrong:
            raise ValueError(f"{path} is not a trace that training wrote with trace_steps: {wrong!r}") from wrong
        for rank in sorted(found):
            if rank in seen:
                raise ValueError(f"{path} and {seen[rank]} are both of rank {rank}; give one file per rank")
            seen[rank] = path
        joined["traceEvents"] += events
    if len(worlds) != 1:
        raise ValueError(
            f"the traces come from trainings with {sorted(worlds)} ranks, which cannot be joined; give the files of "
            "one training"
        )
    joined["otherData"] = {"ranks": worlds.pop(), "clock_error_us": error}
    return joined


def steps_of(joined: dict[str, Any]) -> dict[str, list[RankStep]]:
    """Return the steps that all ranks share, by name, in order of time; `joined` comes from `read_traces`."""
    events = sorted((event for event in joined["traceEvents"] if event["ph"] == "X"), key=lambda event: event["ts"])
    steps: dict[int, dict[str, RankStep]] = {event["pid"]: {} for event in joined["traceEvents"]}
    for event in events:
        if event["cat"] == "step":
            begin = round(event["ts"] * 1000)
            steps[event["pid"]][event["name"]] = RankStep(event["pid"], begin, begin + round(event["dur"] * 1000))
    in_time = {rank: list(found.values()) for rank, found in steps.items()}
    for event in events:
        begin, took = round(event["ts"] * 1000), round(event["dur"] * 1000)
        place = bisect_right(in_time[event["pid"]], begin, key=lambda step: step.begin) - 1
        if place < 0 or begin >= in_time[event["pid"]][place].end:
            continue
        step = in_time[event["pid"]][place]
        if event["cat"] in CATEGORIES:
            step.stretches.append((begin, begin + took, CATEGORIES[event["cat"]]))
        elif event["cat"] == "section":
            step.sections[event["name"]] = step.sections.get(event["name"], 0) + took
    shared = set.intersection(*map(set, steps.values())) if steps else set()
    first = min(steps, default=0)
    return {name: [steps[rank][name] for rank in sorted(steps)] for name in steps.get(first, {}) if name in shared}


def runs(step: RankStep, begin: int, end: int, count: int) -> Iterator[tuple[int, int, Activity | None]]:
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
    begin, end = min(step.begin for step in steps), max(step.end for step in steps)
    took = (end - begin) / 1e6
    marks = ticks(took, 8)
    end = begin + round(marks[-1] * 1e6)  # the axis ends at a round number
    bottom = TOP + ROW * len(steps)
    drawing = Drawing(LEFT + WIDTH + RIGHT, bottom + BOTTOM)
    drawing.text(LEFT, 24, f"{name}: {took:.1f} ms, {len(steps)} ranks", style="strong")
    x = float(LEFT)
    for activity, words in NAMES.items():
        drawing.bar(x, 36, 12, 12, activity, words)
        drawing.text(x + 18, 47, words)
        x += 48 + 8 * len(words)
    for mark in marks:
        x = LEFT + WIDTH * mark / marks[-1]
        drawing.line(x, TOP - 4, x, bottom)
        drawing.text(x, bottom + 18, f"{mark:,.10g} ms", "middle")
    drawing.text(LEFT + WIDTH + 24, TOP - 8, " + ".join(NAMES))
    for row, step in enumerate(steps):
        y = TOP + ROW * row
        drawing.text(LEFT - 8, y + 12, f"rank {step.rank}", "end")
        for first, last, main in runs(step, begin, end, WIDTH):
            if main is not None:
                drawing.bar(LEFT + first, y, last - first, ROW - 3, main, f"rank {step.rank}, {NAMES[main]}")
        totals = " + ".join(f"{time / 1e6:.1f}" for time in step.totals().values())
        drawing.text(LEFT + WIDTH + 24, y + 12, f"{totals} ms")
    return drawing.file(f"{name}: what each of {len(steps)} ranks did in {took:.1f} ms")
