"""Tasks cut at the borders of segments, and the K/V rows that each of them reads.

K/V rows that tasks of full attention read.

A local task reads its own segment in place, and all rows of the document before the segment, which all its queries
see. A remote-query task reads rows [0, stop) among the rows sent to the worker. Of the rows of a stage a query sees
the rows up to its own: all of them, a part if its own row is among them, or none.


K/V rows that tasks of sliding-window attention read.

A task reads rows [first, stop), where `first` is the edge of its first query's window. If all these rows are in the
segment of its queries, they are read in place. Otherwise all of them are sent to the worker, in one stage.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import Plan
from hf_distca.planner.cost import pairs
from hf_distca.planner.intervals import Intervals, expand
from hf_distca.planner.routes.moves import Moves
from hf_distca.planner.routes.tables import IntArray


@dataclass(frozen=True, eq=False)
class CutTasks:
    """Tasks cut at the borders of segments: all query rows of a task lie on one rank.

    Attributes:
        queries: [n] query rows, from the rank that holds them to the worker that computes them.
        segment_start: [n] the document's first row in the segment of the query rows.
    """

    queries: Moves
    segment_start: IntArray

    @classmethod
    def of(cls, plan: Plan, tasks: NDArray[np.void], segments: NDArray[np.void]) -> "CutTasks":
        """Cut some tasks of a plan.

        Args:
            segments: the plan's segments by (document, start).
        """
        found = Intervals.of(tasks).overlaps(Intervals.of(segments))
        held = segments[found.second]
        return cls(Moves.from_segments(found.rows, held, tasks["worker"][found.first]), held["start"])

    def __getitem__(self, index: IntArray | NDArray[np.bool_]) -> "CutTasks":
        return CutTasks(self.queries[index], self.segment_start[index])

    def pieces(self, which: IntArray, first: IntArray, last: IntArray) -> "CutTasks":
        """Return parts of these tasks, see `Moves.pieces`."""
        return CutTasks(self.queries.pieces(which, first, last), self.segment_start[which])

    @property
    def queries_local(self) -> NDArray[np.bool_]:
        """[n] whether the rank that holds the query rows computes them."""
        same: NDArray[np.bool_] = self.queries.source == self.queries.target
        return same


@dataclass(frozen=True, eq=False)
class KeysRead:
    """K/V rows that cut tasks read, in the queries' segment or sent to the worker. All [n].

    Attributes:
        local: whether a task reads rows [local_first, stop) of its document, up to its own last row, in the segment of
            its queries.
        brought_rows: rows of the document that are sent to the worker and read, if `brought`; else empty.
    """

    local: NDArray[np.bool_]
    local_first: IntArray
    brought: NDArray[np.bool_]
    brought_rows: Intervals

    def __getitem__(self, index: IntArray | NDArray[np.bool_]) -> "KeysRead":
        return KeysRead(self.local[index], self.local_first[index], self.brought[index], self.brought_rows[index])


@dataclass(frozen=True, eq=False)
class Reads:
    """Query rows and the K/V rows of one stage that they attend to; no query row is listed twice.

    Attributes:
        task: [n] cut task of the query rows.
        queries: [n] query rows.
        counts: [n] number of intervals of keys.
        keys: [sum of counts] K/V rows of the same document.
        pairs: [n] query-key pairs that are computed.
    """

    task: IntArray
    queries: Intervals
    counts: IntArray
    keys: Intervals
    pairs: IntArray


def full_keys(tasks: CutTasks) -> KeysRead:
    """Return the K/V rows that tasks read; query row p reads rows 0 to p."""
    rows, queries_local = tasks.queries.rows, tasks.queries_local
    stop = np.where(queries_local, tasks.segment_start, rows.stop)
    return KeysRead(
        local=queries_local,
        local_first=tasks.segment_start,
        brought=stop > 0,
        brought_rows=Intervals(rows.document, np.zeros_like(stop), stop),
    )


def before_queries(task: IntArray, queries: Intervals, keys: Intervals) -> Reads:
    """Return queries with all rows of a stage that come before them in the document.

    Args:
        task: [n] a cut task that reads an interval of a stage, increasing.
        queries: [n] all query rows of the task.
        keys: [n] the interval; intervals of one task are in order.
    """
    start = np.maximum(queries.start, keys.stop)
    seen = start < queries.stop
    task, queries, keys, start = task[seen], queries[seen], keys[seen], start[seen]
    # Queries of a task that see one more interval form a separate read, of that interval and all earlier ones.
    last = np.append((task[1:] != task[:-1]) | (start[1:] != start[:-1]), True)[: len(task)]
    which = np.flatnonzero(last)
    first = np.searchsorted(task, task[which])
    of_same_task = np.append(task[which][1:] == task[which][:-1], False)[: len(which)]
    stop = np.where(of_same_task, np.append(start[which][1:], 0)[: len(which)], queries.stop[which])
    seeing = Intervals(queries.document[which], start[which], stop)
    counts = which - first + 1
    read = keys[expand(first, counts)]
    rows = np.bincount(np.repeat(np.arange(len(counts)), counts), weights=read.lengths, minlength=len(counts))
    return Reads(task[which], seeing, counts, read, seeing.lengths * rows.astype(np.int64))


def up_to_queries(task: IntArray, queries: Intervals, keys: Intervals) -> Reads:
    """Return queries whose own rows are the last of an interval of a stage.

    Args:
        task: [n] a cut task that reads an interval of a stage.
        queries: [n] all query rows of the task.
        keys: [n] the interval.
    """
    start = np.maximum(queries.start, keys.start)
    among = start < keys.stop
    task, keys, start = task[among], keys[among], start[among]
    seeing = Intervals(keys.document, start, keys.stop)
    return Reads(task, seeing, np.ones_like(task), keys, pairs(start - keys.start, keys.lengths))


def windowed_keys(tasks: CutTasks, window: int) -> KeysRead:
    """Return the K/V rows that tasks read; query row p reads rows max(0, p - window + 1) to p."""
    rows = tasks.queries.rows
    first = np.maximum(rows.start - window + 1, 0)
    inside = tasks.queries_local & (first >= tasks.segment_start)
    return KeysRead(
        local=inside,
        local_first=first,
        brought=~inside,
        brought_rows=Intervals(rows.document, first, np.where(inside, first, rows.stop)),
    )


def within_window(task: IntArray, queries: Intervals, keys: Intervals, window: int) -> Reads:
    """Return queries with all rows that their windows reach.

    Args:
        task: [n] cut task of each interval of queries.
        queries: [n] query rows of the task.
        keys: [n] K/V rows that the task reads.
    """
    return Reads(task, queries, np.ones_like(task), keys, pairs(queries.start, queries.stop, window))
