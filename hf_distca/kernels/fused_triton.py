"""The operators of `fused` on CUDA: each reads every number once and writes every number once.

Shape suffixes: N rows of the result, Q rows of a merged part, H query heads, E head dim of values;
W rows of a sum that are written, A addends of all of them, S rows of a source, where the letters
after a row letter are free.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .contract import SOURCE_BITS

NUMBERS = 2048
"""Numbers that one program merges, or adds up."""


@triton.jit
def _merge_kernel(  # type: ignore[no-untyped-def]  # compiled from its source
    o, lse, o_part, lse_part, rows,
    o_row, lse_row, lse_head, o_part_row, lse_part_row, lse_part_head,
    heads, head_dim,
    BY_INDEX: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    part_row = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + part_row).to(tl.int64) if BY_INDEX else part_row
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    e = tl.arange(0, BLOCK_E)
    is_head = h < heads
    lse_o = tl.load(lse + row * lse_row + h * lse_head, mask=is_head, other=0.0)
    lse_new = tl.load(
        lse_part + part_row * lse_part_row + h * lse_part_head, mask=is_head, other=0.0
    )
    greatest = tl.maximum(lse_o, lse_new)
    # Without any key: no -inf - (-inf).
    greatest = tl.where(greatest == float("-inf"), 0.0, greatest)
    weight = tl.exp(lse_new - greatest)
    total = tl.exp(lse_o - greatest) + weight
    share = tl.where(total > 0, weight / total, 0.0)
    merged = tl.where(total > 0, greatest + tl.log(total), float("-inf"))

    numbers = h[:, None] * head_dim + e[None, :]
    is_number = is_head[:, None] & (e < head_dim)[None, :]
    o_numbers = o + row * o_row + numbers
    o_old = tl.load(o_numbers, mask=is_number, other=0.0).to(share.dtype)
    o_new = tl.load(o_part + part_row * o_part_row + numbers, mask=is_number, other=0.0).to(
        share.dtype
    )
    tl.store(
        o_numbers, (o_old + (o_new - o_old) * share[:, None]).to(o.dtype.element_ty), mask=is_number
    )
    tl.store(lse + row * lse_row + h * lse_head, merged, mask=is_head)


def merge_into(
    o_NHE: Tensor, lse_NH: Tensor, o_part_QHE: Tensor, lse_part_QH: Tensor, rows_Q: Tensor | None
) -> None:
    """See `hf_distca.kernels.fused.merge_into`; the part has at least one row."""
    rows, heads, head_dim = o_part_QHE.shape
    assert _is_dense(o_NHE)
    assert _is_dense(o_part_QHE)  # as kernels return it
    block_e = triton.next_power_of_2(head_dim)
    block_h = min(triton.next_power_of_2(heads), max(1, NUMBERS // block_e))
    _merge_kernel[(rows, triton.cdiv(heads, block_h))](
        o_NHE, lse_NH, o_part_QHE, lse_part_QH, lse_NH if rows_Q is None else rows_Q,
        o_NHE.stride(0), *lse_NH.stride(), o_part_QHE.stride(0), *lse_part_QH.stride(),
        heads, head_dim,
        BY_INDEX=rows_Q is not None, BLOCK_H=block_h, BLOCK_E=block_e,
    )  # fmt: skip


@triton.jit
def _sum_kernel(  # type: ignore[no-untyped-def]  # compiled from its source
    out, out_row, width, rows, ends, addends, sources, source_rows,
    BITS: tl.constexpr, BY_INDEX: tl.constexpr, ONTO: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    written = tl.program_id(0)
    row = tl.load(rows + written).to(tl.int64) if BY_INDEX else written.to(tl.int64)
    numbers = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_number = numbers < width
    out_numbers = out + row * out_row + numbers
    total = (
        tl.load(out_numbers, mask=is_number, other=0).to(WIDE)
        if ONTO
        else tl.full((BLOCK,), 0, WIDE)
    )
    for place in range(tl.load(ends + written), tl.load(ends + written + 1)):
        addend = tl.load(addends + place)
        source = addend & ((1 << BITS) - 1)
        member = (addend >> BITS).to(tl.int64)
        for i in tl.static_range(len(sources)):
            # Nothing is read from sources other than the addend's.
            is_read = numbers < tl.where(source == i, width, 0)
            row_numbers = sources[i] + member * source_rows[i] + numbers
            total += tl.load(row_numbers, mask=is_read, other=0).to(WIDE)
    tl.store(out_numbers, total.to(out.dtype.element_ty), mask=is_number)


def sum_rows(
    out_N: Tensor,
    rows_W: Tensor | None,
    ends_W: Tensor,
    addends_A: Tensor,
    sources_S: Sequence[Tensor],
    onto: bool,
) -> None:
    """Write rows of a sum.

    Args:
        out_N: the sum; dense within a row, as all sources are.
        rows_W: the rows to write; None: all.
        ends_W: first addend of each of these rows, then the number of addends.
        onto: add to present values.
    """
    width = out_N[0].numel()
    sources = tuple(sources_S)
    assert all(map(_is_dense, (out_N, *sources)))
    block = min(NUMBERS, triton.next_power_of_2(width))
    _sum_kernel[(len(ends_W) - 1, triton.cdiv(width, block))](
        out_N, out_N.stride(0), width, ends_W if rows_W is None else rows_W, ends_W, addends_A,
        sources, tuple(source.stride(0) for source in sources),
        BITS=SOURCE_BITS, BY_INDEX=rows_W is not None, ONTO=onto,
        WIDE=tl.float64 if out_N.element_size() == 8 else tl.float32, BLOCK=block,
    )  # fmt: skip


def _is_dense(x_N: Tensor) -> bool:
    """Return whether the numbers of a row are adjacent; a tensor without rows is never read."""
    return not len(x_N) or x_N[0].is_contiguous()
