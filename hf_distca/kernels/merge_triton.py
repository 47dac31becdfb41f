"""`merge_into` on CUDA: one kernel that reads both parts once and writes the merged rows.

Shape suffixes: N rows of the result so far, Q rows of the part, H query heads, E head dim of values.
"""

import triton
import triton.language as tl
from torch import Tensor

NUMBERS = 2048
"""Numbers of O that one program merges."""


@triton.jit
def _merge_kernel(  # type: ignore[no-untyped-def]  # compiled from its source
    o,
    lse,
    o_part,
    lse_part,
    rows,
    o_row,
    lse_row,
    lse_head,
    o_part_row,
    lse_part_row,
    lse_part_head,
    heads,
    head_dim,
    BY_INDEX: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    part_row = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + part_row).to(tl.int64) if BY_INDEX else part_row
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    e = tl.arange(0, BLOCK_E)
    there = h < heads
    before = tl.load(lse + row * lse_row + h * lse_head, mask=there, other=0.0)
    more = tl.load(lse_part + part_row * lse_part_row + h * lse_part_head, mask=there, other=0.0)
    most = tl.maximum(before, more)
    most = tl.where(most == float("-inf"), 0.0, most)  # without any key: no -inf - (-inf)
    weight = tl.exp(more - most)
    total = tl.exp(before - most) + weight
    share = tl.where(total > 0, weight / total, 0.0)
    merged = tl.where(total > 0, most + tl.log(total), float("-inf"))

    numbers = h[:, None] * head_dim + e[None, :]
    there_too = there[:, None] & (e < head_dim)[None, :]
    into = o + row * o_row + numbers
    was = tl.load(into, mask=there_too, other=0.0).to(share.dtype)
    part = tl.load(o_part + part_row * o_part_row + numbers, mask=there_too, other=0.0).to(share.dtype)
    tl.store(into, (was + (part - was) * share[:, None]).to(o.dtype.element_ty), mask=there_too)
    tl.store(lse + row * lse_row + h * lse_head, merged, mask=there)


def merge_into(o_NHE: Tensor, lse_NH: Tensor, o_part_QHE: Tensor, lse_part_QH: Tensor, rows_Q: Tensor | None) -> None:
    """See `hf_distca.kernels.merge.merge_into`; the part has at least one row."""
    rows, heads, head_dim = o_part_QHE.shape
    o_part_QHE = o_part_QHE if o_part_QHE.stride()[1:] == (head_dim, 1) else o_part_QHE.contiguous()
    assert o_NHE.stride()[1:] == (head_dim, 1)  # written in place; kernels give dense rows
    block_e = triton.next_power_of_2(head_dim)
    block_h = min(triton.next_power_of_2(heads), max(1, NUMBERS // block_e))
    _merge_kernel[(rows, triton.cdiv(heads, block_h))](
        o_NHE, lse_NH, o_part_QHE, lse_part_QH, lse_NH if rows_Q is None else rows_Q,
        o_NHE.stride(0), *lse_NH.stride(), o_part_QHE.stride(0), *lse_part_QH.stride(),
        heads, head_dim,
        BY_INDEX=rows_Q is not None, BLOCK_H=block_h, BLOCK_E=block_e,
    )  # fmt: skip
