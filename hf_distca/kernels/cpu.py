"""The CPU kernel: torch's flash attention for CPU, run over parts and merged by log-sum-exp.

`aten::_scaled_dot_product_flash_attention_for_cpu` takes and returns the log-sum-exp and reads fewer
key/value heads than query heads, but masks only top-left causal. So tasks are cut into parts (see
`parts`): no mask tensor, no pair computed that is not seen, memory linear in the rows.

Its results lie in memory as [B, Q, H, ...], which is the packed layout: nothing is transposed here.

Shape suffixes: Q packed query rows, K packed key/value rows, H query heads, G key/value heads, D head dim of
queries and keys, E head dim of values, B blocks of a part, R rows or keys of a block.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import cpu_softcap
from .checks import check_tensors
from .merge import merge_into
from .params import AttentionParams
from .parts import Part, plan_parts
from .shapes import TaskShapes

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class CpuKernel:
    """Core attention on the CPU in any floating dtype, for any head dim, with windows and softcap.

    With softcap, which torch's op lacks, blocks of scores are computed with plain torch operations
    (see `cpu_softcap`): slower, but memory stays bounded just the same. See `Kernel` for the methods.
    """

    name = "cpu"
    # Half a tile of 512 keys: documents of 512 tokens were measured to take twice the time of their pairs.
    row_overhead = 256
    # Ranks on CPUs are often on one machine: there a byte sent is copied a few times, a byte gathered once in either
    # direction of the layer, and a second, short task makes small tiles.
    gather_cost = 0.2

    def check(
        self,
        *,
        device: torch.device,
        dtype: torch.dtype,
        head_dim_qk: int,
        head_dim_v: int,
        params: AttentionParams,
    ) -> None:
        """See `Kernel.check`."""
        if device.type != "cpu":
            raise ValueError(
                f"kernel 'cpu' computes on the CPU, got {device}; on CUDA use 'torch_varlen' or 'flash_attn'"
            )
        if dtype not in DTYPES:
            names = ", ".join(str(supported).removeprefix("torch.") for supported in DTYPES)
            raise ValueError(f"kernel 'cpu' computes in {names}, got {dtype}; 'reference' takes any dtype")

    def forward(
        self, q_QHD: Tensor, k_KGD: Tensor, v_KGE: Tensor, shapes: TaskShapes, params: AttentionParams
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        check_tensors(q_QHD, k_KGD, v_KGE, shapes, params.causal)
        head_dim_v = v_KGE.shape[2]
        q_QHD, k_KGD, v_KGE = _one_head_dim(params, q_QHD, k_KGD, v_KGE)
        plan = plan_parts(shapes, params)

        def compute(part: Part) -> tuple[Tensor, Tensor]:
            q_BRHD = _rows(q_QHD, part)
            k_BRGD, v_BRGE = _keys(k_KGD, part), _keys(v_KGE, part)
            return _block_forward(q_BRHD, k_BRGD, v_BRGE, part.mask, params)

        if plan.parts and plan.rows_in_order:
            o_parts, lse_parts = zip(*map(compute, plan.parts), strict=True)
            return _packed(o_parts)[..., :head_dim_v].contiguous(), _packed(lse_parts)

        lse_QH = q_QHD.new_full(q_QHD.shape[:2], -torch.inf, dtype=_accumulator(q_QHD.dtype))
        o_QHE = lse_QH.new_zeros(*q_QHD.shape[:2], v_KGE.shape[2])
        for part in plan.parts:
            o_BRHE, lse_BRH = compute(part)
            o_so_far, lse_so_far = _rows(o_QHE, part), _rows(lse_QH, part)
            if part.mask == "causal" or not params.causal:
                # Nothing has touched these rows yet.
                o_so_far.copy_(o_BRHE)
                lse_so_far.copy_(lse_BRH)
            else:
                merge_into(o_so_far, lse_so_far, o_BRHE, lse_BRH)
        return o_QHE[..., :head_dim_v].to(q_QHD.dtype).contiguous(), lse_QH

    def backward(
        self,
        do_QHE: Tensor,
        q_QHD: Tensor,
        k_KGD: Tensor,
        v_KGE: Tensor,
        o_QHE: Tensor,
        lse_QH: Tensor,
        shapes: TaskShapes,
        params: AttentionParams,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        check_tensors(q_QHD, k_KGD, v_KGE, shapes, params.causal)
        head_dim_qk, head_dim_v, dtype = q_QHD.shape[2], v_KGE.shape[2], q_QHD.dtype
        # In bfloat16 and float16 the op rounds dk and dv after every tile of rows, and is 3 times slower
        # than in float32 where the processor has no matrix instructions for them.
        tensors = (x.to(_accumulator(dtype)) for x in (do_QHE, q_QHD, k_KGD, v_KGE, o_QHE))
        do_QHE, q_QHD, k_KGD, v_KGE, o_QHE = _one_head_dim(params, *tensors)
        plan = plan_parts(shapes, params)

        def compute(part: Part) -> tuple[Tensor, Tensor, Tensor]:
            do_BRHE, q_BRHD, o_BRHE, lse_BRH = (_rows(x, part) for x in (do_QHE, q_QHD, o_QHE, lse_QH))
            k_BRGD, v_BRGE = _keys(k_KGD, part), _keys(v_KGE, part)
            return _block_backward(do_BRHE, q_BRHD, o_BRHE, lse_BRH, k_BRGD, v_BRGE, part.mask, params)

        if plan.parts and plan.rows_in_order and plan.keys_in_order:
            dq_QHD, dk_KGD, dv_KGE = map(_packed, zip(*map(compute, plan.parts), strict=True))
        else:
            dq_QHD, dk_KGD, dv_KGE = (torch.zeros(x.shape, dtype=x.dtype) for x in (q_QHD, k_KGD, v_KGE))
            for part in plan.parts:
                dq_BRHD, dk_BRGD, dv_BRGE = compute(part)
                _rows(dq_QHD, part).add_(dq_BRHD)
                _add_keys(dk_KGD, part, dk_BRGD)
                _add_keys(dv_KGE, part, dv_BRGE)
        return (
            dq_QHD[..., :head_dim_qk].to(dtype).contiguous(),
            dk_KGD[..., :head_dim_qk].to(dtype).contiguous(),
            dv_KGE[..., :head_dim_v].to(dtype).contiguous(),
        )


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    """What parts are added up in, and the dtype of lse."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """Join the results [B, R, ...] of parts that lie in order into a packed tensor."""
    return torch.cat([x_BR.flatten(0, 1) for x_BR in parts]) if len(parts) > 1 else parts[0].flatten(0, 1)


def _one_head_dim(params: AttentionParams, *tensors: Tensor) -> list[Tensor]:
    """Pad all tensors to one head dim, which the op needs (zeros change no score and add empty columns to o).

    Also makes the head dim dense, which it takes for granted.
    """
    widest = max(x.shape[-1] for x in tensors) if params.softcap is None else 0
    padded = [pad(x, (0, widest - x.shape[-1])) if x.shape[-1] < widest else x for x in tensors]
    return [x if x.stride(-1) == 1 else x.contiguous() for x in padded]


def _rows(x_Q: Tensor, part: Part) -> Tensor:
    """View [B, R, ...] of the part's rows in a packed tensor [Q, ...]."""
    return _blocks(x_Q, part.count, part.q_first, part.q_rows, part.q_step)


def _keys(x_K: Tensor, part: Part) -> Tensor:
    """View [B, R, ...] of the part's keys in a packed tensor [K, ...]."""
    return _blocks(x_K, part.count, part.k_first, part.k_rows, part.k_step)


def _blocks(x: Tensor, count: int, first: int, rows: int, step: int) -> Tensor:
    row_stride, *strides = x.stride()
    return x.as_strided(
        (count, rows, *x.shape[1:]),
        (step * row_stride, row_stride, *strides),
        x.storage_offset() + first * row_stride,
    )


def _add_keys(sum_K: Tensor, part: Part, x_BR: Tensor) -> None:
    """Add the part's gradients [B, R, ...] to its keys, which blocks may share: a step's width at a time."""
    step = part.k_step or part.k_rows
    for start in range(0, part.k_rows, step):
        width = min(step, part.k_rows - start)
        target = _blocks(sum_K, part.count, part.k_first + start, width, part.k_step)
        target.add_(x_BR[:, start : start + width])


def _block_forward(
    q_BRHD: Tensor, k_BRGD: Tensor, v_BRGE: Tensor, mask: str, params: AttentionParams
) -> tuple[Tensor, Tensor]:
    """Attention within the blocks of a part: o [B, R, H, E] and lse [B, R, H]."""
    if mask == "anti":
        # Seen from the last row and key, j >= i is j <= i.
        o_BRHE, lse_BRH = _block_forward(q_BRHD.flip(1), k_BRGD.flip(1), v_BRGE.flip(1), "causal", params)
        return o_BRHE.flip(1), lse_BRH.flip(1)
    if params.softcap is not None:
        return cpu_softcap.forward(q_BRHD, k_BRGD, v_BRGE, mask == "causal", params.scale, params.softcap)
    o_BHRE, lse_BHR = _forward(
        q_BRHD.transpose(1, 2),
        k_BRGD.transpose(1, 2),
        v_BRGE.transpose(1, 2),
        0.0,
        mask == "causal",
        scale=params.scale,
    )
    return o_BHRE.transpose(1, 2), lse_BHR.transpose(1, 2)


def _block_backward(
    do_BRHE: Tensor,
    q_BRHD: Tensor,
    o_BRHE: Tensor,
    lse_BRH: Tensor,
    k_BRGD: Tensor,
    v_BRGE: Tensor,
    mask: str,
    params: AttentionParams,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients within the blocks of a part: dq [B, R, H, D], dk [B, R, G, D], dv [B, R, G, E]."""
    if mask == "anti":
        do_BRHE, q_BRHD, o_BRHE, lse_BRH = (x.flip(1) for x in (do_BRHE, q_BRHD, o_BRHE, lse_BRH))
        dq_BRHD, dk_BRGD, dv_BRGE = _block_backward(
            do_BRHE, q_BRHD, o_BRHE, lse_BRH, k_BRGD.flip(1), v_BRGE.flip(1), "causal", params
        )
        return dq_BRHD.flip(1), dk_BRGD.flip(1), dv_BRGE.flip(1)
    if params.softcap is not None:
        return cpu_softcap.backward(
            do_BRHE, q_BRHD, o_BRHE, lse_BRH, k_BRGD, v_BRGE, mask == "causal", params.scale, params.softcap
        )
    dq_BHRD, dk_BGRD, dv_BGRE = _backward(
        do_BRHE.transpose(1, 2),
        q_BRHD.transpose(1, 2),
        k_BRGD.transpose(1, 2),
        v_BRGE.transpose(1, 2),
        o_BRHE.transpose(1, 2),
        lse_BRH.transpose(1, 2),
        0.0,
        mask == "causal",
        scale=params.scale,
    )
    return dq_BHRD.transpose(1, 2), dk_BGRD.transpose(1, 2), dv_BGRE.transpose(1, 2)
