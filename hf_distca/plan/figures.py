"""Figures of a plan: loads and bytes, from segments and tasks alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hf_distca.plan import ExchangeFigures, Plan
from hf_distca.plan.arrays import BoolArray, IntArray, Table
from hf_distca.plan.cost import RowBytes, pairs
from hf_distca.plan.intervals import row_counts
from hf_distca.plan.moves import Forwards, rows_to_move
from hf_distca.plan.nodes import NETWORK_BANDWIDTH, NODE_BANDWIDTH

WITHIN = 0
BETWEEN = 1
"""Indices of links inside a node and between nodes."""
BANDWIDTHS = (NODE_BANDWIDTH, NETWORK_BANDWIDTH)
"""GB/s of these links."""


def loads_of(plan: Plan, row_overhead: int = 0) -> IntArray:
    """Return [workers] int64: query-key pairs that each worker computes.

    Each query row counts as `row_overhead` further pairs.
    """
    loads = np.zeros(plan.workers, np.int64)
    tasks = plan.tasks
    amount = pairs(tasks["start"], tasks["stop"], plan.window) + row_overhead * row_counts(tasks)
    np.add.at(loads, tasks["worker"], amount)
    return loads


@dataclass(frozen=True, eq=False)
class RowsMoved:
    """Rows that travel in one layer's forward.

    Arrays are [2, 2, workers]: within and between nodes, sent and received.
    """

    queries: IntArray  # rows of Q; as many rows of O come back
    keys: IntArray  # rows of K/V, forwarded rows included

    @classmethod
    def of(cls, plan: Plan, nodes: Sequence[int]) -> "RowsMoved":
        """Count the rows of a plan.

        Every K/V row that a worker's tasks read reaches the worker once.
        """
        queries, first_hop, forwards = rows_to_move(replace(plan, stage_rows=None))
        return cls(
            rows_between(plan.workers, queries).by_link(nodes),
            rows_between(plan.workers, first_hop, forwards).by_link(nodes),
        )

    @property
    def most_keys(self) -> int:
        """K/V rows that the busiest worker sends or receives."""
        return int(self.keys.sum(axis=0).max(initial=0))

    @cached_property
    def most(self) -> tuple[IntArray, IntArray]:
        """Query rows, and K/V rows, by link.

        Each array is [2, workers]: the larger of what a worker sends and receives.
        """
        return self.queries.max(axis=1), self.keys.max(axis=1)

    def forward_bytes(self, row_bytes: RowBytes) -> IntArray:
        """Return [2, 2, workers] bytes of the forward: Q, K and V are sent.

        As many rows of O come back.
        """
        return np.asarray(
            self.queries * row_bytes.q
            + self.queries[:, ::-1] * row_bytes.o
            + self.keys * row_bytes.kv
        )

    def backward_bytes(self, row_bytes: RowBytes) -> IntArray:
        """Return [2, 2, workers] bytes of the backward: Q, O, dO, K and V are sent.

        The gradients dQ, dK and dV come back.
        """
        sent = self.queries * (row_bytes.q + 2 * row_bytes.o) + self.keys * row_bytes.kv
        returned = self.queries[:, ::-1] * row_bytes.q + self.keys[:, ::-1] * row_bytes.kv
        return np.asarray(sent + returned)


class RowsBetween(NamedTuple):
    """Rows that go from workers to workers, once for each pair of workers."""

    source: IntArray  # [pairs]
    target: IntArray  # [pairs] possibly the source itself
    rows: IntArray  # [pairs]

    def to(self, is_target: BoolArray) -> "RowsBetween":
        """Return the rows that go to some of [workers]."""
        return RowsBetween(*(column[is_target[self.target]] for column in self))

    def by_link(self, nodes: Sequence[int]) -> IntArray:
        """Return [2, 2, workers] rows within and between nodes, sent and received.

        Rows that stay are left out.

        Args:
            nodes: [workers] node of each worker.
        """
        node = np.asarray(nodes)
        workers = len(node)
        travels = self.source != self.target
        source, target, rows = (column[travels] for column in self)
        # Of the two places of a link, the first one counts rows sent, the second rows received.
        place = (node[source] != node[target]) * (2 * workers)
        sent = np.bincount(place + source, rows, 4 * workers)
        received = np.bincount(place + workers + target, rows, 4 * workers)
        return (sent + received).astype(np.int64).reshape(2, 2, workers)


def rows_between(workers: int, moves: Table, forwards: Forwards | None = None) -> RowsBetween:
    """Count the rows of moves, a table of dtype MOVE; rows that a worker keeps count, too."""
    count = row_counts(moves)
    rows = np.bincount(moves["source"] * workers + moves["target"], count, workers**2)
    if forwards is not None:
        gateway = moves["target"][forwards.move]
        pair_of_workers = gateway * workers + forwards.reader
        rows += np.bincount(pair_of_workers, count[forwards.move], workers**2)
    pair = np.flatnonzero(rows)
    return RowsBetween(*np.divmod(pair, workers), rows[pair].astype(np.int64))


def bytes_by_link(plan: Plan, row_bytes: RowBytes, nodes: Sequence[int]) -> IntArray:
    """Return [2, 2, workers] bytes of a layer's forward, by link and direction.

    Args:
        nodes: [workers] node of each worker.
    """
    return RowsMoved.of(plan, nodes).forward_bytes(row_bytes)


def bytes_moved(plan: Plan, row_bytes: RowBytes) -> IntArray:
    """Return [2, workers] int64: bytes that each worker sends and receives in a layer's forward."""
    return np.asarray(bytes_by_link(plan, row_bytes, (0,) * plan.workers).sum(axis=0))


def exchange_figures(
    worker_bytes: IntArray, nodes: Sequence[int], bandwidths: Sequence[float] = BANDWIDTHS
) -> ExchangeFigures:
    """Sum up the bytes of all nano-batches.

    Args:
        worker_bytes: [2, 2, workers] within and between nodes, sent and received.
        nodes: [workers] node of each worker, from 0 on.
    """
    node_bytes = worker_bytes @ np.equal.outer(nodes, np.unique(nodes))  # [2, 2, nodes]
    return ExchangeFigures(
        bytes_total=int(worker_bytes[:, 0].sum()),
        bytes_bottleneck=int(worker_bytes.sum(axis=0).max()),
        bytes_within_nodes=int(worker_bytes[WITHIN, 0].sum()),
        bytes_within_nodes_bottleneck=int(worker_bytes[WITHIN].max()),
        bytes_within_nodes_busiest_node=int(node_bytes[WITHIN].max()),
        bytes_between_nodes=int(worker_bytes[BETWEEN, 0].sum()),
        bytes_between_nodes_bottleneck=int(worker_bytes[BETWEEN].max()),
        bytes_between_nodes_busiest_node=int(node_bytes[BETWEEN].max()),
        link_seconds=link_seconds(worker_bytes, bandwidths),
    )


def link_seconds(worker_bytes: IntArray, bandwidths: Sequence[float] = BANDWIDTHS) -> float:
    """Return the seconds that the busiest link takes.

    Args:
        worker_bytes: as in `exchange_figures`.
        bandwidths: GB/s within and between nodes.
    """
    seconds = [
        int(link_bytes.max(initial=0)) / bandwidth / 1e9
        for link_bytes, bandwidth in zip(worker_bytes, bandwidths, strict=True)
    ]
    return max(seconds)
