"""Plans with dedicated servers, and plans for the tasks of lost servers.

The ranks hold the rows, so they compute the tasks of a lost server within the micro-batch. Each task goes to the ranks
that hold its rows, or the tasks are balanced over the ranks again, whichever finishes sooner. Ranks have finished
their local tasks by then. The remaining servers take no part: they would need the plan first.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import TASK, AttentionKind, Layout, MicroBatchPlan, Plan
from hf_distca.planner.balance import ideals_inside
from hf_distca.planner.balancing_pass import BalancingPass, Goal, Prices
from hf_distca.planner.build import plan_tasks
from hf_distca.planner.cost import Workers, pairs
from hf_distca.planner.intervals import Intervals, by_document
from hf_distca.planner.metrics import RowsMoved, exchange_figures, link_seconds, loads_of, query_rows_of
from hf_distca.planner.nodes import node_sizes, nodes_of
from hf_distca.planner.settings import PlanSettings
from hf_distca.planner.shifted import ShiftedRows, merged
from hf_distca.planner.stages import usual_stages, with_stages

IDLE = 1e-9
"""Speed of a rank that should compute no core attention."""


def balance_with_servers(
    layout: Layout,
    kind: AttentionKind,
    workers: Workers,
    settings: PlanSettings,
    *,
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
    servers = len(workers) - layout.ranks
    if servers < 1:
        raise ValueError(
            f"{len(workers)} workers for {layout.ranks} ranks leave no server; describe at least one worker more than "
            "there are ranks"
        )
    if not ranks_serve:
        workers = Workers((IDLE,) * layout.ranks + workers.speed[layout.ranks :], (0.0,) * len(workers))
    nodes = _nodes_of_workers(settings.nodes, server_nodes or [None] * servers)
    plan = plan_tasks(layout, kind, settings, workers, nodes)
    return plan if ranks_serve else _without_ranks(plan, workers)


def _nodes_of_workers(of_ranks: tuple[int, ...] | None, of_servers: Sequence[int | None]) -> tuple[int, ...] | None:
    """Return [workers] the node of each rank and server; None if all links are alike."""
    if of_ranks is None:
        return None
    nodes = list(of_ranks)
    for node in of_servers:
        nodes.append(max(nodes) + 1 if node is None else node)
    return tuple(nodes)


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
    nano_batches = [
        replace(
            nano,
            plans={
                kind: with_stages(
                    balance_with_servers(
                        nano.layout, kind, workers, settings, ranks_serve=ranks_serve, server_nodes=server_nodes
                    ),
                    settings.buffer_rows(kind),
                    stages=usual_stages(len(plan.nano_batches)),
                )
                for kind in nano.plans
            },
        )
        for nano in plan.nano_batches
    ]
    kind = settings.dominant_kind
    plans = [nano.plans[kind] for nano in nano_batches]
    loads = np.sum([loads_of(plan) + settings.row_overhead * query_rows_of(plan) for plan in plans], axis=0)
    working = np.arange(len(workers)) >= (0 if ranks_serve else settings.ranks)
    every = Workers(workers.speed, tuple(len(plans) * load for load in workers.base_load))
    nodes = plans[0].nodes or range(len(workers))
    summary = replace(
        plan.summary,
        max_over_mean=float(every.finishing(loads)[working].max() / every.finishing(loads)[working].mean()),
        exchange=exchange_figures(plans, settings.row_bytes(kind), nodes),
    )
    return replace(plan, nano_batches=tuple(nano_batches), summary=summary)


def _without_ranks(plan: Plan, workers: Workers) -> Plan:
    """Give the tasks left on ranks to the servers that finish first, the largest first."""
    tasks = plan.tasks.copy()
    cost = pairs(tasks["start"], tasks["stop"], plan.window)
    ranks = plan.layout.ranks
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
    segments = by_document(plan.layout.segments)
    lost = plan.tasks[np.isin(plan.tasks["worker"], list(workers))]
    found = Intervals.of(lost).overlaps(Intervals.of(segments))
    tasks = np.zeros(len(found.rows), TASK)
    tasks["document"], tasks["start"], tasks["stop"] = found.rows.document, found.rows.start, found.rows.stop
    tasks["worker"] = segments["rank"][found.second]
    order = np.lexsort((tasks["start"], tasks["document"], tasks["worker"]))
    nodes = None if plan.nodes is None else plan.nodes[: plan.layout.ranks]
    return Plan(plan.layout, tasks[order], plan.layout.ranks, plan.window, nodes=nodes)


def seconds_of(plan: Plan, kind: AttentionKind, settings: PlanSettings, pairs_per_second: float) -> float:
    """Return the seconds of the busiest rank's pairs and the busiest link's bytes in one layer.

    Forward and backward are counted together, for a plan of the ranks alone.
    """
    loads = loads_of(plan) + settings.row_overhead * query_rows_of(plan)
    nodes = nodes_of(node_sizes(settings.ranks, settings.ranks_per_node))
    moved, row_bytes = RowsMoved.of(plan, nodes), settings.row_bytes(kind)
    exchanges = (moved.forward_bytes(row_bytes), moved.backward_bytes(row_bytes))
    return float(loads.max()) / pairs_per_second + sum(map(link_seconds, exchanges))


def _spread(local: Plan, kind: AttentionKind, settings: PlanSettings, nodes: tuple[int, ...] | None) -> Plan:
    """Balance the tasks of a plan over equal ranks in one pass: few moves, the largest first.

    Args:
        nodes: [ranks] node of each rank; nothing leaves a node. None: any rank gives to any other.
    """
    block = settings.balance_block_size
    rows = ShiftedRows.of(local.layout, local.window, settings.row_overhead, block)
    tasks, ranks = rows.shifted(local.tasks), Workers.uniform(local.workers)
    loads = rows.loads(tasks, local.workers)
    ideal: NDArray[np.float64] = ideals_inside(loads, ranks, nodes or (0,) * local.workers)
    limits = ideal * (1 + settings.balance_tolerance)
    goal = Goal(limits, limits, slack=math.inf)  # infinite slack: cuts always stay on the blocks' boundaries
    prices = Prices.of(settings.row_bytes(kind), rows, settings.gather_cost)
    spread = BalancingPass(tasks, rows, ranks, prices, goal, block, nodes or (0,) * local.workers).run()
    return replace(rows.plan(spread, local.workers), nodes=local.nodes)
