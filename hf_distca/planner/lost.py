"""Plans for tasks of lost servers: the ranks, which hold the rows, compute them within the micro-batch.

Each task goes to the ranks that hold its rows, or the tasks are balanced over the ranks again, whichever finishes
sooner. Ranks have finished their own tasks by then, so only the lost servers' tasks are balanced. The remaining
servers take no part: they would need the plan first.
"""

import math
from collections.abc import Collection
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import TASK, AttentionKind, Plan
from hf_distca.planner.balancing_pass import BalancingPass, Goal, Prices
from hf_distca.planner.cost import Workers
from hf_distca.planner.intervals import Intervals, by_document
from hf_distca.planner.metrics import (
    backward_bytes_of_rows,
    bytes_of_rows,
    key_rows_by_link,
    link_seconds,
    loads_of,
    query_rows_by_link,
    query_rows_of,
)
from hf_distca.planner.nodes import node_sizes, nodes_of
from hf_distca.planner.settings import PlanSettings
from hf_distca.planner.shifted import ShiftedRows
from hf_distca.planner.stages import usual_stages
from hf_distca.planner.tasks import plan_stages
from hf_distca.planner.two_levels import ideals_inside


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
    home = tasks_at_home(plan, workers)
    ways = [home, _spread(home, kind, settings, None)]
    if home.nodes is not None:
        ways.append(_spread(home, kind, settings, home.nodes))
    soonest = min(ways, key=lambda way: seconds_of(way, kind, settings, pairs_per_second))
    return plan_stages(soonest, kind, settings, stages=usual_stages(1))


def tasks_at_home(plan: Plan, workers: Collection[int]) -> Plan:
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
    queries, keys, row_bytes = query_rows_by_link(plan, nodes), key_rows_by_link(plan, nodes), settings.row_bytes(kind)
    exchanges = (bytes_of_rows(queries, keys, row_bytes), backward_bytes_of_rows(queries, keys, row_bytes))
    return float(loads.max()) / pairs_per_second + sum(link_seconds(moved) for moved in exchanges)


def _spread(home: Plan, kind: AttentionKind, settings: PlanSettings, nodes: tuple[int, ...] | None) -> Plan:
    """Balance the tasks of a plan over equal ranks in one pass: few moves, the largest first.

    Args:
        nodes: [ranks] node of each rank; nothing leaves a node. None: any rank gives to any other.
    """
    block = settings.balance_block_size
    rows = ShiftedRows.of(home.layout, home.window, settings.row_overhead, block)
    tasks, ranks = rows.shifted(home.tasks), Workers.uniform(home.workers)
    loads = rows.loads(tasks, home.workers)
    ideal: NDArray[np.float64] = ideals_inside(loads, ranks, nodes or (0,) * home.workers)
    limits = ideal * (1 + settings.balance_tolerance)
    goal = Goal(limits, limits, slack=math.inf)  # infinite slack: cuts always stay on the blocks' boundaries
    prices = Prices.of(settings.row_bytes(kind), rows, settings.gather_cost)
    spread = BalancingPass(tasks, rows, ranks, prices, goal, block, nodes or (0,) * home.workers).run()
    return replace(rows.plan(spread, home.workers), nodes=home.nodes)
