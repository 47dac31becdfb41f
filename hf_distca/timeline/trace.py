"""Traces read back, by the rules of the trace event format, and joined.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NEEDED: dict[str, dict[str, type | tuple[type, ...]]] = {
    "M": {"args": dict},
    "X": {"cat": str, "ts": (int, float), "dur": (int, float), "tid": int},
    "s": {"cat": str, "ts": (int, float), "tid": int, "id": int},
    "f": {"cat": str, "ts": (int, float), "tid": int, "id": int, "bp": str},
}
"""What events must have besides a name and a process, by their kind: metadata, slices, begins and ends of arrows."""


class TraceError(ValueError):
    """A file is no trace; says where and why."""


@dataclass
class Slice:
    """A stretch of time on a track. Times are whole nanoseconds since the zero of all ranks.

    Attributes:
        name: what went on.
        category: which kind of thing that is.
        begin, end: when.
        arguments: further figures.
        within: slices that lie in it, in the order of time.
    """

    name: str
    category: str
    begin: int
    end: int
    arguments: dict[str, Any]
    within: list["Slice"] = field(default_factory=list)

    def all_within(self) -> Iterator["Slice"]:
        """What lies in it, however deep."""
        for inner in self.within:
            yield inner
            yield from inner.all_within()


@dataclass
class Arrow:
    """From the slice that it begins in to the one that it ends in.

    Attributes:
        sender, receiver: ranks.
        left, came: when, in nanoseconds.
    """

    sender: int
    receiver: int
    left: int
    came: int


@dataclass
class Trace:
    """What traces of ranks tell together.

    Attributes:
        ranks: that there are traces of, in their order.
        tracks: by rank and name of the track, the outermost slices in the order of time.
        arrows: of exchanges; those alone of which both ranks' traces are there.
        clock_error: by how many nanoseconds ranks may differ on the zero of time.
    """

    ranks: list[int]
    tracks: dict[tuple[int, str], list[Slice]]
    arrows: list[Arrow]
    clock_error: int

    def steps(self, rank: int) -> list[Slice]:
        """A rank's steps."""
        return [outer for outer in self.tracks.get((rank, "compute"), []) if outer.category == "step"]


def read_traces(paths: Sequence[Path]) -> dict[str, Any]:
    """Files of ranks, or of several of them, as one trace that json.dump can write.

    Raises:
        TraceError: a file is not a trace that training has written, two are of the same rank, or they are of different
            trainings.
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


def parse(content: dict[str, Any]) -> Trace:
    """Check every event of a trace, and put slices into those that they lie in.

    Args:
        content: a trace as `read_traces` returns it.

    Raises:
        TraceError: an event lacks something, slices of a track overlap, or an arrow begins or ends twice, or outside
            of slices.
    """
    events = content["traceEvents"]
    for number, event in enumerate(events):
        _check(event, number)
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    on_track = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            begin = _nanoseconds(event["ts"])
            found = Slice(
                event["name"], event["cat"], begin, begin + _nanoseconds(event["dur"]), event.get("args", {})
            )
            on_track[event["pid"], event["tid"]].append(found)
    tracks = {}
    for place, slices in on_track.items():
        if place not in names:
            raise TraceError(f"track {place[1]} of process {place[0]} has no name")
        tracks[place[0], names[place]] = _nested(slices)
    whole = len({event["pid"] for event in events}) == content["otherData"]["ranks"]
    arrows = _arrows(events, {place: tracks[place[0], names[place]] for place in on_track}, whole=whole)
    error = _nanoseconds(content["otherData"]["clock_error_us"])
    return Trace(sorted({event["pid"] for event in events}), tracks, arrows, error)


def _check(event: Any, number: int) -> None:
    needed: dict[str, Any] = {"name": str, "pid": int, **NEEDED.get(event.get("ph"), {"ph": ()})}
    for name, kind in needed.items():
        if name not in event or not isinstance(event[name], kind) or isinstance(event[name], bool):
            raise TraceError(f"event {number} has no valid {name}: {event}")
    if event.get("dur", 0) < 0:
        raise TraceError(f"event {number} ends before it begins: {event}")


def _nested(slices: list[Slice]) -> list[Slice]:
    """The outermost of a track's slices, the others put into those that they lie in."""
    outermost: list[Slice] = []
    around: list[Slice] = []
    for found in sorted(slices, key=lambda found: (found.begin, -found.end)):
        while around and around[-1].end <= found.begin:
            around.pop()
        if around and found.end > around[-1].end:
            raise TraceError(f"{found.name} begins within {around[-1].name} and ends behind it")
        (around[-1].within if around else outermost).append(found)
        around.append(found)
    return outermost


def _arrows(
    events: Sequence[dict[str, Any]], tracks: dict[tuple[int, int], list[Slice]], *, whole: bool
) -> list[Arrow]:
    """Arrows whose both ends are there: all of them where the trace is `whole`, with every rank of the training."""
    ends: dict[str, dict[Any, dict[str, Any]]] = {"s": {}, "f": {}}
    for event in events:
        if event["ph"] in ends:
            if event["id"] in ends[event["ph"]]:
                raise TraceError(f"two arrows have the id {event['id']}")
            ends[event["ph"]][event["id"]] = event
            at = _nanoseconds(event["ts"])
            wanted = "send" if event["ph"] == "s" else "wait"
            if not any(
                inner.category == wanted for inner in _around(tracks.get((event["pid"], event["tid"]), []), at)
            ):
                raise TraceError(f"an arrow is outside of any {wanted}: {event}")
    alone = ends["s"].keys() ^ ends["f"].keys()
    if alone and whole:
        raise TraceError(f"{len(alone)} arrows have one end only, such as {min(alone)}")
    arrows = []
    for number, left in ends["s"].items():
        came = ends["f"].get(number)
        if came is not None:
            if (came["name"], came["cat"]) != (left["name"], left["cat"]):
                raise TraceError(f"the arrow {number} begins as {left['name']} and ends as {came['name']}")
            arrows.append(Arrow(left["pid"], came["pid"], _nanoseconds(left["ts"]), _nanoseconds(came["ts"])))
    return arrows


def _around(slices: list[Slice], at: int) -> Iterator[Slice]:
    """The slices that a moment lies in, from the outermost on."""
    last = bisect_right(slices, at, key=lambda outer: outer.begin) - 1
    if last >= 0 and at <= slices[last].end:
        yield slices[last]
        yield from _around(slices[last].within, at)


def _nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1000)
