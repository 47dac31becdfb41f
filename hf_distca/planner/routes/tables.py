"""What routes are made of: groups of tasks, messages between workers, and the routes of one rank."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

LocalRows = NDArray[np.int64]
"""Numbers of rows of the nano-batch on this rank."""
ReceivedRows = NDArray[np.int64]
"""Numbers of rows among those received: Q rows or K/V rows."""

UNEVEN = 0.25
"""Halves whose pairs differ by a larger share of all are worth cutting a task."""


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
    q_rows: LocalRows | ReceivedRows
    k_rows: LocalRows | ReceivedRows
    task_pairs: IntArray

    @property
    def pairs(self) -> int:
        """Query-key pairs of all tasks."""
        return int(self.task_pairs.sum())

    def halves(self, window: int | None) -> tuple["TaskGroup", "TaskGroup"]:
        """The first tasks and the others, of about equal pairs: where whole tasks are far from it, one is cut.

        Args:
            window: of the tasks, whose rows are aligned with their keys at the end.
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
        """The same with one task as two: its first query rows, and the others.

        Args:
            task: which.
            rows: so many query rows are the first.
            task_pairs: of these.
        """
        keys = int(self.k_lens[task] - self.q_lens[task]) + rows
        k_start = int(self.k_lens[:task].sum())
        q_lens, k_lens = np.insert(self.q_lens, task, rows), np.insert(self.k_lens, task, keys)
        pairs_of_tasks = np.insert(self.task_pairs, task, task_pairs)
        q_lens[task + 1] -= rows
        pairs_of_tasks[task + 1] -= task_pairs
        k_rows = np.concatenate([self.k_rows[: k_start + keys], self.k_rows[k_start:]])
        return TaskGroup(q_lens, k_lens, self.q_rows, k_rows, pairs_of_tasks)

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
    """Rows of one kind, Q or K and V, that this rank sends and receives.

    Attributes:
        send_rows: local rows, ordered by receiving worker; of rows that are passed on, those received that go on.
        send_counts: [workers] how many of them go to each worker.
        recv_counts: [workers] how many rows come from each.
        crossing: whether any rank sends such a row to another rank. The same on every rank, so that all of
            them skip an empty exchange or none does.
    """

    send_rows: LocalRows | ReceivedRows
    send_counts: IntArray
    recv_counts: IntArray
    crossing: bool


@dataclass(frozen=True, eq=False)
class Stage:
    """K/V rows that travel in one exchange, and the tasks that see them.

    Attributes:
        keys: exchange of the K/V rows.
        passed_on: exchange of those of them that a rank passes on to others of its node; they are the last of the
            received rows there.
        prefix: local queries against keys that come from elsewhere: q_rows local, k_rows received. With
            full attention these are rows before the segment, all of them visible, and the result is
            merged with that of `own`; with a window the task's whole window, bottom-right causal.
        visiting: other ranks' queries: q_rows are received query rows, k_rows received key rows, bottom-right causal.
        visiting_prefix: other ranks' queries against keys before them, all of them visible; none where there is one
            stage, or a window.
    """

    keys: Messages
    passed_on: Messages
    prefix: TaskGroup
    visiting: TaskGroup
    visiting_prefix: TaskGroup


@dataclass(frozen=True, eq=False)
class Routes:
    """The routes of one rank for one plan.

    Attributes:
        local_rows: how many rows this rank holds.
        queries: exchange of Q rows (and of O, dO, dQ rows the other way); never to the rank itself.
        own: tasks whose queries and keys lie in one segment of this rank: q_rows and k_rows are local.
        stages: exchanges of K/V rows, one after another, with the tasks of each. Received key rows of each are
            counted apart. Servers have theirs in the first.
    """

    local_rows: int
    queries: Messages
    own: TaskGroup
    stages: tuple[Stage, ...]
