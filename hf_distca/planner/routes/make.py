"""Construction of one rank's routes from a plan."""

from dataclasses import replace

import numpy as np

from hf_distca.plan import Plan
from hf_distca.planner.cost import pairs
from hf_distca.planner.intervals import (
    ROWS,
    IntArray,
    Table,
    by_document,
    expand,
    joined,
    merge_touching,
    overlaps,
    row_counts,
    rows_before,
    table_of,
)
from hf_distca.planner.routes.moves import rows_to_move
from hf_distca.planner.routes.tables import ExchangedRows, Routes, Stage, TaskGroup

READ = np.dtype([*((name, np.int64) for name in ROWS.names or ()), ("task", np.int64), ("stage", np.int64)])
"""K/V rows [start, stop) of one stage that a task reads; `task` is its index."""


def make_routes(plan: Plan, rank: int) -> Routes:
    """Return the routes of `rank`, which is also worker number `rank`.

    Args:
        rank: a worker; one at or above plan.layout.ranks is a dedicated server and holds no rows.
    """
    tasks, *hops = rows_to_move(plan)
    ranks, workers = plan.layout.ranks, plan.workers
    stages = 1 + max(int(table["stage"].max(initial=0)) for table in (tasks, hops[0]))

    # 1. The tasks of this worker. Received queries are in the order of their arrival.
    mine = tasks.compress(tasks["target"] == rank)
    here = mine["source"] == rank
    local = mine.compress(here & (mine["keys_stop"] < mine["stop"]))
    remote_kv = mine.compress(here & (mine["keys_stop"] > mine["keys_start"]))
    remote_query = _ordered(mine.compress(~here), "source")
    remote_query["at"] = rows_before(remote_query)

    # 2. The K/V rows that arrive in each stage, in the order in which they are counted: first hop first.
    came = [_ordered(hop.compress(hop["target"] == rank), "source") for hop in hops]
    arrived = joined(*came)
    arrived = arrived.take(np.argsort(arrived["stage"], kind="stable"))
    before = rows_before(arrived)
    arrived["at"] = before - before[np.searchsorted(arrived["stage"], arrived["stage"])]
    arrived = by_document(arrived)

    # 3. For each stage: the exchanges, and the kernel calls on the rows.
    every_read = [_reads(of, arrived) for of in (remote_kv, remote_query)]
    made = []
    for stage in range(stages):
        first, second = (hop.compress(hop["stage"] == stage) for hop in hops)
        crossing = bool(np.any((first["source"] != first["target"]) & (first["target"] < ranks)))
        forwards = _ordered(second.compress(second["source"] == rank), "target")
        of_local, of_received = (reads.compress(reads["stage"] == stage) for reads in every_read)
        made.append(
            Stage(
                keys=_exchanged(first, rank, workers, crossing),
                forwarded=replace(
                    _exchanged(second, rank, workers, len(second) > 0), send_rows=_find(forwards, arrived)
                ),
                remote_kv=_before_queries(remote_kv, of_local, arrived)
                if plan.window is None
                else _up_to_queries(remote_kv, of_local, arrived, plan.window),
                remote_query=_up_to_queries(remote_query, of_received, arrived, plan.window),
                remote_query_prefix=_before_queries(remote_query, of_received, arrived),
            )
        )
    q_lens, k_lens = row_counts(local), local["stop"] - local["keys_stop"]
    sent = tasks.compress(tasks["source"] != tasks["target"])
    return Routes(
        local_rows=int(plan.layout.tokens[rank]) if rank < ranks else 0,
        queries=_exchanged(sent, rank, workers, bool(np.any(sent["target"] < ranks))),
        local=TaskGroup(
            q_lens,
            k_lens,
            expand(local["at"], q_lens),
            expand(local["at"] - local["start"] + local["keys_stop"], k_lens),
            pairs(k_lens - q_lens, k_lens, plan.window),
        ),
        stages=tuple(made),
    )


def _ordered(moves: Table, peer: str) -> Table:
    """Sort moves by (peer, document, start), as both ends order the rows of an exchange."""
    return moves.take(np.lexsort((moves["start"], moves["document"], moves[peer])))


def _exchanged(moves: Table, rank: int, workers: int, crossing: bool) -> ExchangedRows:
    """Return what one worker sends and receives of these rows."""
    sent, came = _ordered(moves.compress(moves["source"] == rank), "target"), moves.compress(moves["target"] == rank)
    to, of = (
        np.bincount(each[peer], row_counts(each), workers).astype(np.int64)
        for each, peer in ((sent, "target"), (came, "source"))
    )
    return ExchangedRows(expand(sent["at"], row_counts(sent)), to, of, crossing)


def _find(rows: Table, arrived: Table, reads: IntArray | None = None) -> IntArray:
    """Return the positions of rows among the received rows of their stage, entry after entry.

    Args:
        arrived: received rows by (document, start), with their positions.
        reads: [n] increasing; rows of entries with the same number may come in any order. They then keep the order of
            their arrival, which may save gathering them. None: all rows come in the order of the entries.
    """
    which, other, start, stop = overlaps(rows, arrived)
    position, lengths = arrived["at"][other] + start - arrived["start"][other], stop - start
    if reads is not None:
        order = np.lexsort((position, reads[which]))
        position, lengths = position[order], lengths[order]
    return expand(position, lengths)


def _reads(tasks: Table, arrived: Table) -> Table:
    """Return the received K/V rows that tasks read, by (task, document, start); rows that touch in a stage are one."""
    keys = table_of(ROWS, document=tasks["document"], start=tasks["keys_start"], stop=tasks["keys_stop"])
    rows = merge_touching(arrived, "stage")
    task, other, start, stop = overlaps(keys, rows)
    return table_of(
        READ, document=rows["document"][other], start=start, stop=stop, task=task, stage=rows["stage"][other]
    )


def _up_to_queries(tasks: Table, reads: Table, arrived: Table, window: int | None) -> TaskGroup:
    """Return the queries whose own rows are the last of a read, with all rows of the read."""
    start = np.maximum(tasks["start"][reads["task"]], reads["start"])
    among = start < reads["stop"]
    reads, start = reads.compress(among), start[among]
    q_lens, k_lens = reads["stop"] - start, row_counts(reads)
    return TaskGroup(
        q_lens,
        k_lens,
        _query_rows(tasks, reads["task"], start, q_lens),
        _find(reads, arrived),
        pairs(k_lens - q_lens, k_lens, window),
    )


def _before_queries(tasks: Table, reads: Table, arrived: Table) -> TaskGroup:
    """Return queries with all rows of a stage that come before them in the document."""
    task = reads["task"]
    start, stop = np.maximum(tasks["start"][task], reads["stop"]), tasks["stop"][task]
    # Queries of a task that see one more read form a task of the group, with that read and all earlier ones.
    following = np.append(task[1:] == task[:-1], False)
    stop = np.where(following, np.minimum(np.append(start[1:], 0), stop), stop)
    which = np.flatnonzero(start < stop)
    first = np.searchsorted(task, task[which])
    counts = which - first + 1
    seen, read = reads.take(expand(first, counts)), np.repeat(np.arange(len(which)), counts)
    q_lens = (stop - start)[which]
    k_lens = np.bincount(read, row_counts(seen), len(which)).astype(np.int64)
    q_rows = _query_rows(tasks, task[which], start[which], q_lens)
    return TaskGroup(q_lens, k_lens, q_rows, _find(seen, arrived, read), q_lens * k_lens)


def _query_rows(tasks: Table, task: IntArray, start: IntArray, lengths: IntArray) -> IntArray:
    """Return the positions of query rows, from row `start` of the document on."""
    return expand(tasks["at"][task] + start - tasks["start"][task], lengths)
