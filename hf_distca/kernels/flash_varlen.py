"""What FlashAttention's varlen kernels have in common, whichever package they come from.

With causal=True they align rows with keys at the bottom right, which is exactly a task, and take all tasks
at once. What differs from the contract is handled here: one head dim, a multiple of 8; log-sum-exp as
[H, Q]; tasks without rows or keys, of which some versions leave results unset and call the log-sum-exp +inf.

Shape suffixes: Q packed query rows, K packed key/value rows, H query heads, G key/value heads, D head dim of
queries and keys, E head dim of values, P head dim padded to what the kernels take.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from .contract import AttentionParams, TaskShapes, check_tensors

MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class VarlenCall:
    """The arguments of a varlen kernel besides its tensors of rows.

    Attributes:
        cu_q: [tasks + 1] int32, first row of each task, then the total.
        cu_k: likewise for keys.
        max_q: no task has more rows.
        max_k: no task has more keys.
        scale: factor on the scores.
        causal: aligned bottom right; otherwise every row sees every key.
        window_left: keys seen before the row's own, -1: all.
        window_right: keys seen after the row's own, -1: all.
        softcap: bound of the scores, 0: none.
    """

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    scale: float
    causal: bool
    window_left: int
    window_right: int
    softcap: float

    @staticmethod
    def build(shapes: TaskShapes, params: AttentionParams) -> "VarlenCall":
        """Translate what the contract says."""
        return VarlenCall(
            cu_q=shapes.cu_q,
            cu_k=shapes.cu_k,
            # At 1 the kernels assume one row in *every* task, which empty tasks break. It is only a bound.
            max_q=max(shapes.max_q, 2),
            max_k=shapes.max_k,
            scale=params.scale,
            causal=params.causal,
            window_left=-1 if params.window is None else params.window - 1,
            window_right=0 if params.causal else -1,
            softcap=params.softcap or 0.0,
        )


class FlashVarlenKernel(ABC):
    """A kernel built on a FlashAttention varlen kernel. See `Kernel` for its public methods.

    Gradients are summed in an order that varies from run to run, unless
    torch.use_deterministic_algorithms(True) is set. Nothing here waits for the device.
    """

    name: str
    softcap_supported: bool

    @abstractmethod
    def _call_forward(self, q_QHP: Tensor, k_KGP: Tensor, v_KGP: Tensor, call: VarlenCall) -> tuple[Tensor, Tensor]:
        """Return o_QHP and lse_HQ."""

    @abstractmethod
    def _call_backward(
        self,
        do_QHP: Tensor,
        q_QHP: Tensor,
        k_KGP: Tensor,
        v_KGP: Tensor,
        o_QHP: Tensor,
        lse_HQ: Tensor,
        call: VarlenCall,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq_QHP, dk_KGP and dv_KGP."""

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
        if device.type != "cuda":
            raise ValueError(f"kernel {self.name!r} computes on CUDA, got {device}; on the CPU use 'cpu'")
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            raise ValueError(
                f"kernel {self.name!r} needs a GPU of compute capability 8.0 (Ampere) or later, got "
                f"{capability[0]}.{capability[1]}; 'reference' runs on any"
            )
        if dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"kernel {self.name!r} computes in float16 and bfloat16, got {dtype}: train in bfloat16 "
                "(bf16=True), or use 'reference', which takes any dtype but holds all scores of a task"
            )
        if max(head_dim_qk, head_dim_v) > MAX_HEAD_DIM:
            raise ValueError(
                f"kernel {self.name!r} takes head dims up to {MAX_HEAD_DIM}, got {head_dim_qk} for queries "
                f"and keys and {head_dim_v} for values; 'reference' takes any"
            )
        if params.softcap is not None and not self.softcap_supported:
            raise ValueError(f"kernel {self.name!r} has no softcap, got {params.softcap}; 'flash_attn' has")

    def forward(
        self, q_QHD: Tensor, k_KGD: Tensor, v_KGE: Tensor, shapes: TaskShapes, params: AttentionParams
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        check_tensors(q_QHD, k_KGD, v_KGE, shapes, params.causal)
        rows, heads, _ = q_QHD.shape
        if not shapes.max_q or not shapes.max_k:
            lse_QH = q_QHD.new_full((rows, heads), -torch.inf, dtype=torch.float32)
            return q_QHD.new_zeros(rows, heads, v_KGE.shape[2]), lse_QH
        q_QHP, k_KGP, v_KGP = _one_head_dim(q_QHD, k_KGD, v_KGE)
        o_QHP, lse_HQ = self._call_forward(q_QHP, k_KGP, v_KGP, VarlenCall.build(shapes, params))
        o_QHE, lse_QH = o_QHP[..., : v_KGE.shape[2]].contiguous(), lse_HQ.T.contiguous()
        for start, stop in _spans(shapes.q_lens, without=shapes.k_lens):
            o_QHE[start:stop] = 0
            lse_QH[start:stop] = -torch.inf
        return o_QHE, lse_QH

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
        if not shapes.max_q or not shapes.max_k:
            dq_QHD, dk_KGD, dv_KGE = (x.new_zeros(x.shape) for x in (q_QHD, k_KGD, v_KGE))
            return dq_QHD, dk_KGD, dv_KGE
        do_QHP, q_QHP, k_KGP, v_KGP, o_QHP = _one_head_dim(do_QHE, q_QHD, k_KGD, v_KGE, o_QHE)
        call, lse_HQ = VarlenCall.build(shapes, params), lse_QH.T.contiguous()
        dq_QHP, dk_KGP, dv_KGP = self._call_backward(do_QHP, q_QHP, k_KGP, v_KGP, o_QHP, lse_HQ, call)
        dq_QHD = dq_QHP[..., : q_QHD.shape[2]].contiguous()
        dk_KGD = dk_KGP[..., : k_KGD.shape[2]].contiguous()
        dv_KGE = dv_KGP[..., : v_KGE.shape[2]].contiguous()
        for start, stop in _spans(shapes.q_lens, without=shapes.k_lens):
            dq_QHD[start:stop] = 0
        for start, stop in _spans(shapes.k_lens, without=shapes.q_lens):
            dk_KGD[start:stop] = 0
            dv_KGE[start:stop] = 0
        return dq_QHD, dk_KGD, dv_KGE


def _one_head_dim(*tensors: Tensor) -> list[Tensor]:
    """Pad all to one dense head dim, a multiple of 8 (zeros change no score and add empty columns)."""
    head_dim = -(-max(x.shape[-1] for x in tensors) // 8) * 8
    padded = [pad(x, (0, head_dim - x.shape[-1])) if x.shape[-1] < head_dim else x for x in tensors]
    return [x if x.stride(-1) == 1 else x.contiguous() for x in padded]


def _spans(lens: Sequence[int], without: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last + 1 packed position of each task that has positions here but none on the other side."""
    starts = accumulate(lens, initial=0)
    for start, here, there in zip(starts, lens, without, strict=False):
        if here and not there:
            yield start, start + here
