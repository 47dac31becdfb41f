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
    o_QHE = o_a_QHE.to(lse_a_QH.dtype, copy=True)
    lse_QH = lse_a_QH.clone()
    merge_into(o_QHE, lse_QH, o_b_QHE, lse_b_QH)
    return o_QHE.to(o_a_QHE.dtype), lse_QH


def merge_into(o_QHE: Tensor, lse_QH: Tensor, o_part_QHE: Tensor, lse_part_QH: Tensor) -> None:
    """Merge one more set of keys into o and lse in place.

    Args:
        o_QHE: output so far, in the dtype of lse.
        lse_QH: its log-sum-exp.
        o_part_QHE: output over keys not seen so far.
        lse_part_QH: its log-sum-exp.
    """
    # The part's share of the softmax. A row without any key has -inf - (-inf) = nan: any share of 0 will do.
    share_QH = torch.sigmoid((lse_part_QH - lse_QH).nan_to_num_(nan=0.0))
    o_QHE.lerp_(o_part_QHE.to(o_QHE.dtype), share_QH.unsqueeze(-1))
    torch.logaddexp(lse_QH, lse_part_QH, out=lse_QH)
