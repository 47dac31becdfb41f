"""Queries that a model scales by the number of their row in the call, which it takes for the position."""

from typing import Any

import torch
from torch import Tensor

from hf_distca.dispatch.bound import BoundPlan


def scaled_by_position(module: Any, query_BHTD: Tensor, plan: BoundPlan) -> Tensor:
    """Queries as the layer would give them for each document by itself.

    Llama 4 scales those of its layers without rotary embedding by a factor that grows with the position, and counts
    positions from the first row of the call on, whatever documents it is made of.

    Args:
        module: the attention layer, which has attn_temperature_tuning.
        query_BHTD: its queries of the rows that it was called with, scaled.
        plan: of these rows.

    Returns:
        The queries themselves where the layer has rotary embedding, or all rows have the factor 1.
    """
    if module.use_rope or max(plan.rows, plan.last_position + 1) < module.floor_scale:
        return query_BHTD
    rows_T = torch.arange(plan.rows, device=query_BHTD.device)
    factor_T = _factor(module, plan.positions) / _factor(module, rows_T)
    return (query_BHTD * factor_T[:, None]).to(query_BHTD.dtype)


def _factor(module: Any, positions_T: Tensor) -> Tensor:
    """By what Llama 4 scales the queries at these positions."""
    steps_T = torch.floor((positions_T.float() + 1.0) / module.floor_scale)
    factor_T: Tensor = torch.log1p(steps_T) * module.attn_scale + 1.0
    return factor_T
