"""Tasks and exchanged rows of a plan in one layer, counted for all workers at once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import AttentionKind, Plan
from hf_distca.planner.cost import RowBytes, pairs
from hf_distca.planner.intervals import Intervals, by_document
from hf_distca.planner.metrics import bytes_of_rows, key_rows_by_link, query_rows_by_link, without_whole
from hf_distca.planner.seconds import Tasks

IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RowsMoved:
    """Rows that travel in one layer's forward.

    Arrays are [2, 2, workers]: by link (within a node, between nodes) and direction (sent, received).

    Attributes:
        queries: rows of Q; as many rows of O come back.
        keys: rows of K/V, forwarded rows included.
    """

    queries: IntArray
    keys: IntArray

    @property
    def most_keys(self) -> int:
        """K/V rows that the busiest worker sends or receives."""
        return int(self.keys.sum(axis=0).max(initial=0))

    @classmethod
    def none(cls, workers: int) -> "RowsMoved":
        """Return the count of a plan in which nothing moves."""
        return cls(np.zeros((2, 2, workers), np.int64), np.zeros((2, 2, workers), np.int64))

    @classmethod
    def of(cls, plan: Plan, nodes: Sequence[int]) -> "RowsMoved":
        """Count the rows of a plan."""
        return cls(query_rows_by_link(plan, nodes), key_rows_by_link(plan, nodes))


@dataclass(frozen=True, eq=False)
class CountedPlan:
    """Counts of a plan that a schedule needs: groups of tasks and rows that travel.

    Attributes:
        own: local tasks, whose queries and keys are the worker's own.
        prefix: remote-KV tasks: own queries on received keys.
        visiting: remote-query tasks: received queries on all of their keys.
        ranks: number of workers that hold rows; the workers after them are dedicated servers.
        passes_on: whether K/V rows are forwarded inside nodes.
    """

    own: Tasks
    prefix: Tasks
    visiting: Tasks
    among_ranks: RowsMoved
    with_servers: RowsMoved
    row_bytes: RowBytes
    stages: int
    ranks: int
    passes_on: bool
    windowed: bool

    @property
    def bytes_moved(self) -> IntArray:
        """[2, workers] bytes that each worker sends and receives in one layer's forward."""
        both = (self.among_ranks, self.with_servers)
        moved: IntArray = np.sum(
            [bytes_of_rows(rows.queries, rows.keys, self.row_bytes) for rows in both], axis=(0, 1)
        )
        return moved

    @property
    def servers(self) -> int:
        """Number of dedicated servers."""
        return len(self.own.rows) - self.ranks


def count_plan(
    plan: Plan, kind: AttentionKind, bytes_per_value: int, nodes: Sequence[int] | None = None
) -> CountedPlan:
    """Count a plan's tasks and rows.

    Args:
        nodes: [workers] node of each worker; None for the plan's nodes, or one node for all.
    """
    nodes = nodes or plan.nodes or (0,) * plan.workers
    ranks = plan.layout.ranks
    plan, whole = without_whole(plan)
    own, prefix, visiting = grouped_tasks(plan)
    rows = whole["stop"] - whole["start"]
    alone = _summed(whole["worker"], rows, rows, pairs(whole["start"], whole["stop"], plan.window), plan.workers)
    rows, keys, amount = own.rows + alone.rows, own.keys + alone.keys, own.pairs + alone.pairs
    own = Tasks(rows, keys, amount, (rows > 0).astype(np.float64))
    at_ranks = plan.tasks["worker"] < ranks
    if at_ranks.all():
        among_ranks, with_servers = RowsMoved.of(plan, nodes), RowsMoved.none(plan.workers)
    else:
        among_ranks, with_servers = (
            RowsMoved.of(replace(plan, tasks=plan.tasks[at]), nodes) for at in (at_ranks, ~at_ranks)
        )
    return CountedPlan(
        own,
        prefix,
        visiting,
        among_ranks,
        with_servers,
        RowBytes.of_kind(kind, bytes_per_value),
        stages_of(among_ranks, plan.stage_rows),
        ranks,
        plan.nodes is not None,
        plan.window is not None,
    )


def stages_of(moved: RowsMoved, stage_rows: int | None) -> int:
    """Return the number of stages in which K/V rows travel if every stage is full.

    Uneven stages may take one more.
    """
    return 1 if stage_rows is None else max(-(-moved.most_keys // stage_rows), 1)


def grouped_tasks(plan: Plan) -> tuple[Tasks, Tasks, Tasks]:
    """Return the local, remote-KV and remote-query tasks of each worker, as in `CountedPlan`."""
    segments = by_document(plan.layout.segments)
    pieces = Intervals.of(plan.tasks).overlaps(Intervals.of(segments))
    worker = plan.tasks["worker"][pieces.first]
    held = segments[pieces.second]
    start, stop = pieces.rows.start, pieces.rows.stop
    first = plan.first_key()[pieces.first]
    every = pairs(start, stop, plan.window)
    at_home = held["rank"] == worker
    inside = pairs(start - held["start"], stop - held["start"], plan.window)

    def summed(chosen: NDArray[np.bool_], keys: IntArray, amount: IntArray) -> Tasks:
        return _summed(worker[chosen], (stop - start)[chosen], keys[chosen], amount[chosen], plan.workers)

    begin = np.maximum(first, held["start"])
    own = summed(at_home, stop - begin, inside)
    prefix = summed(at_home & (first < held["start"]), np.maximum(held["start"] - first, 0), every - inside)
    return own, prefix, summed(~at_home, stop - first, every)


def _summed(worker: IntArray, rows: IntArray, keys: IntArray, amount: IntArray, workers: int) -> Tasks:
    """Sum tasks by worker; arrays are [tasks]."""
    totals = [np.bincount(worker, weights=values, minlength=workers) for values in (rows, keys, amount)]
    summed = [each.astype(np.float64) for each in totals]  # bincount returns integers if there are no tasks
    return Tasks(summed[0], summed[1], summed[2], (summed[0] > 0).astype(np.float64))
