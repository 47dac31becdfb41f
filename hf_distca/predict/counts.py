"""Counts of a plan that its prediction needs: tasks of each kernel call, and rows that travel."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

import numpy as np

from hf_distca.plan import AttentionKind, NanoBatch, Plan
from hf_distca.plan.arrays import BoolArray, FloatArray, IntArray, Table
from hf_distca.plan.cost import RowBytes, pairs
from hf_distca.plan.figures import RowsBetween, RowsMoved, rows_between
from hf_distca.plan.intervals import row_counts
from hf_distca.plan.moves import held_pairs, rows_to_move
from hf_distca.predict.seconds import DIAGONAL_ROWS, Tasks


@dataclass(frozen=True, eq=False)
class Connected:
    """Sets of ranks that exchange rows, directly or over other ranks."""

    lowest: IntArray  # [ranks] lowest rank of the set of each rank

    @classmethod
    def by(cls, rows: Sequence[RowsBetween], ranks: int) -> "Connected":
        """Return the sets of ranks that rows connect."""
        source = np.concatenate([between.source for between in rows])
        target = np.concatenate([between.target for between in rows])
        lowest = np.arange(ranks)
        previous = np.zeros(0, np.int64)
        while not np.array_equal(lowest, previous):
            previous = lowest.copy()
            # The lowest number of any partner, and then the lowest that this rank knows itself.
            np.minimum.at(lowest, source, previous[target])
            np.minimum.at(lowest, target, previous[source])
            lowest = lowest[lowest]
        return cls(lowest)

    @cached_property
    def _sets(self) -> tuple[IntArray, IntArray, IntArray]:
        """Ranks set after set, [sets] position of each set in this order, and [ranks] their set."""
        _, set_of_rank, sizes = np.unique(self.lowest, return_inverse=True, return_counts=True)
        return np.argsort(set_of_rank, kind="stable"), np.cumsum(sizes) - sizes, set_of_rank

    @property
    def are_one(self) -> bool:
        """Whether all ranks are connected."""
        return len(self._sets[1]) == 1

    def latest(self, seconds: FloatArray) -> FloatArray:
        """Return the latest of [ranks] times in the set of each rank."""
        order, starts, set_of_rank = self._sets
        return np.asarray(np.maximum.reduceat(seconds[order], starts)[set_of_rank])


@dataclass(frozen=True, eq=False)
class CountedPlan:
    """Counts of a plan that a schedule needs: tasks of kernel calls, and rows that travel."""

    local: Tasks  # tasks whose queries and keys are the worker's own
    remote_kv: Tasks  # tasks of local queries on received keys
    remote_query: Tasks  # tasks of received queries on all of their keys
    among_ranks: RowsMoved
    with_remote: RowsMoved
    row_bytes: RowBytes
    stages: int
    # K/V rows that the busiest rank sends, or receives, with rows that it gathers for itself.
    most_rows: int
    ranks: int  # workers that hold rows; remote workers come after them
    forwards: bool  # whether K/V rows are forwarded inside nodes
    windowed: bool
    connected: Connected

    @property
    def forward_bytes(self) -> IntArray:
        """[2, 2, workers] bytes of one layer's forward, as in `bytes_by_link`."""
        among_ranks = self.among_ranks.forward_bytes(self.row_bytes)
        return among_ranks + self.with_remote.forward_bytes(self.row_bytes)

    @property
    def remote_workers(self) -> int:
        """Number of workers that hold no rows."""
        return len(self.local.rows) - self.ranks


def count_plan(
    plan: Plan, kind: AttentionKind, bytes_per_value: int, nodes: Sequence[int] | None = None
) -> CountedPlan:
    """Count a plan's tasks and rows.

    If K/V rows travel in stages, every stage is taken to be full; uneven stages may take one more.

    Args:
        nodes: [workers] node of each worker; None for the plan's nodes, or for one node of all.
    """
    nodes = nodes or plan.nodes or (0,) * plan.workers
    ranks = plan.layout.ranks
    tasks, first_hop, forwards = rows_to_move(replace(plan, stage_rows=None))

    # Rows that travel. Remote workers get theirs apart from exchanges.
    queries = rows_between(plan.workers, tasks)
    keys = rows_between(plan.workers, first_hop, forwards)
    is_rank = np.arange(plan.workers) < ranks
    queries_of_ranks, keys_of_ranks = queries.to(is_rank), keys.to(is_rank)
    among_ranks = RowsMoved(queries_of_ranks.by_link(nodes), keys_of_ranks.by_link(nodes))
    with_remote = RowsMoved(queries.to(~is_rank).by_link(nodes), keys.to(~is_rank).by_link(nodes))
    stages = 1
    if plan.stage_rows is not None:
        stages = max(ceil(among_ranks.most_keys / plan.stage_rows), 1)

    local, remote_kv, remote_query = _groups_of_tasks(tasks, plan)
    sent_keys, received_keys = (
        np.bincount(end, keys_of_ranks.rows, ranks) for end in keys_of_ranks[:2]
    )
    return CountedPlan(
        local=local,
        remote_kv=remote_kv,
        remote_query=remote_query,
        among_ranks=among_ranks,
        with_remote=with_remote,
        row_bytes=RowBytes.of_kind(kind, bytes_per_value),
        stages=stages,
        most_rows=int(max(received_keys.max(), sent_keys.max())),
        ranks=ranks,
        forwards=plan.nodes is not None,
        windowed=plan.window is not None,
        connected=Connected.by([queries_of_ranks, keys_of_ranks], ranks),
    )


def count_nano_batches(
    nano_batches: Sequence[NanoBatch], bytes_per_value: int, nodes: Sequence[int]
) -> list[dict[AttentionKind, CountedPlan]]:
    """Count the plans of a micro-batch: of each nano-batch, one for each kind of attention.

    Args:
        nodes: [workers] node of each worker.
    """
    counts = []
    for nano_batch in nano_batches:
        counts_of_kinds = {
            kind: count_plan(plan, kind, bytes_per_value, nodes)
            for kind, plan in nano_batch.plans.items()
        }
        counts.append(counts_of_kinds)
    return counts


def _groups_of_tasks(tasks: Table, plan: Plan) -> tuple[Tasks, Tasks, Tasks]:
    """Return the counts of local, remote-KV and remote-query tasks of all workers.

    Args:
        tasks: of `rows_to_move`. Rows [start, stop) have their queries on `source` and are computed
            on `target`. Of their K/V rows, those up to `keys_stop` are received, others are held.
    """
    rows = row_counts(tasks)
    has_own_queries = tasks["source"] == tasks["target"]
    received_keys = tasks["keys_stop"] - tasks["keys_start"]
    held_keys = tasks["stop"] - tasks["keys_stop"]
    all_pairs = pairs(tasks["start"], tasks["stop"], plan.window)
    local_pairs = held_pairs(tasks, plan.window)
    diagonal = rows * np.minimum(rows, DIAGONAL_ROWS)

    def sums_over(
        chosen: BoolArray, keys: IntArray, pair_count: IntArray, diagonal_rows: IntArray
    ) -> Tasks:
        """Return [workers] sums over the chosen tasks."""
        numbers = np.flatnonzero(chosen)
        target = tasks["target"][numbers]

        def total(amount: IntArray) -> FloatArray:
            return np.asarray(np.bincount(target, amount[numbers], plan.workers), np.float64)

        count = total(np.ones_like(rows))
        return Tasks(
            rows=total(rows),
            keys=total(keys),
            pairs=total(pair_count),
            calls=(count > 0).astype(np.float64),
            diagonal=total(diagonal_rows),
            tasks=count,
        )

    local = sums_over(held_keys > 0, held_keys, local_pairs, diagonal)
    # The diagonal of remote-KV tasks is computed with their held keys.
    remote_kv = sums_over(
        has_own_queries & (received_keys > 0),
        received_keys,
        all_pairs - local_pairs,
        np.zeros_like(rows),
    )
    remote_query = sums_over(~has_own_queries, received_keys, all_pairs, diagonal)
    return local, remote_kv, remote_query
