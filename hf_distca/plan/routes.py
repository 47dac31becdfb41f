"""Routes: rows that one rank gathers, sends, receives and scatters to carry out a plan.

Routes are made once per micro-batch and used by every layer. There are three kinds of row numbers:

- A row of a document: its position there, as in segments and tasks. It is used only inside the
  planner.
- A local row: a row of the nano-batch on this rank (Segment.offset + position in the segment).
- A received row: its position among the rows received, in the order (source, document, position). Q
  rows, and K/V rows of each stage, are counted apart. K/V rows that the worker holds itself can be
  among them; these cross no link. K/V rows forwarded by another rank of the node come last, in the
  order (that rank, document, position).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_distca.plan import Branches, Plan
from hf_distca.plan.arrays import BoolArray, IntArray, Table
from hf_distca.plan.cost import pairs
from hf_distca.plan.intervals import (
    ROWS,
    by_document,
    expand,
    joined,
    merge_touching,
    overlaps,
    row_counts,
    rows_before,
    rows_before_in,
    table_of,
)
from hf_distca.plan.moves import MOVE, held_pairs, rows_to_move
from hf_distca.plan.paths import along_paths

UNEVEN = 0.25
"""Difference of a part's pairs from those it should have, as a share of them, above which a task is
cut."""
READ = np.dtype([*MOVE.descr, ("task", np.int64), ("keys_document", np.int64)])
"""Queries of a task, and K/V rows [keys_start, keys_stop) of one document and one stage that they
read. The document is the task's own or lies on its path."""


@dataclass(frozen=True, eq=False)
class CallTasks:
    """Tasks of one kernel call."""

    q_lens: IntArray  # [tasks] query rows of each task
    k_lens: IntArray  # [tasks] K/V rows of each task
    q_rows: IntArray  # [sum of q_lens] positions of query rows, task after task
    # [sum of k_lens] positions of K/V rows; a row that two tasks need is listed twice.
    k_rows: IntArray
    task_pairs: IntArray  # [tasks] query-key pairs of each task within its window

    @property
    def pairs(self) -> int:
        """Query-key pairs of all tasks."""
        return int(self.task_pairs.sum())

    def parts(self, shares: Sequence[float], window: int | None) -> list["CallTasks"]:
        """Divide the tasks into kernel calls that have about these shares of the pairs.

        Cut tasks where whole tasks are too uneven.
        """
        parts = []
        tasks_left = self
        for number, share in enumerate(shares[:-1]):
            due = tasks_left.pairs * share / sum(shares[number:])
            part, tasks_left = tasks_left._first_part(due, window)
            parts.append(part)
        return [*parts, tasks_left]

    def _first_part(self, due: float, window: int | None) -> tuple["CallTasks", "CallTasks"]:
        """Divide the tasks in two, the first of which has about as many pairs as are due."""
        if due == 0:
            return self._divided(0)
        pairs_up_to = np.cumsum(self.task_pairs)  # each task, itself included
        differences = np.abs(pairs_up_to - due)  # from what is due if the part ends at a task
        last = int(differences.argmin())
        middle = int(np.searchsorted(pairs_up_to, due))  # task within which the part should end
        if differences[last] <= UNEVEN * due or self.q_lens[middle] == 1:
            return self._divided(last + 1)
        missing = due - pairs_up_to[middle] + self.task_pairs[middle]
        return self._with_task_cut(middle, missing, window)._divided(middle + 1)

    def _with_task_cut(self, task: int, first_pairs: float, window: int | None) -> "CallTasks":
        """Cut one task in two at a query row.

        Args:
            task: index of the task.
            first_pairs: pairs that the first part should have; it gets about as many.
        """
        q_rows, k_rows = int(self.q_lens[task]), int(self.k_lens[task])
        keys_before = k_rows - q_rows  # the first query
        # [q_rows] pairs of the queries up to each
        pairs_up_to = pairs(keys_before, np.arange(keys_before, k_rows) + 1, window)
        nearest = int(np.abs(pairs_up_to - first_pairs).argmin())
        rows = min(nearest + 1, q_rows - 1)  # of the first part
        # The first part sees the keys before it and its own; the last part sees all keys.
        keys = keys_before + rows
        first_key = int(self.k_lens[:task].sum())
        q_lens = np.insert(self.q_lens, task, rows)
        q_lens[task + 1] -= rows
        task_pairs = np.insert(self.task_pairs, task, pairs_up_to[rows - 1])
        task_pairs[task + 1] -= task_pairs[task]
        return CallTasks(
            q_lens,
            np.insert(self.k_lens, task, keys),
            self.q_rows,
            np.concatenate([self.k_rows[: first_key + keys], self.k_rows[first_key:]]),
            task_pairs,
        )

    def _divided(self, tasks: int) -> tuple["CallTasks", "CallTasks"]:
        """Divide the tasks in two: the first ones, as many as `tasks` says, and all after them."""
        q_rows = int(self.q_lens[:tasks].sum())
        k_rows = int(self.k_lens[:tasks].sum())
        first_part = CallTasks(
            self.q_lens[:tasks],
            self.k_lens[:tasks],
            self.q_rows[:q_rows],
            self.k_rows[:k_rows],
            self.task_pairs[:tasks],
        )
        second_part = CallTasks(
            self.q_lens[tasks:],
            self.k_lens[tasks:],
            self.q_rows[q_rows:],
            self.k_rows[k_rows:],
            self.task_pairs[tasks:],
        )
        return first_part, second_part


@dataclass(frozen=True, eq=False)
class ExchangedRows:
    """Rows of one kind, Q or K and V, that this rank sends and receives."""

    # Local rows, ordered by receiving worker; for forwarded rows, received rows.
    send_rows: IntArray
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
    remote_kv: CallTasks
    remote_query: CallTasks  # received queries and keys, bottom-right causal
    # Received queries and all keys before them; empty with a window, on remote workers, and with
    # one stage without prefix sharing.
    remote_query_prefix: CallTasks


@dataclass(frozen=True, eq=False)
class Routes:
    """Routes of one rank for one plan.

    A remote worker receives its K/V rows in the first stage, which has all its tasks in
    `remote_query`.
    """

    local_rows: int
    queries: ExchangedRows  # rows of Q, and of O, dO and dQ; never to the rank itself
    # Tasks whose queries and keys lie in one segment of this rank; all rows are local.
    local: CallTasks
    least_local_pairs: int  # query-key pairs of the local tasks of the rank with the fewest
    stages: tuple[Stage, ...]  # exchanges of K/V rows, in order, with the tasks of each


def make_routes(plan: Plan, rank: int) -> Routes:
    """Return the routes of a worker.

    Args:
        rank: number of the worker. Remote workers, which hold no rows, have the numbers from
            plan.layout.ranks on.
    """
    queries, first_hop, forwards = rows_to_move(plan)
    stages = 1 + max(int(moves["stage"].max(initial=0)) for moves in (queries, first_hop))
    keys = _of_rank(first_hop, rank)
    forwarded = forwards.of_rank(first_hop, rank)
    crosses = _crosses(first_hop, plan)
    crossing = np.bincount(first_hop["stage"][crosses], minlength=stages) > 0
    forwarding = np.bincount(first_hop["stage"][forwards.move], minlength=stages) > 0

    # 1. The tasks of this worker, as the moves of their queries. Received queries are numbered in
    #    the order of their arrival.
    tasks = queries.compress(queries["target"] == rank)
    has_queries = tasks["source"] == rank
    local = tasks.compress(has_queries & (tasks["keys_stop"] < tasks["stop"]))
    remote_kv = tasks.compress(has_queries & (tasks["keys_stop"] > tasks["keys_start"]))
    remote_query = _ordered(tasks.compress(~has_queries), "source")
    remote_query["offset"] = rows_before(remote_query)

    # 2. The K/V rows that arrive, and which of them each task reads in each stage.
    arrivals = _arrivals(keys, forwarded, rank)
    branches = plan.layout.branches
    read_by_local = _reads(remote_kv, arrivals, branches)
    read_by_received = _reads(remote_query, arrivals, branches)

    # 3. For each stage: the exchanges, and the tasks on its rows. A remote worker has all K/V rows
    #    of its tasks in one stage.
    has_all_keys = plan.window is not None or rank >= plan.layout.ranks
    made = []
    for stage in range(stages):
        by_local = read_by_local.compress(read_by_local["stage"] == stage)
        by_received = read_by_received.compress(read_by_received["stage"] == stage)
        if plan.window is None:
            remote_kv_tasks = _before_queries(by_local, arrivals, branches)
        else:
            remote_kv_tasks = _up_to_queries(by_local, arrivals, plan.window, has_all_keys=True)
        before = by_received[:0] if has_all_keys else by_received
        made.append(
            Stage(
                keys=_exchanged(
                    keys.compress(keys["stage"] == stage), rank, plan, crossing=crossing[stage]
                ),
                forwarded=_exchanged(
                    forwarded.compress(forwarded["stage"] == stage),
                    rank,
                    plan,
                    crossing=forwarding[stage],
                    arrivals=arrivals,
                ),
                remote_kv=remote_kv_tasks,
                remote_query=_up_to_queries(
                    by_received, arrivals, plan.window, has_all_keys=has_all_keys
                ),
                remote_query_prefix=_before_queries(before, arrivals, branches),
            )
        )
    moved = queries.compress(queries["source"] != queries["target"])
    return Routes(
        local_rows=int(plan.layout.tokens[rank]) if rank < plan.layout.ranks else 0,
        queries=_exchanged(_of_rank(moved, rank), rank, plan, crossing=_crosses(moved, plan).any()),
        local=_in_place(local, plan.window),
        least_local_pairs=_least_local_pairs(queries, plan),
        stages=tuple(made),
    )


def nothing_moves(plan: Plan) -> bool:
    """Return whether every rank holds rows, all of whole documents, and computes exactly these."""
    layout, tasks = plan.layout, plan.tasks
    if layout.branches is not None or layout.has_cuts or not layout.tokens.all():
        return False
    rank = np.empty(len(layout.lengths), np.int64)
    rank[layout.segments["document"]] = layout.segments["rank"]
    return bool(np.array_equal(rank[tasks["document"]], tasks["worker"]))


def _of_rank(moves: Table, rank: int) -> Table:
    """Return the moves from a worker and to a worker."""
    return moves.compress((moves["source"] == rank) | (moves["target"] == rank))


def _crosses(moves: Table, plan: Plan) -> BoolArray:
    """Return [moves] whether each leads to another rank."""
    return np.asarray((moves["source"] != moves["target"]) & (moves["target"] < plan.layout.ranks))


def _ordered(moves: Table, peer: str) -> Table:
    """Sort moves by (peer, document, start), as both ends order the rows of an exchange."""
    return moves.take(np.lexsort((moves["start"], moves["document"], moves[peer])))


def _arrivals(first_hop: Table, second_hop: Table, rank: int) -> Table:
    """Return the moves of K/V rows to a worker, by (document, start).

    Their `offset` becomes the position of their first row among the received rows of their stage.
    """
    hops = (moves.compress(moves["target"] == rank) for moves in (first_hop, second_hop))
    arrivals = joined(*(_ordered(moves, "source") for moves in hops))
    arrivals = arrivals.take(np.argsort(arrivals["stage"], kind="stable"))
    arrivals["offset"] = rows_before_in(arrivals, "stage")
    return by_document(arrivals)


def _exchanged(
    moves: Table,
    rank: int,
    plan: Plan,
    *,
    crossing: np.bool_,
    arrivals: Table | None = None,
) -> ExchangedRows:
    """Return the rows of an exchange that one worker sends and receives.

    Args:
        moves: from the worker and to the worker.
        arrivals: received rows, of which the worker forwards some; None if it sends local rows.
    """
    outgoing = _ordered(moves.compress(moves["source"] == rank), "target")
    incoming = moves.compress(moves["target"] == rank)
    local_rows = expand(outgoing["offset"], row_counts(outgoing))
    return ExchangedRows(
        send_rows=_positions(outgoing, arrivals) if arrivals is not None else local_rows,
        send_counts=_rows_by_worker(outgoing, "target", plan.workers),
        recv_counts=_rows_by_worker(incoming, "source", plan.workers),
        crossing=bool(crossing),
    )


def _rows_by_worker(moves: Table, peer: str, workers: int) -> IntArray:
    """Return [workers] rows of the moves from or to each worker."""
    return np.bincount(moves[peer], row_counts(moves), workers).astype(np.int64)


def _reads(tasks: Table, arrivals: Table, branches: Branches | None) -> Table:
    """Return what tasks read, a table of dtype READ, by (task, first K/V row)."""
    # Rows that arrive together in one stage are one range, and are read by one entry.
    ranges = merge_touching(arrivals, "stage")
    keys = table_of(
        ROWS, document=tasks["document"], start=tasks["keys_start"], stop=tasks["keys_stop"]
    )
    task_of_keys = np.arange(len(tasks))
    if branches is not None:
        keys, task_of_keys = along_paths(keys, branches)
    entry, holder, start, stop = overlaps(keys, ranges)
    task = task_of_keys[entry]
    columns = {name: tasks[name][task] for name in MOVE.names or ()}
    columns |= {
        "task": task,
        "keys_document": keys["document"][entry],
        "keys_start": start,
        "keys_stop": stop,
        "stage": ranges["stage"][holder],
    }
    return table_of(READ, **columns)


def _keys(reads: Table) -> Table:
    """Return the K/V rows of reads, a table of dtype ROWS."""
    return table_of(
        ROWS, document=reads["keys_document"], start=reads["keys_start"], stop=reads["keys_stop"]
    )


def _positions(rows: Table, arrivals: Table, task: IntArray | None = None) -> IntArray:
    """Return the positions of rows among the received rows of their stage, entry after entry.

    Args:
        rows: entries that lie in `arrivals`.
        task: [n] increasing task of each entry. Rows of a task's entries keep the order of their
            arrival, which may save gathering them. None: every entry is a task.
    """
    entry, arrival, start, stop = overlaps(rows, arrivals)
    position = arrivals["offset"][arrival] + start - arrivals["start"][arrival]
    lengths = stop - start
    if task is not None:
        order = np.lexsort((position, task[entry]))
        position, lengths = position[order], lengths[order]
    return expand(position, lengths)


def _least_local_pairs(tasks: Table, plan: Plan) -> int:
    """Return the pairs of the local tasks of the rank with the fewest."""
    pairs_of_workers = np.bincount(tasks["target"], held_pairs(tasks, plan.window), plan.workers)
    return int(pairs_of_workers[: plan.layout.ranks].min())


def _in_place(local: Table, window: int | None) -> CallTasks:
    """Return tasks that read their K/V rows among the local rows, from `keys_stop` on."""
    q_lens = row_counts(local)
    k_lens = local["stop"] - local["keys_stop"]
    return CallTasks(
        q_lens,
        k_lens,
        q_rows=expand(local["offset"], q_lens),
        k_rows=expand(local["offset"] - local["start"] + local["keys_stop"], k_lens),
        task_pairs=held_pairs(local, window),
    )


def _up_to_queries(
    reads: Table, arrivals: Table, window: int | None, *, has_all_keys: bool
) -> CallTasks:
    """Return the queries whose own K/V rows are the last ones of a range, with all its rows.

    Args:
        has_all_keys: whether every task has all its K/V rows in this stage. Its reads are then one
            range, which may reach over several documents of a path.
    """
    # 1. The ranges of each task.
    continues = np.zeros(len(reads), np.bool_)
    if has_all_keys:
        is_same_task = reads["task"][1:] == reads["task"][:-1]
        continues[1:] = is_same_task & (reads["keys_start"][1:] == reads["keys_stop"][:-1])
    first = np.flatnonzero(~continues)
    ranges = reads.take(first)
    ranges["keys_stop"] = np.maximum.reduceat(reads["keys_stop"], first) if len(first) else 0

    # 2. The queries from the first row of the range on, if it reaches so far.
    start = np.maximum(ranges["start"], ranges["keys_start"])
    has_queries = start < ranges["keys_stop"]
    reads = reads.compress(has_queries[np.cumsum(~continues) - 1])
    ranges = ranges.compress(has_queries)
    start = start[has_queries]
    q_lens = ranges["keys_stop"] - start
    k_lens = ranges["keys_stop"] - ranges["keys_start"]
    return CallTasks(
        q_lens,
        k_lens,
        q_rows=expand(ranges["offset"] - ranges["start"] + start, q_lens),
        k_rows=_positions(_keys(reads), arrivals),
        task_pairs=pairs(k_lens - q_lens, k_lens, window),
    )


def _before_queries(reads: Table, arrivals: Table, branches: Branches | None) -> CallTasks:
    """Return queries with all K/V rows of a stage that come before them in the document.

    Queries of a task that lie after its last range see all ranges. Queries between two
    ranges see the earlier ones. Both become tasks of the kernel call. Branches that see the same
    rows become one task, which gathers them once.
    """
    # 1. The queries between each range and the next one, or the end of the task.
    is_followed = np.zeros(len(reads), np.bool_)
    is_followed[:-1] = reads["task"][1:] == reads["task"][:-1]
    start = np.maximum(reads["start"], reads["keys_stop"])
    next_start = np.zeros(len(reads), np.int64)
    next_start[:-1] = start[1:]
    stop = np.where(is_followed, np.minimum(next_start, reads["stop"]), reads["stop"])
    has_queries = np.flatnonzero(start < stop)
    q_lens = (stop - start)[has_queries]
    first_query = (reads["offset"] - reads["start"] + start)[has_queries]

    # 2. The ranges up to these queries.
    first = np.searchsorted(reads["task"], reads["task"][has_queries])
    counts = has_queries - first + 1
    ranges = _keys(reads.take(expand(first, counts)))
    reader = np.repeat(np.arange(len(has_queries)), counts)

    # 3. With branches, one task of the kernel call for all queries that see the same ranges.
    if branches is not None:
        order, task_of_reader = _readers_of_equal_rows(ranges, counts)
        tasks = len(np.unique(task_of_reader))
        first_query, rows = first_query[order], q_lens[order]
        q_lens = np.bincount(task_of_reader, q_lens, tasks).astype(np.int64)
        is_kept = np.zeros(len(has_queries), np.bool_)  # the first reader of each task
        is_kept[np.unique(task_of_reader, return_index=True)[1]] = True
        ranges = ranges.compress(is_kept[reader])
        reader = task_of_reader[reader[is_kept[reader]]]
        q_rows = expand(first_query, rows)
    else:
        q_rows = expand(first_query, q_lens)
    k_lens = np.bincount(reader, row_counts(ranges), len(q_lens)).astype(np.int64)
    k_rows = _positions(ranges, arrivals, reader)
    return CallTasks(q_lens, k_lens, q_rows, k_rows, q_lens * k_lens)


def _readers_of_equal_rows(ranges: Table, counts: IntArray) -> tuple[IntArray, IntArray]:
    """Give readers of the same rows the same number, from 0 on, in the order of their first one.

    Args:
        ranges: entries (document, start, stop), reader after reader.
        counts: [readers] entries of each reader.

    Returns:
        The readers in the order of their numbers; [readers] the number of each.
    """
    numbers: dict[bytes, int] = {}
    stops = np.cumsum(counts).tolist()
    number_of_reader = np.array(
        [
            numbers.setdefault(ranges[stop - count : stop].tobytes(), len(numbers))
            for stop, count in zip(stops, counts.tolist(), strict=True)
        ],
        np.int64,
    )
    return np.argsort(number_of_reader, kind="stable"), number_of_reader
