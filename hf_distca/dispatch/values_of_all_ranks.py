"""Values that ranks computed, given to all ranks, with their gradients.

Shape suffixes: T values of this rank, M values of all ranks, C columns.
"""

from typing import Any

import torch
from torch import Tensor

from hf_distca.dispatch.process_groups import Groups


def on_all_ranks(values_TC: Tensor, numbers_T: Tensor, count: int, groups: Groups) -> Tensor:
    """Return the values [M, C] of all ranks on every rank. A collective, as its backward is.

    The gradient of a value is the sum of its gradients on all ranks. So the mean over ranks of a
    loss that each rank computes from all values has the gradient of that loss.

    Args:
        values_TC: this rank's values.
        numbers_T: their numbers among the values of all ranks; each number is of one rank.
        count: the number of all values.
        groups: of the ranks.
    """
    share: Any = _OnAllRanks.apply
    values_MC: Tensor = share(values_TC, numbers_T, count, groups)
    return values_MC


class _OnAllRanks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values_TC: Tensor, numbers_T: Tensor, count: int, groups: Groups
    ) -> Tensor:
        ctx.numbers_T, ctx.groups = numbers_T, groups
        values_MC = values_TC.new_zeros((count, *values_TC.shape[1:]))
        values_MC.index_copy_(0, numbers_T, values_TC)
        return groups.summed(values_MC, "values of other ranks")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad_MC,) = gradients
        summed_MC = ctx.groups.summed(grad_MC, "gradients of values of other ranks")
        return summed_MC.index_select(0, ctx.numbers_T), None, None, None
