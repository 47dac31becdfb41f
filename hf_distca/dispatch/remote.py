"""Workers that hold no rows, as dispatch knows them: what is behind them is for `Dispatcher.remote` to say.

Shape suffixes: N rows; what follows a row's N is free.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hf_distca.dispatch.index_buffer import IndexBuffer
from hf_distca.dispatch.recorder import Work
from hf_distca.dispatch.rows import row_index
from hf_distca.kernels import AttentionParams
from hf_distca.plan import AttentionKind, MicroBatchPlan, Plan
from hf_distca.planner.routes import Messages, Routes
from hf_distca.planner.settings import PlanSettings


class ServerRows:
    """Rows of this rank that one dedicated server needs, as index tensors.

    Attributes:
        server: its index among the plan's servers.
        q_rows: local query rows that it computes.
        k_rows: local K/V rows that it needs.
        q_count: number of query rows; 0 where this rank has none for it.
        k_count: number of K/V rows.
    """

    def __init__(self, server: int, routes: Routes, ranks: int, buffer: IndexBuffer) -> None:
        self.server = server
        q_rows, k_rows = (_rows_for(messages, ranks + server) for messages in (routes.queries, routes.stages[0].keys))
        self.q_rows, self.k_rows = row_index(q_rows, buffer), row_index(k_rows, buffer)
        self.q_count, self.k_count = len(q_rows), len(k_rows)


def _rows_for(messages: Messages, worker: int) -> NDArray[np.int64]:
    stop = int(messages.send_counts[: worker + 1].sum())
    return messages.send_rows[stop - int(messages.send_counts[worker]) : stop]


class RemoteCall(Protocol):
    """One core attention under way at servers."""

    def collect(self) -> tuple[dict[int, dict[str, Tensor]], frozenset[int]]:
        """Wait for the results. A collective.

        Returns:
            results: by server index, the columns of this rank's rows by name, [rows, …] on the rank's device: o and
                lse of a forward; dq, dk and dv of a backward. Nothing of a server that has no rows of this rank.
            lost: indices of the servers from which some rank did not get its results; the same on every rank.
        """


class RemotePlan(Protocol):
    """The plan of a micro-batch at its servers."""

    def start(
        self,
        work: Work,
        servers: Sequence[ServerRows],
        kind: AttentionKind,
        params: AttentionParams,
        rows: Mapping[str, Tensor],
    ) -> RemoteCall:
        """Send servers this rank's rows of one core attention.

        Args:
            work: which core attention.
            servers: every server that has tasks, with the rows that it needs; on every rank the same servers.
            kind: of the layer.
            params: its scale, window and softcap.
            rows: the rank's rows by column name, [T, …] each: q, k and v; in a backward do, o and lse too.
        """

    def repair(self, plan: Plan, kind: AttentionKind, lost: frozenset[int]) -> Plan:
        """The plan by which the ranks compute what lost servers were to compute; the same on every rank.

        Args:
            plan: of the micro-batch, for one kind of layer.
            kind: of the layer.
            lost: indices of the servers.
        """


class RemoteWorkers(Protocol):
    """Servers that may take part in any micro-batch."""

    def bind(self, plan: MicroBatchPlan, settings: PlanSettings) -> tuple[MicroBatchPlan, RemotePlan | None]:
        """The plan for the workers that are there now, and how its servers are reached; None without any.

        Args:
            plan: of a micro-batch, for the ranks alone.
            settings: with which it was made.
        """
