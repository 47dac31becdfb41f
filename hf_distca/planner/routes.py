"""Routes: what one rank gathers, sends, receives and scatters to carry a plan out.

Made once per micro-batch and used by every layer. Row numbers are of three kinds:

- local: a row among the rank's own rows (Segment.offset + position in the segment);
- received query rows: Q rows of other ranks, in the order (owner, document, position);
- received key rows: K/V rows that came for tasks whose keys do not all lie in the query's own segment, in
  the order (owner, document, position). Rows the worker holds itself are among them and cross no link.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import TASK, Layout, Plan
from hf_distca.planner.cost import pairs

IntArray = NDArray[np.int64]

# Combines (group, row) into one sortable number; no document has this many rows.
_ROW_LIMIT = 1 << 40


@dataclass(frozen=True, eq=False)
class TaskGroup:
    """Tasks of one kernel call.

    Attributes:
        q_lens: [tasks] query rows of each task.
        k_lens: [tasks] K/V rows of each task.
        q_rows: [sum of q_lens] where its query rows are, task after task.
        k_rows: [sum of k_lens] where its K/V rows are; a row that two tasks need stands here twice.
        task_pairs: [tasks] query-key pairs of each task, those that its window leaves.
    """

    q_lens: IntArray
    k_lens: IntArray
    q_rows: IntArray
    k_rows: IntArray
    task_pairs: IntArray

    @property
    def pairs(self) -> int:
        """Query-key pairs of all tasks."""
        return int(self.task_pairs.sum())

    def half(self) -> int:
        """So many tasks, from the first on, have about half of the pairs; 1 or more if there are any."""
        before = np.cumsum(self.task_pairs)
        return int(np.abs(2 * before - before[-1]).argmin()) + 1 if len(before) else 0

    def split(self, cut: int) -> tuple["TaskGroup", "TaskGroup"]:
        """The first `cut` tasks and the others."""
        at_q, at_k = int(self.q_lens[:cut].sum()), int(self.k_lens[:cut].sum())
        return (
            TaskGroup(
                self.q_lens[:cut], self.k_lens[:cut], self.q_rows[:at_q], self.k_rows[:at_k], self.task_pairs[:cut]
            ),
            TaskGroup(
                self.q_lens[cut:], self.k_lens[cut:], self.q_rows[at_q:], self.k_rows[at_k:], self.task_pairs[cut:]
            ),
        )


@dataclass(frozen=True, eq=False)
class Messages:
    """Rows of one kind that this rank exchanges.

    Attributes:
        send_rows: local rows, ordered by receiving worker.
        send_counts: [workers] how many of them go to each worker.
        recv_counts: [workers] how many rows come from each.
        crossing: whether any rank sends such a row to another rank. The same on every rank, so that all of
            them skip an empty exchange or none does.
    """

    send_rows: IntArray
    send_counts: IntArray
    recv_counts: IntArray
    crossing: bool


@dataclass(frozen=True, eq=False)
class Routes:
    """The routes of one rank for one plan.

    Attributes:
        local_rows: rows that this rank holds.
        queries: exchange of Q rows (and of O, dO, dQ rows the other way); never to the rank itself.
        keys: exchange of K/V rows.
        own: tasks whose queries and keys lie in one segment of this rank: q_rows and k_rows are local.
        prefix: local queries against keys that come from elsewhere: q_rows local, k_rows received. With
            full attention these are the rows before the segment, all of them visible, and the result is
            merged with that of `own`; with a window the task's whole window, bottom-right causal.
        visiting: tasks of other ranks' queries: q_rows are the received query rows in order, k_rows
            received key rows.
    """

    local_rows: int
    queries: Messages
    keys: Messages
    own: TaskGroup
    prefix: TaskGroup
    visiting: TaskGroup


@dataclass(frozen=True, eq=False)
class _Ranges:
    """Rows [start, stop) of a document, moving from rank `source` to worker `target`; all [n] int64."""

    document: IntArray
    start: IntArray
    stop: IntArray
    source: IntArray
    target: IntArray
    local: IntArray  # row `start` among the source's own rows

    def where(self, keep: NDArray[np.bool_]) -> "_Ranges":
        return self._indexed(np.flatnonzero(keep))

    def sorted_by(self, *keys: IntArray) -> "_Ranges":
        return self._indexed(np.lexsort(keys[::-1]))

    def _indexed(self, index: IntArray) -> "_Ranges":
        columns = (self.document, self.start, self.stop, self.source, self.target, self.local)
        return _Ranges(*(column[index] for column in columns))


def make_routes(plan: Plan, rank: int) -> Routes:
    """Routes of `rank`, which is also worker number `rank`.

    Args:
        plan: the plan of one kind of attention layer.
        rank: a worker; one at or above plan.layout.ranks is a dedicated server and holds no rows.
    """
    segments = plan.layout.segments[np.lexsort((plan.layout.segments["start"], plan.layout.segments["document"]))]

    # 1. Only documents that this rank holds or works on concern it.
    concerned = np.zeros(len(plan.layout.lengths), bool)
    concerned[segments["document"][segments["rank"] == rank]] = True
    concerned[plan.tasks["document"][plan.tasks["worker"] == rank]] = True
    tasks = plan.tasks[concerned[plan.tasks["document"]]]

    # 2. Tasks cut at segment borders: each piece's query rows have one owner.
    task, segment, start, stop = _overlaps(tasks["document"], tasks["start"], tasks["stop"], segments)
    home = segments[segment]
    pieces = _Ranges(
        home["document"],
        start,
        stop,
        home["rank"],
        tasks["worker"][task],
        home["offset"] + start - home["start"],
    )
    first = np.zeros_like(start) if plan.window is None else np.maximum(start - plan.window + 1, 0)
    resident = pieces.source == pieces.target
    inside = resident & (first >= home["start"])  # every key lies in the piece's own segment

    # 3. K/V rows that each piece needs from beyond its own segment.
    # With full attention that is the prefix of a resident piece; otherwise everything, or nothing.
    last = np.where(resident, home["start"], stop) if plan.window is None else np.where(inside, first, stop)
    moved_keys = _key_ranges(pieces.target, pieces.document, first, last, segments)

    # 4. Messages, ordered alike at both ends.
    moved_queries = pieces.where(~resident)
    queries = _messages(moved_queries, rank, plan, _any_query_moves(plan))
    keys = _messages(moved_keys, rank, plan, _any_key_moves(plan))

    # 5. The three kernel calls of this worker.
    here = pieces.target == rank
    received = _ReceivedKeys(moved_keys.where(moved_keys.target == rank))
    if plan.window is None:
        in_own = here & resident
        in_prefix = here & resident & (home["start"] > 0)
        own_first = home["start"]
    else:
        in_own = here & inside
        in_prefix = here & resident & ~inside
        own_first = first
    visiting = np.flatnonzero(here & ~resident)
    visiting = visiting[np.lexsort((start[visiting], pieces.document[visiting], pieces.source[visiting]))]

    def group(select: IntArray, q_rows: IntArray, causal: bool) -> TaskGroup:
        k_rows = received.rows(pieces.document[select], first[select], last[select])
        q_lens, k_lens = (stop - start)[select], (last - first)[select]
        task_pairs = pairs(start[select], stop[select], plan.window) if causal else q_lens * k_lens
        return TaskGroup(q_lens, k_lens, q_rows, k_rows, task_pairs)

    own_index = np.flatnonzero(in_own)
    own_q = _expand(pieces.local[own_index], (stop - start)[own_index])
    own_k_start = (pieces.local - start + own_first)[own_index]  # local row of the first key
    own_k_lens = (stop - own_first)[own_index]
    own_q_lens = (stop - start)[own_index]
    own_pairs = pairs(own_k_lens - own_q_lens, own_k_lens, plan.window)
    own = TaskGroup(own_q_lens, own_k_lens, own_q, _expand(own_k_start, own_k_lens), own_pairs)
    prefix_index = np.flatnonzero(in_prefix)
    prefix_q = _expand(pieces.local[prefix_index], (stop - start)[prefix_index])
    visiting_q = np.arange((stop - start)[visiting].sum(), dtype=np.int64)
    return Routes(
        local_rows=int(plan.layout.tokens[rank]) if rank < plan.layout.ranks else 0,
        queries=queries,
        keys=keys,
        own=own,
        prefix=group(prefix_index, prefix_q, causal=plan.window is not None),
        visiting=group(visiting, visiting_q, causal=True),
    )


def _overlaps(
    document: IntArray, start: IntArray, stop: IntArray, segments: NDArray[np.void]
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Cut non-empty ranges of documents at the borders of segments sorted by (document, start).

    Returns:
        Index of the range, index of the segment, start and stop of each piece, in the order of the ranges.
    """
    border = segments["document"] * _ROW_LIMIT + segments["start"]
    low = np.searchsorted(border, document * _ROW_LIMIT + start, side="right") - 1
    high = np.searchsorted(border, document * _ROW_LIMIT + stop - 1, side="right")
    counts = high - low
    which = np.repeat(np.arange(len(document)), counts)
    segment = _expand(low, counts)
    piece_start = np.maximum(start[which], segments["start"][segment])
    piece_stop = np.minimum(stop[which], segments["stop"][segment])
    return which, segment, piece_start, piece_stop


def _key_ranges(
    target: IntArray, document: IntArray, first: IntArray, last: IntArray, segments: NDArray[np.void]
) -> _Ranges:
    """K/V rows to bring to each worker: the union of what its tasks need, each row once per worker."""
    needed = np.flatnonzero(last > first)
    order = needed[np.lexsort((first[needed], document[needed], target[needed]))]
    target, document, first, last = target[order], document[order], first[order], last[order]
    # Rows up to `covered` of the same document were already brought by the ranges before this one.
    new_pair = np.ones(len(order), bool)
    new_pair[1:] = (target[1:] != target[:-1]) | (document[1:] != document[:-1])
    pair = np.cumsum(new_pair)
    covered = np.zeros_like(last)
    if len(order):
        covered[1:] = np.maximum.accumulate(pair * _ROW_LIMIT + last)[:-1] - pair[1:] * _ROW_LIMIT
    first = np.maximum(first, covered)  # negative where another document's rows came before
    kept = last > first
    target, document, first, last = target[kept], document[kept], first[kept], last[kept]
    which, segment, start, stop = _overlaps(document, first, last, segments)
    home = segments[segment]
    local = home["offset"] + start - home["start"]
    return _Ranges(home["document"], start, stop, home["rank"], target[which], local)


def _messages(moves: _Ranges, rank: int, plan: Plan, crossing: bool) -> Messages:
    """What `rank` sends and receives of some moving rows, in the order (peer, document, start)."""
    sent = moves.where(moves.source == rank)
    sent = sent.sorted_by(sent.target, sent.document, sent.start)
    came = moves.where(moves.target == rank)

    def per_worker(peer: IntArray, ranges: _Ranges) -> IntArray:
        rows = ranges.stop - ranges.start
        return np.bincount(peer, weights=rows, minlength=plan.workers).astype(np.int64)

    return Messages(
        send_rows=_expand(sent.local, sent.stop - sent.start),
        send_counts=per_worker(sent.target, sent),
        recv_counts=per_worker(came.source, came),
        crossing=crossing,
    )


class _ReceivedKeys:
    """Finds rows of documents among the received key rows of one worker."""

    def __init__(self, came: _Ranges) -> None:
        came = came.sorted_by(came.source, came.document, came.start)
        rows = came.stop - came.start
        position = np.cumsum(rows) - rows
        order = np.lexsort((came.start, came.document))
        self._border = (came.document * _ROW_LIMIT + came.start)[order]
        self._start = came.start[order]
        self._stop = came.stop[order]
        self._position = position[order]

    def rows(self, document: IntArray, start: IntArray, stop: IntArray) -> IntArray:
        """Received key rows of the given ranges of documents, range after range."""
        low = np.searchsorted(self._border, document * _ROW_LIMIT + start, side="right") - 1
        high = np.searchsorted(self._border, document * _ROW_LIMIT + stop - 1, side="right")
        counts = high - low
        which = np.repeat(np.arange(len(document)), counts)
        piece = _expand(low, counts)
        begin = np.maximum(start[which], self._start[piece])
        end = np.minimum(stop[which], self._stop[piece])
        return _expand(self._position[piece] + begin - self._start[piece], end - begin)


def _any_query_moves(plan: Plan) -> bool:
    """Whether some rank's task has a query row that the rank does not hold."""
    tasks = _tasks_of_ranks(plan)
    return bool(np.any(_rows_held(plan, tasks, tasks["start"]) < tasks["stop"] - tasks["start"]))


def _any_key_moves(plan: Plan) -> bool:
    """Whether some rank's task has a K/V row that the rank does not hold."""
    tasks = _tasks_of_ranks(plan)
    first = plan.first_key()[plan.tasks["worker"] < plan.layout.ranks]
    return bool(np.any(_rows_held(plan, tasks, first) < tasks["stop"] - first))


def _tasks_of_ranks(plan: Plan) -> NDArray[np.void]:
    """The tasks that in-place servers compute."""
    return plan.tasks[plan.tasks["worker"] < plan.layout.ranks]


def _rows_held(plan: Plan, tasks: NDArray[np.void], first: IntArray) -> IntArray:
    """[tasks] how many of each task's rows [first, stop) its own worker holds."""
    layout: Layout = plan.layout
    segments = layout.segments[np.lexsort((layout.segments["start"], layout.segments["document"]))]
    which, segment, start, stop = _overlaps(tasks["document"], first, tasks["stop"], segments)
    held = np.where(segments["rank"][segment] == tasks["worker"][which], stop - start, 0)
    return np.bincount(which, weights=held, minlength=len(tasks)).astype(np.int64)


def tasks_at_home(plan: Plan, workers: Collection[int]) -> Plan:
    """The tasks of some workers alone, each row's at the rank that holds it: what is left to do when they are lost.

    Args:
        plan: the plan in which they were lost.
        workers: the lost workers.
    """
    segments = plan.layout.segments[np.lexsort((plan.layout.segments["start"], plan.layout.segments["document"]))]
    lost = plan.tasks[np.isin(plan.tasks["worker"], list(workers))]
    _, segment, start, stop = _overlaps(lost["document"], lost["start"], lost["stop"], segments)
    tasks = np.zeros(len(start), TASK)
    tasks["document"], tasks["start"], tasks["stop"] = segments["document"][segment], start, stop
    tasks["worker"] = segments["rank"][segment]
    order = np.lexsort((tasks["start"], tasks["document"], tasks["worker"]))
    return Plan(plan.layout, tasks[order], plan.layout.ranks, plan.window)


def _expand(starts: IntArray, counts: IntArray) -> IntArray:
    """start, start + 1, … (count numbers) of every range, one range after another."""
    total = int(counts.sum())
    offsets = np.repeat(starts - (np.cumsum(counts) - counts), counts)
    return offsets + np.arange(total, dtype=np.int64)
