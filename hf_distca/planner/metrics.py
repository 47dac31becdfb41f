"""Figures of a plan: loads, bytes, and counts for predictions; from segments and tasks alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import AttentionKind, ExchangeFigures, Plan
from hf_distca.planner.cost import RowBytes, pairs
from hf_distca.planner.intervals import IntArray, Table, row_counts
from hf_distca.planner.moves import rows_to_move
from hf_distca.planner.nodes import NETWORK_BANDWIDTH, NODE_BANDWIDTH
from hf_distca.planner.seconds import DIAGONAL_ROWS, Tasks

WITHIN, BETWEEN = 0, 1
"""Indices of links inside a node and between nodes."""
BANDWIDTHS = (NODE_BANDWIDTH, NETWORK_BANDWIDTH)
"""GB/s of these links."""


def loads_of(plan: Plan, row_overhead: int = 0) -> IntArray:
    """Return [workers] int64: query-key pairs that each worker computes, and `row_overhead` for each query row."""
    loads, tasks = np.zeros(plan.workers, np.int64), plan.tasks
    amount = pairs(tasks["start"], tasks["stop"], plan.window) + row_overhead * row_counts(tasks)
    np.add.at(loads, tasks["worker"], amount)
    return loads


@dataclass(frozen=True, eq=False)
class RowsMoved:
    """Rows that travel in one layer's forward: [2, 2, workers], within and between nodes, sent and received."""

    queries: IntArray  # rows of Q; as many rows of O come back
    keys: IntArray  # rows of K/V, forwarded rows included

    @classmethod
    def of(cls, plan: Plan, nodes: Sequence[int]) -> "RowsMoved":
        """Count the rows of a plan.

        Every K/V row that a worker's tasks read reaches the worker once.
        """
        tasks, first, second = rows_to_move(replace(plan, stage_rows=None))
        return cls(
            *_by_link(
                [_rows_between(plan.workers, *each) for each in ([tasks], [first, second])], nodes
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


def _rows_between(workers: int, *tables: Table) -> IntArray:
    """Return [workers, workers] rows that go from each worker to each worker, to itself included."""
    moved = np.zeros(workers**2)
    for moves in tables:
        moved += np.bincount(
            moves["source"] * workers + moves["target"], row_counts(moves), workers**2
        )
    return moved.astype(np.int64).reshape(workers, workers)


def _by_link(every: Sequence[IntArray], nodes: Sequence[int]) -> list[IntArray]:
    """Return [2, 2, workers] of each [workers, workers] rows that go to another worker, by link and direction."""
    between = np.not_equal.outer(nodes, nodes)
    links = np.stack([~between & ~np.eye(len(between), dtype=bool), between])
    over_links = (moved * links for moved in every)
    return [np.stack([over.sum(axis=2), over.sum(axis=1)], axis=1) for over in over_links]


def bytes_by_link(plan: Plan, row_bytes: RowBytes, nodes: Sequence[int]) -> IntArray:
    """Return [2, 2, workers] bytes of a layer's forward, within and between [workers] nodes, sent and received."""
    return RowsMoved.of(plan, nodes).forward_bytes(row_bytes)


def bytes_moved(plan: Plan, row_bytes: RowBytes) -> IntArray:
    """Return [2, workers] int64: bytes that each worker sends and receives in one layer's forward."""
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


@dataclass(frozen=True, eq=False)
class CountedPlan:
    """Counts of a plan that a schedule needs: groups of tasks and rows that travel."""

    local: Tasks  # tasks whose queries and keys are the worker's own
    remote_kv: Tasks  # tasks of local queries on received keys
    remote_query: Tasks  # tasks of received queries on all of their keys
    among_ranks: RowsMoved
    with_servers: RowsMoved
    row_bytes: RowBytes
    stages: int
    # K/V rows that the busiest rank sends, or receives, with rows that it gathers for itself.
    most_rows: int
    ranks: int  # workers that hold rows; the workers after them are dedicated servers
    forwards: bool  # whether K/V rows are forwarded inside nodes
    windowed: bool
    # [ranks] the same number for ranks that exchange rows, directly or over other ranks.
    connected: IntArray

    @property
    def forward_bytes(self) -> IntArray:
        """[2, 2, workers] bytes of one layer's forward by link and direction, as in `bytes_by_link`."""
        return self.among_ranks.forward_bytes(self.row_bytes) + self.with_servers.forward_bytes(
            self.row_bytes
        )

    @cached_property
    def most_of_ranks(self) -> tuple[IntArray, IntArray]:
        """Query rows, and K/V rows: [2, ranks] by link, the larger of what each rank sends and receives."""
        moved = self.among_ranks
        return moved.queries.max(axis=1)[:, : self.ranks], moved.keys.max(axis=1)[:, : self.ranks]

    @property
    def servers(self) -> int:
        """Number of dedicated servers."""
        return len(self.local.rows) - self.ranks


def count_plan(
    plan: Plan, kind: AttentionKind, bytes_per_value: int, nodes: Sequence[int] | None = None
) -> CountedPlan:
    """Count a plan's tasks and rows, for [workers] nodes.

    None for the plan's nodes, or one node for all.

    If K/V rows travel in stages, every stage is taken to be full; uneven stages may take one more.
    """
    nodes = nodes or plan.nodes or (0,) * plan.workers
    ranks = plan.layout.ranks
    tasks, first, second = rows_to_move(replace(plan, stage_rows=None))
    rows, here = row_counts(tasks), tasks["source"] == tasks["target"]
    sent, in_place = tasks["keys_stop"] - tasks["keys_start"], tasks["stop"] - tasks["keys_stop"]
    every = pairs(tasks["start"], tasks["stop"], plan.window)
    inside = np.where(in_place > 0, pairs(in_place - rows, in_place, plan.window), 0)
    diagonal = rows * np.minimum(rows, DIAGONAL_ROWS)

    def summed(
        chosen: NDArray[np.bool_], keys: IntArray, amount: IntArray, diagonal: IntArray
    ) -> Tasks:
        amounts = (each * chosen for each in (rows, keys, amount, diagonal, np.ones_like(rows)))
        counts = (
            np.bincount(tasks["target"], each, plan.workers).astype(np.float64) for each in amounts
        )
        of_rows, of_keys, of_pairs, of_diagonal, count = counts
        return Tasks(of_rows, of_keys, of_pairs, (count > 0).astype(np.float64), of_diagonal, count)

    queries, keys = (_rows_between(plan.workers, *each) for each in ([tasks], [first, second]))
    to_server = np.arange(plan.workers) >= ranks  # servers get their rows in exchanges apart
    moved = [each * received for received in (~to_server, to_server) for each in (queries, keys)]
    by_link = _by_link(moved, nodes)
    among_ranks, with_servers = RowsMoved(*by_link[:2]), RowsMoved(*by_link[2:])
    # Ranks that exchange rows, directly or over other ranks, get the lowest number of any of them.
    linked = (queries + keys)[:ranks, :ranks] > 0
    linked |= linked.T | np.eye(ranks, dtype=bool)
    lowest, before = np.arange(ranks), np.zeros(0, np.int64)
    while not np.array_equal(lowest, before):
        before, lowest = lowest, np.where(linked, lowest, ranks).min(axis=1)
        lowest = lowest[lowest]
    held = keys[:, :ranks]
    return CountedPlan(
        local=summed(in_place > 0, in_place, inside, diagonal),
        remote_kv=summed(here & (sent > 0), sent, every - inside, np.zeros_like(rows)),
        remote_query=summed(~here, sent, every, diagonal),
        among_ranks=among_ranks,
        with_servers=with_servers,
        row_bytes=RowBytes.of_kind(kind, bytes_per_value),
        stages=1
        if plan.stage_rows is None
        else max(-(-among_ranks.most_keys // plan.stage_rows), 1),
        most_rows=int(max(held.sum(axis=0).max(), held.sum(axis=1).max())),
        ranks=ranks,
        forwards=plan.nodes is not None,
        windowed=plan.window is not None,
        connected=lowest,
    )
