"""Rows with several targets: a decoder returns a row once for each of its targets.

Documents that share a prefix share its rows, and each document may have its own target of such a
row. The head, the loss and its labels then have one row for each target, and none for other rows.

Shape suffixes: R rows of this rank, T targets, D hidden size.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hf_distca.dispatch.bound import BoundPlan
from hf_distca.models.decoder import base_model, text_decoder
from hf_distca.patches.modules import subclass, uncompiled
from hf_distca.plan import PLAN_KEY


def repeat_target_rows(model: nn.Module) -> None:
    """Let the decoder of a model return a row for each target of a plan, in place.

    Plans without `target_rows` run as before.
    """
    decoder: Any = text_decoder(base_model(model))
    if not isinstance(decoder, TargetRows):
        decoder.__class__ = subclass(type(decoder), TargetRows)


class TargetRows(nn.Module):
    """Base that precedes a decoder's own class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the decoder, and select the rows of targets."""
        plan = kwargs.get(PLAN_KEY)
        if not isinstance(plan, BoundPlan) or plan.target_rows is None:
            return super().forward(*args, **kwargs)
        # Some models pass targets on to their layers, which divide their arguments by rows.
        for name in ("labels", "shift_labels"):
            kwargs.pop(name, None)
        output = super().forward(*args, **kwargs)
        output.last_hidden_state = _selected(output.last_hidden_state, plan.target_rows)
        plan.ran.selected_targets = True
        return output


@uncompiled("plans are new with each micro-batch")
def _selected(hidden_1RD: Tensor, target_rows: list[Tensor]) -> Tensor:
    """Return the rows [1, T, D] of targets.

    Args:
        target_rows: as `BoundPlan.target_rows`.
    """
    select: Any = _Select.apply
    selected_TD: Tensor = select(hidden_1RD.squeeze(0), *target_rows)
    return selected_TD.unsqueeze(0)


class _Select(torch.autograd.Function):
    """Selection of rows; gradients of a row that is selected several times are added in order."""

    @staticmethod
    def forward(ctx: Any, hidden_RD: Tensor, *target_rows: Tensor) -> Tensor:
        ctx.target_rows = target_rows
        ctx.rows = len(hidden_RD)
        return hidden_RD.index_select(0, torch.cat(target_rows))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad_TD,) = gradients
        summed = torch.promote_types(grad_TD.dtype, torch.float32)
        sums_RD = grad_TD.new_zeros((ctx.rows, *grad_TD.shape[1:]), dtype=summed)
        sizes = [len(rows) for rows in ctx.target_rows]
        for rows, part in zip(ctx.target_rows, grad_TD.split(sizes), strict=True):
            sums_RD.index_add_(0, rows, part.to(summed))
        return sums_RD.to(grad_TD.dtype), *[None] * len(sizes)
