"""Figures of a plan: loads, bytes, and counts for predictions; from segments and tasks alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import AttentionKind, ExchangeFigures, Plan
from hf_distca.planner.cost import RowBytes, pairs
from hf_distca.planner.intervals import IntArray, Table, joined, row_counts
from hf_distca.planner.nodes import NETWORK_BANDWIDTH, NODE_BANDWIDTH
from hf_distca.planner.routes.moves import rows_to_move
from hf_distca.planner.seconds import Tasks

WITHIN, BETWEEN = 0, 1
"""Indices of links inside a node and between nodes."""


def loads_of(plan: Plan) -> IntArray:
    """Return [workers] int64: query-key pairs that each worker computes."""
    loads = np.zeros(plan.workers, np.int64)
    np.add.at(loads, plan.tasks["worker"], pairs(plan.tasks["start"], plan.tasks["stop"], plan.window))
    return loads


def query_rows_of(plan: Plan) -> IntArray:
    """Return [workers] int64: query rows that each worker computes."""
    return np.bincount(plan.tasks["worker"], row_counts(plan.tasks), plan.workers).astype(np.int64)


@dataclass(frozen=True, eq=False)
class RowsMoved:
    """Rows that travel in one layer's forward: [2, 2, workers], by link and direction as in `bytes_by_link`.

    Attributes:
        queries: rows of Q; as many rows of O come back.
        keys: rows of K/V, forwarded rows included.
    """

    queries: IntArray
    keys: IntArray

    @classmethod
    def of(cls, plan: Plan, nodes: Sequence[int]) -> "RowsMoved":
        """Count the rows of a plan; every K/V row that a worker's tasks read reaches the worker once."""
        tasks, first, second = rows_to_move(replace(plan, stage_rows=None))
        return cls(_by_link(tasks, nodes), _by_link(joined(first, second), nodes))

    @property
    def most_keys(self) -> int:
        """K/V rows that the busiest worker sends or receives."""
        return int(self.keys.sum(axis=0).max(initial=0))

    def forward_bytes(self, row_bytes: RowBytes) -> IntArray:
        """Return [2, 2, workers] bytes of the forward: Q, K and V are sent; as many rows of O come back."""
        moved: IntArray = self.queries * row_bytes.q + self.queries[:, ::-1] * row_bytes.o + self.keys * row_bytes.kv
        return moved

    def backward_bytes(self, row_bytes: RowBytes) -> IntArray:
        """Return [2, 2, workers] bytes of the backward: Q, O, dO, K and V are sent; dQ, dK and dV come back."""
        there = self.queries * (row_bytes.q + 2 * row_bytes.o) + self.keys * row_bytes.kv
        moved: IntArray = there + self.queries[:, ::-1] * row_bytes.q + self.keys[:, ::-1] * row_bytes.kv
        return moved


def _by_link(moves: Table, nodes: Sequence[int], chosen: NDArray[np.bool_] | bool = True) -> IntArray:
    """Return [2, 2, workers] rows of the chosen moves that go to another worker, by link and direction."""
    node = np.asarray(nodes)
    away = np.flatnonzero((moves["source"] != moves["target"]) & chosen)
    source, target, rows = moves["source"][away], moves["target"][away], row_counts(moves)[away]
    link = len(node) * (node[source] != node[target])
    ends = [np.bincount(link + worker, rows, 2 * len(node)) for worker in (source, target)]
    return np.stack(ends).reshape(2, 2, len(node)).swapaxes(0, 1).astype(np.int64)


def bytes_by_link(plan: Plan, row_bytes: RowBytes, nodes: Sequence[int]) -> IntArray:
    """Return [2, 2, workers] int64: bytes of one layer's forward by link and direction.

    Links are WITHIN and BETWEEN nodes, directions are sent and received. If the plan has nodes itself, forwarded K/V
    rows cross to a node once.

    Args:
        nodes: [workers] node of each worker.
    """
    return RowsMoved.of(plan, nodes).forward_bytes(row_bytes)


def bytes_moved(plan: Plan, row_bytes: RowBytes) -> IntArray:
    """Return [2, workers] int64: bytes that each worker sends and receives in one layer's forward."""
    moved: IntArray = bytes_by_link(plan, row_bytes, plan.nodes or (0,) * plan.workers).sum(axis=0)
    return moved


def exchange_figures(
    plans: Sequence[Plan],
    row_bytes: RowBytes,
    nodes: Sequence[int],
    node_bandwidth: float = NODE_BANDWIDTH,
    network_bandwidth: float = NETWORK_BANDWIDTH,
) -> ExchangeFigures:
    """Count the bytes of exchanges.

    Args:
        plans: one for each nano-batch, all for one kind of attention.
        nodes: [workers] node of each worker, from 0 on.
        node_bandwidth: GB/s that a worker sends, and receives, inside its node.
        network_bandwidth: GB/s that a worker sends, and receives, between nodes.
    """
    moved = np.sum([bytes_by_link(plan, row_bytes, nodes) for plan in plans], axis=0)
    of_nodes = moved @ np.equal.outer(nodes, np.unique(nodes))
    return ExchangeFigures(
        bytes_total=int(moved[:, 0].sum()),
        bytes_bottleneck=int(moved.sum(axis=0).max()),
        bytes_within_nodes=int(moved[WITHIN, 0].sum()),
        bytes_within_nodes_bottleneck=int(moved[WITHIN].max()),
        bytes_within_nodes_busiest_node=int(of_nodes[WITHIN].max()),
        bytes_between_nodes=int(moved[BETWEEN, 0].sum()),
        bytes_between_nodes_bottleneck=int(moved[BETWEEN].max()),
        bytes_between_nodes_busiest_node=int(of_nodes[BETWEEN].max()),
        link_seconds=link_seconds(moved, node_bandwidth, network_bandwidth),
    )


def link_seconds(
    moved: NDArray[np.int64], node_bandwidth: float = NODE_BANDWIDTH, network_bandwidth: float = NETWORK_BANDWIDTH
) -> float:
    """Return the seconds that the busiest link takes for [2, 2, workers] bytes, at bandwidths in GB/s."""
    within, between = (int(moved[link].max(initial=0)) for link in (WITHIN, BETWEEN))
    return max(within / node_bandwidth, between / network_bandwidth) / 1e9


@dataclass(frozen=True, eq=False)
class CountedPlan:
    """Counts of a plan that a schedule needs: groups of tasks and rows that travel.

    Attributes:
        local: tasks whose queries and keys are the worker's own.
        remote_kv: tasks of local queries on received keys.
        remote_query: tasks of received queries on all of their keys.
        ranks: number of workers that hold rows; the workers after them are dedicated servers.
        forwards: whether K/V rows are forwarded inside nodes.
    """

    local: Tasks
    remote_kv: Tasks
    remote_query: Tasks
    among_ranks: RowsMoved
    with_servers: RowsMoved
    row_bytes: RowBytes
    stages: int
    ranks: int
    forwards: bool
    windowed: bool

    @property
    def bytes_moved(self) -> IntArray:
        """[2, workers] bytes that each worker sends and receives in one layer's forward."""
        both = [rows.forward_bytes(self.row_bytes) for rows in (self.among_ranks, self.with_servers)]
        moved: IntArray = np.sum(both, axis=(0, 1))
        return moved

    @property
    def servers(self) -> int:
        """Number of dedicated servers."""
        return len(self.local.rows) - self.ranks


def count_plan(
    plan: Plan, kind: AttentionKind, bytes_per_value: int, nodes: Sequence[int] | None = None
) -> CountedPlan:
    """Count a plan's tasks and rows.

    If K/V rows travel in stages, every stage is taken to be full; uneven stages may take one more.

    Args:
        nodes: [workers] node of each worker; None for the plan's nodes, or one node for all.
    """
    nodes = nodes or plan.nodes or (0,) * plan.workers
    ranks = plan.layout.ranks
    tasks, *hops = rows_to_move(replace(plan, stage_rows=None))
    rows, sent, in_place = (
        row_counts(tasks),
        tasks["keys_stop"] - tasks["keys_start"],
        tasks["stop"] - tasks["keys_stop"],
    )
    here = tasks["source"] == tasks["target"]
    every = pairs(tasks["start"], tasks["stop"], plan.window)
    inside = np.where(in_place > 0, pairs(in_place - rows, in_place, plan.window), 0)

    def summed(chosen: NDArray[np.bool_], keys: IntArray, amount: IntArray) -> Tasks:
        worker = tasks["target"][chosen]
        of_rows, of_keys, of_pairs = (
            np.bincount(worker, values[chosen], plan.workers).astype(np.float64) for values in (rows, keys, amount)
        )
        return Tasks(of_rows, of_keys, of_pairs, (of_rows > 0).astype(np.float64))

    # Servers get their rows in exchanges apart.
    moves = joined(*hops)
    among_ranks, with_servers = (
        RowsMoved(*(_by_link(table, nodes, (table["target"] < ranks) == to_ranks) for table in (tasks, moves)))
        for to_ranks in (True, False)
    )
    return CountedPlan(
        local=summed(in_place > 0, in_place, inside),
        remote_kv=summed(here & (sent > 0), sent, every - inside),
        remote_query=summed(~here, sent, every),
        among_ranks=among_ranks,
        with_servers=with_servers,
        row_bytes=RowBytes.of_kind(kind, bytes_per_value),
        stages=1 if plan.stage_rows is None else max(-(-among_ranks.most_keys // plan.stage_rows), 1),
        ranks=ranks,
        forwards=plan.nodes is not None,
        windowed=plan.window is not None,
    )
