"""Figures of a plan: loads and bytes, from segments and tasks alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hf_distca.plan import ExchangeFigures, Plan
from hf_distca.plan.cost import RowBytes, pairs
from hf_distca.plan.intervals import IntArray, Table, row_counts
from hf_distca.plan.moves import rows_to_move
from hf_distca.plan.nodes import NETWORK_BANDWIDTH, NODE_BANDWIDTH

WITHIN, BETWEEN = 0, 1
"""Indices of links inside a node and between nodes."""
BANDWIDTHS = (NODE_BANDWIDTH, NETWORK_BANDWIDTH)
"""GB/s of these links."""


def loads_of(plan: Plan, row_overhead: int = 0) -> IntArray:
    """Return [workers] int64: query-key pairs that each worker computes.

    Each query row counts as `row_overhead` further pairs.
    """
    loads, tasks = np.zeros(plan.workers, np.int64), plan.tasks
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
        tasks, first, second = rows_to_move(replace(plan, stage_rows=None))
        return cls(
            *rows_by_link(
                [rows_between(plan.workers, *each) for each in ([tasks], [first, second])], nodes
            )
        )

    @property
    def most_keys(self) -> int:
        """K/V rows that the busiest worker sends or receives."""
        return int(self.keys.sum(axis=0).max(initial=0))

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

        DQ, dK and dV come back.
        """
        there = self.queries * (row_bytes.q + 2 * row_bytes.o) + self.keys * row_bytes.kv
        return np.asarray(
            there + self.queries[:, ::-1] * row_bytes.q + self.keys[:, ::-1] * row_bytes.kv
        )


def rows_between(workers: int, *tables: Table) -> IntArray:
    """Return [workers, workers] rows that go from each worker to each worker.

    Rows that a worker keeps count, too.
    """
    moved = np.zeros(workers**2)
    for moves in tables:
        moved += np.bincount(
            moves["source"] * workers + moves["target"], row_counts(moves), workers**2
        )
    return moved.astype(np.int64).reshape(workers, workers)


def rows_by_link(every: Sequence[IntArray], nodes: Sequence[int]) -> list[IntArray]:
    """Return [2, 2, workers] rows by link and direction, for each table of rows.

    A table has [workers, workers] rows that go from each worker to each worker. Rows that stay are
    left out.
    """
    between = np.not_equal.outer(nodes, nodes)
    links = np.stack([~between & ~np.eye(len(between), dtype=bool), between])
    over_links = (moved * links for moved in every)
    return [np.stack([over.sum(axis=2), over.sum(axis=1)], axis=1) for over in over_links]


def bytes_by_link(plan: Plan, row_bytes: RowBytes, nodes: Sequence[int]) -> IntArray:
    """Return [2, 2, workers] bytes of a layer's forward.

    They travel within and between [workers] nodes, and are sent and received.
    """
    return RowsMoved.of(plan, nodes).forward_bytes(row_bytes)


def bytes_moved(plan: Plan, row_bytes: RowBytes) -> IntArray:
    """Return [2, workers] int64: bytes that each worker sends and receives.

    They are those of one layer's forward.
    """
    return np.asarray(bytes_by_link(plan, row_bytes, (0,) * plan.workers).sum(axis=0))


def exchange_figures(
    moved: IntArray, nodes: Sequence[int], bandwidths: Sequence[float] = BANDWIDTHS
) -> ExchangeFigures:
    """Sum [2, 2, workers] bytes, all nano-batches together, for [workers] nodes from 0 on."""
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
        link_seconds=link_seconds(moved, bandwidths),
    )


def link_seconds(moved: IntArray, bandwidths: Sequence[float] = BANDWIDTHS) -> float:
    """Return the seconds that the busiest link takes for [2, 2, workers] bytes."""
    busiest = (int(of_link.max(initial=0)) for of_link in moved)
    return max(size / bandwidth for size, bandwidth in zip(busiest, bandwidths, strict=True)) / 1e9
