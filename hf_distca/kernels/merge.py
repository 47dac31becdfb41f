"""Merging what the same rows found in different keys.

Shape suffixes: N rows of the result so far, Q rows of the part, H query heads, E head dim of values.
"""

import torch
from torch import Tensor

from .operators import define_operator

CHUNK = 1 << 16
"""Numbers of O that are merged at a time on the CPU where they must be copied: the copies stay in cache."""


def merge_into(
    o_NHE: Tensor, lse_NH: Tensor, o_part_QHE: Tensor, lse_part_QH: Tensor, rows_Q: Tensor | None = None
) -> None:
    """Merge one more set of keys into o and lse in place, computed in the dtype of lse.

    Differentiate by handing the merged result to the backward of both parts (see `Kernel.backward`), not through
    this function. A row without keys in both sets has o = 0 and lse = -inf.

    Args:
        o_NHE: output so far.
        lse_NH: its log-sum-exp; -inf for a row that has had no key.
        o_part_QHE: output over keys not seen so far.
        lse_part_QH: its log-sum-exp.
        rows_Q: the rows of the part among those of the result, none twice; None: all, in order.
    """
    if o_part_QHE.numel():
        torch.ops.hf_distca.merge_into(o_NHE, lse_NH, o_part_QHE, lse_part_QH, rows_Q)


def _merge_on_cpu(
    o_NHE: Tensor, lse_NH: Tensor, o_part_QHE: Tensor, lse_part_QH: Tensor, rows_Q: Tensor | None
) -> None:
    if rows_Q is None and o_NHE.dtype == lse_NH.dtype:
        _merge(o_NHE, lse_NH, o_part_QHE, lse_part_QH)
        return
    step = max(1, CHUNK // o_part_QHE[0].numel())
    for start in range(0, len(o_part_QHE), step):
        chunk = slice(start, start + step)
        rows = chunk if rows_Q is None else rows_Q[chunk]
        o, lse = o_NHE[rows].to(lse_NH.dtype), lse_NH[rows]
        _merge(o, lse, o_part_QHE[chunk], lse_part_QH[chunk])
        o_NHE[rows] = o.to(o_NHE.dtype)
        lse_NH[rows] = lse


def _merge(o: Tensor, lse: Tensor, o_part: Tensor, lse_part: Tensor) -> None:
    # The part's share of the softmax. A row without any key has -inf - (-inf) = nan: any share of 0 will do.
    share = torch.sigmoid((lse_part - lse).nan_to_num_(nan=0.0))
    o.lerp_(o_part.to(o.dtype), share.unsqueeze(-1))
    torch.logaddexp(lse, lse_part, out=lse)


def _merge_on_cuda(
    o_NHE: Tensor, lse_NH: Tensor, o_part_QHE: Tensor, lse_part_QH: Tensor, rows_Q: Tensor | None
) -> None:
    from .merge_triton import merge_into as fused

    fused(o_NHE, lse_NH, o_part_QHE, lse_part_QH, rows_Q)


define_operator(
    "merge_into(Tensor(a!) o, Tensor(b!) lse, Tensor o_part, Tensor lse_part, Tensor? rows) -> ()",
    _merge_on_cuda,
    _merge_on_cpu,
)
