"""What routes are made of: groups of tasks, messages between workers, and the routes of one rank."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

LocalRows = NDArray[np.int64]
"""Numbers of rows of the nano-batch on this rank."""
ReceivedRows = NDArray[np.int64]
"""Numbers of rows among those received: Q rows or K/V rows."""


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

    def half(self) -> int:
        """So many tasks, from the first on, have about half of the pairs; 1 or more if there are any."""
        so_far = np.cumsum(self.task_pairs)
        return int(np.abs(2 * so_far - so_far[-1]).argmin()) + 1 if len(so_far) else 0

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
        send_rows: local rows, ordered by receiving worker.
        send_counts: [workers] how many of them go to each worker.
        recv_counts: [workers] how many rows come from each.
        crossing: whether any rank sends such a row to another rank. The same on every rank, so that all of
            them skip an empty exchange or none does.
    """

    send_rows: LocalRows
    send_counts: IntArray
    recv_counts: IntArray
    crossing: bool


@dataclass(frozen=True, eq=False)
class Stage:
    """K/V rows that travel in one exchange, and the tasks that see them.

    Attributes:
        keys: exchange of the K/V rows.
        prefix: local queries against keys that come from elsewhere: q_rows local, k_rows received. With
            full attention these are rows before the segment, all of them visible, and the result is
            merged with that of `own`; with a window the task's whole window, bottom-right causal.
        visiting: other ranks' queries: q_rows are received query rows, k_rows received key rows, bottom-right causal.
        visiting_prefix: other ranks' queries against keys before them, all of them visible; none where there is one
            stage, or a window.
    """

    keys: Messages
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
