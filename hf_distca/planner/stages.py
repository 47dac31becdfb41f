"""How large the stages are in which K/V rows come to the ranks that compute with them."""

from dataclasses import replace

import numpy as np

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
    (moves,) = Arrivals.of(plan, plan.tasks).stages
    among_ranks = moves[moves.target < plan.layout.ranks]
    rows = among_ranks.rows.lengths
    most = max(int(np.bincount(end, weights=rows, minlength=1).max()) for end in (among_ranks.source, among_ranks.target))
    stage_rows = buffer_rows
    if alone:
        stage_rows = min(buffer_rows, max(-(-most // STAGES_ALONE), SMALLEST_STAGE))
    return replace(plan, stage_rows=stage_rows) if most > stage_rows else plan
