"""Balance core attention on a given layout: choose the rows that other workers compute.

Each pass has three steps:

1. Flows: how many pairs each worker gives to which other (`plan_flows`). Few large flows are
   cheapest, since bytes grow with the square root of the pairs moved.
2. Sources: each flow is taken from the documents where giving costs least (`Stock`).
3. Places: flows out of one task take rows side by side, where together they cost least
   (`balancing_pass`).

Rounding to whole rows leaves small differences, so passes are repeated until every worker is within
the tolerance.

Between nodes a byte takes about nine times as long as inside one. So nodes are balanced first, each
as if it were one worker; only the differences in their pairs cross the network. Then each node's
tasks go to its own workers. Rows stay on the rank that holds them if it is on the node; other rows
go to workers with room.
"""

from collections.abc import Sequence

import numpy as np

from hf_distca.plan import TASK, AttentionKind, Layout, Plan
from hf_distca.plan.arrays import FloatArray, IntArray, Table
from hf_distca.plan.cost import Workers, pairs, row_reaching
from hf_distca.plan.intervals import by_document, cut_at, joined, merged, moved_by
from hf_distca.planner.balancing_pass import Problem, balancing_pass
from hf_distca.planner.bin_packing import largest_first
from hf_distca.planner.layout import assemble, layout_of_kind
from hf_distca.planner.settings import PlanSettings

AIM = (0.96, 0.8, 0.6, 0.4, 0.2, 0.0)
"""Share of the tolerance that flows aim at, pass after pass; the rest is left for rounding to rows.
"""
NODES_SHARE = 0.5
"""Share of the tolerance for differences between nodes; the rest is for the workers of a node. Both
balances round to whole blocks, so both get half."""
LEAST_INSIDE = 0.25
"""Smallest share of the tolerance for the workers of a node, whatever the node's load. With less,
passes would chase what rounding to blocks leaves."""


def balance(
    layout: Layout,
    kind: AttentionKind,
    settings: PlanSettings,
    workers: Workers | None = None,
    nodes: Sequence[int] | None = None,
    groups: Sequence[int] | None = None,
    tolerance: FloatArray | None = None,
) -> Plan:
    """Choose tasks for one kind of layer so that all workers finish together.

    Few bytes are sent, in one stage.

    Args:
        workers: ranks, then remote workers, which hold no rows. None for the ranks alone, at the
            speeds of the settings.
        nodes: [workers] node of each worker, numbered in the order of the ranks. None for the nodes
            of the settings.
        groups: [workers] group of each worker, from 0 on, each of whole nodes; nothing moves
            between groups.
        tolerance: [workers] in place of balance_tolerance, equal within a group. If whole rows
            cannot reach it, the best plan found is returned. 0 is as fine as rows allow and takes
            several times as long.

    Raises:
        ValueError: settings out of range, fewer workers than ranks, or nodes that do not match the
            workers.
    """
    # 1. Defaults and checks.
    workers = workers or settings.workers(layout.tokens) or Workers.uniform(layout.ranks)
    nodes = settings.nodes if nodes is None else nodes
    if len(workers) < layout.ranks:
        raise ValueError(
            f"the layout has {layout.ranks} ranks, but only {len(workers)} workers are described; "
            "describe every rank, then the remote workers"
        )
    if tolerance is None:
        tolerance = np.full(len(workers), settings.finest_tolerance)
    # 2. Balance the tasks, over nodes first where links differ.
    layout = layout_of_kind(layout, kind)
    problem = Problem(layout, kind, settings, workers, tolerance)
    group = np.zeros(len(workers), np.int64) if groups is None else np.asarray(groups)
    if nodes is None:
        tasks = _passes(problem, problem.as_laid_out, group)
    else:
        _check_nodes(nodes, problem)
        node = np.asarray(nodes)
        over_nodes = Problem(
            _layout_on_nodes(layout, node),
            kind,
            settings,
            _nodes_as_workers(workers, node),
            tolerance[np.unique(node, return_index=True)[1]] * NODES_SHARE,
        )
        tasks = _nodes_then_workers(problem, over_nodes, node, group)
    return Plan(
        layout=layout,
        tasks=moved_by(tasks, -problem.origin),
        workers=len(workers),
        window=kind.window,
        nodes=None if nodes is None else tuple(nodes),
    )


def _check_nodes(nodes: Sequence[int], problem: Problem) -> None:
    """Raise ValueError unless every worker has a node, and nodes are numbered as ranks are."""
    ranks = problem.layout.ranks
    workers = len(problem.workers)
    node_of_rank = np.asarray(nodes)[:ranks]
    changes = np.diff(node_of_rank, prepend=node_of_rank[:1]) != 0
    ranks_are_ordered = np.array_equal(node_of_rank, np.cumsum(changes))
    node_numbers = np.unique(nodes)
    nodes_are_numbered = np.array_equal(node_numbers, np.arange(len(node_numbers)))
    if len(nodes) != workers or not ranks_are_ordered or not nodes_are_numbered:
        raise ValueError(
            f"nodes must have one number per worker, {workers} in all: 0, 1, 2, … in the "
            f"order of the {ranks} ranks, then the nodes of remote workers; got "
            f"{tuple(nodes)!r:.120}"
        )


def _nodes_then_workers(
    problem: Problem, over_nodes: Problem, node: IntArray, group: IntArray
) -> Table:
    """Balance nodes, then the workers of each node, and return the tasks.

    Args:
        over_nodes: the same problem with nodes in place of workers.
        node, group: [workers] node and group of each worker.
    """
    # 1. Each node is one worker, and the touching rows of its ranks are one segment.
    first_worker = np.unique(node, return_index=True)[1]
    tasks_of_nodes = _passes(over_nodes, over_nodes.as_laid_out, group[first_worker])
    # 2. The tasks of each node go to its workers.
    ideal = ideals_inside(problem.loads(problem.as_laid_out), problem.workers, group)
    limit = ideal * (1 + problem.tolerance)
    tasks = tasks_of_workers(tasks_of_nodes, problem, node, limit)
    return _passes(problem, tasks, node, limit)


def _layout_on_nodes(layout: Layout, node: IntArray) -> Layout:
    """Return the layout with nodes in place of ranks, from [workers] nodes."""
    segments = layout.segments.copy()
    segments["rank"] = node[segments["rank"]]
    count = int(node[: layout.ranks].max()) + 1
    return assemble(layout.lengths, segments, count, by_document=True)


def _nodes_as_workers(workers: Workers, node: IntArray) -> Workers:
    """Return one worker for each node, as fast as its workers together."""
    speed = np.bincount(node, workers.speed)
    base_pairs = np.bincount(node, np.asarray(workers.speed) * np.asarray(workers.base_load))
    return Workers(tuple(speed.tolist()), tuple((base_pairs / speed).tolist()))


def _passes(
    problem: Problem, tasks: Table, groups: IntArray, limit: FloatArray | None = None
) -> Table:
    """Repeat passes inside groups until all workers finish early enough.

    Args:
        limit: [workers] time by which they should finish; None for the tolerance above their
            group's ideal time.

    Returns:
        Tasks of the pass in which the latest worker finishes first, beside its limit.
    """
    ideal = ideals_inside(problem.loads(tasks), problem.workers, groups)
    limit = ideal * (1 + problem.tolerance) if limit is None else limit
    gives_nothing_until = np.maximum(limit, ideal * (1 + problem.tolerance * LEAST_INSIDE))
    has_limit = limit > 0

    def latest(tasks: Table) -> float:
        """Return when the latest worker finishes, as a multiple of its limit."""
        finishing = problem.workers.finishing(problem.loads(tasks))
        return float(np.max(finishing[has_limit] / limit[has_limit], initial=0.0))

    # A later pass may be worse than an earlier one, so the best tasks are kept.
    best_tasks = tasks
    earliest = latest(tasks)
    for share in AIM:
        if earliest <= 1 or not len(tasks):
            break
        aim = ideal + share * (gives_nothing_until - ideal)
        tasks = balancing_pass(problem, tasks, aim, gives_nothing_until, groups)
        finish = latest(tasks)
        if finish < earliest:
            best_tasks, earliest = tasks, finish
    return best_tasks


def ideals_inside(loads: IntArray, workers: Workers, nodes: IntArray) -> FloatArray:
    """Return [workers] when all workers of the same node would finish together.

    Args:
        loads, nodes: [workers] pairs and node of each worker.
    """
    if not any(workers.base_load):
        ideal_of_node = np.bincount(nodes, loads) / np.bincount(nodes, workers.speed)
        return np.asarray(ideal_of_node[nodes])
    # With base loads the ideal depends on which workers are late already.
    speeds, base_loads = np.asarray(workers.speed), np.asarray(workers.base_load)
    ideal = np.zeros(len(workers))
    for node in range(int(nodes.max()) + 1):
        members = np.flatnonzero(nodes == node)
        node_workers = Workers(tuple(speeds[members].tolist()), tuple(base_loads[members].tolist()))
        ideal[members] = node_workers.ideal(int(loads[members].sum()))
    return ideal


def tasks_of_workers(tasks: Table, problem: Problem, nodes: IntArray, limit: FloatArray) -> Table:
    """Give the tasks of nodes to workers of each node.

    Rows stay on the rank that holds them if it is on the node.

    Args:
        tasks: [tasks] of dtype TASK, with nodes in place of workers.
        nodes: [workers] node of each worker.
        limit: [workers] time by which each worker finishes if it can.
    """
    workers, window = problem.workers, problem.pair_window
    # 1. Leave rows on their ranks, if these are on the node that computes the rows.
    cut_tasks, holders = cut_at(tasks, by_document(problem.layout.segments))
    stays = nodes[holders["rank"]] == cut_tasks["worker"]
    moved_tasks = merged(cut_tasks.compress(~stays))
    cut_tasks["worker"] = holders["rank"]
    local_tasks = cut_tasks.compress(stays)
    # 2. Give other rows to the workers with the most room. The largest tasks come
    #    first, since they need the most room.
    time_left = limit - np.asarray(workers.base_load)
    room = time_left * np.asarray(workers.speed) - problem.loads(local_tasks)
    placed_tasks = []
    for index in largest_first(pairs(moved_tasks["start"], moved_tasks["stop"], window)).tolist():
        document, start, stop, node = moved_tasks[index].tolist()
        members = np.flatnonzero(nodes == node)
        while start < stop:
            worker = int(members[room[members].argmax()])
            cut = _cut_for_room(start, stop, float(room[worker]), problem)
            placed_tasks.append((document, start, cut, worker))
            room[worker] -= pairs(start, cut, window)
            start = cut
    return merged(joined(local_tasks, np.array(placed_tasks, TASK)))


def _cut_for_room(start: int, stop: int, room: float, problem: Problem) -> int:
    """Return up to which row a worker takes rows [start, stop) of a document.

    The worker takes as many pairs as it has room for, up to a block's boundary. It takes all rows
    if either side would be smaller than a block.
    """
    block, window = problem.block, problem.pair_window
    full = row_reaching(pairs(0, start, window) + max(room, 0.0), window)
    cut = int(full) // block * block
    return stop if cut < start + block or stop - cut < block else cut
