"""Remote workers: processes besides the ranks that compute tasks of plans and hold no rows.

Three protocols are all that training knows of them. `hf_distca.pool` implements them.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from hf_distca.dispatch.recorder import Work
from hf_distca.dispatch.rows import IndexBuffer, row_index
from hf_distca.kernels import AttentionParams
from hf_distca.plan import AttentionKind, MicroBatchPlan, Plan
from hf_distca.plan.arrays import IntArray
from hf_distca.plan.routes import ExchangedRows, Routes
from hf_distca.planner.settings import PlanSettings


class RemoteRows:
    """Local query rows that one remote worker computes, as an index tensor.

    The local K/V rows that it needs are another one.
    """

    def __init__(self, index: int, routes: Routes, ranks: int, buffer: IndexBuffer) -> None:
        self.index = index  # among the plan's remote workers
        worker = ranks + index
        q_rows = _rows_sent_to(worker, routes.queries)
        k_rows = _rows_sent_to(worker, routes.stages[0].keys)
        self.q_rows = row_index(q_rows, buffer)
        self.k_rows = row_index(k_rows, buffer)
        self.q_count = len(q_rows)
        self.k_count = len(k_rows)


def _rows_sent_to(worker: int, messages: ExchangedRows) -> IntArray:
    """Return the local rows that a rank sends to one worker."""
    return np.split(messages.send_rows, np.cumsum(messages.send_counts))[worker]


class RemoteCall(Protocol):
    """One core attention under way at remote workers."""

    def collect(self) -> tuple[dict[int, dict[str, Tensor]], frozenset[int]]:
        """Wait for this rank's results, and return the workers that failed. A collective.

        A worker has failed if it did not give some rank its own results.

        Results are by the worker's index, nothing of workers without rows of this rank: columns by
        name, [rows, …] on the rank's device, o and lse of a forward; dq, dk and dv of a backward.
        """


class RemotePlan(Protocol):
    """Plan of a micro-batch at its remote workers."""

    def start(
        self,
        work: Work,
        workers: Sequence[RemoteRows],
        kind: AttentionKind,
        params: AttentionParams,
        rows: Mapping[str, Tensor],
    ) -> RemoteCall:
        """Send this rank's rows of one core attention to every worker that has tasks.

        These workers are the same on every rank.

        Args:
            rows: the rank's rows by column name, [T, …] each: q, k and v; in a backward also do, o
                and lse.
        """

    def repair(self, plan: Plan, kind: AttentionKind, lost: frozenset[int]) -> Plan:
        """Return the plan by which the ranks compute the tasks of lost workers.

        The same on every rank.
        """


class RemoteWorkers(Protocol):
    """Workers that may take part in any micro-batch, and come and go between steps.

    `Dispatcher.remote` is one.
    """

    @property
    def present(self) -> int:
        """Number of workers that take part now."""

    def refresh(self) -> None:
        """Let workers that have come take part, before an optimizer step. A collective."""

    def figures(self) -> dict[str, float]:
        """Return what the log of a training reports of the workers, by names of metrics."""

    def close(self) -> None:
        """End the work of all workers, once training has ended."""

    def bind(
        self, plan: MicroBatchPlan, settings: PlanSettings
    ) -> tuple[MicroBatchPlan, RemotePlan | None]:
        """Return a plan of ranks alone with the present workers, and their side of it.

        None where no worker is present.
        """
