"""Convert a rank's recorded spans to a trace: JSON in Chrome's trace event format, for ui.perfetto.dev.

Each rank is a process. Its track "compute" nests steps, sections and phases; phases hold kernel
calls, waits and the starts of exchanges. Its tracks "exchange" show each exchange from its start
until the end of its wait; simultaneous exchanges lie on several tracks. Arrows go from the start of
an exchange on the sender to the end of the receiver's wait.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from hf_distca.dispatch.recorder import Kind, Span

TRACED: tuple[Kind, ...] = ("step", "section", "phase", "kernel", "wait", "send")
"""Kinds of spans in a trace."""

COMPUTE = 0
"""Number of the rank's compute track; exchange tracks follow."""


def rank_trace(
    spans: Sequence[Span], rank: int, world: int, members: Sequence[int], zero: tuple[float, float]
) -> dict[str, Any]:
    """Return the trace of one rank, for json.dump, from spans of the kinds `TRACED`.

    Args:
        members: world ranks that exchange rows, in the order of a span's rows.
        zero: common zero of time of all ranks, on the clock of the spans, and the seconds by which
            ranks may differ.
    """
    zero_s, error_s = zero

    def time_of(seconds: float) -> int:
        return round((seconds - zero_s) * 1e9)  # whole nanoseconds keep the nesting of spans

    def event(phase: str, name: str, track: int, **more: Any) -> dict[str, Any]:
        # Viewers take track 0, or the process's number, for the main thread.
        return {"ph": phase, "name": name, "pid": rank, "tid": world + 1 + track, **more}

    def piece(span: Span, category: str, track: int, end: float, **more: int) -> dict[str, Any]:
        begin = time_of(span.begin)
        times = {"ts": begin / 1000, "dur": (time_of(end) - begin) / 1000}
        arguments = {**(span.work._asdict() if span.work is not None else {}), **more}
        return event("X", span.part, track, cat=category, **times, args=arguments)

    events = []
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        more = {"pairs": span.pairs} if span.pairs else {}
        events.append(piece(span, span.kind, COMPUTE, span.end, **more))
    here = members.index(rank)  # rows that stay on the rank do not travel
    lanes: list[float] = []  # time at which each lane becomes free
    waits: defaultdict[Any, deque[Span]] = defaultdict(deque)
    for span in sorted(spans, key=lambda span: span.begin):
        if span.kind == "wait":
            waits[span.work, span.part].append(span)
    # Ranks start exchanges in the same order, whether or not any row crosses, and so number them
    # alike.
    sends = sorted((span for span in spans if span.kind == "send"), key=lambda span: span.begin)
    for number, send in enumerate(sends):
        waiting = waits[send.work, send.part]
        if not (send.rows.sent and waiting):
            continue
        wait = waiting.popleft()
        lane = next((lane for lane, free in enumerate(lanes) if free <= send.begin), len(lanes))
        lanes[lane : lane + 1] = [wait.end]
        sent, received = (sum(rows) - rows[here] for rows in (send.rows.sent, send.rows.received))
        more = {"rows_sent": sent, "rows_received": received, "number": number}
        events.append(piece(send, "exchange", 1 + lane, wait.end, **more))
        # Arrows begin within the send span, which may outlast the sending, and end within the wait.
        left = min(time_of(send.begin) + 1, time_of(send.end)) / 1000
        came = max(time_of(wait.end) - 1, time_of(wait.begin)) / 1000
        for other, to_other, from_other in zip(
            members, send.rows.sent, send.rows.received, strict=True
        ):
            if other != rank and to_other:
                key = (number * world + rank) * world + other
                events.append(event("s", send.part, COMPUTE, cat="rows", ts=left, id=key))
            if other != rank and from_other:
                key = (number * world + other) * world + rank
                events.append(event("f", send.part, COMPUTE, cat="rows", ts=came, id=key, bp="e"))
    names = [
        event("M", "process_name", COMPUTE, args={"name": f"rank {rank}"}),
        event("M", "process_sort_index", COMPUTE, args={"sort_index": rank}),
    ]
    tracks = [
        "compute",
        *("exchange" if lane == 0 else f"exchange {lane + 1}" for lane in range(len(lanes))),
    ]
    for track, name in enumerate(tracks):
        names.append(event("M", "thread_name", track, args={"name": name}))
        names.append(event("M", "thread_sort_index", track, args={"sort_index": track}))
    return {
        "traceEvents": [*names, *events],
        "displayTimeUnit": "ms",
        "otherData": {"rank": rank, "ranks": world, "clock_error_us": error_s * 1e6},
    }
