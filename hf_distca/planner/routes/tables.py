"""Elements of routes: groups of tasks, rows exchanged between workers, and the routes of one rank."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

LocalRows = NDArray[np.int64]
"""Numbers of rows of the nano-batch on this rank."""
ReceivedRows = NDArray[np.int64]
"""Numbers of rows among the received Q rows or K/V rows."""

UNEVEN = 0.25
"""Difference of two halves, as a share of all pairs, above which a task is cut."""


@dataclass(frozen=True, eq=False)
class TaskGroup:
    """Tasks of one kernel call.

    Attributes:
        q_lens: [tasks] query rows of each task.
        k_lens: [tasks] K/V rows of each task.
        q_rows: [sum of q_lens] positions of query rows, task after task.
        k_rows: [sum of k_lens] positions of K/V rows; a row that two tasks need is listed twice.
        task_pairs: [tasks] query-key pairs of each task within its window.
    """

    q_lens: IntArray
    k_lens: IntArray
    q_rows: LocalRows | ReceivedRows
    k_rows: LocalRows | ReceivedRows
    task_pairs: IntArray

    @property
    def pairs(self) -> int:
        """Query-key pairs of all tasks."""
        return int(self.task_pairs.sum())

    def halves(self, window: int | None) -> tuple["TaskGroup", "TaskGroup"]:
        """Divide the tasks into two groups of about equal pairs; cut one task if whole tasks are too uneven.

        Args:
            window: window of the tasks, whose rows are aligned with their keys at the end.
        """
        if not len(self.q_lens):
            return self, self
        so_far = np.cumsum(self.task_pairs)
        uneven = np.abs(2 * so_far - so_far[-1])
        cut = int(uneven.argmin())
        if uneven[cut] <= UNEVEN * so_far[-1]:
            return self.split(cut + 1)
        middle = int(np.searchsorted(2 * so_far, so_far[-1]))
        q_len, k_len = int(self.q_lens[middle]), int(self.k_lens[middle])
        seen = np.cumsum(np.minimum(np.arange(k_len - q_len, k_len) + 1, window or k_len))
        wanted = so_far[-1] / 2 - so_far[middle] + self.task_pairs[middle]
        rows = min(int(np.abs(seen - wanted).argmin()) + 1, q_len - 1)
        return self._with_cut(middle, rows, int(seen[rows - 1])).split(middle + 1) if rows else self.split(cut + 1)

    def _with_cut(self, task: int, rows: int, task_pairs: int) -> "TaskGroup":
        """Return the group with one task cut in two after its first `rows` query rows, of `task_pairs` pairs."""
        keys = int(self.k_lens[task] - self.q_lens[task]) + rows
        k_start = int(self.k_lens[:task].sum())
        q_lens, k_lens = np.insert(self.q_lens, task, rows), np.insert(self.k_lens, task, keys)
        pairs_of_tasks = np.insert(self.task_pairs, task, task_pairs)
        q_lens[task + 1] -= rows
        pairs_of_tasks[task + 1] -= task_pairs
        k_rows = np.concatenate([self.k_rows[: k_start + keys], self.k_rows[k_start:]])
        return TaskGroup(q_lens, k_lens, self.q_rows, k_rows, pairs_of_tasks)

    def split(self, cut: int) -> tuple["TaskGroup", "TaskGroup"]:
        """Return the first `cut` tasks and the others."""
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
class ExchangedRows:
    """Rows of one kind, Q or K and V, that this rank sends and receives.

    Attributes:
        send_rows: local rows, ordered by receiving worker; for forwarded rows, received rows.
        send_counts: [workers] rows that go to each worker.
        recv_counts: [workers] rows that come from each worker.
        crossing: whether any rank sends such a row to another rank. The value is the same on every rank, so that all
            ranks skip an empty exchange or none does.
    """

    send_rows: LocalRows | ReceivedRows
    send_counts: IntArray
    recv_counts: IntArray
    crossing: bool


@dataclass(frozen=True, eq=False)
class Stage:
    """K/V rows that travel in one exchange, and the tasks that see them.

    Attributes:
        forwarded: exchange of forwarded rows inside nodes; they come last among the received rows.
        remote_kv: q_rows are local, k_rows received. With full attention the keys lie before the segment and are all
            visible; results are merged with those of `local`. With a window a task has its whole window, bottom-right
            causal.
        remote_query: q_rows are received query rows, k_rows received key rows, bottom-right causal.
        remote_query_prefix: received queries against keys before them, all of them visible; empty with one stage or a
            window.
    """

    keys: ExchangedRows
    forwarded: ExchangedRows
    remote_kv: TaskGroup
    remote_query: TaskGroup
    remote_query_prefix: TaskGroup


@dataclass(frozen=True, eq=False)
class Routes:
    """Routes of one rank for one plan.

    Attributes:
        queries: exchange of Q rows, and of O, dO and dQ rows; never to the rank itself.
        local: local tasks, whose queries and keys lie in one segment of this rank; q_rows and k_rows are local.
        stages: exchanges of K/V rows, in order, with the tasks of each. Received key rows of each stage are counted
            apart. Servers receive theirs in the first stage.
    """

    local_rows: int
    queries: ExchangedRows
    local: TaskGroup
    stages: tuple[Stage, ...]
