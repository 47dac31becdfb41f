"""Fewer bytes through the busiest worker: swaps of work between two workers.

What a task costs depends on who else computes rows of its document, above all where that lies on several ranks
and K/V rows go out from all of them: more than flows and sources see, which settle one giver at a time. So the
finished tasks are looked at once more. In a swap two workers compute equally many pairs of each
other's tasks (a part of the larger one, at either of its ends); it is kept if the busiest worker of those
concerned then has fewer bytes than the busiest of all had. Few are tried, those near the busiest worker.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import TASK
from hf_distca.planner.cost import RowBytes, pairs, row_reaching
from hf_distca.planner.intervals import Span, grain, joined
from hf_distca.planner.shifted import ShiftedRows

Spot = tuple[int, Span]
"""A task and the document that it is of."""
Traffic = dict[tuple[int, int], int]
"""(SENT or RECEIVED, worker) -> bytes"""
SENT, RECEIVED = 0, 1

TRIES = 128
"""Swaps tried; fewer with many workers."""
MOST = 1024
"""Tries times workers."""
LEAST = 16
"""For fewer tries the search is not worth setting up."""
GOOD = 4
"""The best of so many that help is made."""
GAIN = 0.001
"""Share of its bytes that a swap must save the busiest worker."""
MORE_BYTES = 0.03
"""Share by which the bytes of all workers may grow."""
TOTAL = 0.3
"""What a byte of all workers counts beside one of the busiest."""


def swapped(
    tasks: NDArray[np.void], rows: ShiftedRows, room: Sequence[float], row_bytes: RowBytes, block: int
) -> NDArray[np.void]:
    """The tasks, in no order, after the swaps that help.

    Args:
        tasks: [tasks] of dtype TASK; none that touch on one worker.
        rows: where the rows are, in the view that the tasks are counted in.
        room: [workers] pairs that each worker may take on.
        row_bytes: bytes of the rows.
        block: rows of a kernel block.
    """
    tries = min(TRIES, MOST // len(room))
    home = np.zeros(len(rows.stops), np.int64)
    home[rows.segments["document"]] = rows.segments["rank"]
    ranks = np.bincount(rows.segments["document"], minlength=len(home))
    away = ranks > 1
    away[tasks["document"][tasks["worker"] != home[tasks["document"]]]] = True
    concerned = away[tasks["document"]]
    if tries < LEAST or not concerned.any():
        return tasks
    search = _Search(tasks[concerned], rows, room, row_bytes, block)
    search.run(tries)
    found = [(doc, *span) for doc, spans in search.spans.items() for span in spans]
    return np.concatenate([tasks[~concerned], np.array(found, TASK)])


class _Search:
    """The tasks of all documents but those that one rank holds and computes.

    Attributes:
        spans: document -> its tasks by start; they touch, and neighbours have different workers.
        segments: document -> (start, stop, rank) of its rows by start.
        traffic: document -> bytes that it causes.
        total: the sum of all traffic.
        room: [workers] pairs that each worker may still take on.
    """

    def __init__(
        self, tasks: NDArray[np.void], rows: ShiftedRows, room: Sequence[float], row_bytes: RowBytes, block: int
    ) -> None:
        self.rows, self.row_bytes, self.block, self.room = rows, row_bytes, block, list(room)
        self.spans: dict[int, list[Span]] = {}
        for doc, *span in np.sort(tasks, order=["document", "start"]).tolist():
            self.spans.setdefault(doc, []).append((span[0], span[1], span[2]))
        self.segments: dict[int, list[Span]] = {doc: [] for doc in self.spans}
        segments = rows.segments[np.isin(rows.segments["document"], list(self.spans))]
        for doc, start, stop, rank, _ in np.sort(segments, order=["document", "start"]).tolist():
            self.segments[doc].append((start, stop, rank))
        self.traffic = {doc: self._traffic(doc, spans) for doc, spans in self.spans.items()}
        self.total: Traffic = {}
        for traffic in self.traffic.values():
            _add(self.total, traffic, 1)

    def run(self, tries: int) -> None:
        """Make swaps until none is found, or `tries` were tried."""
        spare = MORE_BYTES * sum(size for (side, _), size in self.total.items() if side == SENT)
        # Neighbours in the list are alike, so the few that are tried are drawn from all of it.
        draw = np.random.default_rng(0)
        while tries > 0 and self.total:
            busiest = max(self.total, key=self.total.__getitem__)
            enough = self.total[busiest] * (1 - GAIN)
            candidates = list(self._candidates(*busiest))
            helping: list[tuple[float, int, dict[int, list[Span]], dict[int, int]]] = []
            for one, other in (candidates[at] for at in draw.permutation(len(candidates)).tolist()):
                if tries <= 0 or len(helping) >= GOOD:
                    break
                tries -= 1
                for at_end in (False, True):
                    new, added = self._swap(one, other, at_end)
                    change = self._change(new)
                    if change.get(busiest, 0) >= 0:
                        continue
                    more = sum(size for (side, _), size in change.items() if side == SENT)
                    most = max(self.total.get(key, 0) + size for key, size in change.items())
                    if most <= enough and more <= spare:
                        helping.append((most + TOTAL * more, more, new, added))
            if not helping:
                return
            _, more, new, added = min(helping, key=lambda found: found[0])
            self._make(new, added)
            spare -= more

    def _candidates(self, side: int, worker: int) -> Iterator[tuple[Spot, Spot]]:
        """Tasks that add to what a worker sends or receives, each with tasks for which it may be swapped:
        those of workers that hold or compute rows of its document, and those of documents that its worker does."""
        by_worker: dict[int, list[Spot]] = {}
        for doc, spans in self.spans.items():
            for span in spans:
                by_worker.setdefault(span[2], []).append((doc, span))
        for doc, spans in self.spans.items():
            if (side, worker) not in self.traffic[doc]:
                continue
            near = {span[2] for span in spans + self.segments[doc]}
            first = min((start for start, _, rank in self.segments[doc] if rank == worker), default=None)
            for span in spans:
                # The worker computes the task, or holds K/V rows that the task needs.
                if span[2] != worker and (side == RECEIVED or first is None or first >= span[1]):
                    continue
                others = [spot for taker in sorted(near) for spot in by_worker.get(taker, [])]
                for shared, _ in by_worker[span[2]]:
                    others += [(shared, other) for other in self.spans[shared]]
                yield from (((doc, span), spot) for spot in dict.fromkeys(others) if spot[1][2] != span[2])

    def _swap(self, one: Spot, other: Spot, at_end: bool) -> tuple[dict[int, list[Span]], dict[int, int]]:
        """document -> its tasks, and worker -> pairs that it computes more, after a swap; empty if none fits.

        Args:
            one, other: tasks of two workers.
            at_end: where the part of the larger one lies: at its end, or at its start.
        """
        window = self.rows.pair_window
        size = {spot: pairs(spot[1][0], spot[1][1], window) for spot in (one, other)}
        small, large = sorted((one, other), key=lambda spot: size[spot])
        excess = size[large] - size[small]
        begin, end, owner = large[1]
        taker = small[1][2]
        if excess > self.room[taker]:
            cut = self._cut(large[1], size[small], at_end, min(self.room[owner], self.room[taker]))
            begin, end = (cut, end) if at_end else (begin, cut)
            if cut - large[1][0] < self.block or large[1][1] - cut < self.block:
                return {}, {}
            excess = pairs(begin, end, window) - size[small]
        if excess > self.room[taker] or -excess > self.room[owner]:
            return {}, {}
        new = {doc: self.spans[doc].copy() for doc in (small[0], large[0])}
        for (doc, old), spans in (
            (small, [(*small[1][:2], owner)]),
            (large, [(large[1][0], begin, owner), (begin, end, taker), (end, large[1][1], owner)]),
        ):
            at = new[doc].index(old)
            new[doc][at : at + 1] = [span for span in spans if span[0] < span[1]]
        return {doc: joined(spans) for doc, spans in new.items()}, {taker: excess, owner: -excess}

    def _cut(self, span: Span, amount: int, at_end: bool, room: float) -> int:
        """The row that cuts `amount` pairs off a task: a block's boundary if the rounding fits into the room."""
        window = self.rows.pair_window
        start, stop, _ = span
        before = pairs(0, stop, window) - amount if at_end else pairs(0, start, window) + amount
        row = row_reaching(float(before), window)
        multiple = grain(self.block, lambda size: abs(pairs(0, round(row / size) * size, window) - before) > room)
        return min(max(round(row / multiple) * multiple, start), stop)

    def _change(self, new: dict[int, list[Span]]) -> Traffic:
        """Bytes that each worker would send and receive more."""
        change: Traffic = {}
        for doc, spans in new.items():
            _add(change, self._traffic(doc, spans), 1)
            _add(change, self.traffic[doc], -1)
        return change

    def _make(self, new: dict[int, list[Span]], added: dict[int, int]) -> None:
        _add(self.total, self._change(new), 1)
        for doc, spans in new.items():
            self.spans[doc] = spans
            self.traffic[doc] = self._traffic(doc, spans)
        for worker, amount in added.items():
            self.room[worker] -= amount

    def _traffic(self, doc: int, spans: list[Span]) -> Traffic:
        """Bytes that a document causes if these are its tasks; what metrics.bytes_moved counts for it."""
        size, window = self.row_bytes, self.rows.window
        traffic: Traffic = {}
        there: dict[int, int] = {}  # worker -> end of the K/V rows that its tasks so far need
        for start, stop, worker in spans:
            first = there.get(worker, self.rows.origin)
            if window is not None:
                first = max(first, start - window + 1)
            there[worker] = stop
            for begin, end, rank in self.segments[doc]:
                if begin >= stop:
                    break
                if rank == worker or end <= first:
                    continue
                rows = max(min(end, stop) - max(begin, start), 0)
                out = rows * size.q + (min(end, stop) - max(begin, first)) * size.kv
                for key, amount in (
                    ((SENT, rank), out),
                    ((RECEIVED, worker), out),
                    ((SENT, worker), rows * size.o),
                    ((RECEIVED, rank), rows * size.o),
                ):
                    if amount:
                        traffic[key] = traffic.get(key, 0) + amount
        return traffic


def _add(traffic: Traffic, other: Traffic, sign: int) -> None:
    for key, size in other.items():
        traffic[key] = traffic.get(key, 0) + sign * size
