"""Counts of a plan that its prediction needs: tasks of each group, and rows that travel."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import AttentionKind, Plan
from hf_distca.plan.cost import RowBytes, pairs
from hf_distca.plan.intervals import IntArray, row_counts
from hf_distca.plan.metrics import RowsMoved, rows_between, rows_by_link
from hf_distca.plan.moves import rows_to_move
from hf_distca.predict.seconds import DIAGONAL_ROWS, Tasks


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

    queries, keys = (rows_between(plan.workers, *each) for each in ([tasks], [first, second]))
    to_server = np.arange(plan.workers) >= ranks  # servers get their rows in exchanges apart
    moved = [each * received for received in (~to_server, to_server) for each in (queries, keys)]
    by_link = rows_by_link(moved, nodes)
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
