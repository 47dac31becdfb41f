"""The CPU kernel: torch's flash attention, or a loop over blocks.

Flash attention serves full and causal tasks, the loop windows and softcap.

`aten::_scaled_dot_product_flash_attention_for_cpu` takes and returns the log-sum-exp and reads
fewer key/value heads than query heads. Its causal mask starts top left, so that a task with keys
before its rows takes two calls. It knows no windows, for which the loop gives it masks, and no
softcap.

Shape suffixes: Q packed query rows, K packed key/value rows, H query heads, G key/value heads, D
head dim of queries and keys, E head dim of values, B equal tasks, R query rows and S keys of each,
M = R·H/G query rows of all heads that read one key/value head.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_distca.checks.kernel_rules import Kernels

from .contract import AttentionParams, Need, TaskShapes, check_tensors
from .fused import merge_into

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SCORES_AT_ONCE = 1 << 22
"""Scores that the loop over blocks holds at a time, of all heads together: 16 MiB in float32."""


class CpuKernel:
    """Core attention on the CPU in any floating dtype, for any head dim.

    See `Kernel` for the methods.

    Memory is linear in the rows.
    """

    name = "cpu"
    # Half a tile of 512 keys: documents of 512 tokens were measured to take twice the time of their
    # pairs.
    row_overhead = 256
    # Ranks on CPUs are often on one machine: there a byte sent is copied a few times, a byte
    # gathered once in either direction of the layer, and a second, short task makes small tiles.
    gather_cost = 0.2

    def check(self, need: Need, device: torch.device) -> None:
        """See `Kernel.check`."""
        if device.type != "cpu":
            raise Kernels.ON_CUDA.error(device=device)
        if need.dtype not in DTYPES:
            names = ", ".join(str(supported).removeprefix("torch.") for supported in DTYPES)
            raise Kernels.DTYPE_ON_CPU.error(dtype=need.dtype, dtypes=names)

    def forward(
        self,
        q_QHD: Tensor,
        k_KGD: Tensor,
        v_KGE: Tensor,
        shapes: TaskShapes,
        params: AttentionParams,
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        check_tensors(q_QHD, k_KGD, v_KGE, shapes, params.causal)
        head_dim_v = v_KGE.shape[2]
        dtype = q_QHD.dtype
        q_QHD, k_KGD, v_KGE = _one_head_dim(q_QHD, k_KGD, v_KGE)
        lse_QH = q_QHD.new_full(q_QHD.shape[:2], -torch.inf, dtype=_accumulator(dtype))
        o_QHE = lse_QH.new_zeros(*q_QHD.shape[:2], v_KGE.shape[2])
        for call in _calls(shapes, params, q_QHD):
            part = _forward(
                call.rows_of(q_QHD), call.keys_of(k_KGD), call.keys_of(v_KGE), call, params
            )
            o_BHRE, lse_BHR = call.rows_of(o_QHE), call.rows_of(lse_QH)
            if call.further:
                merge_into(o_BHRE, lse_BHR, *part)
            else:
                o_BHRE.copy_(part[0])
                lse_BHR.copy_(part[1])
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
        head_dim_qk = q_QHD.shape[2]
        head_dim_v = v_KGE.shape[2]
        dtype = q_QHD.dtype
        # In bfloat16 and float16 the op rounds dk and dv after every tile of rows, and is 3 times
        # slower than in float32 where the processor has no matrix instructions for them.
        tensors = (x.to(_accumulator(dtype)) for x in (do_QHE, q_QHD, k_KGD, v_KGE, o_QHE))
        do_QHE, q_QHD, k_KGD, v_KGE, o_QHE = _one_head_dim(*tensors)
        dq_QHD, dk_KGD, dv_KGE = (
            torch.zeros(x.shape, dtype=x.dtype) for x in (q_QHD, k_KGD, v_KGE)
        )
        for call in _calls(shapes, params, q_QHD):
            do, q, o, lse = (call.rows_of(x) for x in (do_QHE, q_QHD, o_QHE, lse_QH))
            dq, dk, dv = _backward(
                (do, q, call.keys_of(k_KGD), call.keys_of(v_KGE), o, lse), call, params
            )
            call.rows_of(dq_QHD).add_(dq)
            call.keys_of(dk_KGD).add_(dk)
            call.keys_of(dv_KGE).add_(dv)
        dq_QHD, dk_KGD, dv_KGE = (
            dq_QHD[..., :head_dim_qk],
            dk_KGD[..., :head_dim_qk],
            dv_KGE[..., :head_dim_v],
        )
        return (
            dq_QHD.to(dtype).contiguous(),
            dk_KGD.to(dtype).contiguous(),
            dv_KGE.to(dtype).contiguous(),
        )


class _Call(NamedTuple):
    """One call of an op on some query rows and some keys of each of several equal tasks.

    These tasks are neighbours.
    """

    tasks: int
    rows: slice  # packed rows of all tasks
    keys: slice
    task_rows: slice  # rows of each task that take part
    task_keys: slice
    causal: bool = False
    further: bool = False  # these rows' results over other keys came before
    # [R, S] added to scores, -inf where a row does not see a key. None: all pairs are visible.
    mask: Tensor | None = None

    def rows_of(self, x_Q: Tensor) -> Tensor:
        """View query rows of a packed tensor [Q, H, ...] as [B, H, R, ...]."""
        x_BR: Tensor = x_Q[self.rows].unflatten(0, (self.tasks, -1))
        return x_BR[:, self.task_rows].transpose(1, 2)

    def keys_of(self, x_K: Tensor) -> Tensor:
        """View keys of a packed tensor [K, G, ...] as [B, G, S, ...]."""
        x_BK: Tensor = x_K[self.keys].unflatten(0, (self.tasks, -1))
        return x_BK[:, self.task_keys].transpose(1, 2)


def _calls(shapes: TaskShapes, params: AttentionParams, q_QHD: Tensor) -> Iterable[_Call]:
    """Return the calls that together compute each visible pair of all tasks once."""
    if params.softcap is not None or (params.window is not None and params.window < shapes.max_k):
        return _calls_of(shapes, params, SCORES_AT_ONCE // q_QHD.shape[1], q_QHD.dtype)
    return shapes.once(("cpu", params.causal), lambda: list(_calls_of(shapes, params)))


def _calls_of(
    shapes: TaskShapes, params: AttentionParams, scores: int = 0, dtype: torch.dtype | None = None
) -> Iterator[_Call]:
    """Yield calls on whole tasks, or on blocks of `scores` pairs of a row and a key.

    Calls on blocks have masks of this dtype.
    """
    q_stop = k_stop = 0
    for (q_len, k_len), run in groupby(zip(shapes.q_lens, shapes.k_lens, strict=True)):
        # 1. A run of tasks of the same lengths.
        tasks = len(list(run))
        earlier_keys = k_len - q_len  # of each task, before the key of its first row
        rows = slice(q_stop, q_stop + tasks * q_len)
        keys = slice(k_stop, k_stop + tasks * k_len)
        q_stop = rows.stop
        k_stop = keys.stop
        if not q_len or not k_len:
            continue
        # 2. Whole tasks: the square with the diagonal, and the keys before it.
        if not scores:
            square_begin = earlier_keys if params.causal else 0
            square = slice(square_begin, k_len)
            yield _Call(tasks, rows, keys, slice(None), square, params.causal)
            if square_begin:
                yield _Call(tasks, rows, keys, slice(None), slice(0, square_begin), further=True)
            continue
        # 3. Or blocks of rows. Small blocks compute little in vain at the edges of the mask.
        block_rows = max(scores // (tasks * k_len), 1)
        if params.causal:
            block_rows = min(block_rows, 128)
        for start in range(0, q_len, block_rows):
            stop = min(start + block_rows, q_len)
            block_keys = slice(0, k_len)
            mask_RS = None
            if params.causal:
                first_position = earlier_keys + start
                first_key = 0
                if params.window is not None:
                    first_key = max(first_position - params.window + 1, 0)
                # The keys that any of the rows sees.
                block_keys = slice(first_key, earlier_keys + stop)
                mask_RS = _mask(first_position, block_keys, params.window, dtype)
            yield _Call(tasks, rows, keys, slice(start, stop), block_keys, mask=mask_RS)


def _mask(
    first_position: int, keys: slice, window: int | None, dtype: torch.dtype | None
) -> Tensor:
    """Return [R, S] what is added to scores: -inf where a row does not see a key, 0 elsewhere.

    Args:
        first_position: position of the first row; the last row is at the last key.
        keys: positions of the keys.
    """
    row_R1 = torch.arange(first_position, keys.stop).unsqueeze(1)
    key_S = torch.arange(keys.start, keys.stop)
    hidden_RS = key_S > row_R1
    if window is not None:
        hidden_RS |= key_S <= row_R1 - window
    return torch.zeros(hidden_RS.shape, dtype=dtype).masked_fill_(hidden_RS, -torch.inf)


def _one_head_dim(*tensors: Tensor) -> list[Tensor]:
    """Pad with zeros to one dense head dim, as the op needs.

    Zeros change no score and add empty columns.
    """
    widest = max(x.shape[-1] for x in tensors)
    padded = [pad(x, (0, widest - x.shape[-1])) if x.shape[-1] < widest else x for x in tensors]
    return [x if x.stride(-1) == 1 else x.contiguous() for x in padded]


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over parts and of lse."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _forward(
    q_BHRD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, call: _Call, params: AttentionParams
) -> tuple[Tensor, Tensor]:
    """Return o_BHRE and lse_BHR."""
    if params.softcap is None:
        options = {"attn_mask": call.mask, "scale": params.scale}
        o_BHRE, lse_BHR = _flash_forward(q_BHRD, k_BGSD, v_BGSE, 0.0, call.causal, **options)
        return o_BHRE, lse_BHR
    dtype = _accumulator(q_BHRD.dtype)
    heads = q_BHRD.shape[1]
    q_BGMD = _by_kv_head(q_BHRD.to(dtype), k_BGSD.shape[1])
    s_BGMS = (
        (q_BGMD @ k_BGSD.to(dtype).mT)
        .mul_(params.scale / params.softcap)
        .tanh_()
        .mul_(params.softcap)
    )
    if call.mask is not None:
        s_BGMS.unflatten(2, (-1, len(call.mask))).add_(call.mask)
    lse_BGM1 = s_BGMS.logsumexp(dim=-1, keepdim=True)
    o_BGME = s_BGMS.sub_(lse_BGM1).exp_() @ v_BGSE.to(dtype)
    return _by_head(o_BGME, heads), _by_head(lse_BGM1, heads).squeeze(-1)


def _backward(
    tensors: tuple[Tensor, ...], call: _Call, params: AttentionParams
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v that the pairs of a call add.

    The tensors are do, q, k, v, and o and lse over all keys of the rows.
    """
    if params.softcap is None:
        options = {"attn_mask": call.mask, "scale": params.scale}
        dq, dk, dv = _flash_backward(*tensors, 0.0, call.causal, **options)
        return dq, dk, dv
    do_BHRE, q_BHRD, k_BGSD, v_BGSE, o_BHRE, lse_BHR = tensors
    kv_heads = k_BGSD.shape[1]
    do_BGME = _by_kv_head(do_BHRE, kv_heads)
    q_BGMD = _by_kv_head(q_BHRD, kv_heads)
    o_BGME = _by_kv_head(o_BHRE, kv_heads)
    lse_BGM1 = _by_kv_head(lse_BHR.unsqueeze(-1), kv_heads)
    t_BGMS = (q_BGMD @ k_BGSD.mT).mul_(params.scale / params.softcap).tanh_()
    p_BGMS = (t_BGMS * params.softcap).sub_(lse_BGM1)
    if call.mask is not None:
        p_BGMS.unflatten(2, (-1, len(call.mask))).add_(call.mask)
    p_BGMS.exp_()
    ds_BGMS = (do_BGME @ v_BGSE.mT).sub_((do_BGME * o_BGME).sum(-1, keepdim=True)).mul_(p_BGMS)
    slope_BGMS = t_BGMS.square_().neg_().add_(1.0)  # of the softcap: 1 - tanh²
    ds_BGMS.mul_(slope_BGMS).mul_(params.scale)
    return _by_head(ds_BGMS @ k_BGSD, q_BHRD.shape[1]), ds_BGMS.mT @ q_BGMD, p_BGMS.mT @ do_BGME


def _by_kv_head(x_BHRD: Tensor, kv_heads: int) -> Tensor:
    """Return [B, G, M, D]."""
    return torch.unflatten(x_BHRD, 1, (kv_heads, -1)).flatten(2, 3)


def _by_head(x_BGMD: Tensor, heads: int) -> Tensor:
    """Return [B, H, R, D]."""
    return torch.unflatten(x_BGMD, 2, (heads // x_BGMD.shape[1], -1)).flatten(1, 2)
