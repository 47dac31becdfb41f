"""Balancing over ranks and dedicated servers together."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hf_distca.plan import AttentionKind, Layout, MicroBatchPlan, Plan
from hf_distca.planner.cost import Workers, pairs
from hf_distca.planner.metrics import exchange_figures, loads_of, query_rows_of
from hf_distca.planner.settings import PlanSettings
from hf_distca.planner.shifted import merged
from hf_distca.planner.stages import usual_stages
from hf_distca.planner.tasks import plan_stages, plan_tasks

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
                kind: plan_stages(
                    balance_with_servers(
                        nano.layout, kind, workers, settings, ranks_serve=ranks_serve, server_nodes=server_nodes
                    ),
                    kind,
                    settings,
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
