"""Balancing core attention on a given layout: which rows to compute elsewhere, and where.

Rows move in few and cheap tasks:

1. Flows: who gives how many pairs to whom (`plan_flows`). Few and large ones, since bytes grow like the
   square root of the pairs moved.
2. Sources: a flow is taken from the documents where it costs least (`Source.take`).
3. Places: the flows out of one stretch of a document lie side by side in it, at the place where all of
   them together cost least (`BalancingPass`).

Rounding to whole rows leaves small differences; the three steps are repeated on the result until every
worker is within the tolerance.

Where links between nodes are slower than inside them all this is done twice: for nodes, and inside each of them
(two_levels.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import Layout, Plan
from hf_distca.planner.balancing_pass import BalancingPass, Goal, Prices
from hf_distca.planner.cost import BALANCE_TOLERANCE, RowBytes, Workers
from hf_distca.planner.layout import check_settings
from hf_distca.planner.shifted import ShiftedRows
from hf_distca.planner.two_levels import (
    check_nodes,
    ideals_inside,
    layout_of_nodes,
    tasks_of_workers,
    workers_of_nodes,
)

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

AIM = (0.96, 0.8, 0.6, 0.4, 0.2, 0.0)
"""Flows aim at this share of the tolerance, pass after pass; rounding to rows has the rest."""
NODES_SHARE = 0.5
"""Share of the tolerance by which nodes may differ; the rest is for the workers of a node."""
LEAST_INSIDE = 0.25
"""Share of the tolerance that workers of a node have in any case, however much the node has to do."""


def balance(
    layout: Layout,
    *,
    workers: Workers | None = None,
    nodes: Sequence[int] | None = None,
    groups: Sequence[int] | None = None,
    window: int | None = None,
    balance_tolerance: float | FloatArray = BALANCE_TOLERANCE,
    balance_block_size: int = 128,
    row_bytes: RowBytes | None = None,
    row_overhead: int = 0,
    gather_cost: float = 0.0,
) -> Plan:
    """Choose tasks so that all workers finish together, for few bytes.

    Args:
        layout: where the rows are; they stay there.
        workers: speeds and base loads; worker r < layout.ranks is rank r, further ones hold no rows. None for
            the ranks alone, all equal.
        nodes: [workers] the node of each worker, those of ranks numbered in their order; None: all links are alike.
        groups: [workers] the group of each worker, numbered from 0 on, each of whole nodes; nothing moves between
            groups. None: all workers are one group.
        window: width of the sliding window; None for full causal attention.
        balance_tolerance: how far above its group's ideal finishing time the last worker may finish, measured on the
            plan returned, as a fraction of that time; or [workers], the same for all of a group. Where whole rows
            cannot reach it, the best found: 0 is as fine as they allow, and takes several times as long.
        balance_block_size: rows of a kernel block. Cuts fall on its multiples, except where a document or segment
            ends or where the balance needs finer ones.
        row_bytes: bytes of the rows; None for RowBytes().
        row_overhead: what a query row costs besides its pairs, in pairs; counted in whole blocks. What is balanced
            is then pairs + rows · row_overhead.
        gather_cost: what a byte of K and V costs that is gathered on the rank itself because a task is left on either
            side of one that moves, compared with a byte sent.

    Raises:
        ValueError: settings out of range, fewer workers than ranks, or nodes of other workers.
    """
    check_settings(float(np.min(balance_tolerance)), balance_block_size, window)
    workers = workers or Workers.uniform(layout.ranks)
    if len(workers) < layout.ranks:
        raise ValueError(
            f"the layout has {layout.ranks} ranks, but only {len(workers)} workers are described; describe every "
            "rank, then the dedicated servers"
        )
    rows = ShiftedRows.of(layout, window, row_overhead, balance_block_size)
    prices = Prices.of(row_bytes or RowBytes(), rows, gather_cost)
    tolerance = np.broadcast_to(np.asarray(balance_tolerance, np.float64), len(workers))
    group_of = np.zeros(len(workers), np.int64) if groups is None else np.asarray(groups)
    search = _Search(rows, workers, prices, tolerance, balance_block_size, group_of)
    if nodes is None:
        return rows.plan(search.over_all(), len(workers))
    check_nodes(nodes, layout.ranks, len(workers))
    first = np.unique(np.asarray(nodes), return_index=True)[1]
    over_nodes = replace(
        search,
        rows=ShiftedRows.of(layout_of_nodes(layout, nodes), window, row_overhead, balance_block_size),
        workers=workers_of_nodes(workers, nodes),
        tolerance=tolerance[first] * NODES_SHARE,
        groups=group_of[first],
    )
    tasks = search.inside(over_nodes.over_all(), nodes)
    return replace(rows.plan(tasks, len(workers)), nodes=tuple(nodes))


@dataclass(frozen=True, eq=False)
class _Search:
    """Looks for tasks.

    Attributes:
        rows: where the rows are.
        workers: speeds and base loads.
        prices: what giving costs.
        tolerance: [workers] how far above its group's ideal a worker may finish, as a fraction of it.
        block: rows of a kernel block.
        groups: [workers] the group of each worker.
    """

    rows: ShiftedRows
    workers: Workers
    prices: Prices
    tolerance: FloatArray
    block: int
    groups: NDArray[np.int64]

    def over_all(self) -> NDArray[np.void]:
        """Tasks for which anybody gives to anybody of a group."""
        tasks = self.rows.tasks_as_laid_out()
        ideal = ideals_inside(self._loads(tasks), self.workers, self.groups)
        limits = ideal * (1 + self.tolerance)
        return self._passes(tasks, ideal, limits, limits, self.groups)

    def inside(self, of_nodes: NDArray[np.void], nodes: Sequence[int]) -> NDArray[np.void]:
        """Tasks of nodes, given to the workers of each; none leaves its node.

        Args:
            of_nodes: [tasks] of dtype TASK, whose workers are nodes.
            nodes: [workers] the node of each worker.
        """
        as_laid_out = self._loads(self.rows.tasks_as_laid_out())
        limits = ideals_inside(as_laid_out, self.workers, self.groups) * (1 + self.tolerance)
        tasks = tasks_of_workers(of_nodes, self.rows, self.workers, nodes, limits, self.block)
        ideal = ideals_inside(self._loads(tasks), self.workers, nodes)
        least = ideal * (1 + self.tolerance * LEAST_INSIDE)
        return self._passes(tasks, ideal, np.maximum(limits, least), limits, np.asarray(nodes))

    def _passes(
        self, tasks: NDArray[np.void], ideal: FloatArray, limits: FloatArray, enough: FloatArray, groups: IntArray
    ) -> NDArray[np.void]:
        """The tasks of the best of some passes, one after another until all workers finish in time.

        Args:
            tasks: [tasks] of dtype TASK.
            ideal: [workers] when the workers of each one's group would finish together.
            limits: [workers] until when none need give anything.
            enough: [workers] when all have to be done.
            groups: [workers] what nothing leaves.
        """
        best, latest = tasks, self._latest(tasks, enough)
        for share in AIM:
            if latest <= 1 or not len(tasks):
                break
            goal = Goal(ideal + share * (limits - ideal), limits, self.tolerance)
            tasks = BalancingPass(tasks, self.rows, self.workers, self.prices, goal, self.block, groups).run()
            finish = self._latest(tasks, enough)
            if finish < latest:
                best, latest = tasks, finish
        return best

    def _loads(self, tasks: NDArray[np.void]) -> NDArray[np.int64]:
        return self.rows.loads(tasks, len(self.workers))

    def _latest(self, tasks: NDArray[np.void], limits: FloatArray) -> float:
        """When the last worker is done, in parts of its limit."""
        finishing = self.workers.finishing(self._loads(tasks))
        return float(np.max(finishing[limits > 0] / limits[limits > 0], initial=0.0))
