"""Merge attention outputs of the same rows over different keys; and fused kernels as operators of torch.

Shape suffixes: N rows of the result so far, Q rows of the part, H query heads, E head dim of values.
"""

from collections.abc import Callable

import torch
from torch import Tensor

CHUNK = 1 << 16
"""Numbers of O that are merged at a time on the CPU where they must be copied: the copies stay in cache."""

_library = torch.library.Library("hf_distca", "FRAGMENT")


def define_operator(schema: str, on_cuda: Callable[..., None], on_cpu: Callable[..., None] | None = None) -> None:
    """Make an operator `torch.ops.hf_distca.…`, which fake tensors and profilers see as one.

    Args:
        schema: its name, its arguments and which of them it writes, as torch writes schemas; it returns nothing.
        on_cuda: imports Triton when it runs and not before: Triton comes with torch for CUDA only.
        on_cpu: None where the operator is not used on the CPU.
    """
    name = _library.define(schema)
    _library.impl(name, on_cuda, "CUDA")
    if on_cpu is not None:
        _library.impl(name, on_cpu, "CPU")
    _library.impl(name, lambda *_: None, "Meta")


def merge_into(
    o_NHE: Tensor, lse_NH: Tensor, o_part_QHE: Tensor, lse_part_QH: Tensor, rows_Q: Tensor | None = None
) -> None:
    """Merge the output over further keys into o and lse in place, computed in the dtype of lse.

    Differentiate by handing the merged result to the backward of both parts (see `Kernel.backward`), not through
    this function. A row without keys has lse = -inf; a row without keys in both has o = 0.

    Args:
        o_NHE: output so far.
        lse_NH: log-sum-exp so far.
        o_part_QHE: output over keys not seen so far.
        lse_part_QH: log-sum-exp over the same keys.
        rows_Q: the part's rows among the rows of the result, none twice; None: all, in order.
    """
    if o_part_QHE.numel():
        torch.ops.hf_distca.merge_into(o_NHE, lse_NH, o_part_QHE, lse_part_QH, rows_Q)


def _merge_on_cpu(o: Tensor, lse: Tensor, o_part: Tensor, lse_part: Tensor, rows_Q: Tensor | None) -> None:
    if rows_Q is None and o.dtype == lse.dtype:
        _merge(o, lse, o_part, lse_part)
        return
    step = max(1, CHUNK // o_part[0].numel())
    for start in range(0, len(o_part), step):
        chunk = slice(start, start + step)
        rows = chunk if rows_Q is None else rows_Q[chunk]
        o_chunk, lse_chunk = o[rows].to(lse.dtype), lse[rows]
        _merge(o_chunk, lse_chunk, o_part[chunk], lse_part[chunk])
        o[rows] = o_chunk.to(o.dtype)
        lse[rows] = lse_chunk


def _merge(o: Tensor, lse: Tensor, o_part: Tensor, lse_part: Tensor) -> None:
    # The part's share of the softmax. A row without any key has -inf - (-inf) = nan: it shares zeros.
    share = torch.sigmoid((lse_part - lse).nan_to_num_(nan=0.0))
    o.lerp_(o_part.to(o.dtype), share.unsqueeze(-1))
    torch.logaddexp(lse, lse_part, out=lse)


def _merge_on_cuda(o: Tensor, lse: Tensor, o_part: Tensor, lse_part: Tensor, rows_Q: Tensor | None) -> None:
    from .merge_triton import merge_into as fused

    fused(o, lse, o_part, lse_part, rows_Q)


define_operator(
    "merge_into(Tensor(a!) o, Tensor(b!) lse, Tensor o_part, Tensor lse_part, Tensor? rows) -> ()",
    _merge_on_cuda,
    _merge_on_cpu,
)
