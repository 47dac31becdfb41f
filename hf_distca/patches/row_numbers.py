"""Correction of queries that a model scales by their row in the call instead of their position."""

from typing import Any

import torch
from torch import Tensor

from hf_distca.dispatch.bound import BoundPlan


def scaled_by_position(module: Any, query_BHTD: Tensor, plan: BoundPlan) -> Tensor:
    """Return queries scaled by their positions in their documents.

    In layers without rotary embedding, Llama 4 scales queries by a factor that grows with the position. It counts
    positions from the first row of the call, across documents.

    Args:
        module: an attention layer with attn_temperature_tuning.

    Returns:
        The queries themselves if the layer has rotary embedding, or all rows have the factor 1.
    """
    if module.use_rope or max(plan.rows, plan.last_position + 1) < module.floor_scale:
        return query_BHTD
    rows_T = torch.arange(plan.rows, device=query_BHTD.device)
    factor_T = _factor(module, plan.positions) / _factor(module, rows_T)
    return (query_BHTD * factor_T[:, None]).to(query_BHTD.dtype)


def _factor(module: Any, positions_T: Tensor) -> Tensor:
    """Return Llama 4's factor on queries at these positions."""
    steps_T = torch.floor((positions_T.float() + 1.0) / module.floor_scale)
    factor_T: Tensor = torch.log1p(steps_T) * module.attn_scale + 1.0
    return factor_T
