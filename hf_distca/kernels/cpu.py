"""The CPU kernel: torch's flash attention for full and causal tasks, and a loop over blocks for windows and softcap.

`aten::_scaled_dot_product_flash_attention_for_cpu` takes and returns the log-sum-exp and reads fewer key/value heads
than query heads. Its causal mask starts top left, so that a task with keys before its rows takes two calls. It knows
no windows, for which the loop gives it masks, and no softcap.

Shape suffixes: Q packed query rows, K packed key/value rows, H query heads, G key/value heads, D head dim of queries
and keys, E head dim of values, B equal tasks, R query rows and S keys of a task or block, M = R·H/G query rows of all
heads that read one key/value head.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor
from torch.nn.functional import pad

from .contract import AttentionParams, Need, TaskShapes, check_tensors
from .fused import merge_into

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SCORES_AT_ONCE = 1 << 22
"""Scores that the loop over blocks holds at a time, of all heads together: 16 MiB in float32."""


class CpuKernel:
    """Core attention on the CPU in any floating dtype, for any head dim. See `Kernel` for the methods.

    Memory is linear in the rows.
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
        head_dim_v, dtype = v_KGE.shape[2], q_QHD.dtype
        q_QHD, k_KGD, v_KGE = _one_head_dim(q_QHD, k_KGD, v_KGE)
        lse_QH = q_QHD.new_full(q_QHD.shape[:2], -torch.inf, dtype=_accumulator(dtype))
        o_QHE = lse_QH.new_zeros(*q_QHD.shape[:2], v_KGE.shape[2])
        if _needs_blocks(shapes, params):
            for rows, keys, hidden_RS in _row_blocks(shapes, params, q_QHD.shape[1]):
                o_QHE[rows], lse_QH[rows] = _block_forward(q_QHD[rows], k_KGD[keys], v_KGE[keys], hidden_RS, params)
        else:
            for part in _parts(shapes, params.causal):
                by_head = (x.transpose(1, 2) for x in (part.rows(q_QHD), part.keys(k_KGD), part.keys(v_KGE)))
                found = _flash_forward(*by_head, 0.0, part.causal, scale=params.scale)
                o_BRHE, lse_BRH = (x.transpose(1, 2) for x in found)
                if params.causal and not part.causal:  # the other keys of these rows came before
                    merge_into(part.rows(o_QHE), part.rows(lse_QH), o_BRHE, lse_BRH)
                else:
                    part.rows(o_QHE).copy_(o_BRHE)
                    part.rows(lse_QH).copy_(lse_BRH)
        return o_QHE[..., :head_dim_v].to(dtype).contiguous(), lse_QH

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
        do_QHE, q_QHD, k_KGD, v_KGE, o_QHE = _one_head_dim(*tensors)
        dq_QHD, dk_KGD, dv_KGE = (torch.zeros(x.shape, dtype=x.dtype) for x in (q_QHD, k_KGD, v_KGE))
        if _needs_blocks(shapes, params):
            for rows, keys, hidden_RS in _row_blocks(shapes, params, q_QHD.shape[1]):
                block = do_QHE[rows], q_QHD[rows], k_KGD[keys], v_KGE[keys], o_QHE[rows], lse_QH[rows]
                dq, dk, dv = _block_backward(*block, hidden_RS, params)
                dq_QHD[rows] = dq
                dk_KGD[keys] += dk
                dv_KGE[keys] += dv
        else:
            for part in _parts(shapes, params.causal):
                do, q, o, lse = (part.rows(x).transpose(1, 2) for x in (do_QHE, q_QHD, o_QHE, lse_QH))
                k, v = (part.keys(x).transpose(1, 2) for x in (k_KGD, v_KGE))
                dq, dk, dv = _flash_backward(do, q, k, v, o, lse, 0.0, part.causal, scale=params.scale)
                part.rows(dq_QHD).add_(dq.transpose(1, 2))
                part.keys(dk_KGD).copy_(dk.transpose(1, 2))  # parts share no keys
                part.keys(dv_KGE).copy_(dv.transpose(1, 2))
        return (
            dq_QHD[..., :head_dim_qk].to(dtype).contiguous(),
            dk_KGD[..., :head_dim_qk].to(dtype).contiguous(),
            dv_KGE[..., :head_dim_v].to(dtype).contiguous(),
        )


@dataclass(frozen=True)
class _Part:
    """One call of the flash op: equal tasks that lie one after another, with keys [k_start, k_stop) of each."""

    q_first: int
    k_first: int
    tasks: int
    q_len: int
    k_len: int
    k_start: int
    k_stop: int
    causal: bool

    def rows(self, x_Q: Tensor) -> Tensor:
        """View the query rows in a packed tensor [Q, ...] as [B, R, ...]."""
        rows = x_Q[self.q_first : self.q_first + self.tasks * self.q_len]
        return torch.unflatten(rows, 0, (self.tasks, self.q_len))

    def keys(self, x_K: Tensor) -> Tensor:
        """View the keys in a packed tensor [K, ...] as [B, S, ...]."""
        keys = x_K[self.k_first : self.k_first + self.tasks * self.k_len]
        return torch.unflatten(keys, 0, (self.tasks, self.k_len))[:, self.k_start : self.k_stop]


def _parts(shapes: TaskShapes, causal: bool) -> list[_Part]:
    """Return the calls of the flash op that together compute each visible pair of all tasks once."""

    def make() -> list[_Part]:
        parts = []
        for q_len, k_len, run in _runs(shapes):
            q_first, k_first = run[0]
            tasks = q_first, k_first, len(run), q_len, k_len
            if causal:
                parts.append(_Part(*tasks, k_len - q_len, k_len, causal=True))
            if not causal or k_len > q_len:
                parts.append(_Part(*tasks, 0, k_len - q_len if causal else k_len, causal=False))
        return parts

    return shapes.once(("cpu", causal), make)


def _runs(shapes: TaskShapes) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Yield the lengths of equal neighbouring tasks and the starts of each; leave out tasks without a pair."""
    starts = zip(accumulate(shapes.q_lens, initial=0), accumulate(shapes.k_lens, initial=0), strict=True)
    tasks = zip(shapes.q_lens, shapes.k_lens, starts, strict=False)
    for (q_len, k_len), run in groupby(tasks, key=lambda task: task[:2]):
        if q_len and k_len:
            yield q_len, k_len, [start for _, _, start in run]


def _one_head_dim(*tensors: Tensor) -> list[Tensor]:
    """Pad with zeros to one dense head dim, as the op needs: zeros change no score and add empty columns."""
    widest = max(x.shape[-1] for x in tensors)
    padded = [pad(x, (0, widest - x.shape[-1])) if x.shape[-1] < widest else x for x in tensors]
    return [x if x.stride(-1) == 1 else x.contiguous() for x in padded]


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over parts and of lse."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _needs_blocks(shapes: TaskShapes, params: AttentionParams) -> bool:
    """Return whether scores are capped, or a window hides keys of some task."""
    return params.softcap is not None or (params.window is not None and params.window < shapes.max_k)


def _row_blocks(
    shapes: TaskShapes, params: AttentionParams, heads: int
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield the packed rows and keys of each block, with a mask [R, S] of hidden pairs; None hides no pair."""
    for q_len, k_len, run in _runs(shapes):
        before = k_len - q_len  # keys before the first row's own
        rows_at_once = max(SCORES_AT_ONCE // (heads * k_len), 1)
        if params.causal:  # small blocks leave little to be computed in vain at the edges of the mask
            rows_at_once = min(rows_at_once, 128)
        for start in range(0, q_len, rows_at_once):
            stop = min(start + rows_at_once, q_len)
            first, last, hidden_RS = 0, k_len, None
            if params.causal:
                first = 0 if params.window is None else max(before + start - params.window + 1, 0)
                last = before + stop
                own_R1, key_S = torch.arange(before + start, last).unsqueeze(1), torch.arange(first, last)
                hidden_RS = key_S > own_R1
                if params.window is not None:
                    hidden_RS |= key_S <= own_R1 - params.window
            for q_first, k_first in run:
                yield slice(q_first + start, q_first + stop), slice(k_first + first, k_first + last), hidden_RS


def _block_forward(
    q_RHD: Tensor, k_SGD: Tensor, v_SGE: Tensor, hidden_RS: Tensor | None, params: AttentionParams
) -> tuple[Tensor, Tensor]:
    """Return o_RHE and lse_RH of one block."""
    if params.softcap is None:
        by_head = (x.unsqueeze(0).transpose(1, 2) for x in (q_RHD, k_SGD, v_SGE))
        found = _flash_forward(*by_head, attn_mask=_mask(hidden_RS, q_RHD.dtype), scale=params.scale)
        o_RHE, lse_RH = (x.transpose(1, 2).squeeze(0) for x in found)
        return o_RHE, lse_RH
    dtype, heads, kv_heads = _accumulator(q_RHD.dtype), q_RHD.shape[1], k_SGD.shape[1]
    q_GMD, k_GSD, v_GSE = (_by_head(x.to(dtype), kv_heads) for x in (q_RHD, k_SGD, v_SGE))
    s_GMS = _hide(_tanh(q_GMD, k_GSD, params).mul_(params.softcap), hidden_RS, -torch.inf)
    lse_GM1 = s_GMS.logsumexp(dim=-1, keepdim=True)
    return _by_row(s_GMS.sub_(lse_GM1).exp_() @ v_GSE, heads), _by_row(lse_GM1, heads).squeeze(-1)


def _block_backward(
    do_RHE: Tensor,
    q_RHD: Tensor,
    k_SGD: Tensor,
    v_SGE: Tensor,
    o_RHE: Tensor,
    lse_RH: Tensor,
    hidden_RS: Tensor | None,
    params: AttentionParams,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of one block, complete for its rows."""
    if params.softcap is None:
        tensors = (do_RHE, q_RHD, k_SGD, v_SGE, o_RHE, lse_RH)
        by_head = (x.unsqueeze(0).transpose(1, 2) for x in tensors)
        mask_RS = _mask(hidden_RS, q_RHD.dtype)
        found = _flash_backward(*by_head, 0.0, False, attn_mask=mask_RS, scale=params.scale)
        dq_RHD, dk_SGD, dv_SGE = (x.transpose(1, 2).squeeze(0) for x in found)
        return dq_RHD, dk_SGD, dv_SGE
    tensors = (do_RHE, q_RHD, k_SGD, v_SGE, o_RHE, lse_RH.unsqueeze(-1))
    do_GME, q_GMD, k_GSD, v_GSE, o_GME, lse_GM1 = (_by_head(x, k_SGD.shape[1]) for x in tensors)
    t_GMS = _tanh(q_GMD, k_GSD, params)
    p_GMS = _hide((t_GMS * params.softcap).sub_(lse_GM1).exp_(), hidden_RS, 0.0)
    ds_GMS = (do_GME @ v_GSE.mT).sub_((do_GME * o_GME).sum(-1, keepdim=True)).mul_(p_GMS)
    ds_GMS.mul_(t_GMS.square_().neg_().add_(1.0)).mul_(params.scale)  # the slope of the softcap is 1 - tanh²
    dk_GSD, dv_GSE = ds_GMS.mT @ q_GMD, p_GMS.mT @ do_GME
    return _by_row(ds_GMS @ k_GSD, q_RHD.shape[1]), dk_GSD.transpose(0, 1), dv_GSE.transpose(0, 1)


def _mask(hidden_RS: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return what is added to the scores of a block with a window."""
    assert hidden_RS is not None  # windows are causal
    return torch.zeros(hidden_RS.shape, dtype=dtype).masked_fill_(hidden_RS, -torch.inf)


def _tanh(q_GMD: Tensor, k_GSD: Tensor, params: AttentionParams) -> Tensor:
    """Return the capped scores [G, M, S] of a block, divided by the softcap."""
    assert params.softcap is not None
    return (q_GMD @ k_GSD.mT).mul_(params.scale / params.softcap).tanh_()


def _hide(x_GMS: Tensor, hidden_RS: Tensor | None, value: float) -> Tensor:
    """Fill in a value for pairs that are not visible."""
    if hidden_RS is not None:
        x_GMS.unflatten(1, (-1, len(hidden_RS))).masked_fill_(hidden_RS, value)
    return x_GMS


def _by_head(x_RHD: Tensor, kv_heads: int) -> Tensor:
    """Return [G, M, D]; M is S for keys and values."""
    return torch.unflatten(x_RHD.transpose(0, 1), 0, (kv_heads, -1)).flatten(1, 2)


def _by_row(x_GMD: Tensor, heads: int) -> Tensor:
    """Return [R, H, D]."""
    return x_GMD.view(heads, -1, x_GMD.shape[2]).transpose(0, 1)
