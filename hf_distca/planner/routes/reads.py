"""Tasks cut at the borders of segments, the K/V rows that each of them reads, and the stage of these rows."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import Plan
from hf_distca.planner.cost import pairs
from hf_distca.planner.intervals import Intervals, by_document, expand, union
from hf_distca.planner.routes.forwarded import Hops, forward_inside_nodes, hops_by_stage
from hf_distca.planner.routes.moves import Moves
from hf_distca.planner.routes.stages import moves_by_stage, pieces_of_windows, stage_intervals
from hf_distca.planner.routes.tables import IntArray


@dataclass(frozen=True, eq=False)
class CutTasks:
    """Tasks cut at the borders of segments: all query rows of a task lie on one rank.

    A local task reads keys in the segment of its queries in place. With full attention all other keys are sent to the
    worker. With a window a task reads all keys in place, or all of them are sent to the worker, in one stage.

    Attributes:
        queries: [n] query rows, from the rank that holds them to the worker that computes them.
        segment_start: [n] the document's first row in the segment of the query rows.
    """

    queries: Moves
    segment_start: IntArray
    window: int | None

    @classmethod
    def of(cls, plan: Plan, tasks: NDArray[np.void], segments: NDArray[np.void]) -> "CutTasks":
        """Cut some tasks of a plan.

        Args:
            segments: the plan's segments by (document, start).
        """
        found = Intervals.of(tasks).overlaps(Intervals.of(segments))
        held = segments[found.second]
        queries = Moves.from_segments(found.rows, held, tasks["worker"][found.first])
        return cls(queries, held["start"], plan.window)

    def __getitem__(self, index: IntArray | NDArray[np.bool_]) -> "CutTasks":
        return CutTasks(self.queries[index], self.segment_start[index], self.window)

    @property
    def queries_local(self) -> NDArray[np.bool_]:
        """[n] whether the rank that holds the query rows computes them."""
        same: NDArray[np.bool_] = self.queries.source == self.queries.target
        return same

    @cached_property
    def local_first(self) -> IntArray:
        """[n] first K/V row that a task reads in place; the last one is its own last row."""
        if self.window is None:
            return self.segment_start
        first: IntArray = np.maximum(self.queries.rows.start - self.window + 1, 0)
        return first

    @cached_property
    def keys_local(self) -> NDArray[np.bool_]:
        """[n] whether a task reads keys in place."""
        local: NDArray[np.bool_] = self.queries_local & (self.local_first >= self.segment_start)
        return local

    @cached_property
    def received(self) -> Intervals:
        """[n] K/V rows that are sent to the worker and read, possibly none."""
        rows = self.queries.rows
        if self.window is None:
            stop = np.where(self.queries_local, self.segment_start, rows.stop)
            return Intervals(rows.document, np.zeros_like(stop), stop)
        return Intervals(rows.document, self.local_first, np.where(self.keys_local, self.local_first, rows.stop))

    def key_moves(self, segments: NDArray[np.void]) -> Moves:
        """Return the K/V rows that are sent, each row once per worker."""
        worker, rows = union(self.queries.target, self.received)
        found = rows.overlaps(Intervals.of(segments))
        return Moves.from_segments(found.rows, segments[found.second], worker[found.first])


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


@dataclass(frozen=True, eq=False)
class Arrivals:
    """Tasks of a plan and the K/V rows that are sent to their workers.

    Attributes:
        tasks: [n] the cut tasks; with a window they are also cut so that each has its keys in one stage.
        stages: for each stage, hops of the rows to all workers. Each row is sent once per worker; with a window, once
            per worker and stage.
        stage: [n] with a window, the stage of a task's keys.
    """

    tasks: CutTasks
    stages: tuple[Hops, ...]
    stage: IntArray

    @classmethod
    def of(cls, plan: Plan, tasks: NDArray[np.void]) -> "Arrivals":
        """Return the arrivals for some tasks of a plan.

        Args:
            tasks: tasks of the plan. All tasks are needed with stages, which depend on all that ranks send and
                receive. They are also needed with nodes, since every rank has to know whether any rank forwards rows.
        """
        ranks = plan.layout.ranks
        segments = by_document(plan.layout.segments)
        cut = CutTasks.of(plan, tasks, segments)
        stage = np.zeros_like(cut.segment_start)
        if plan.window is None:
            hops = forward_inside_nodes(cut.key_moves(segments), plan.nodes, ranks)
            if plan.stage_rows is None:
                return cls(cut, (hops,), stage)
            if len(hops.second.source):
                return cls(cut, hops_by_stage(hops, plan.stage_rows, ranks), stage)
            return cls(cut, tuple(map(Hops.direct, moves_by_stage(hops.first, plan.stage_rows, ranks))), stage)
        if plan.stage_rows is not None:
            rows, target = cut.queries.rows, cut.queries.target
            cut = cut[np.lexsort((rows.start, rows.document, target))]
            pieces = pieces_of_windows(cut.queries, cut.received, plan.stage_rows, plan.window, ranks)
            which, first, last, stage = pieces
            cut = CutTasks(cut.queries.pieces(which, first, last), cut.segment_start[which], plan.window)
        of_stages = [cut[stage == number] for number in range(stage.max(initial=0) + 1)]
        hops_of = [forward_inside_nodes(each.key_moves(segments), plan.nodes, ranks) for each in of_stages]
        return cls(cut, tuple(hops_of), stage)

    def reads(self, which: IntArray, rank: int) -> Iterator[tuple[Reads, Reads]]:
        """Yield, for each stage, the reads up to the queries' own rows, and the reads of all rows before them.

        `which` are indices of tasks of worker `rank`.
        """
        queries, keys = self.tasks.queries.rows[which], self.tasks.received[which]
        if self.tasks.window is not None:
            none = which[:0]
            for number in range(len(self.stages)):
                task = np.flatnonzero(self.stage[which] == number)
                rows, read = queries[task], keys[task]
                amount = pairs(rows.start, rows.stop, self.tasks.window)
                yield (
                    Reads(task, rows, np.ones_like(task), read, amount),
                    before_queries(none, queries[none], keys[none]),
                )
            return
        stage, rows = stage_intervals([hops.arriving(rank) for hops in self.stages])
        overlaps = keys.overlaps(rows)
        for number in range(len(self.stages)):
            found = np.flatnonzero(stage[overlaps.second] == number)
            task, read = overlaps.first[found], overlaps.rows[found]
            yield up_to_queries(task, queries[task], read), before_queries(task, queries[task], read)
