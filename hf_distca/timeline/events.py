"""Convert a rank's recorded spans to a trace in Chrome's trace event format, for ui.perfetto.dev.

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
    events = _Events(rank, world, zero_s)
    events.add_spans(spans)
    lanes = events.add_exchanges(spans, members)
    return {
        "traceEvents": [*events.track_names(lanes), *events.listed],
        "displayTimeUnit": "ms",
        "otherData": {"rank": rank, "ranks": world, "clock_error_us": error_s * 1e6},
    }


class _Events:
    """Events of one rank's trace, `listed` in the order in which they are added."""

    def __init__(self, rank: int, world: int, zero_s: float) -> None:
        self.rank = rank
        self.world = world
        self.zero_s = zero_s
        self.listed: list[dict[str, Any]] = []

    def add_spans(self, spans: Sequence[Span]) -> None:
        """Add all spans to the compute track."""
        for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
            arguments = {"pairs": span.pairs} if span.pairs else {}
            self.listed.append(self._slice(span, span.kind, COMPUTE, span.end, arguments))

    def add_exchanges(self, spans: Sequence[Span], members: Sequence[int]) -> int:
        """Add this rank's exchanges with their arrows; return the number of exchange tracks."""
        # 1. Waits in order of time, by the core attention and the exchange that they are for.
        waits: defaultdict[Any, deque[Span]] = defaultdict(deque)
        for span in sorted(spans, key=lambda span: span.begin):
            if span.kind == "wait":
                waits[span.work, span.part].append(span)

        # 2. An exchange lasts from its start to the end of its wait. Ranks start exchanges in the
        # same order, whether or not any row crosses, and so number them alike.
        row_of_rank = members.index(self.rank)
        lane_ends: list[float] = []  # time at which each lane becomes free
        starts = [span for span in spans if span.kind == "send"]
        for number, start in enumerate(sorted(starts, key=lambda span: span.begin)):
            waiting = waits[start.work, start.part]
            if not (start.rows.sent and waiting):
                continue
            wait = waiting.popleft()
            lane = _free_lane(lane_ends, start.begin)
            lane_ends[lane : lane + 1] = [wait.end]
            # Rows that stay on the rank do not travel.
            own = row_of_rank - start.rows.first_rank
            arguments = {
                "rows_sent": sum(start.rows.sent) - start.rows.sent[own],
                "rows_received": sum(start.rows.received) - start.rows.received[own],
                "number": number,
            }
            self.listed.append(self._slice(start, "exchange", 1 + lane, wait.end, arguments))
            self._add_arrows(number, start, wait, members)
        return len(lane_ends)

    def track_names(self, lanes: int) -> list[dict[str, Any]]:
        """Return the events that name and order the process and its tracks."""
        exchanges = ["exchange" if lane == 0 else f"exchange {lane + 1}" for lane in range(lanes)]
        names = [
            self._event("M", "process_name", COMPUTE, args={"name": f"rank {self.rank}"}),
            self._event("M", "process_sort_index", COMPUTE, args={"sort_index": self.rank}),
        ]
        for track, name in enumerate(["compute", *exchanges]):
            names.append(self._event("M", "thread_name", track, args={"name": name}))
            names.append(self._event("M", "thread_sort_index", track, args={"sort_index": track}))
        return names

    def _add_arrows(self, number: int, start: Span, wait: Span, members: Sequence[int]) -> None:
        """Add the arrows of an exchange; both of its ranks give an arrow the same id."""
        # Arrows begin within the start, which may outlast the sending, and end within the wait.
        departure = min(self._time(start.begin) + 1, self._time(start.end)) / 1000
        arrival = max(self._time(wait.end) - 1, self._time(wait.begin)) / 1000
        first, count = start.rows.first_rank, len(start.rows.sent)
        peers = members[first : first + count]
        for peer, sent, received in zip(peers, start.rows.sent, start.rows.received, strict=True):
            if peer != self.rank and sent:
                key = self._arrow_id(number, self.rank, peer)
                self.listed.append(
                    self._event("s", start.part, COMPUTE, cat="rows", ts=departure, id=key)
                )
            if peer != self.rank and received:
                key = self._arrow_id(number, peer, self.rank)
                self.listed.append(
                    self._event("f", start.part, COMPUTE, cat="rows", ts=arrival, id=key, bp="e")
                )

    def _arrow_id(self, number: int, sender: int, receiver: int) -> int:
        return (number * self.world + sender) * self.world + receiver

    def _time(self, seconds: float) -> int:
        return round((seconds - self.zero_s) * 1e9)  # whole nanoseconds keep the nesting of spans

    def _event(self, phase: str, name: str, track: int, **fields: Any) -> dict[str, Any]:
        # Viewers take track 0, or the process's number, for the main thread.
        thread = self.world + 1 + track
        return {"ph": phase, "name": name, "pid": self.rank, "tid": thread, **fields}

    def _slice(
        self, span: Span, category: str, track: int, end: float, arguments: dict[str, int]
    ) -> dict[str, Any]:
        """Return an event that lasts from the begin of a span to an end, in microseconds."""
        begin = self._time(span.begin)
        times = {"ts": begin / 1000, "dur": (self._time(end) - begin) / 1000}
        work = span.work._asdict() if span.work is not None else {}
        return self._event("X", span.part, track, cat=category, **times, args={**work, **arguments})


def _free_lane(lane_ends: Sequence[float], begin: float) -> int:
    """Return the first lane that is free at a time, or a new one."""
    for lane, end in enumerate(lane_ends):
        if end <= begin:
            return lane
    return len(lane_ends)
