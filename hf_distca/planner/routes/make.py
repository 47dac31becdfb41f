"""Construction of one rank's routes from a plan."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import Plan
from hf_distca.planner.cost import pairs
from hf_distca.planner.intervals import expand
from hf_distca.planner.routes.arrivals import Arrivals
from hf_distca.planner.routes.cut_tasks import Reads
from hf_distca.planner.routes.moves import Moves, Received, any_key_crosses, any_query_crosses
from hf_distca.planner.routes.tables import (
    IntArray,
    LocalRows,
    Messages,
    ReceivedRows,
    Routes,
    Stage,
    TaskGroup,
)


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

    # 2. The tasks of this worker: own tasks read keys in the segment of their queries, prefix tasks are own queries on
    #    received keys, and visiting tasks are received queries, in the order of their arrival.
    here = tasks.queries.target == rank
    own = np.flatnonzero(here & keys.local)
    prefix = np.flatnonzero(here & tasks.at_home & keys.brought)
    visiting = np.flatnonzero(here & ~tasks.at_home)
    visitors = tasks.queries[visiting]
    visiting = visiting[np.lexsort((visitors.rows.start, visitors.rows.document, visitors.source))]
    visitors = tasks.queries[visiting]
    received_queries = np.cumsum(visitors.rows.lengths) - visitors.rows.lengths

    # 3. For each stage: the rows that arrive, and the kernel calls on them.
    stages = []
    at_home = tasks.queries[prefix]
    for hops, of_home, of_visitors in zip(
        arrivals.stages, arrivals.reads(prefix, rank), arrivals.reads(visiting, rank), strict=True
    ):
        received = Received(hops.arriving(rank))
        home_up_to, home_before = of_home
        visiting_up_to, visiting_before = of_visitors
        stages.append(
            Stage(
                keys=hops.first.messages(rank, plan.workers, _crosses(plan, hops.first)),
                passed_on=_passed_on(hops.second, rank, plan.workers, received),
                prefix=_group(home_before, at_home, at_home.local, received, causal=False)
                if plan.window is None
                else _group(home_up_to, at_home, at_home.local, received),
                visiting=_group(visiting_up_to, visitors, received_queries, received),
                visiting_prefix=_group(visiting_before, visitors, received_queries, received, causal=False),
            )
        )
    return Routes(
        local_rows=int(plan.layout.tokens[rank]) if rank < plan.layout.ranks else 0,
        queries=tasks.queries[~tasks.at_home].messages(rank, plan.workers, any_query_crosses(plan)),
        own=_own(tasks.queries[own], keys.local_first[own], plan.window),
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


def _passed_on(moves: Moves, rank: int, workers: int, received: Received) -> Messages:
    """Return the rows that one rank forwards, and the rows forwarded to it."""
    messages = moves.messages(rank, workers, crossing=bool(len(moves.source)))
    sent = moves[moves.source == rank]
    return replace(messages, send_rows=received.find(sent.ordered(sent.target).rows))


def _own(queries: Moves, first: IntArray, window: int | None) -> TaskGroup:
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
