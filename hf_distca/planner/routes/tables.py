"""Routes of one rank: task groups, exchanges and stages."""

from dataclasses import dataclass

import numpy as np

from hf_distca.planner.cost import pairs
from hf_distca.planner.intervals import IntArray

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
    q_rows: IntArray
    k_rows: IntArray
    task_pairs: IntArray

    @property
    def pairs(self) -> int:
        """Query-key pairs of all tasks."""
        return int(self.task_pairs.sum())

    def halves(self, window: int | None) -> tuple["TaskGroup", "TaskGroup"]:
        """Divide the tasks into two groups of about equal pairs; cut one task if whole tasks are too uneven."""
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
            # The first `rows` query rows see the keys before them and their own; the others see all keys.
            at = int(k_lens[:task].sum())
            k_rows = np.concatenate([k_rows[: at + before + rows], k_rows[at:]])
            q_lens, k_lens = np.insert(q_lens, task, rows), np.insert(k_lens, task, before + rows)
            task_pairs = np.insert(task_pairs, task, seen[rows - 1])
            q_lens[task + 1] -= rows
            task_pairs[task + 1] -= task_pairs[task]
            last = task
        cut = last + 1
        at_q, at_k = int(q_lens[:cut].sum()), int(k_lens[:cut].sum())
        return (
            TaskGroup(q_lens[:cut], k_lens[:cut], self.q_rows[:at_q], k_rows[:at_k], task_pairs[:cut]),
            TaskGroup(q_lens[cut:], k_lens[cut:], self.q_rows[at_q:], k_rows[at_k:], task_pairs[cut:]),
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

    send_rows: IntArray
    send_counts: IntArray
    recv_counts: IntArray
    crossing: bool


@dataclass(frozen=True, eq=False)
class Stage:
    """K/V rows that travel in one exchange, and the tasks that see them.

    Attributes:
        forwarded: exchange of forwarded rows inside nodes; they come last among the received rows.
        remote_kv: q_rows are local, k_rows received. With full attention the keys lie before the segment and are all
            visible; results are merged with local ones. With a window a task has its whole window, bottom-right
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
