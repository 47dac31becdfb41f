"""How large the stages are in which K/V rows come to the ranks that compute with them."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import Plan
from hf_distca.planner.routes.arrivals import Arrivals

EXCHANGE_BUFFER_BYTES = 1 << 27
"""K/V rows that a rank sends or receives at a time; 32768 rows of Llama-3-8B in bfloat16."""
STAGES_ALONE = 4
"""A nano-batch that has no other one to hide behind takes about so many stages, where they are worth it: of these a
rank waits for the first at most, and that one travels while own tasks are computed."""
SMALLEST_STAGE = 1024
"""Rows. Fewer are not worth an exchange and kernel calls of their own, if only to hide behind computation."""

UNEVEN = 8
"""Where rows are passed on inside nodes, a stage may be larger than its even share by one part in so many."""


def usual_stages(nano_batches: int) -> int:
    """Into how many stages K/V rows are divided where nothing says otherwise; fewer where they are few."""
    return STAGES_ALONE if nano_batches == 1 else 1


def with_stages(plan: Plan, buffer_rows: int, *, stages: int) -> Plan:
    """The plan in stages, if its exchanges need them.

    Args:
        plan: a plan without stages.
        buffer_rows: K/V rows that a rank may send, and receive, at a time.
        stages: into about so many K/V rows are divided where they are worth it; more where the buffer asks for it.
    """
    most = int(rows_by_stage(plan).max(initial=0))
    return replace(plan, stage_rows=stage_rows(most, buffer_rows, stages=stages, in_hops=plan.nodes is not None))


def stage_rows(most: int, buffer_rows: int, *, stages: int, in_hops: bool) -> int | None:
    """Return how many K/V rows a stage has; None where all rows travel at once.

    Args:
        most: K/V rows that the busiest rank sends, or receives, in a layer.
        buffer_rows: as in `with_stages`.
        stages: as in `with_stages`.
        in_hops: whether rows are passed on inside nodes.
    """
    rows = buffer_rows
    if stages > 1:
        share = -(-most // stages)
        if in_hops:  # what goes the same way is spread over stages in blocks: they cannot be quite even
            share += share // UNEVEN
        rows = min(buffer_rows, max(share, SMALLEST_STAGE))
    return rows if most > rows else None


def rows_by_stage(plan: Plan) -> NDArray[np.int64]:
    """[stages, 2, ranks] int64: K/V rows that each rank sends, those that it passes on included, and receives in each
    stage.

    Rows that a rank gathers for itself are counted on both sides; what servers receive is not counted.
    """
    stages = Arrivals.of(plan, plan.tasks).stages
    return np.concatenate(
        [hops.rows_by_stage(np.zeros_like(hops.first.source), 1, plan.layout.ranks) for hops in stages]
    )
