"""Routes: rows that one rank gathers, sends, receives and scatters to carry out a plan.

Routes are made once per micro-batch and used by every layer. There are three kinds of row numbers:

- A row of a document: its position there, as in segments and tasks. It is used only inside the
  planner.
- A local row: a row of the nano-batch on this rank (Segment.offset + position in the segment).
- A received row: its position among the rows received, in the order (owner, document, position). Q
  rows, and K/V rows of each stage, are counted apart. K/V rows that the worker holds itself can be
  among them; these cross no link. K/V rows forwarded by another rank of the node come last, in the
  order (that rank, document, position).
"""

from dataclasses import dataclass

import numpy as np

from hf_distca.plan import Plan
from hf_distca.plan.cost import pairs
from hf_distca.plan.intervals import (
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
from hf_distca.plan.moves import rows_to_move

UNEVEN = 0.25
"""Difference of two halves, as a share of all pairs, above which a task is cut."""
READ = np.dtype([*ROWS.descr, ("task", np.int64), ("stage", np.int64)])
"""K/V rows [start, stop) of one stage that a task reads; `task` is its index."""


@dataclass(frozen=True, eq=False)
class TaskGroup:
    """Tasks of one kernel call."""

    q_lens: IntArray  # [tasks] query rows of each task
    k_lens: IntArray  # [tasks] K/V rows of each task
    q_rows: IntArray  # [sum of q_lens] positions of query rows, task after task
    k_rows: (
        IntArray  # [sum of k_lens] positions of K/V rows; a row that two tasks need is listed twice
    )
    task_pairs: IntArray  # [tasks] query-key pairs of each task within its window

    @property
    def pairs(self) -> int:
        """Query-key pairs of all tasks."""
        return int(self.task_pairs.sum())

    def halves(self, window: int | None) -> tuple["TaskGroup", "TaskGroup"]:
        """Divide the tasks into two groups of about equal pairs.

        Cut one task if whole tasks are too uneven.
        """
        if not len(self.q_lens):
            return self, self
        q_lens, k_lens, k_rows, task_pairs = self.q_lens, self.k_lens, self.k_rows, self.task_pairs
        so_far = np.cumsum(task_pairs)
        uneven = np.abs(2 * so_far - so_far[-1])
        last = int(uneven.argmin())  # last task of the first group
        task = int(np.searchsorted(2 * so_far, so_far[-1]))  # task in the middle of all pairs
        if uneven[last] > UNEVEN * so_far[-1] and q_lens[task] > 1:
            before = int(k_lens[task] - q_lens[task])
            seen = pairs(before, np.arange(before, int(k_lens[task])) + 1, window)
            wanted = so_far[-1] / 2 - so_far[task] + task_pairs[task]
            rows = min(int(np.abs(seen - wanted).argmin()) + 1, int(q_lens[task]) - 1)
            # The first `rows` query rows see the keys before them and their own; the others see all
            # keys.
            at = int(k_lens[:task].sum())
            k_rows = np.concatenate([k_rows[: at + before + rows], k_rows[at:]])
            q_lens, k_lens = np.insert(q_lens, task, rows), np.insert(k_lens, task, before + rows)
            task_pairs = np.insert(task_pairs, task, seen[rows - 1])
            q_lens[task + 1] -= rows
            task_pairs[task + 1] -= task_pairs[task]
            last = task
        cut = last + 1
        at_q, at_k = int(q_lens[:cut].sum()), int(k_lens[:cut].sum())
        parts = (
            (q_lens, cut),
            (k_lens, cut),
            (self.q_rows, at_q),
            (k_rows, at_k),
            (task_pairs, cut),
        )
        return TaskGroup(*(rows[:at] for rows, at in parts)), TaskGroup(
            *(rows[at:] for rows, at in parts)
        )


@dataclass(frozen=True, eq=False)
class ExchangedRows:
    """Rows of one kind, Q or K and V, that this rank sends and receives."""

    send_rows: (
        IntArray  # local rows, ordered by receiving worker; for forwarded rows, received rows
    )
    send_counts: IntArray  # [workers] rows that go to each worker
    recv_counts: IntArray  # [workers] rows that come from each worker
    # Whether any rank sends such a row to another, so that all ranks skip an empty exchange or
    # none.
    crossing: bool


@dataclass(frozen=True, eq=False)
class Stage:
    """K/V rows that travel in one exchange, and the tasks that see them."""

    keys: ExchangedRows
    forwarded: ExchangedRows  # inside nodes; these rows come last among the received rows
    # Local queries. With full attention the received keys lie before the segment and are all
    # visible; results are merged with local ones. With a window a task has its whole window,
    # bottom-right causal.
    remote_kv: TaskGroup
    remote_query: TaskGroup  # received queries and keys, bottom-right causal
    remote_query_prefix: (
        TaskGroup  # received queries and all keys before them; empty with one stage or a window
    )


@dataclass(frozen=True, eq=False)
class Routes:
    """Routes of one rank for one plan; servers receive their key rows in the first stage."""

    local_rows: int
    queries: ExchangedRows  # rows of Q, and of O, dO and dQ; never to the rank itself
    # Tasks whose queries and keys lie in one segment of this rank; all rows are local.
    local: TaskGroup
    stages: tuple[Stage, ...]  # exchanges of K/V rows, in order, with the tasks of each


def make_routes(plan: Plan, rank: int) -> Routes:
    """Return the routes of a worker.

    One at or above plan.layout.ranks is a dedicated server and holds no rows.
    """
    tasks, *hops = rows_to_move(plan)
    stages = 1 + max(int(table["stage"].max(initial=0)) for table in (tasks, hops[0]))

    # 1. The tasks of this worker. Received queries are in the order of their arrival.
    mine = tasks.compress(tasks["target"] == rank)
    here = mine["source"] == rank
    local = mine.compress(here & (mine["keys_stop"] < mine["stop"]))
    remote_kv = mine.compress(here & (mine["keys_stop"] > mine["keys_start"]))
    remote_query = _ordered(mine.compress(~here), "source")
    remote_query["at"] = rows_before(remote_query)

    # 2. The K/V rows that arrive in each stage, in the order in which they are counted: first hop
    # first.
    came = [_ordered(hop.compress(hop["target"] == rank), "source") for hop in hops]
    arrived = joined(*came)
    arrived = arrived.take(np.argsort(arrived["stage"], kind="stable"))
    before = rows_before(arrived)
    arrived["at"] = before - before[np.searchsorted(arrived["stage"], arrived["stage"])]
    arrived = by_document(arrived)

    # 3. The K/V rows that tasks read, by (task, document, start); rows that touch in a stage are
    # one.
    together, every_read, made = merge_touching(arrived, "stage"), [], []
    for of in (remote_kv, remote_query):
        keys = table_of(ROWS, document=of["document"], start=of["keys_start"], stop=of["keys_stop"])
        task, other, start, stop = overlaps(keys, together)
        document, stage_of = together["document"][other], together["stage"][other]
        every_read.append(
            table_of(READ, document=document, start=start, stop=stop, task=task, stage=stage_of)
        )

    # 4. For each stage: the exchanges, and the kernel calls on the rows.
    for stage in range(stages):
        first, second = (hop.compress(hop["stage"] == stage) for hop in hops)
        of_local, of_received = (reads.compress(reads["stage"] == stage) for reads in every_read)
        made.append(
            Stage(
                keys=_exchanged(first, rank, plan),
                forwarded=_exchanged(second, rank, plan, arrived),
                remote_kv=_before_queries(remote_kv, of_local, arrived)
                if plan.window is None
                else _up_to_queries(remote_kv, of_local, arrived, plan.window),
                remote_query=_up_to_queries(remote_query, of_received, arrived, plan.window),
                remote_query_prefix=_before_queries(remote_query, of_received, arrived),
            )
        )
    q_lens, k_lens = row_counts(local), local["stop"] - local["keys_stop"]
    return Routes(
        local_rows=int(plan.layout.tokens[rank]) if rank < plan.layout.ranks else 0,
        queries=_exchanged(tasks.compress(tasks["source"] != tasks["target"]), rank, plan),
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


def _exchanged(moves: Table, rank: int, plan: Plan, arrived: Table | None = None) -> ExchangedRows:
    """Return what one worker sends and receives of these rows.

    With `arrived` it sends received rows on.
    """
    sent, came = (
        _ordered(moves.compress(moves["source"] == rank), "target"),
        moves.compress(moves["target"] == rank),
    )
    to, of = (
        np.bincount(each[peer], row_counts(each), plan.workers).astype(np.int64)
        for each, peer in ((sent, "target"), (came, "source"))
    )
    rows = expand(sent["at"], row_counts(sent)) if arrived is None else _find(sent, arrived)
    crossing = np.any((moves["source"] != moves["target"]) & (moves["target"] < plan.layout.ranks))
    return ExchangedRows(rows, to, of, bool(crossing))


def _find(rows: Table, arrived: Table, reads: IntArray | None = None) -> IntArray:
    """Return the positions of rows among the received rows of their stage, by (document, start), entry after entry.

    Rows of entries with the same number in `reads`, [n] increasing, keep the order of their
    arrival, which may save gathering them.
    """
    which, other, start, stop = overlaps(rows, arrived)
    position, lengths = arrived["at"][other] + start - arrived["start"][other], stop - start
    if reads is not None:
        order = np.lexsort((position, reads[which]))
        position, lengths = position[order], lengths[order]
    return expand(position, lengths)


def _up_to_queries(tasks: Table, reads: Table, arrived: Table, window: int | None) -> TaskGroup:
    """Return the queries whose own rows are the last of a read, with all rows of the read."""
    start = np.maximum(tasks["start"][reads["task"]], reads["start"])
    among = start < reads["stop"]
    reads, start = reads.compress(among), start[among]
    q_lens, k_lens = reads["stop"] - start, row_counts(reads)
    return TaskGroup(
        q_lens,
        k_lens,
        expand((tasks["at"] - tasks["start"])[reads["task"]] + start, q_lens),
        _find(reads, arrived),
        pairs(k_lens - q_lens, k_lens, window),
    )


def _before_queries(tasks: Table, reads: Table, arrived: Table) -> TaskGroup:
    """Return queries with all rows of a stage that come before them in the document."""
    task = reads["task"]
    start, stop = np.maximum(tasks["start"][task], reads["stop"]), tasks["stop"][task]
    # Queries of a task that see one more read form a task of the group, with that read and all
    # earlier ones.
    following = np.append(task[1:] == task[:-1], False)
    stop = np.where(following, np.minimum(np.append(start[1:], 0), stop), stop)
    which = np.flatnonzero(start < stop)
    first = np.searchsorted(task, task[which])
    counts = which - first + 1
    seen, read = reads.take(expand(first, counts)), np.repeat(np.arange(len(which)), counts)
    q_lens = (stop - start)[which]
    k_lens = np.bincount(read, row_counts(seen), len(which)).astype(np.int64)
    q_rows = expand(((tasks["at"] - tasks["start"])[task] + start)[which], q_lens)
    return TaskGroup(q_lens, k_lens, q_rows, _find(seen, arrived, read), q_lens * k_lens)


def nothing_moves(plan: Plan) -> bool:
    """Return whether every rank holds rows, all of whole documents, and computes exactly these."""
    layout, tasks = plan.layout, plan.tasks
    if layout.has_cuts or not layout.tokens.all():
        return False
    rank = np.empty(len(layout.lengths), np.int64)
    rank[layout.segments["document"]] = layout.segments["rank"]
    return bool(np.array_equal(rank[tasks["document"]], tasks["worker"]))
