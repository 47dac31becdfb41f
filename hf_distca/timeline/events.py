"""From what a rank's recorder measured to a trace: JSON in Chrome's trace event format, which ui.perfetto.dev opens.

One process a rank. Its track "compute" has steps, within them sections, phases, and within these kernel calls, waits
and the starts of exchanges. Its tracks "exchange" have what is on its way, from its start until it has been waited
for; what is on its way at the same time lies on several. Arrows go from the start of an exchange on the rank that
sends rows to the end of the wait of the rank that receives them.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hf_distca.dispatch.recorder import Kind, Span

TRACED: tuple[Kind, ...] = ("step", "section", "phase", "kernel", "wait", "send")
"""What a trace is made of."""

COMPUTE = 0
"""Number of the track of what the rank computes; those of exchanges follow."""

NANOSECONDS = 1e9
"""In a second."""


class Place(NamedTuple):
    """Where a trace was made.

    Attributes:
        rank: of this process in the world.
        world: number of processes.
        members: ranks of the world among which rows are exchanged, in the order of a span's rows.
    """

    rank: int
    world: int
    members: Sequence[int]

    def event(self, track: int) -> dict[str, int]:
        """What an event on a track has. Viewers take the track of the process's own number, or 0, for its main thread:
        tracks have numbers of their own."""
        return {"pid": self.rank, "tid": self.world + 1 + track}


class Zero(NamedTuple):
    """The moment that all ranks count from.

    Attributes:
        at: in seconds on the clock of this rank's spans.
        error: by how many seconds ranks may differ on it.
    """

    at: float
    error: float


class Exchanged(NamedTuple):
    """An exchange as a rank saw it.

    Attributes:
        number: of the exchange, the same on every rank.
        send: its start.
        wait: the wait for it.
        begin, end: of the time between, in nanoseconds.
    """

    number: int
    send: Span
    wait: Span
    begin: int
    end: int


def rank_trace(spans: Sequence[Span], place: Place, zero: Zero) -> dict[str, Any]:
    """The trace of one rank.

    Args:
        spans: of some steps, of the kinds `TRACED`.
        place: of the rank.
        zero: the moment to count from.

    Returns:
        What json.dump writes: "traceEvents", and under "otherData" rank, ranks and clock_error_us.
    """
    exchanges = list(_exchanges(spans, zero))
    events = [_slice(span, place, zero) for span in sorted(spans, key=lambda span: (span.begin, -span.end))]
    lanes: list[int] = []  # when each becomes free
    for exchanged in exchanges:
        lane = next((lane for lane, free in enumerate(lanes) if free <= exchanged.begin), len(lanes))
        lanes[lane : lane + 1] = [exchanged.end]
        events.append(_under_way(exchanged, place, 1 + lane))
        events += _arrows(exchanged, place, zero)
    names = ["compute", *("exchange" if lane == 0 else f"exchange {lane + 1}" for lane in range(len(lanes)))]
    return {
        "traceEvents": [*_named(place, names), *events],
        "displayTimeUnit": "ms",
        "otherData": {"rank": place.rank, "ranks": place.world, "clock_error_us": zero.error * 1e6},
    }


def _named(place: Place, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Names of the process and of its tracks, from above."""
    told: list[tuple[str, int, dict[str, Any]]] = [
        ("process_name", COMPUTE, {"name": f"rank {place.rank}"}),
        ("process_sort_index", COMPUTE, {"sort_index": place.rank}),
    ]
    for track, name in enumerate(names):
        told += [("thread_name", track, {"name": name}), ("thread_sort_index", track, {"sort_index": track})]
    for name, track, arguments in told:
        yield {"ph": "M", "name": name, **place.event(track), "args": arguments}


def _slice(span: Span, place: Place, zero: Zero) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if span.work is not None:
        arguments |= span.work._asdict()
    if span.pairs:
        arguments["pairs"] = span.pairs
    begin, end = _at(span.begin, zero), _at(span.end, zero)
    return _complete(span.part, span.kind, place, COMPUTE, begin, end, arguments)


def _under_way(exchanged: Exchanged, place: Place, track: int) -> dict[str, Any]:
    send = exchanged.send
    work = {} if send.work is None else send.work._asdict()
    here = place.members.index(place.rank)
    sent, received = (
        sum(rows) - rows[here] for rows in (send.rows.sent, send.rows.received)
    )  # those that stay on the rank do not travel
    arguments = {**work, "rows_sent": sent, "rows_received": received, "number": exchanged.number}
    return _complete(send.part, "exchange", place, track, exchanged.begin, exchanged.end, arguments)


def _complete(
    name: str, category: str, place: Place, track: int, begin: int, end: int, arguments: dict[str, Any]
) -> dict[str, Any]:
    """A slice. Begin and end are whole nanoseconds, so that what lies within another still does as it is written."""
    return {
        **{"ph": "X", "name": name, "cat": category, **place.event(track)},
        **{"ts": begin / 1000, "dur": (end - begin) / 1000, "args": arguments},
    }


def _arrows(exchanged: Exchanged, place: Place, zero: Zero) -> Iterator[dict[str, Any]]:
    """Where this rank's rows leave for each rank, and where those of each rank have come."""
    send, wait = exchanged.send, exchanged.wait
    # Within the start, which may go on when rows have left, and within the wait.
    left = min(_at(send.begin, zero) + 1, _at(send.end, zero))
    came = max(_at(wait.end, zero) - 1, _at(wait.begin, zero))
    rows = send.rows
    for other, sent, received in zip(place.members, rows.sent, rows.received, strict=True):
        if other == place.rank:
            continue
        if sent:
            yield _arrow("s", exchanged, (place.rank, other), place, left)
        if received:
            yield {**_arrow("f", exchanged, (other, place.rank), place, came), "bp": "e"}


def _arrow(phase: str, exchanged: Exchanged, way: tuple[int, int], place: Place, at: int) -> dict[str, Any]:
    sender, receiver = way
    return {
        **{"ph": phase, "name": exchanged.send.part, "cat": "rows", **place.event(COMPUTE)},
        **{"ts": at / 1000, "id": (exchanged.number * place.world + sender) * place.world + receiver},
    }


def _exchanges(spans: Sequence[Span], zero: Zero) -> Iterator[Exchanged]:
    """Starts of exchanges with the waits for them, by start. Ranks start them in the same order, whether or not
    anything crosses: so they are numbered."""
    waits: defaultdict[Any, deque[Span]] = defaultdict(deque)
    for span in sorted(spans, key=lambda span: span.begin):
        if span.kind == "wait":
            waits[span.work, span.part].append(span)
    sends = sorted((span for span in spans if span.kind == "send"), key=lambda span: span.begin)
    for number, send in enumerate(sends):
        waiting = waits[send.work, send.part]
        if send.rows.sent and waiting:
            wait = waiting.popleft()
            yield Exchanged(number, send, wait, _at(send.begin, zero), _at(wait.end, zero))


def _at(seconds: float, zero: Zero) -> int:
    """Nanoseconds since the zero."""
    return round((seconds - zero.at) * NANOSECONDS)
