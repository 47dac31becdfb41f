"""Plans with dedicated servers, and plans for the tasks of lost servers.

The ranks hold the rows, so they compute the tasks of a lost server within the micro-batch. Each
task goes to the ranks that hold its rows, or the tasks are balanced over the ranks again, whichever
finishes sooner. Ranks have finished their local tasks by then. The remaining servers take no part:
they would need the plan first.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from hf_distca.plan import AttentionKind, MicroBatchPlan, Plan
from hf_distca.plan.cost import Workers, pairs
from hf_distca.plan.intervals import by_document, cut_at, merged, moved_by
from hf_distca.plan.metrics import (
    RowsMoved,
    bytes_by_link,
    exchange_figures,
    link_seconds,
    loads_of,
)
from hf_distca.plan.stages import usual_stages, with_stages
from hf_distca.planner.balance import balance, ideals_inside
from hf_distca.planner.balancing_pass import Problem, balancing_pass
from hf_distca.planner.settings import PlanSettings

IDLE = 1e-9
"""Speed of a rank that should compute no core attention."""


def plan_with_servers(
    plan: MicroBatchPlan,
    workers: Workers,
    settings: PlanSettings,
    *,
    ranks_serve: bool,
    server_nodes: Sequence[int | None] | None = None,
) -> MicroBatchPlan:
    """Plan tasks on the layouts of a plan so that ranks and servers finish together.

    Args:
        workers: the ranks, then at least one server. A rank's base load is its work besides core
            attention while servers compute a nano-batch.
        ranks_serve: whether ranks compute core attention too; otherwise servers compute all of it.
        server_nodes: [servers] node of each server, None for a node of its own. Ignored if all
            links are alike.

    Raises:
        ValueError: there is no server, or settings are out of range.
    """
    ranks, servers = settings.ranks, len(workers) - settings.ranks
    if servers < 1:
        raise ValueError(
            f"{len(workers)} workers for {ranks} ranks leave no server; describe at least one "
            "worker more than there are ranks"
        )
    computing = (
        workers
        if ranks_serve
        else Workers((IDLE,) * ranks + workers.speed[ranks:], (0.0,) * len(workers))
    )
    nodes = None if settings.nodes is None else list(settings.nodes)
    if nodes is not None:
        for node in server_nodes or [None] * servers:
            nodes.append(max(nodes) + 1 if node is None else node)
    stages = usual_stages(len(plan.nano_batches))
    nano_batches = []
    for nano in plan.nano_batches:
        plans = {}
        for kind in nano.plans:
            of_kind = balance(nano.layout, kind, settings, computing, nodes)
            of_kind = of_kind if ranks_serve else without_ranks(of_kind, workers.speed)
            plans[kind] = with_stages(of_kind, settings.buffer_rows(kind), stages=stages)
        nano_batches.append(replace(nano, plans=plans))
    kind = settings.dominant_kind
    dominant = [nano.plans[kind] for nano in nano_batches]
    each = [workers.finishing(loads_of(plan, settings.row_overhead)) for plan in dominant]
    finishing = np.sum(each, axis=0)[0 if ranks_serve else ranks :]
    in_nodes, row_bytes = nodes or range(len(workers)), settings.row_bytes(kind)
    moved = np.sum([bytes_by_link(plan, row_bytes, in_nodes) for plan in dominant], axis=0)
    summary = replace(
        plan.summary,
        max_over_mean=float(finishing.max() / finishing.mean()),
        exchange=exchange_figures(moved, in_nodes),
    )
    return replace(plan, nano_batches=tuple(nano_batches), summary=summary)


def without_ranks(plan: Plan, speeds: Sequence[float]) -> Plan:
    """Give the tasks left on ranks to the servers that finish first, the largest first, for [workers] speeds."""
    tasks, ranks = plan.tasks.copy(), plan.layout.ranks
    cost = pairs(tasks["start"], tasks["stop"], plan.window)
    loads = np.bincount(tasks["worker"], weights=cost, minlength=plan.workers)[ranks:]
    left = np.flatnonzero(tasks["worker"] < ranks)
    for index in left[np.argsort(-cost[left], kind="stable")].tolist():
        server = int(np.argmin((loads + cost[index]) / np.asarray(speeds[ranks:])))
        loads[server] += cost[index]
        tasks["worker"][index] = ranks + server
    return replace(plan, tasks=merged(tasks))


def plan_lost(
    plan: Plan,
    workers: Collection[int],
    kind: AttentionKind,
    settings: PlanSettings,
    pairs_per_second: float,
) -> Plan:
    """Return a plan of the tasks of lost workers alone, over the ranks, in stages of its own.

    Ranks with equal arguments find equal plans. Tasks are cut at blocks' boundaries only, and where
    segments and the plan's tasks end. A rank computes `pairs_per_second`, forward and backward
    together.
    """
    local = local_tasks(plan, workers)
    ranks, candidates = local.workers, [local]
    # An infinite tolerance keeps cuts on the blocks' boundaries.
    problem = Problem(local.layout, kind, settings, Workers.uniform(ranks), np.full(ranks, np.inf))
    tasks = moved_by(local.tasks, problem.origin)
    for nodes in (
        (0,) * ranks,
        local.nodes,
    ):  # balanced in one pass of few moves: anywhere, or inside nodes
        if nodes is not None:
            group = np.asarray(nodes)
            limits = ideals_inside(problem.loads(tasks), problem.workers, group) * (
                1 + settings.balance_tolerance
            )
            spread = balancing_pass(problem, tasks, limits, limits, group)
            candidates.append(replace(local, tasks=moved_by(spread, -problem.origin)))
    soonest = min(candidates, key=lambda plan: seconds_of(plan, kind, settings, pairs_per_second))
    return with_stages(soonest, settings.buffer_rows(kind), stages=usual_stages(1))


def local_tasks(plan: Plan, workers: Collection[int]) -> Plan:
    """Return the tasks of some workers alone, each row at the rank that holds it, in one stage."""
    ranks = plan.layout.ranks
    lost = plan.tasks.compress(np.isin(plan.tasks["worker"], list(workers)))
    tasks, held = cut_at(lost, by_document(plan.layout.segments))
    tasks["worker"] = held["rank"]
    tasks = tasks.take(np.lexsort((tasks["start"], tasks["document"], tasks["worker"])))
    return Plan(
        plan.layout,
        tasks,
        ranks,
        plan.window,
        nodes=None if plan.nodes is None else plan.nodes[:ranks],
    )


def seconds_of(
    plan: Plan, kind: AttentionKind, settings: PlanSettings, pairs_per_second: float
) -> float:
    """Return the seconds of the busiest rank's pairs and the busiest link's bytes, forward and backward of a layer."""
    loads = loads_of(plan, settings.row_overhead)
    nodes = settings.node_of_ranks
    moved, row_bytes = RowsMoved.of(plan, nodes), settings.row_bytes(kind)
    exchanges = (moved.forward_bytes(row_bytes), moved.backward_bytes(row_bytes))
    return float(loads.max()) / pairs_per_second + sum(map(link_seconds, exchanges))
