"""Interface of workers that hold no rows; `Dispatcher.remote` implements it."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hf_distca.dispatch.recorder import Work
from hf_distca.dispatch.rows import IndexBuffer, row_index
from hf_distca.kernels import AttentionParams
from hf_distca.plan import AttentionKind, MicroBatchPlan, Plan
from hf_distca.plan.routes import ExchangedRows, Routes
from hf_distca.planner.settings import PlanSettings


class ServerRows:
    """Local query rows that one dedicated server computes, as an index tensor.

    The local K/V rows that it needs are another one.
    """

    def __init__(self, server: int, routes: Routes, ranks: int, buffer: IndexBuffer) -> None:
        self.server = server  # index among the plan's servers
        worker = ranks + server
        q_rows = _rows_sent_to(worker, routes.queries)
        k_rows = _rows_sent_to(worker, routes.stages[0].keys)
        self.q_rows = row_index(q_rows, buffer)
        self.k_rows = row_index(k_rows, buffer)
        self.q_count = len(q_rows)
        self.k_count = len(k_rows)


def _rows_sent_to(worker: int, messages: ExchangedRows) -> NDArray[np.int64]:
    """Return the local rows that a rank sends to one worker."""
    return np.split(messages.send_rows, np.cumsum(messages.send_counts))[worker]


class RemoteCall(Protocol):
    """One core attention under way at servers."""

    def collect(self) -> tuple[dict[int, dict[str, Tensor]], frozenset[int]]:
        """Wait for this rank's results, and return the servers that failed. A collective.

        A server has failed if it did not give some rank its own results.

        Results are by server index, nothing of servers without rows of this rank: columns by name,
        [rows, …] on the rank's device, o and lse of a forward; dq, dk and dv of a backward.
        """


class RemotePlan(Protocol):
    """Plan of a micro-batch at its servers."""

    def start(
        self,
        work: Work,
        servers: Sequence[ServerRows],
        kind: AttentionKind,
        params: AttentionParams,
        rows: Mapping[str, Tensor],
    ) -> RemoteCall:
        """Send this rank's rows of one core attention to every server that has tasks.

        These servers are the same on every rank.

        Args:
            rows: the rank's rows by column name, [T, …] each: q, k and v; in a backward also do, o
                and lse.
        """

    def repair(self, plan: Plan, kind: AttentionKind, lost: frozenset[int]) -> Plan:
        """Return the plan by which the ranks compute the tasks of lost servers.

        The same on every rank.
        """


class RemoteWorkers(Protocol):
    """Servers that may take part in any micro-batch."""

    def bind(
        self, plan: MicroBatchPlan, settings: PlanSettings
    ) -> tuple[MicroBatchPlan, RemotePlan | None]:
        """Return a plan of ranks alone with the current servers, and the servers' side.

        None without servers.
        """
