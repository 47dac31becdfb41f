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


def with_stages(plan: Plan, buffer_rows: int, *, alone: bool) -> Plan:
    """The plan in stages, if its exchanges need them.

    Args:
        plan: a plan without stages.
        buffer_rows: K/V rows that a rank may send, and receive, at a time.
        alone: whether no other nano-batch hides the exchange.
    """
    most = int(rows_by_stage(plan).max(initial=0))
    stage_rows = buffer_rows
    if alone:
        stage_rows = min(buffer_rows, max(-(-most // STAGES_ALONE), SMALLEST_STAGE))
    return replace(plan, stage_rows=stage_rows) if most > stage_rows else plan


def rows_by_stage(plan: Plan) -> NDArray[np.int64]:
    """[stages, 2, ranks] int64: K/V rows that each rank sends and receives in each stage.

    Rows that a rank gathers for itself are counted on both sides; what servers receive is not counted.
    """
    ranks = plan.layout.ranks
    stages = Arrivals.of(plan, plan.tasks).stages
    rows = np.zeros((len(stages), 2, ranks), np.int64)
    for moves, (sent, received) in zip(stages, rows, strict=True):
        among_ranks = moves[moves.target < ranks]
        np.add.at(sent, among_ranks.source, among_ranks.rows.lengths)
        np.add.at(received, among_ranks.target, among_ranks.rows.lengths)
    return rows
