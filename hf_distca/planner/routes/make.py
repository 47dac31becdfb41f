"""Construction of one rank's routes from a plan."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import Plan
from hf_distca.planner.cost import pairs
from hf_distca.planner.intervals import expand
from hf_distca.planner.routes.moves import Moves, Received, any_key_crosses, any_query_crosses
from hf_distca.planner.routes.reads import Arrivals, Reads
from hf_distca.planner.routes.tables import ExchangedRows, IntArray, LocalRows, ReceivedRows, Routes, Stage, TaskGroup


def make_routes(plan: Plan, rank: int) -> Routes:
    """Return the routes of `rank`, which is also worker number `rank`.

    Args:
        rank: a worker; one at or above plan.layout.ranks is a dedicated server and holds no rows.
    """
    # 1. Cut tasks of documents that this rank holds or works on, so that the queries of each task have one owner; and
    #    the K/V rows that move for them, each row once per worker that reads it.
    alone = plan.stage_rows is None and plan.nodes is None
    arrivals = Arrivals.of(plan, _tasks_concerning(plan, rank) if alone else plan.tasks)
    tasks = arrivals.tasks

    # 2. The tasks of this worker: local tasks read keys in the segment of their queries. Remote-KV tasks are local
    #    queries on received keys. Remote-query tasks are received queries, in the order of their arrival.
    here = tasks.queries.target == rank
    local = np.flatnonzero(here & tasks.keys_local)
    remote_kv = np.flatnonzero(here & tasks.queries_local & (tasks.received.lengths > 0))
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
        local=_local(tasks.queries[local], tasks.local_first[local], plan.window),
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
