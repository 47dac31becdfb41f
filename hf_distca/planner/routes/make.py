"""K/V rows that arrive at workers, stage by stage, and the tasks that read them.

Construction of one rank's routes from a plan."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import Plan
from hf_distca.planner.cost import pairs
from hf_distca.planner.intervals import Intervals, by_document, expand, union
from hf_distca.planner.routes.forwarded import Hops, forward_inside_nodes, hops_by_stage
from hf_distca.planner.routes.moves import Moves, Received, any_key_crosses, any_query_crosses
from hf_distca.planner.routes.reads import (
    CutTasks,
    KeysRead,
    Reads,
    before_queries,
    full_keys,
    up_to_queries,
    windowed_keys,
    within_window,
)
from hf_distca.planner.routes.stages import moves_by_stage, stage_intervals, tasks_by_stage
from hf_distca.planner.routes.tables import ExchangedRows, IntArray, LocalRows, ReceivedRows, Routes, Stage, TaskGroup


@dataclass(frozen=True, eq=False)
class Arrivals:
    """Tasks of a plan and the K/V rows that are sent to their workers.

    Attributes:
        tasks: [n] the cut tasks; with a window they are also cut so that each has its keys in one stage.
        keys: [n] K/V rows that the tasks read.
        stages: for each stage, hops of the rows to all workers. Each row is sent once per worker; with a window, once
            per worker and stage.
        stage: [n] with a window, the stage of a task's keys.
    """

    window: int | None
    tasks: CutTasks
    keys: KeysRead
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
            keys = full_keys(cut)
            hops = forward_inside_nodes(_brought(cut, keys, segments), plan.nodes, ranks)
            if plan.stage_rows is None:
                stages: tuple[Hops, ...] = (hops,)
            elif len(hops.second.source):
                stages = hops_by_stage(hops, plan.stage_rows, ranks)
            else:
                stages = tuple(Hops.direct(moves) for moves in moves_by_stage(hops.first, plan.stage_rows, ranks))
            return cls(plan.window, cut, keys, stages, stage)
        keys = windowed_keys(cut, plan.window)
        if plan.stage_rows is not None:
            cut, stage = tasks_by_stage(cut, keys, plan.stage_rows, plan.window, ranks)
            keys = windowed_keys(cut, plan.window)
        of_stages = [stage == number for number in range(stage.max(initial=0) + 1)]
        stages = tuple(
            forward_inside_nodes(_brought(cut[these], keys[these], segments), plan.nodes, ranks) for these in of_stages
        )
        return cls(plan.window, cut, keys, stages, stage)

    def reads(self, which: IntArray, rank: int) -> Iterator[tuple[Reads, Reads]]:
        """Yield, for each stage, the reads up to the queries' own rows, and the reads of all rows before them.

        `which` are indices of tasks of worker `rank`.
        """
        queries, keys = self.tasks.queries.rows[which], self.keys.brought_rows[which]
        if self.window is not None:
            none = which[:0]
            for number in range(len(self.stages)):
                task = np.flatnonzero(self.stage[which] == number)
                yield (
                    within_window(task, queries[task], keys[task], self.window),
                    before_queries(none, queries[none], keys[none]),
                )
            return
        stage, rows = stage_intervals([hops.arriving(rank) for hops in self.stages])
        overlaps = keys.overlaps(rows)
        for number in range(len(self.stages)):
            found = np.flatnonzero(stage[overlaps.second] == number)
            task, read = overlaps.first[found], overlaps.rows[found]
            yield up_to_queries(task, queries[task], read), before_queries(task, queries[task], read)


def _brought(tasks: CutTasks, keys: KeysRead, segments: NDArray[np.void]) -> Moves:
    """Return the K/V rows that each worker's tasks read, each row once per worker."""
    worker, rows = union(tasks.queries.target, keys.brought_rows)
    found = rows.overlaps(Intervals.of(segments))
    return Moves.from_segments(found.rows, segments[found.second], worker[found.first])


def make_routes(plan: Plan, rank: int) -> Routes:
    """Return the routes of `rank`, which is also worker number `rank`.

    Args:
        rank: a worker; one at or above plan.layout.ranks is a dedicated server and holds no rows.
    """
    # 1. Cut tasks of documents that this rank holds or works on, so that the queries of each task have one owner; and
    #    the K/V rows that move for them, each row once per worker that reads it.
    alone = plan.stage_rows is None and plan.nodes is None
    arrivals = Arrivals.of(plan, _tasks_concerning(plan, rank) if alone else plan.tasks)
    tasks, keys = arrivals.tasks, arrivals.keys

    # 2. The tasks of this worker: local tasks read keys in the segment of their queries. Remote-KV tasks are local
    #    queries on received keys. Remote-query tasks are received queries, in the order of their arrival.
    here = tasks.queries.target == rank
    local = np.flatnonzero(here & keys.local)
    remote_kv = np.flatnonzero(here & tasks.queries_local & keys.brought)
    remote_query = np.flatnonzero(here & ~tasks.queries_local)
    received_query = tasks.queries[remote_query]
    remote_query = remote_query[
        np.lexsort((received_query.rows.start, received_query.rows.document, received_query.source))
    ]
    received_query = tasks.queries[remote_query]
    received_queries = np.cumsum(received_query.rows.lengths) - received_query.rows.lengths

    # 3. For each stage: the rows that arrive, and the kernel calls on them.
    stages = []
    local_query = tasks.queries[remote_kv]
    for hops, of_local, of_received in zip(
        arrivals.stages, arrivals.reads(remote_kv, rank), arrivals.reads(remote_query, rank), strict=True
    ):
        received = Received(hops.arriving(rank))
        local_up_to, local_before = of_local
        received_up_to, received_before = of_received
        stages.append(
            Stage(
                keys=hops.first.exchanged(rank, plan.workers, _crosses(plan, hops.first)),
                forwarded=_forwarded(hops.second, rank, plan.workers, received),
                remote_kv=_group(local_before, local_query, local_query.local, received, causal=False)
                if plan.window is None
                else _group(local_up_to, local_query, local_query.local, received),
                remote_query=_group(received_up_to, received_query, received_queries, received),
                remote_query_prefix=_group(received_before, received_query, received_queries, received, causal=False),
            )
        )
    return Routes(
        local_rows=int(plan.layout.tokens[rank]) if rank < plan.layout.ranks else 0,
        queries=tasks.queries[~tasks.queries_local].exchanged(rank, plan.workers, any_query_crosses(plan)),
        local=_local(tasks.queries[local], keys.local_first[local], plan.window),
        stages=tuple(stages),
    )


def _tasks_concerning(plan: Plan, rank: int) -> NDArray[np.void]:
    """Return all tasks of the documents that a rank holds rows or computes tasks of."""
    concerned = np.zeros(len(plan.layout.lengths), bool)
    concerned[plan.layout.of_rank(rank)["document"]] = True
    concerned[plan.tasks["document"][plan.tasks["worker"] == rank]] = True
    tasks: NDArray[np.void] = plan.tasks[concerned[plan.tasks["document"]]]
    return tasks


def _crosses(plan: Plan, moves: Moves) -> bool:
    """Return whether some rank receives K/V rows of a stage from another one; the same on every rank."""
    if plan.stage_rows is None and plan.nodes is None:
        return any_key_crosses(plan)
    return bool(np.any((moves.source != moves.target) & (moves.target < plan.layout.ranks)))


def _forwarded(moves: Moves, rank: int, workers: int, received: Received) -> ExchangedRows:
    """Return the rows that one rank forwards, and the rows forwarded to it."""
    rows = moves.exchanged(rank, workers, crossing=bool(len(moves.source)))
    sent = moves[moves.source == rank]
    return replace(rows, send_rows=received.find(sent.ordered(sent.target).rows))


def _local(queries: Moves, first: IntArray, window: int | None) -> TaskGroup:
    """Return the tasks that read keys in the segment of their queries.

    Args:
        queries: [n] query rows.
        first: [n] first K/V row that each task reads.
    """
    q_lens = queries.rows.lengths
    k_lens = queries.rows.stop - first
    first_local = queries.local - queries.rows.start + first
    task_pairs = pairs(k_lens - q_lens, k_lens, window)
    return TaskGroup(q_lens, k_lens, expand(queries.local, q_lens), expand(first_local, k_lens), task_pairs)


def _group(
    reads: Reads, tasks: Moves, place: LocalRows | ReceivedRows, received: Received, *, causal: bool = True
) -> TaskGroup:
    """Return the task group of queries against K/V rows of a stage.

    Args:
        tasks: [n] tasks that `reads.task` indexes.
        place: [n] position of each task's first query row.
        causal: whether the order of the keys matters.
    """
    q_lens, count = reads.queries.lengths, len(reads.task)
    first = place[reads.task] + reads.queries.start - tasks.rows.start[reads.task]
    read = np.repeat(np.arange(count), reads.counts)
    k_lens = np.bincount(read, weights=reads.keys.lengths, minlength=count).astype(np.int64)
    k_rows = received.find(reads.keys, None if causal else read)
    return TaskGroup(q_lens, k_lens, expand(first, q_lens), k_rows, reads.pairs)
