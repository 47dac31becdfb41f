"""Making the routes of one rank from a plan."""

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import Plan
from hf_distca.planner.cost import pairs
from hf_distca.planner.intervals import Intervals, by_document, expand, union
from hf_distca.planner.routes.cut_tasks import CutTasks, KeysRead
from hf_distca.planner.routes.full import full_keys
from hf_distca.planner.routes.moves import Moves, Received, any_key_crosses, any_query_crosses
from hf_distca.planner.routes.tables import IntArray, LocalRows, ReceivedRows, Routes, TaskGroup
from hf_distca.planner.routes.windowed import windowed_keys


def make_routes(plan: Plan, rank: int) -> Routes:
    """Routes of `rank`, which is also worker number `rank`.

    Args:
        plan: the plan of one kind of attention layer.
        rank: a worker; one at or above plan.layout.ranks is a dedicated server and holds no rows.
    """
    # 1. The tasks of documents that this rank holds or works on, cut so that the queries of each have one owner.
    segments = by_document(plan.layout.segments)
    tasks = CutTasks.of(plan, _tasks_concerning(plan, rank), segments)
    keys = full_keys(tasks) if plan.window is None else windowed_keys(tasks, plan.window)

    # 2. What moves: queries that are computed elsewhere, and every K/V row once per worker that reads it.
    moved_queries = tasks.queries[~tasks.at_home]
    moved_keys = _brought(tasks, keys, segments)

    # 3. The three kernel calls of this worker.
    here = tasks.queries.target == rank
    received = Received(moved_keys[moved_keys.target == rank])
    groups = _Groups(tasks, keys, received, plan.window)
    visiting = np.flatnonzero(here & ~tasks.at_home)
    visitors = tasks.queries[visiting]
    visiting = visiting[np.lexsort((visitors.rows.start, visitors.rows.document, visitors.source))]
    return Routes(
        local_rows=int(plan.layout.tokens[rank]) if rank < plan.layout.ranks else 0,
        queries=moved_queries.messages(rank, plan.workers, any_query_crosses(plan)),
        keys=moved_keys.messages(rank, plan.workers, any_key_crosses(plan)),
        own=groups.own(np.flatnonzero(here & keys.local)),
        prefix=groups.prefix(np.flatnonzero(here & tasks.at_home & keys.brought)),
        visiting=groups.visiting(visiting),
    )


def _tasks_concerning(plan: Plan, rank: int) -> NDArray[np.void]:
    """All tasks of the documents that a rank holds rows or computes tasks of."""
    concerned = np.zeros(len(plan.layout.lengths), bool)
    concerned[plan.layout.of_rank(rank)["document"]] = True
    concerned[plan.tasks["document"][plan.tasks["worker"] == rank]] = True
    tasks: NDArray[np.void] = plan.tasks[concerned[plan.tasks["document"]]]
    return tasks


def _brought(tasks: CutTasks, keys: KeysRead, segments: NDArray[np.void]) -> Moves:
    """K/V rows to bring to each worker: the union of what its tasks read, each row once per worker."""
    worker, rows = union(tasks.queries.target, keys.brought_rows)
    found = rows.overlaps(Intervals.of(segments))
    return Moves.from_segments(found.rows, segments[found.second], worker[found.first])


class _Groups:
    """Groups of tasks of one worker.

    Args:
        tasks: the tasks.
        keys: the K/V rows that they read.
        received: the K/V rows that are brought to the worker.
        window: width of the sliding window; None for full causal attention.
    """

    def __init__(self, tasks: CutTasks, keys: KeysRead, received: Received, window: int | None) -> None:
        self._queries, self._keys, self._received, self._window = tasks.queries, keys, received, window

    def own(self, which: IntArray) -> TaskGroup:
        """Tasks that read keys in the segment of their queries."""
        queries = self._queries[which]
        q_lens = queries.rows.lengths
        k_lens = queries.rows.stop - self._keys.local_first[which]
        first_local = queries.local - queries.rows.start + self._keys.local_first[which]
        task_pairs = pairs(k_lens - q_lens, k_lens, self._window)
        return TaskGroup(q_lens, k_lens, expand(queries.local, q_lens), expand(first_local, k_lens), task_pairs)

    def prefix(self, which: IntArray) -> TaskGroup:
        """Local queries against keys that are brought here."""
        queries = self._queries[which]
        return self._against_brought(which, expand(queries.local, queries.rows.lengths))

    def visiting(self, which: IntArray) -> TaskGroup:
        """Received queries, in the order in which they come."""
        received = int(self._queries[which].rows.lengths.sum())
        return self._against_brought(which, np.arange(received, dtype=np.int64))

    def _against_brought(self, which: IntArray, q_rows: LocalRows | ReceivedRows) -> TaskGroup:
        brought = self._keys.brought_rows[which]
        return TaskGroup(
            self._queries[which].rows.lengths,
            brought.lengths,
            q_rows,
            self._received.find(brought),
            self._keys.brought_pairs[which],
        )
