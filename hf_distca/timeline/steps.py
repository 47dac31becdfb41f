"""Read and join the traces of ranks, and find each rank's activities in each step."""

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Doing = Literal["attention", "waits", "other"]
"""Activity of a rank: core attention, waits for rows of other ranks, or anything else."""

CATEGORIES: dict[str, Doing] = {"kernel": "attention", "wait": "waits"}
"""Activity for each category of slices."""


class TraceError(ValueError):
    """Error of a file that is not a trace of a training; names the file and the reason."""


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
    stretches: list[tuple[int, int, Doing]] = field(default_factory=list)
    sections: dict[str, int] = field(default_factory=dict)

    def totals(self) -> dict[Doing, int]:
        """Return the nanoseconds of each activity; their sum is the step."""
        totals: dict[Doing, int] = {"attention": 0, "waits": 0, "other": self.end - self.begin}
        for begin, end, doing in self.stretches:
            totals[doing] += end - begin
            totals["other"] -= end - begin
        return totals


def read_traces(paths: Sequence[Path]) -> dict[str, Any]:
    """Join traces, each of one or several ranks, into one trace that json.dump can write.

    Raises:
        TraceError: a file is not a trace from training, two files have the same rank, or trainings differ.
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
            steps_of(content)
        except (ValueError, KeyError, TypeError) as wrong:
            raise TraceError(f"{path} is not a trace that training with trace_steps has written: {wrong!r}") from wrong
        for rank in sorted(found):
            if rank in seen:
                raise TraceError(f"{path} and {seen[rank]} are both of rank {rank}; give one file a rank")
            seen[rank] = path
        joined["traceEvents"] += events
    if len(worlds) != 1:
        raise TraceError(f"traces are of trainings with {sorted(worlds)} ranks; give the files of one training")
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


def runs(step: RankStep, begin: int, end: int, count: int) -> Iterator[tuple[int, int, Doing | None]]:
    """Divide a time into `count` equal cells and join neighbours with the same main activity of the rank.

    Yields:
        First cell, one past the last cell, and the activity; None outside the rank's step.
    """
    cells = _cells(step, begin, end, count)
    first = 0
    for cell in range(1, count + 1):
        if cell == count or cells[cell] != cells[first]:
            yield first, cell, cells[first]
            first = cell


def _cells(step: RankStep, begin: int, end: int, count: int) -> list[Doing | None]:
    """Return the activity of a rank that fills most of each cell."""
    width = (end - begin) / count
    taken = {doing: [0.0] * count for doing in ("inside", "attention", "waits")}
    for start, stop, doing in [(step.begin, step.end, "inside"), *step.stretches]:
        start, stop = start - begin, stop - begin
        for cell in range(max(int(start / width), 0), min(int(stop / width) + 1, count)):
            shared = min(stop, (cell + 1) * width) - max(start, cell * width)
            taken[doing][cell] += max(shared, 0.0) / width
    return list(map(_most, taken["inside"], taken["attention"], taken["waits"]))


def _most(inside: float, attention: float, waits: float) -> Doing | None:
    if inside < 0.5:
        return None
    if inside - attention - waits >= max(attention, waits):
        return "other"
    return "attention" if attention >= waits else "waits"
