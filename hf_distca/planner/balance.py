"""Balance core attention on a given layout: choose the rows that other workers compute.

Each pass has three steps:

1. Flows: how many pairs each worker gives to which other (`plan_flows`). Few large flows are
   cheapest, since bytes grow with the square root of the pairs moved.
2. Sources: each flow is taken from the documents where giving costs least (`take`).
3. Places: flows out of one stretch of a document lie side by side, where together they cost least
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
from hf_distca.plan.cost import Workers, pairs, row_reaching
from hf_distca.plan.intervals import (
    FloatArray,
    IntArray,
    Table,
    by_document,
    cut_at,
    joined,
    merged,
    moved_by,
)
from hf_distca.planner.balancing_pass import Problem, balancing_pass
from hf_distca.planner.layout import assemble, check_settings, layout_of_kind
from hf_distca.planner.settings import PlanSettings

AIM = (0.96, 0.8, 0.6, 0.4, 0.2, 0.0)
"""Share of the tolerance that flows aim at, pass after pass; the rest is left for rounding to rows.
"""
NODES_SHARE = 0.5
"""Share of the tolerance for differences between nodes; the rest is for the workers of a node."""
LEAST_INSIDE = 0.25
"""Smallest share of the tolerance for the workers of a node, whatever the node's load."""


def balance(
    layout: Layout,
    kind: AttentionKind,
    settings: PlanSettings,
    workers: Workers | None = None,
    nodes: Sequence[int] | None = None,
    groups: Sequence[int] | None = None,
    tolerance: FloatArray | None = None,
) -> Plan:
    """Choose tasks for one kind of layer so that all workers finish together, with few bytes sent, in one stage.

    Args:
        workers: ranks, then workers that hold no rows. None for the ranks alone, at the speeds of
            the settings.
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
    workers = workers or settings.workers(layout.tokens) or Workers.uniform(layout.ranks)
    nodes = settings.nodes if nodes is None else nodes
    if len(workers) < layout.ranks:
        raise ValueError(
            f"the layout has {layout.ranks} ranks, but only {len(workers)} workers are described; "
            "describe every rank, then the dedicated servers"
        )
    if tolerance is None:
        tolerance = np.full(len(workers), settings.balance_tolerance)
    check_settings(float(tolerance.min()), settings.balance_block_size)
    layout = layout_of_kind(layout, kind)
    problem = Problem(layout, kind, settings, workers, tolerance)
    group = np.zeros(len(workers), np.int64) if groups is None else np.asarray(groups)
    if nodes is None:
        tasks = _passes(problem, problem.as_laid_out, group)
    else:
        node = np.asarray(nodes)
        of_ranks, named = node[: layout.ranks], np.unique(node)
        in_order = np.array_equal(of_ranks, np.cumsum(np.diff(of_ranks, prepend=of_ranks[:1]) != 0))
        if (
            len(node) != len(workers)
            or not in_order
            or not np.array_equal(named, np.arange(len(named)))
        ):
            raise ValueError(
                f"nodes must have one number per worker, {len(workers)} in all: 0, 1, 2, … in the "
                f"order of the {layout.ranks} ranks, then the nodes of dedicated servers; got "
                f"{tuple(nodes)!r:.120}"
            )
        first = np.unique(node, return_index=True)[1]
        # 1. Each node is one worker, and the touching rows of its ranks are one segment.
        segments = layout.segments.copy()
        segments["rank"] = node[segments["rank"]]
        on_nodes = assemble(
            layout.lengths, segments, int(node[: layout.ranks].max()) + 1, by_document=True
        )
        speed = np.bincount(node, workers.speed)
        busy = np.bincount(node, np.asarray(workers.speed) * np.asarray(workers.base_load))
        as_workers = Workers(tuple(speed.tolist()), tuple((busy / speed).tolist()))
        over_nodes = Problem(on_nodes, kind, settings, as_workers, tolerance[first] * NODES_SHARE)
        of_nodes = _passes(over_nodes, over_nodes.as_laid_out, group[first])
        # 2. The tasks of each node go to its workers.
        enough = ideals_inside(problem.loads(problem.as_laid_out), workers, group) * (1 + tolerance)
        tasks = _passes(problem, tasks_of_workers(of_nodes, problem, node, enough), node, enough)
    tasks = moved_by(tasks, -problem.origin)
    return Plan(
        layout, tasks, len(workers), kind.window, nodes=None if nodes is None else tuple(nodes)
    )


def _passes(
    problem: Problem, tasks: Table, groups: IntArray, enough: FloatArray | None = None
) -> Table:
    """Repeat passes inside groups until all workers finish early enough, and return the best pass's tasks.

    Args:
        enough: [workers] time by which they should finish; None for the tolerance above their
            group's ideal time.
    """
    ideal = ideals_inside(problem.loads(tasks), problem.workers, groups)
    enough = ideal * (1 + problem.tolerance) if enough is None else enough
    limits = np.maximum(enough, ideal * (1 + problem.tolerance * LEAST_INSIDE))

    def latest(tasks: Table) -> float:
        finishing = problem.workers.finishing(problem.loads(tasks))
        return float(np.max(finishing[enough > 0] / enough[enough > 0], initial=0.0))

    best, least = tasks, latest(tasks)
    for share in AIM:
        if least <= 1 or not len(tasks):
            break
        tasks = balancing_pass(problem, tasks, ideal + share * (limits - ideal), limits, groups)
        finish = latest(tasks)
        if finish < least:
            best, least = tasks, finish
    return best


def ideals_inside(loads: IntArray, workers: Workers, nodes: IntArray) -> FloatArray:
    """Return [workers] when all workers of the same node would finish together, for [workers] loads and nodes."""
    if not any(workers.base_load):
        return np.asarray((np.bincount(nodes, loads) / np.bincount(nodes, workers.speed))[nodes])
    ideal = np.zeros(len(workers))
    for number in range(int(nodes.max()) + 1):
        here = np.flatnonzero(nodes == number)
        own = Workers(
            *(
                tuple(np.asarray(of_all)[here].tolist())
                for of_all in (workers.speed, workers.base_load)
            )
        )
        ideal[here] = own.ideal(int(loads[here].sum()))
    return ideal


def tasks_of_workers(tasks: Table, problem: Problem, nodes: IntArray, limit: FloatArray) -> Table:
    """Give the tasks of nodes to workers of each node, so that worker w finishes by limit[w] if it can."""
    workers, window, block = problem.workers, problem.pair_window, problem.block
    given, held = cut_at(tasks, by_document(problem.layout.segments))
    stays = nodes[held["rank"]] == given["worker"]
    moved = merged(given.compress(~stays))
    given["worker"] = held["rank"]
    given = given.compress(stays)
    room = (limit - np.asarray(workers.base_load)) * np.asarray(workers.speed) - problem.loads(
        given
    )
    # The largest pieces of documents come first, since they need the most room.
    placed = []
    for index in np.argsort(-pairs(moved["start"], moved["stop"], window), kind="stable").tolist():
        document, start, stop, node = moved[index].tolist()
        members = np.flatnonzero(nodes == node)
        while start < stop:
            worker = int(members[room[members].argmax()])
            # Cut at a block's boundary, if both sides keep a block.
            cut = (
                int(row_reaching(pairs(0, start, window) + max(float(room[worker]), 0.0), window))
                // block
                * block
            )
            cut = stop if cut < start + block or stop - cut < block else cut
            placed.append((document, start, cut, worker))
            room[worker] -= pairs(start, cut, window)
            start = cut
    return merged(joined(given, np.array(placed, TASK)))
