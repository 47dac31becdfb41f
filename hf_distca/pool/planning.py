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
from hf_distca.plan.arrays import IntArray
from hf_distca.plan.cost import Workers, pairs
from hf_distca.plan.figures import exchange_figures, link_seconds, loads_of
from hf_distca.plan.intervals import by_document, cut_at, merged, moved_by
from hf_distca.plan.stages import usual_stages, with_stages
from hf_distca.planner.balance import balance, ideals_inside
from hf_distca.planner.balancing_pass import Problem, balancing_pass
from hf_distca.planner.settings import PlanSettings
from hf_distca.predict.counts import CountedPlan, count_plan

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
    ranks = settings.ranks
    servers = len(workers) - settings.ranks
    if servers < 1:
        raise ValueError(
            f"{len(workers)} workers for {ranks} ranks leave no server; describe at least one "
            "worker more than there are ranks"
        )
    computing = workers if ranks_serve else _idle_ranks(workers, ranks)
    nodes = _nodes_of_workers(settings, servers, server_nodes)

    # 1. Balance each nano-batch over ranks and servers, in stages.
    link_nodes = nodes or range(len(workers))
    stages = usual_stages(len(plan.nano_batches))
    dominant = settings.dominant_kind
    nano_batches = []
    forward_bytes: IntArray = np.zeros((2, 2, len(workers)), np.int64)
    finishing = np.zeros(len(workers))
    for nano_batch in plan.nano_batches:
        plans = {}
        for kind in nano_batch.plans:
            balanced = balance(nano_batch.layout, kind, settings, computing, nodes)
            if not ranks_serve:  # the balance may leave small tasks on idle ranks
                balanced = without_ranks(balanced, workers.speed)
            counts = count_plan(balanced, kind, settings.bytes_per_value, link_nodes)
            plans[kind] = with_stages(
                balanced, settings.buffer_rows(kind), stages=stages, busiest_rows=counts.most_rows
            )
            if kind == dominant:
                forward_bytes += counts.forward_bytes
                finishing += workers.finishing(loads_of(balanced, settings.row_overhead))
        nano_batches.append(replace(nano_batch, plans=plans))

    # 2. Sum up the costliest kind of attention over the nano-batches.
    computing_workers = finishing if ranks_serve else finishing[ranks:]
    summary = replace(
        plan.summary,
        max_over_mean=float(computing_workers.max() / computing_workers.mean()),
        exchange=exchange_figures(forward_bytes, link_nodes),
    )
    return replace(plan, nano_batches=tuple(nano_batches), summary=summary)


def _idle_ranks(workers: Workers, ranks: int) -> Workers:
    """Return workers of which the ranks should compute no core attention."""
    return Workers((IDLE,) * ranks + workers.speed[ranks:], (0.0,) * len(workers))


def _nodes_of_workers(
    settings: PlanSettings, servers: int, server_nodes: Sequence[int | None] | None
) -> list[int] | None:
    """Return [workers] the node of each worker, or None if all links are alike.

    Args:
        server_nodes: as in `plan_with_servers`.
    """
    if settings.nodes is None:
        return None
    nodes = list(settings.nodes)
    for node in server_nodes or [None] * servers:
        nodes.append(max(nodes) + 1 if node is None else node)
    return nodes


def without_ranks(plan: Plan, speeds: Sequence[float]) -> Plan:
    """Give the tasks that are left on ranks to the servers that finish first.

    The largest tasks are given first.

    Args:
        speeds: [workers] pairs per unit of time.
    """
    tasks = plan.tasks.copy()
    ranks = plan.layout.ranks
    server_speeds = np.asarray(speeds[ranks:])
    cost = pairs(tasks["start"], tasks["stop"], plan.window)
    # Pairs that each server has already.
    server_loads = np.bincount(tasks["worker"], weights=cost, minlength=plan.workers)[ranks:]
    tasks_on_ranks = np.flatnonzero(tasks["worker"] < ranks)
    largest_first = tasks_on_ranks[np.argsort(-cost[tasks_on_ranks], kind="stable")]
    for task in largest_first.tolist():
        server = int(np.argmin((server_loads + cost[task]) / server_speeds))
        server_loads[server] += cost[task]
        tasks["worker"][task] = ranks + server
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
    # 1. Local tasks, and tasks balanced anywhere or inside nodes.
    local = tasks_of_ranks(plan, workers)
    repairs = [local, _balanced_again(local, (0,) * local.workers, kind, settings)]
    if local.nodes is not None:
        repairs.append(_balanced_again(local, local.nodes, kind, settings))

    # 2. The one that finishes first. Among equals it is the one with the fewest moves.
    rank_nodes = settings.node_of_ranks
    counts = [count_plan(repair, kind, settings.bytes_per_value, rank_nodes) for repair in repairs]
    seconds = [
        seconds_with_servers(repair, plan_counts, settings, pairs_per_second)
        for repair, plan_counts in zip(repairs, counts, strict=True)
    ]
    soonest = int(np.argmin(seconds))
    return with_stages(
        repairs[soonest],
        settings.buffer_rows(kind),
        stages=usual_stages(1),
        busiest_rows=counts[soonest].most_rows,
    )


def _balanced_again(
    local: Plan, nodes: Sequence[int], kind: AttentionKind, settings: PlanSettings
) -> Plan:
    """Return local tasks balanced in one pass of few moves, inside [ranks] nodes."""
    ranks = local.workers
    # An infinite tolerance keeps cuts on the blocks' boundaries.
    tolerance = np.full(ranks, np.inf)
    problem = Problem(local.layout, kind, settings, Workers.uniform(ranks), tolerance)
    tasks = moved_by(local.tasks, problem.origin)
    group = np.asarray(nodes)
    ideals = ideals_inside(problem.loads(tasks), problem.workers, group)
    limits = ideals * (1 + settings.finest_tolerance)
    balanced = balancing_pass(problem, tasks, limits, limits, group)
    return replace(local, tasks=moved_by(balanced, -problem.origin))


def tasks_of_ranks(plan: Plan, workers: Collection[int]) -> Plan:
    """Return the tasks of some workers alone, each row at the rank that holds it, in one stage."""
    ranks = plan.layout.ranks
    lost = plan.tasks.compress(np.isin(plan.tasks["worker"], list(workers)))
    tasks, segments = cut_at(lost, by_document(plan.layout.segments))
    tasks["worker"] = segments["rank"]
    tasks = tasks.take(np.lexsort((tasks["start"], tasks["document"], tasks["worker"])))
    nodes = None if plan.nodes is None else plan.nodes[:ranks]
    return Plan(plan.layout, tasks, ranks, plan.window, nodes=nodes)


def seconds_with_servers(
    plan: Plan, counts: CountedPlan, settings: PlanSettings, pairs_per_second: float
) -> float:
    """Return the seconds of the busiest rank's pairs and of the busiest link's bytes.

    The seconds are of a layer's forward and backward, for a plan over ranks alone.
    """
    loads = loads_of(plan, settings.row_overhead)
    computing_s = float(loads.max()) / pairs_per_second
    backward_bytes = counts.among_ranks.backward_bytes(counts.row_bytes)
    return computing_s + (link_seconds(counts.forward_bytes) + link_seconds(backward_bytes))
