"""Fused operators on rows: merge attention over different keys, and add up rows of several tensors.

On CUDA each is one Triton kernel, see `fused_triton`. Fake tensors and profilers see each as one
operator of torch.

Shape suffixes: N rows of the result so far, Q rows of the part, H query heads, E head dim of
values.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

CHUNK = 1 << 16
"""Numbers of O that are merged at a time on the CPU where they must be copied: the copies stay in
cache."""


def merge_into(
    o_NHE: Tensor,
    lse_NH: Tensor,
    o_part_QHE: Tensor,
    lse_part_QH: Tensor,
    rows_Q: Tensor | None = None,
) -> None:
    """Merge the output over further keys into o and lse in place, computed in the dtype of lse.

    Differentiate by handing the merged result to the backward of both parts (see
    `Kernel.backward`), not through this function. A row without keys has lse = -inf; a row without
    keys in both has o = 0.

    Args:
        rows_Q: the part's rows among the rows of the result, none twice; None: all, in order.
    """
    if o_part_QHE.numel():
        torch.ops.hf_distca.merge_into(o_NHE, lse_NH, o_part_QHE, lse_part_QH, rows_Q)


def _merge_on_cpu(
    o: Tensor, lse: Tensor, o_part: Tensor, lse_part: Tensor, rows_Q: Tensor | None
) -> None:
    if rows_Q is None and o.dtype == lse.dtype:
        _merge(o, lse, o_part, lse_part)
        return
    step = max(1, CHUNK // o_part[0].numel())
    for start in range(0, len(o_part), step):
        chunk = slice(start, start + step)
        rows = chunk if rows_Q is None else rows_Q[chunk]
        o_chunk = o[rows].to(lse.dtype)
        lse_chunk = lse[rows]
        _merge(o_chunk, lse_chunk, o_part[chunk], lse_part[chunk])
        o[rows] = o_chunk.to(o.dtype)
        lse[rows] = lse_chunk


def _merge(o: Tensor, lse: Tensor, o_part: Tensor, lse_part: Tensor) -> None:
    # The part's share of the softmax. A row without any key has -inf - (-inf) = nan: it shares
    # zeros.
    share = torch.sigmoid((lse_part - lse).nan_to_num_(nan=0.0))
    o.lerp_(o_part.to(o.dtype), share.unsqueeze(-1))
    torch.logaddexp(lse, lse_part, out=lse)


def _on_cuda(name: str, *arguments: Any) -> None:
    from . import fused_triton  # Triton comes with torch for CUDA only

    getattr(fused_triton, name)(*arguments)


_library = torch.library.Library("hf_distca", "FRAGMENT")
for _schema in (
    "merge_into(Tensor(a!) o, Tensor(b!) lse, Tensor o_part, Tensor lse_part, Tensor? rows) -> ()",
    "sum_rows(Tensor(a!) out, Tensor? rows, Tensor ends, Tensor addends, Tensor[] sources, "
    "bool onto) -> ()",
):
    _name = _library.define(_schema)
    _library.impl(_name, partial(_on_cuda, _name), "CUDA")
    _library.impl(_name, lambda *_: None, "Meta")
# Only the merge has an implementation for the CPU: for sums see `hf_distca.dispatch.rows`.
_library.impl("merge_into", _merge_on_cpu, "CPU")
