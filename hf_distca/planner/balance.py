"""Balance core attention on a given layout: choose the rows that other workers compute.

Each pass has three steps:

1. Flows: how many pairs each worker gives to which other (`plan_flows`). Few large flows are cheapest, since bytes
   grow with the square root of the pairs moved.
2. Sources: each flow is taken from the documents where giving costs least (`Source.take`).
3. Places: flows out of one stretch of a document lie side by side, where together they cost least (`BalancingPass`).

Rounding to whole rows leaves small differences, so passes are repeated until every worker is within the tolerance.

Between nodes a byte takes about nine times as long as inside one. So nodes are balanced first, each as if it were one
worker; only the differences in their pairs cross the network. Then each node's tasks go to its own workers. Rows stay
on the rank that holds them if it is on the node; other rows go to workers with room.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import SEGMENT, TASK, Layout, Plan
from hf_distca.planner.balancing_pass import BalancingPass, Goal, Prices
from hf_distca.planner.cost import BALANCE_TOLERANCE, RowBytes, Workers, pairs, row_reaching
from hf_distca.planner.intervals import Intervals, by_document, merge_touching
from hf_distca.planner.layout import check_settings
from hf_distca.planner.shifted import ShiftedRows, merged

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

AIM = (0.96, 0.8, 0.6, 0.4, 0.2, 0.0)
"""Share of the tolerance that flows aim at, pass after pass; the rest is left for rounding to rows."""
NODES_SHARE = 0.5
"""Share of the tolerance for differences between nodes; the rest is for the workers of a node."""
LEAST_INSIDE = 0.25
"""Smallest share of the tolerance for the workers of a node, whatever the node's load."""


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
    """Choose tasks so that all workers finish together, with few bytes sent.

    Args:
        workers: worker r < layout.ranks is rank r; further ones hold no rows. None for the ranks alone, all equal.
        nodes: [workers] node of each worker, numbered in the order of the ranks. None if all links are alike.
        groups: [workers] group of each worker, from 0 on, each of whole nodes; nothing moves between groups. None for
            one group.
        balance_tolerance: how far above its group's ideal finishing time the last worker may finish, as a fraction of
            that time; or [workers], equal within a group. If whole rows cannot reach it, the best plan found is
            returned. 0 is as fine as rows allow and takes several times as long.
        balance_block_size: rows of a kernel block. Cuts fall on its multiples, except at the end of a document or
            segment or where the balance needs finer cuts.
        row_overhead: cost of a query row besides its pairs, in pairs, rounded to whole blocks.
        gather_cost: cost of gathering a byte of K and V on the rank itself, in bytes sent. A task that is cut in its
            middle leaves two rests, and the second one gathers.

    Raises:
        ValueError: settings out of range, fewer workers than ranks, or nodes that do not match the workers.
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
    """Search for balanced tasks.

    Attributes:
        tolerance: [workers] how far above its group's ideal a worker may finish, as a fraction of the ideal.
        block: rows of a kernel block.
        groups: [workers] group of each worker.
    """

    rows: ShiftedRows
    workers: Workers
    prices: Prices
    tolerance: FloatArray
    block: int
    groups: NDArray[np.int64]

    def over_all(self) -> NDArray[np.void]:
        """Return tasks for which any worker may give to any other of its group."""
        tasks = self.rows.tasks_as_laid_out()
        ideal = ideals_inside(self._loads(tasks), self.workers, self.groups)
        limits = ideal * (1 + self.tolerance)
        return self._passes(tasks, ideal, limits, limits, self.groups)

    def inside(self, of_nodes: NDArray[np.void], nodes: Sequence[int]) -> NDArray[np.void]:
        """Give the tasks of each node to workers of that node.

        Args:
            of_nodes: [tasks] of dtype TASK, whose workers are nodes.
            nodes: [workers] node of each worker.
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
        """Repeat passes until all workers finish in time, and return the best pass's tasks.

        Args:
            tasks: [tasks] of dtype TASK.
            ideal: [workers] time at which all workers of the same group would finish together.
            limits: [workers] a worker that finishes by this time gives nothing.
            enough: [workers] time by which each worker has to finish.
            groups: [workers] groups between which nothing moves.
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
        """Return the largest ratio of a worker's finishing time to its limit."""
        finishing = self.workers.finishing(self._loads(tasks))
        return float(np.max(finishing[limits > 0] / limits[limits > 0], initial=0.0))


def check_nodes(nodes: Sequence[int], ranks: int, workers: int) -> None:
    """Raise ValueError unless nodes of workers are numbered so that nodes of ranks are the first ones, in order."""
    of_ranks = np.asarray(nodes[:ranks])
    steps = np.diff(of_ranks, prepend=0)
    named = np.unique(np.asarray(nodes))
    in_order = len(of_ranks) and of_ranks[0] == 0 and bool(np.all((steps == 0) | (steps == 1)))
    if len(nodes) != workers or not in_order or not np.array_equal(named, np.arange(len(named))):
        raise ValueError(
            f"nodes must have one number per worker, {workers} in all: 0, 1, 2, … in the order of the {ranks} ranks, "
            f"then the nodes of dedicated servers; got {tuple(nodes)!r:.120}"
        )


def layout_of_nodes(layout: Layout, nodes: Sequence[int]) -> Layout:
    """Return the layout with nodes in place of ranks; touching rows of a node are one segment.

    Args:
        nodes: [workers] node of each worker; ranks are on nodes 0, 1, 2, … in order.
    """
    segments = layout.segments.copy()
    segments["rank"] = np.asarray(nodes)[segments["rank"]]
    order = np.lexsort((segments["start"], segments["document"], segments["rank"]))
    segments = merge_touching(segments[order], "rank")
    rows = segments["stop"] - segments["start"]
    before = np.cumsum(rows) - rows
    segments["offset"] = before - before[np.searchsorted(segments["rank"], segments["rank"])] if len(rows) else before
    return Layout(layout.lengths, segments.astype(SEGMENT), max(nodes[: layout.ranks]) + 1)


def workers_of_nodes(workers: Workers, nodes: Sequence[int]) -> Workers:
    """Return nodes as workers, with the summed speed and the mean base load, weighted by speed, of their workers."""
    count = max(nodes) + 1
    speed = np.bincount(nodes, weights=workers.speed, minlength=count)
    busy = np.bincount(nodes, weights=np.asarray(workers.speed) * np.asarray(workers.base_load), minlength=count)
    return Workers(tuple(speed.tolist()), tuple((busy / speed).tolist()))


def ideals_inside(
    loads: NDArray[np.int64], workers: Workers, nodes: Sequence[int] | NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return [workers] when all workers of the same node would finish together.

    Args:
        loads: [workers] pairs of each worker.
        nodes: [workers] node of each worker.
    """
    if not any(workers.base_load):
        node = np.asarray(nodes)
        even: NDArray[np.float64] = (np.bincount(node, loads) / np.bincount(node, workers.speed))[node]
        return even
    ideal = np.zeros(len(workers))
    for number in range(max(nodes) + 1):
        here = np.flatnonzero(np.asarray(nodes) == number)
        own = Workers(*(tuple(np.asarray(of_all)[here].tolist()) for of_all in (workers.speed, workers.base_load)))
        ideal[here] = own.ideal(int(loads[here].sum()))
    return ideal


def tasks_of_workers(
    tasks: NDArray[np.void],
    rows: ShiftedRows,
    workers: Workers,
    nodes: Sequence[int],
    limit: NDArray[np.float64],
    block: int,
) -> NDArray[np.void]:
    """Give the tasks of each node to workers of that node.

    Args:
        tasks: [tasks] of dtype TASK, whose workers are nodes, in the view of `rows`.
        nodes: [workers] node of each worker.
        limit: [workers] when each worker may finish.
        block: rows of a kernel block.

    Returns:
        Tasks of the same rows, sorted and merged.
    """
    node = np.asarray(nodes)
    segments = by_document(rows.segments)
    found = Intervals.of(tasks).overlaps(Intervals.of(segments))
    holder, of_node = segments["rank"][found.second], tasks["worker"][found.first]
    given = np.zeros(len(holder), TASK)
    given["document"], given["start"], given["stop"] = found.rows.document, found.rows.start, found.rows.stop
    given["worker"] = holder
    moves = node[holder] != of_node
    loads = rows.loads(given[~moves], len(workers))
    room = ((limit - np.asarray(workers.base_load)) * np.asarray(workers.speed) - loads).tolist()
    members = [np.flatnonzero(node == number).tolist() for number in range(int(node.max()) + 1)]
    # The largest pieces of documents come first, since they need the most room.
    moved = given[moves]
    moved["worker"] = of_node[moves]
    moved = merged(moved)
    cost = pairs(moved["start"], moved["stop"], rows.pair_window)
    placed = []
    for index in np.argsort(-cost, kind="stable").tolist():
        doc, start, stop, at = moved[index].tolist()
        while start < stop:
            worker = max(members[at], key=lambda one: (room[one], -one))
            cut = _last_row(start, stop, room[worker], rows.pair_window, block)
            placed.append((doc, start, cut, worker))
            room[worker] -= pairs(start, cut, rows.pair_window)
            start = cut
    return merged(np.concatenate([given[~moves], np.array(placed, TASK)]))


def _last_row(start: int, stop: int, room: float, window: int | None, block: int) -> int:
    """Return where to cut a task so that its beginning fits into `room`: a block's boundary, or the task's end."""
    cut = int(row_reaching(pairs(0, start, window) + max(room, 0.0), window)) // block * block
    return stop if cut < start + block or stop - cut < block else cut
