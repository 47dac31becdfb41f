"""Plans with dedicated servers, and plans for the tasks of lost servers.

The ranks hold the rows, so they compute the tasks of a lost server within the micro-batch. Each task goes to the ranks
that hold its rows, or the tasks are balanced over the ranks again, whichever finishes sooner. Ranks have finished
their local tasks by then. The remaining servers take no part: they would need the plan first.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from hf_distca.plan import AttentionKind, Layout, MicroBatchPlan, Plan
from hf_distca.planner.balance import balance, ideals_inside
from hf_distca.planner.balancing_pass import BalancingPass, Problem
from hf_distca.planner.cost import Workers, pairs
from hf_distca.planner.intervals import by_document, cut_at, merged, moved_by
from hf_distca.planner.metrics import RowsMoved, exchange_figures, link_seconds, loads_of, query_rows_of
from hf_distca.planner.nodes import node_sizes, nodes_of
from hf_distca.planner.settings import PlanSettings
from hf_distca.planner.stages import usual_stages, with_stages

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
    """Plan tasks for ranks and servers on the layouts of a plan.

    Args:
        workers: see `balance_with_servers`; base loads are for one nano-batch.
    """
    stages = usual_stages(len(plan.nano_batches))
    nano_batches = []
    for nano in plan.nano_batches:
        plans = {}
        for kind in nano.plans:
            of_kind = balance_with_servers(nano.layout, kind, workers, settings, ranks_serve, server_nodes)
            plans[kind] = with_stages(of_kind, settings.buffer_rows(kind), stages=stages)
        nano_batches.append(replace(nano, plans=plans))
    kind = settings.dominant_kind
    dominant = [nano.plans[kind] for nano in nano_batches]
    loads = np.sum([loads_of(plan) + settings.row_overhead * query_rows_of(plan) for plan in dominant], axis=0)
    every = Workers(workers.speed, tuple(len(dominant) * load for load in workers.base_load))
    finishing = every.finishing(loads)[0 if ranks_serve else settings.ranks :]
    exchange = exchange_figures(dominant, settings.row_bytes(kind), dominant[0].nodes or range(len(workers)))
    max_over_mean = float(finishing.max() / finishing.mean())
    summary = replace(plan.summary, max_over_mean=max_over_mean, exchange=exchange)
    return replace(plan, nano_batches=tuple(nano_batches), summary=summary)


def balance_with_servers(
    layout: Layout,
    kind: AttentionKind,
    workers: Workers,
    settings: PlanSettings,
    ranks_serve: bool = True,
    server_nodes: Sequence[int | None] | None = None,
) -> Plan:
    """Choose tasks so that ranks and servers finish together.

    Args:
        workers: the ranks, then at least one server. A rank's base load is its work besides core attention while
            servers compute.
        ranks_serve: whether ranks compute core attention too; otherwise servers compute all of it.
        server_nodes: [servers] node of each server, None for a node of its own; None if every server has a node of its
            own. Ignored if all links are alike.

    Raises:
        ValueError: there is no server, or settings are out of range.
    """
    ranks = layout.ranks
    servers = len(workers) - ranks
    if servers < 1:
        raise ValueError(
            f"{len(workers)} workers for {ranks} ranks leave no server; describe at least one worker more than there "
            "are ranks"
        )
    if not ranks_serve:
        workers = Workers((IDLE,) * ranks + workers.speed[ranks:], (0.0,) * len(workers))
    nodes = None if settings.nodes is None else list(settings.nodes)
    if nodes is not None:
        for node in server_nodes or [None] * servers:
            nodes.append(max(nodes) + 1 if node is None else node)
    plan = balance(layout, kind, settings, workers, nodes)
    return plan if ranks_serve else _without_ranks(plan, workers)


def _without_ranks(plan: Plan, workers: Workers) -> Plan:
    """Give the tasks left on ranks to the servers that finish first, the largest first."""
    tasks, ranks = plan.tasks.copy(), plan.layout.ranks
    cost = pairs(tasks["start"], tasks["stop"], plan.window)
    speed = np.asarray(workers.speed[ranks:])
    loads = np.bincount(tasks["worker"], weights=cost, minlength=len(workers))[ranks:]
    left = np.flatnonzero(tasks["worker"] < ranks)
    for index in left[np.argsort(-cost[left], kind="stable")].tolist():
        server = int(np.argmin((loads + cost[index]) / speed))
        loads[server] += cost[index]
        tasks["worker"][index] = ranks + server
    return replace(plan, tasks=merged(tasks))


def plan_lost(
    plan: Plan, workers: Collection[int], kind: AttentionKind, settings: PlanSettings, pairs_per_second: float
) -> Plan:
    """Give the tasks of lost workers to the ranks so that they finish soon.

    Ranks with equal arguments find equal plans.

    Args:
        pairs_per_second: query-key pairs that a rank computes in a second, forward and backward together.

    Returns:
        A plan of the lost tasks alone, over the ranks, in stages of its own. Tasks are cut at blocks' boundaries only,
        and where segments and the plan's tasks end.
    """
    local = local_tasks(plan, workers)
    candidates = [local, _spread(local, kind, settings, None)]
    if local.nodes is not None:
        candidates.append(_spread(local, kind, settings, local.nodes))
    soonest = min(candidates, key=lambda plan: seconds_of(plan, kind, settings, pairs_per_second))
    return with_stages(soonest, settings.buffer_rows(kind), stages=usual_stages(1))


def local_tasks(plan: Plan, workers: Collection[int]) -> Plan:
    """Return the tasks of some workers alone, each row at the rank that holds it, in one stage."""
    ranks = plan.layout.ranks
    lost = plan.tasks.compress(np.isin(plan.tasks["worker"], list(workers)))
    tasks, held = cut_at(lost, by_document(plan.layout.segments))
    tasks["worker"] = held["rank"]
    tasks = tasks.take(np.lexsort((tasks["start"], tasks["document"], tasks["worker"])))
    return Plan(plan.layout, tasks, ranks, plan.window, nodes=None if plan.nodes is None else plan.nodes[:ranks])


def seconds_of(plan: Plan, kind: AttentionKind, settings: PlanSettings, pairs_per_second: float) -> float:
    """Return the seconds of the busiest rank's pairs and the busiest link's bytes, forward and backward of a layer."""
    loads = loads_of(plan) + settings.row_overhead * query_rows_of(plan)
    nodes = nodes_of(node_sizes(settings.ranks, settings.ranks_per_node))
    moved, row_bytes = RowsMoved.of(plan, nodes), settings.row_bytes(kind)
    exchanges = (moved.forward_bytes(row_bytes), moved.backward_bytes(row_bytes))
    return float(loads.max()) / pairs_per_second + sum(map(link_seconds, exchanges))


def _spread(local: Plan, kind: AttentionKind, settings: PlanSettings, nodes: Sequence[int] | None) -> Plan:
    """Balance the tasks of a plan over equal ranks in one pass: few moves, the largest first.

    Args:
        nodes: [ranks] node of each rank; nothing leaves a node. None: any rank gives to any other.
    """
    ranks = local.workers
    # An infinite tolerance keeps cuts on the blocks' boundaries.
    problem = Problem.of(local.layout, kind, settings, Workers.uniform(ranks), np.full(ranks, np.inf))
    group = np.asarray(nodes or (0,) * ranks)
    tasks = moved_by(local.tasks, problem.origin)
    limits = ideals_inside(problem.loads(tasks), problem.workers, group) * (1 + settings.balance_tolerance)
    tasks = BalancingPass(problem, tasks, limits, limits, group).run()
    return replace(local, tasks=moved_by(tasks, -problem.origin))
