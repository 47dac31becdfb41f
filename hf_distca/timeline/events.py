"""Convert a rank's recorded spans to a trace: JSON in Chrome's trace event format, for ui.perfetto.dev.

Each rank is a process. Its track "compute" nests steps, sections and phases; phases hold kernel calls, waits and the
starts of exchanges. Its tracks "exchange" show each exchange from its start until the end of its wait; simultaneous
exchanges lie on several tracks. Arrows go from the start of an exchange on the sender to the end of the receiver's
wait.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hf_distca.dispatch.recorder import Kind, Span

TRACED: tuple[Kind, ...] = ("step", "section", "phase", "kernel", "wait", "send")
"""Kinds of spans in a trace."""

COMPUTE = 0
"""Number of the rank's compute track; exchange tracks follow."""

NANOSECONDS = 1e9
"""Nanoseconds in a second."""


class Place(NamedTuple):
    """Process in which a trace was made.

    Attributes:
        rank: of this process in the world.
        world: number of processes.
        members: world ranks that exchange rows, in the order of a span's rows.
    """

    rank: int
    world: int
    members: Sequence[int]

    def event(self, phase: str, name: str, track: int, **more: Any) -> dict[str, Any]:
        """Return an event on a track.

        Viewers take track 0, or the process's number, for the main thread, so tracks have other numbers.
        """
        return {"ph": phase, "name": name, "pid": self.rank, "tid": self.world + 1 + track, **more}


class Zero(NamedTuple):
    """Common zero of time of all ranks.

    Attributes:
        at: seconds on the clock of this rank's spans.
        error: seconds by which ranks may differ.
    """

    at: float
    error: float

    def until(self, seconds: float) -> int:
        """Return the nanoseconds from the zero to another moment.

        Whole nanoseconds keep the nesting of spans.
        """
        return round((seconds - self.at) * NANOSECONDS)


def rank_trace(spans: Sequence[Span], place: Place, zero: Zero) -> dict[str, Any]:
    """Return the trace of one rank from spans of the kinds `TRACED`.

    Returns:
        Content for json.dump: "traceEvents", and under "otherData" rank, ranks and clock_error_us.
    """
    events = []
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        more = {"pairs": span.pairs} if span.pairs else {}
        events.append(_slice(span, span.kind, place, COMPUTE, zero.until(span.begin), zero.until(span.end), more))
    lanes: list[int] = []  # time at which each lane becomes free
    for number, send, wait in _exchanges(spans):
        begin, end = zero.until(send.begin), zero.until(wait.end)
        lane = next((lane for lane, free in enumerate(lanes) if free <= begin), len(lanes))
        lanes[lane : lane + 1] = [end]
        here = place.members.index(place.rank)  # rows that stay on the rank do not travel
        sent, received = (sum(rows) - rows[here] for rows in (send.rows.sent, send.rows.received))
        more = {"rows_sent": sent, "rows_received": received, "number": number}
        events.append(_slice(send, "exchange", place, 1 + lane, begin, end, more))
        events += _arrows(number, send, wait, place, zero)
    names = ["compute", *("exchange" if lane == 0 else f"exchange {lane + 1}" for lane in range(len(lanes)))]
    return {
        "traceEvents": [*_named(place, names), *events],
        "displayTimeUnit": "ms",
        "otherData": {"rank": place.rank, "ranks": place.world, "clock_error_us": zero.error * 1e6},
    }


def _named(place: Place, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield names of the process and of its tracks, from the top."""
    yield place.event("M", "process_name", COMPUTE, args={"name": f"rank {place.rank}"})
    yield place.event("M", "process_sort_index", COMPUTE, args={"sort_index": place.rank})
    for track, name in enumerate(names):
        yield place.event("M", "thread_name", track, args={"name": name})
        yield place.event("M", "thread_sort_index", track, args={"sort_index": track})


def _slice(
    span: Span, category: str, place: Place, track: int, begin: int, end: int, more: dict[str, int]
) -> dict[str, Any]:
    """Return a slice of time on a track; begin and end are nanoseconds."""
    arguments = {**(span.work._asdict() if span.work is not None else {}), **more}
    times = {"ts": begin / 1000, "dur": (end - begin) / 1000}
    return place.event("X", span.part, track, cat=category, **times, args=arguments)


def _arrows(number: int, send: Span, wait: Span, place: Place, zero: Zero) -> Iterator[dict[str, Any]]:
    """Yield starts of arrows to each receiving rank, and ends of arrows from each sending rank."""
    # Arrows begin within the send span, which may outlast the sending, and end within the wait.
    left = min(zero.until(send.begin) + 1, zero.until(send.end))
    came = max(zero.until(wait.end) - 1, zero.until(wait.begin))
    for other, sent, received in zip(place.members, send.rows.sent, send.rows.received, strict=True):
        if other == place.rank:
            continue
        of_number = number * place.world
        if sent:
            to_other = (of_number + place.rank) * place.world + other
            yield place.event("s", send.part, COMPUTE, cat="rows", ts=left / 1000, id=to_other)
        if received:
            to_this = (of_number + other) * place.world + place.rank
            yield place.event("f", send.part, COMPUTE, cat="rows", ts=came / 1000, id=to_this, bp="e")


def _exchanges(spans: Sequence[Span]) -> Iterator[tuple[int, Span, Span]]:
    """Yield the start of each exchange and its wait, in order, with a number that all ranks share.

    Ranks start exchanges in the same order, whether or not any row crosses.
    """
    waits: defaultdict[Any, deque[Span]] = defaultdict(deque)
    for span in sorted(spans, key=lambda span: span.begin):
        if span.kind == "wait":
            waits[span.work, span.part].append(span)
    sends = sorted((span for span in spans if span.kind == "send"), key=lambda span: span.begin)
    for number, send in enumerate(sends):
        waiting = waits[send.work, send.part]
        if send.rows.sent and waiting:
            yield number, send, waiting.popleft()
