"""The CPU kernel: torch's flash attention for CPU, called for blocks of rows and merged by log-sum-exp.

`aten::_scaled_dot_product_flash_attention_for_cpu` takes and returns the log-sum-exp, reads fewer key/value heads than
query heads, and lays results out as [B, R, H, ...], which is the packed layout. But its causal mask starts top left,
and it knows neither windows nor softcap. So tasks are cut into parts, of which each is one call of the op. With
softcap, a loop over blocks of scores takes the op's place.

Shape suffixes: Q packed query rows, K packed key/value rows, H query heads, G key/value heads, N = H/G query heads per
key/value head, D head dim of queries and keys, E head dim of values, B blocks of a part, R rows and S keys of a block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from .contract import AttentionParams, Need, TaskShapes, check_tensors
from .fused import merge_into

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SCORES_AT_ONCE = 1 << 22
"""Scores that the softcap loop holds at a time, of all heads together: 16 MiB in float32."""


class CpuKernel:
    """Core attention on the CPU in any floating dtype, for any head dim. See `Kernel` for the methods.

    Memory is linear in the rows. Softcap is slower than the rest.
    """

    name = "cpu"
    # Half a tile of 512 keys: documents of 512 tokens were measured to take twice the time of their pairs.
    row_overhead = 256
    # Ranks on CPUs are often on one machine: there a byte sent is copied a few times, a byte gathered once in either
    # direction of the layer, and a second, short task makes small tiles.
    gather_cost = 0.2

    def check(self, need: Need, device: torch.device) -> None:
        """See `Kernel.check`."""
        if device.type != "cpu":
            raise ValueError(
                f"kernel 'cpu' computes on the CPU, got {device}; on CUDA use 'torch_varlen' or 'flash_attn'"
            )
        if need.dtype not in DTYPES:
            names = ", ".join(str(supported).removeprefix("torch.") for supported in DTYPES)
            raise ValueError(f"kernel 'cpu' computes in {names}, got {need.dtype}; 'reference' takes any dtype")

    def forward(
        self, q_QHD: Tensor, k_KGD: Tensor, v_KGE: Tensor, shapes: TaskShapes, params: AttentionParams
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        check_tensors(q_QHD, k_KGD, v_KGE, shapes, params.causal)
        if params.softcap is not None:
            return _softcap_forward(q_QHD, k_KGD, v_KGE, shapes, params, params.softcap)
        head_dim_v = v_KGE.shape[2]
        q_QHD, k_KGD, v_KGE = _one_head_dim(q_QHD, k_KGD, v_KGE)
        plan = plan_parts(shapes, params)

        def compute(part: Part) -> tuple[Tensor, Tensor]:
            by_head = (x.transpose(1, 2) for x in (_rows(q_QHD, part), _keys(k_KGD, part), _keys(v_KGE, part)))
            mask = _window_mask(part, q_QHD.dtype)
            o_BHRE, lse_BHR = _flash_forward(*by_head, 0.0, part.mask == "causal", attn_mask=mask, scale=params.scale)
            return o_BHRE.transpose(1, 2), lse_BHR.transpose(1, 2)

        if plan.whole_tasks:
            o_parts, lse_parts = zip(*map(compute, plan.parts), strict=True)
            return _packed(o_parts)[..., :head_dim_v].contiguous(), _packed(lse_parts)

        lse_QH = q_QHD.new_full(q_QHD.shape[:2], -torch.inf, dtype=_accumulator(q_QHD.dtype))
        o_QHE = lse_QH.new_zeros(*q_QHD.shape[:2], v_KGE.shape[2])
        for part in plan.parts:
            o_BRHE, lse_BRH = compute(part)
            o_so_far, lse_so_far = _rows(o_QHE, part), _rows(lse_QH, part)
            if params.causal and part.mask == "full":
                merge_into(o_so_far, lse_so_far, o_BRHE, lse_BRH)
            else:  # the first part of these rows
                o_so_far.copy_(o_BRHE)
                lse_so_far.copy_(lse_BRH)
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
        if params.softcap is not None:
            return _softcap_backward((do_QHE, q_QHD, k_KGD, v_KGE, o_QHE, lse_QH), shapes, params, params.softcap)
        head_dim_qk, head_dim_v, dtype = q_QHD.shape[2], v_KGE.shape[2], q_QHD.dtype
        # In bfloat16 and float16 the op rounds dk and dv after every tile of rows, and is 3 times slower
        # than in float32 where the processor has no matrix instructions for them.
        tensors = (x.to(_accumulator(dtype)) for x in (do_QHE, q_QHD, k_KGD, v_KGE, o_QHE))
        do_QHE, q_QHD, k_KGD, v_KGE, o_QHE = _one_head_dim(*tensors)
        plan = plan_parts(shapes, params)

        def compute(part: Part) -> list[Tensor]:
            do_BRHE, q_BRHD, o_BRHE, lse_BRH = (_rows(x, part) for x in (do_QHE, q_QHD, o_QHE, lse_QH))
            tensors = (do_BRHE, q_BRHD, _keys(k_KGD, part), _keys(v_KGE, part), o_BRHE, lse_BRH)
            by_head, mask = (x.transpose(1, 2) for x in tensors), _window_mask(part, q_QHD.dtype)
            grads = _flash_backward(*by_head, 0.0, part.mask == "causal", attn_mask=mask, scale=params.scale)
            return [x.transpose(1, 2) for x in grads]  # dq [B, R, H, D], dk [B, S, G, D], dv [B, S, G, E]

        if plan.whole_tasks:
            dq_QHD, dk_KGD, dv_KGE = (_packed(x) for x in zip(*map(compute, plan.parts), strict=True))
        else:
            dq_QHD, dk_KGD, dv_KGE = (torch.zeros(x.shape, dtype=x.dtype) for x in (q_QHD, k_KGD, v_KGE))
            for part in plan.parts:
                dq_BRHD, dk_BSGD, dv_BSGE = compute(part)
                _rows(dq_QHD, part).add_(dq_BRHD)
                _add_keys(dk_KGD, part, dk_BSGD)
                _add_keys(dv_KGE, part, dv_BSGE)
        return (
            dq_QHD[..., :head_dim_qk].to(dtype).contiguous(),
            dk_KGD[..., :head_dim_qk].to(dtype).contiguous(),
            dv_KGE[..., :head_dim_v].to(dtype).contiguous(),
        )


@dataclass(frozen=True)
class Part:
    """Equally large blocks: block b has packed rows q_first + b·q_step + [0, q_rows), and packed keys likewise.

    Attributes:
        q_rows: at least 1. The rows of different blocks never overlap.
        k_rows: at least 1. The keys of different blocks may overlap.
        mask: visible pairs of row i and key j of a block: "full": all; "causal": j <= i; "window": i <= j <= i +
            k_rows - q_rows.
        count: number of blocks.
    """

    q_first: int
    q_rows: int
    k_first: int
    k_rows: int
    mask: Literal["full", "causal", "window"]
    count: int = 1
    q_step: int = 0
    k_step: int = 0


@dataclass(frozen=True)
class PartPlan:
    """All parts of a kernel call, which together hold each visible pair of row and key exactly once.

    Attributes:
        parts: of a causal call, "full" parts add to rows whose other part comes before.
        whole_tasks: every part is one or more whole tasks, and the parts hold all rows and keys in order.
    """

    parts: tuple[Part, ...]
    whole_tasks: bool


def plan_parts(shapes: TaskShapes, params: AttentionParams) -> PartPlan:
    """Cut all tasks of a kernel call into parts. Pure integers."""
    return _plan(shapes.q_lens, shapes.k_lens, params.causal, params.window)


# Every layer of a micro-batch asks for the same plan, in both directions.
@lru_cache(maxsize=256)
def _plan(q_lens: tuple[int, ...], k_lens: tuple[int, ...], causal: bool, window: int | None) -> PartPlan:
    parts: list[Part] = []
    whole_tasks = True
    q_starts, k_starts = accumulate(q_lens, initial=0), accumulate(k_lens, initial=0)
    tasks = zip(q_lens, k_lens, q_starts, k_starts, strict=False)
    for (q_len, k_len), group in groupby(tasks, key=lambda task: task[:2]):
        run = list(group)
        if not q_len or not k_len:
            whole_tasks &= q_len == k_len
            continue
        of_task = list(_task_parts(q_len, k_len, causal, window))
        whole_tasks &= len(of_task) == 1 and of_task[0].k_rows == k_len
        for part in of_task:
            tasks_at = [(q_first, k_first) for _, _, q_first, k_first in run]
            if part.count == 1:  # equal neighbours are one batch
                part = replace(part, count=len(run), q_step=q_len, k_step=k_len)
                tasks_at = tasks_at[:1]
            parts += [replace(part, q_first=part.q_first + q, k_first=part.k_first + k) for q, k in tasks_at]
    return PartPlan(tuple(parts), whole_tasks and bool(parts))


def _task_parts(q_len: int, k_len: int, causal: bool, window: int | None) -> Iterator[Part]:
    """Cut one task, whose rows and keys begin at 0."""
    if not causal:
        yield Part(0, q_len, 0, k_len, "full")
        return
    before = k_len - q_len  # keys before the first row's own
    # The first rows see all keys before them.
    head = q_len if window is None else min(max(window - before, 0), q_len)
    if head:
        yield Part(0, head, before, head, "causal")
        if before:
            yield Part(0, head, 0, before, "full")
    if window is not None and head < q_len:
        # The other rows in blocks, whose keys begin with the first that the block's first row sees.
        rows = min(window, max(window // 2, 64), 256)
        blocks, rest = divmod(q_len - head, rows)
        first_key, more = before + head - window + 1, window - 1
        if blocks:
            yield Part(head, rows, first_key, rows + more, "window", blocks, q_step=rows, k_step=rows)
        if rest:
            yield Part(q_len - rest, rest, k_len - rest - more, rest + more, "window")


def _rows(x_Q: Tensor, part: Part) -> Tensor:
    """View the part's rows in a packed tensor [Q, ...] as [B, R, ...]."""
    return _blocks(x_Q, part.count, part.q_first, part.q_rows, part.q_step)


def _keys(x_K: Tensor, part: Part) -> Tensor:
    """View the part's keys in a packed tensor [K, ...] as [B, S, ...]."""
    return _blocks(x_K, part.count, part.k_first, part.k_rows, part.k_step)


def _blocks(x: Tensor, count: int, first: int, rows: int, step: int) -> Tensor:
    row_stride, *strides = x.stride()
    return x.as_strided(
        (count, rows, *x.shape[1:]),
        (step * row_stride, row_stride, *strides),
        x.storage_offset() + first * row_stride,
    )


def _add_keys(sum_K: Tensor, part: Part, x_BS: Tensor) -> None:
    """Add gradients [B, S, ...] to the part's keys, which blocks may share: a step's width at a time."""
    step = part.k_step or part.k_rows
    for start in range(0, part.k_rows, step):
        width = min(step, part.k_rows - start)
        target = _blocks(sum_K, part.count, part.k_first + start, width, part.k_step)
        target.add_(x_BS[:, start : start + width])


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """Join the results [B, R, ...] of parts that lie in order into a packed tensor."""
    return torch.cat([x_BR.flatten(0, 1) for x_BR in parts]) if len(parts) > 1 else parts[0].flatten(0, 1)


def _one_head_dim(*tensors: Tensor) -> list[Tensor]:
    """Pad to one head dim, which the op needs (zeros change no score and add empty columns), and make it dense."""
    widest = max(x.shape[-1] for x in tensors)
    padded = [pad(x, (0, widest - x.shape[-1])) if x.shape[-1] < widest else x for x in tensors]
    return [x if x.stride(-1) == 1 else x.contiguous() for x in padded]


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over parts and of lse."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _window_mask(part: Part, dtype: torch.dtype) -> Tensor | None:
    """Return what is added to the scores [R, S] of a block with a window; None for other masks."""
    if part.mask != "window":
        return None
    distance_RS = torch.arange(part.k_rows) - torch.arange(part.q_rows).unsqueeze(1)
    hidden_RS = (distance_RS < 0) | (distance_RS > part.k_rows - part.q_rows)
    return torch.zeros(hidden_RS.shape, dtype=dtype).masked_fill_(hidden_RS, -torch.inf)


def _softcap_forward(
    q_QHD: Tensor, k_KGD: Tensor, v_KGE: Tensor, shapes: TaskShapes, params: AttentionParams, softcap: float
) -> tuple[Tensor, Tensor]:
    """Compute attention with softcap·tanh(score/softcap) for scores, in blocks of rows that meet all their keys."""
    dtype, kv_heads = _accumulator(q_QHD.dtype), k_KGD.shape[1]
    o_QHE = q_QHD.new_zeros(*q_QHD.shape[:2], v_KGE.shape[2])
    lse_QH = q_QHD.new_full(q_QHD.shape[:2], -torch.inf, dtype=dtype)
    for rows, keys, hidden_RS in _row_blocks(shapes, params, q_QHD.shape[1]):
        q_GNRD = _by_head(q_QHD[rows], kv_heads, dtype)
        k_G1SD, v_G1SE = (_by_head(x[keys], kv_heads, dtype) for x in (k_KGD, v_KGE))
        s_GNRS = (q_GNRD @ k_G1SD.mT).mul_(params.scale / softcap).tanh_().mul_(softcap)
        if hidden_RS is not None:
            s_GNRS.masked_fill_(hidden_RS, -torch.inf)
        lse_GNR = s_GNRS.logsumexp(dim=-1)
        p_GNRS = s_GNRS.sub_(lse_GNR.unsqueeze(-1)).exp_()
        o_QHE[rows] = (p_GNRS @ v_G1SE).flatten(0, 1).transpose(0, 1)
        lse_QH[rows] = lse_GNR.flatten(0, 1).T
    return o_QHE, lse_QH


def _softcap_backward(
    tensors: tuple[Tensor, ...], shapes: TaskShapes, params: AttentionParams, softcap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients; the slope of the softcap is 1 - tanh²."""
    do_QHE, q_QHD, k_KGD, v_KGE, o_QHE, lse_QH = tensors
    dtype, kv_heads = _accumulator(q_QHD.dtype), k_KGD.shape[1]
    dq_QHD, dk_KGD, dv_KGE = (torch.zeros(x.shape, dtype=dtype) for x in (q_QHD, k_KGD, v_KGE))
    for rows, keys, hidden_RS in _row_blocks(shapes, params, q_QHD.shape[1]):
        q_GNRD, do_GNRE, o_GNRE = (_by_head(x[rows], kv_heads, dtype) for x in (q_QHD, do_QHE, o_QHE))
        k_G1SD, v_G1SE = (_by_head(x[keys], kv_heads, dtype) for x in (k_KGD, v_KGE))
        t_GNRS = (q_GNRD @ k_G1SD.mT).mul_(params.scale / softcap).tanh_()
        p_GNRS = (t_GNRS * softcap).sub_(_by_head(lse_QH[rows].unsqueeze(-1), kv_heads, dtype)).exp_()
        if hidden_RS is not None:
            p_GNRS.masked_fill_(hidden_RS, 0.0)
        dv_KGE[keys] += torch.einsum("gnrs,gnre->sge", p_GNRS, do_GNRE)
        delta_GNR1 = (do_GNRE * o_GNRE).sum(-1, keepdim=True)
        ds_GNRS = (do_GNRE @ v_G1SE.mT).sub_(delta_GNR1).mul_(p_GNRS)
        ds_GNRS.mul_(t_GNRS.square_().neg_().add_(1.0)).mul_(params.scale)
        dq_QHD[rows] = (ds_GNRS @ k_G1SD).flatten(0, 1).transpose(0, 1)
        dk_KGD[keys] += torch.einsum("gnrs,gnrd->sgd", ds_GNRS, q_GNRD)
    return dq_QHD.to(q_QHD.dtype), dk_KGD.to(q_QHD.dtype), dv_KGE.to(q_QHD.dtype)


def _row_blocks(
    shapes: TaskShapes, params: AttentionParams, heads: int
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield packed rows, the packed keys that any of them sees, and a mask [R, S] of pairs that are not visible."""
    q_starts, k_starts = accumulate(shapes.q_lens, initial=0), accumulate(shapes.k_lens, initial=0)
    for q_len, k_len, q_first, k_first in zip(shapes.q_lens, shapes.k_lens, q_starts, k_starts, strict=False):
        before = k_len - q_len  # keys before the first row's own
        rows_at_once = max(SCORES_AT_ONCE // (heads * max(k_len, 1)), 1)
        if params.causal:  # small blocks leave little to be computed in vain at the edges of the mask
            rows_at_once = min(rows_at_once, 128)
        for start in range(0, q_len if k_len else 0, rows_at_once):
            stop = min(start + rows_at_once, q_len)
            first, last, hidden_RS = 0, k_len, None
            if params.causal:
                first = 0 if params.window is None else max(before + start - params.window + 1, 0)
                last = before + stop
                own_R1 = torch.arange(before + start, last).unsqueeze(1)
                key_S = torch.arange(first, last)
                hidden_RS = key_S > own_R1
                if params.window is not None:
                    hidden_RS |= key_S <= own_R1 - params.window
            yield slice(q_first + start, q_first + stop), slice(k_first + first, k_first + last), hidden_RS


def _by_head(x_RHD: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """Return [G, N, R, D], with N = 1 for keys and values."""
    return torch.unflatten(x_RHD.to(dtype).transpose(0, 1), 0, (kv_heads, -1))
