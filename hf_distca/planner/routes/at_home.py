"""Plans for what servers have not computed."""

from collections.abc import Collection

import numpy as np

from hf_distca.plan import TASK, Plan
from hf_distca.planner.intervals import Intervals, by_document


def tasks_at_home(plan: Plan, workers: Collection[int]) -> Plan:
    """The tasks of some workers alone, each row's at the rank that holds it: what is left to do when they are lost.

    Args:
        plan: the plan in which they were lost.
        workers: the lost workers.
    """
    segments = by_document(plan.layout.segments)
    lost = plan.tasks[np.isin(plan.tasks["worker"], list(workers))]
    found = Intervals.of(lost).overlaps(Intervals.of(segments))
    tasks = np.zeros(len(found.rows), TASK)
    tasks["document"], tasks["start"], tasks["stop"] = found.rows.document, found.rows.start, found.rows.stop
    tasks["worker"] = segments["rank"][found.second]
    order = np.lexsort((tasks["start"], tasks["document"], tasks["worker"]))
    nodes = None if plan.nodes is None else plan.nodes[: plan.layout.ranks]
    return Plan(plan.layout, tasks[order], plan.layout.ranks, plan.window, plan.stage_rows, nodes)
