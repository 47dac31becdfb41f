"""Moves of rows from the rank that holds them to the worker that computes with them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import Plan
from hf_distca.planner.intervals import Intervals, by_document, expand
from hf_distca.planner.routes.tables import ExchangedRows, IntArray, LocalRows, ReceivedRows


@dataclass(frozen=True, eq=False)
class Moves:
    """Intervals of rows, each from one rank to one worker, possibly the rank itself.

    Attributes:
        rows: [n] rows of documents.
        source: [n] rank that holds them.
        target: [n] worker that computes with them.
        local: [n] local row number, at the source, of the first row.
    """

    rows: Intervals
    source: IntArray
    target: IntArray
    local: LocalRows

    @classmethod
    def from_segments(cls, rows: Intervals, segments: NDArray[np.void], target: IntArray) -> "Moves":
        """Return moves of rows that lie in one segment each.

        Args:
            segments: [n] segment of each interval of rows.
            target: [n] worker that receives the rows.
        """
        return cls(rows, segments["rank"], target, segments["offset"] + rows.start - segments["start"])

    def __getitem__(self, index: IntArray | NDArray[np.bool_]) -> "Moves":
        return Moves(self.rows[index], self.source[index], self.target[index], self.local[index])

    def pieces(self, which: IntArray, first: IntArray, last: IntArray) -> "Moves":
        """Return parts of these moves.

        Args:
            which: [pieces] index of the move.
            first: [pieces] first row of the piece, counted from the first row of the move.
            last: [pieces] one past the last row of the piece.
        """
        rows = self.rows[which]
        rows = Intervals(rows.document, rows.start + first, rows.start + last)
        return Moves(rows, self.source[which], self.target[which], self.local[which] + first)

    def followed_by(self, other: "Moves") -> "Moves":
        """Return these moves followed by others."""
        document, start, stop = (
            np.concatenate([getattr(each.rows, name) for each in (self, other)])
            for name in ("document", "start", "stop")
        )
        source, target, local = (
            np.concatenate([getattr(each, name) for each in (self, other)]) for name in ("source", "target", "local")
        )
        return Moves(Intervals(document, start, stop), source, target, local)

    def ordered(self, peer: IntArray) -> "Moves":
        """Sort the moves by (peer, document, start), as both ends order the rows of an exchange."""
        return self[np.lexsort((self.rows.start, self.rows.document, peer))]

    def exchanged(self, rank: int, workers: int, crossing: bool) -> ExchangedRows:
        """Return what one rank or server sends and receives of these rows."""
        sent, came = self[self.source == rank], self[self.target == rank]
        sent = sent.ordered(sent.target)

        def per_worker(peer: IntArray, rows: Intervals) -> IntArray:
            return np.bincount(peer, weights=rows.lengths, minlength=workers).astype(np.int64)

        return ExchangedRows(
            send_rows=expand(sent.local, sent.rows.lengths),
            send_counts=per_worker(sent.target, sent.rows),
            recv_counts=per_worker(came.source, came.rows),
            crossing=crossing,
        )


class Received:
    """Lookup of document rows among the rows that one worker receives.

    Args:
        came: moves to the worker, in the order in which it counts the rows; each row once.
    """

    def __init__(self, came: Moves) -> None:
        lengths = came.rows.lengths
        order = np.lexsort((came.rows.start, came.rows.document))
        self._rows = came.rows[order]
        self._position = (np.cumsum(lengths) - lengths)[order]

    def find(self, rows: Intervals, reads: IntArray | None = None) -> ReceivedRows:
        """Return the positions of document rows among the received rows, interval after interval.

        Args:
            reads: [n] increasing; rows of intervals with the same number may come in any order. They then keep the
                order of their arrival, which may save gathering them. None: all rows come in the order of the
                intervals.
        """
        found = rows.overlaps(self._rows)
        position = self._position[found.second] + found.rows.start - self._rows.start[found.second]
        lengths = found.rows.lengths
        if reads is not None:
            order = np.lexsort((position, reads[found.first]))
            position, lengths = position[order], lengths[order]
        return expand(position, lengths)


def nothing_moves(plan: Plan) -> bool:
    """Return whether every rank holds rows, all of whole documents, and computes exactly these."""
    layout, tasks = plan.layout, plan.tasks
    if layout.has_cuts or not layout.tokens.all():
        return False
    rank = np.empty(len(layout.lengths), np.int64)
    rank[layout.segments["document"]] = layout.segments["rank"]
    return bool(np.array_equal(rank[tasks["document"]], tasks["worker"]))


def any_query_crosses(plan: Plan) -> bool:
    """Return whether some rank's task has a query row that the rank does not hold."""
    tasks = _tasks_of_ranks(plan)
    return _any_elsewhere(plan, tasks, tasks["start"])


def any_key_crosses(plan: Plan) -> bool:
    """Return whether some rank's task has a K/V row that the rank does not hold."""
    tasks = _tasks_of_ranks(plan)
    return _any_elsewhere(plan, tasks, plan.first_key()[plan.tasks["worker"] < plan.layout.ranks])


def _tasks_of_ranks(plan: Plan) -> NDArray[np.void]:
    return plan.tasks[plan.tasks["worker"] < plan.layout.ranks]


def _any_elsewhere(plan: Plan, tasks: NDArray[np.void], first: IntArray) -> bool:
    """Return whether some task's worker lacks any of the task's rows [first, stop)."""
    segments = by_document(plan.layout.segments)
    found = Intervals(tasks["document"], first, tasks["stop"]).overlaps(Intervals.of(segments))
    return bool(np.any(segments["rank"][found.second] != tasks["worker"][found.first]))
