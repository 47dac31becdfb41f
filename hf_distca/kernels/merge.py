"""Merging what the same rows found in different keys.

Shape suffixes: Q rows, H query heads, E head dim of values.
"""

import torch
from torch import Tensor


def merge(o_a_QHE: Tensor, lse_a_QH: Tensor, o_b_QHE: Tensor, lse_b_QH: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the attention of the same rows to two disjoint sets of keys into attention to all of them.

    Differentiate by handing the merged result to the backward of both parts (see `Kernel.backward`), not
    through this function.

    Args:
        o_a_QHE: output of the rows over the first set of keys.
        lse_a_QH: its log-sum-exp; -inf for a row that has no key in this set.
        o_b_QHE: output over the second set.
        lse_b_QH: its log-sum-exp.

    Returns:
        The merged o in the dtype of o_a and the merged lse in that of lse_a; computed in float32 at least.
        A row without keys in both sets has o = 0 and lse = -inf.
    """
    lse_QH = torch.logaddexp(lse_a_QH, lse_b_QH)
    weight_a_QH, weight_b_QH = weights(lse_a_QH, lse_QH), weights(lse_b_QH, lse_QH)
    o_QHE = o_a_QHE * weight_a_QH.unsqueeze(-1) + o_b_QHE * weight_b_QH.unsqueeze(-1)
    return o_QHE.to(o_a_QHE.dtype), lse_QH


def weights(lse_part_QH: Tensor, lse_QH: Tensor) -> Tensor:
    """Share of the softmax that lies in one set of keys.

    Args:
        lse_part_QH: log-sum-exp over this set of keys.
        lse_QH: log-sum-exp over all keys.

    Returns:
        [Q, H]: exp(lse_part - lse), 0 for a row without keys in this set.
    """
    # A row without any key has -inf - (-inf) = nan; against 0 it is exp(-inf) = 0.
    return (lse_part_QH - lse_QH.masked_fill(lse_QH == -torch.inf, 0.0)).exp_()
