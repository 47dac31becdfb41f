"""What FlashAttention's varlen kernels have in common, whichever package they come from.

With causal=True they align rows with keys at the bottom right, which is exactly a task, and take all tasks
at once. What differs from the contract is handled here: head dims that must be multiples of 8, and for most kernels
one; rows that must begin at multiples of 16 bytes; log-sum-exp as [H, Q]; tasks without rows or keys, of which some
versions leave results unset and call the log-sum-exp +inf; tasks of very different lengths (see `split`).

Shape suffixes: Q packed query rows, K packed key/value rows, H query heads, G key/value heads, D head dim of
queries and keys, E head dim of values, P and R the same head dims padded to what the kernel takes.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from .checks import check_tensors
from .packed import joined, ready, some_rows, unpadded, without_partners
from .params import AttentionParams
from .shapes import TaskShapes
from .split import Grid, TaskRange, task_ranges
from .varlen_call import VarlenCall

MAX_HEAD_DIM = 256


class FlashVarlenKernel(ABC):
    """A kernel built on a FlashAttention varlen kernel. See `Kernel` for its public methods.

    Gradients are summed in an order that varies from run to run, unless
    torch.use_deterministic_algorithms(True) is set. Nothing here waits for the device.

    Attributes:
        majors: major compute capabilities of the GPUs that it runs on.
        gpus: the same in words.
        softcap_supported: whether scores can be capped.
        forward_grid: what a forward launches for the longest task; None where empty tasks cost nothing.
        backward_grid: likewise.
    """

    name: str
    # Half a tile of 128 keys.
    row_overhead = 64
    # A GPU's memory is tens of times as fast as its links.
    gather_cost = 0.0
    majors: ClassVar[Sequence[int]]
    gpus: ClassVar[str]
    softcap_supported: ClassVar[bool]
    forward_grid: ClassVar[Grid | None]
    backward_grid: ClassVar[Grid | None]

    @abstractmethod
    def _call_forward(self, q_QHP: Tensor, k_KGP: Tensor, v_KGR: Tensor, call: VarlenCall) -> tuple[Tensor, Tensor]:
        """Return o_QHR and lse_HQ."""

    @abstractmethod
    def _call_backward(
        self,
        do_QHR: Tensor,
        q_QHP: Tensor,
        k_KGP: Tensor,
        v_KGR: Tensor,
        o_QHR: Tensor,
        lse_HQ: Tensor,
        call: VarlenCall,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq_QHP, dk_KGP and dv_KGR."""

    def _padded(self, head_dim_qk: int, head_dim_v: int, device: torch.device) -> tuple[int, int]:
        """The least head dims that the kernel takes and that hold these; by default equal ones, multiples of 8."""
        return (-(-max(head_dim_qk, head_dim_v) // 8) * 8,) * 2

    def _refusal(
        self, capability: tuple[int, int], head_dim_qk: int, head_dim_v: int, params: AttentionParams
    ) -> str | None:
        """What to say of something that this kernel alone cannot do."""
        return None

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
        if capability[0] not in self.majors:
            others = "'reference' runs on any" if capability[0] < 8 else "'torch_varlen' runs from 8.0 on"
            raise ValueError(
                f"kernel {self.name!r} needs a GPU of compute capability {self.gpus}, got "
                f"{capability[0]}.{capability[1]}; {others}"
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
            raise ValueError(
                f"kernel {self.name!r} has no softcap, got {params.softcap}; 'flash_attn', 'flash_attn_3' and "
                "'flash_attn_4' have"
            )
        if refusal := self._refusal(capability, head_dim_qk, head_dim_v, params):
            raise ValueError(refusal)

    def forward(
        self, q_QHD: Tensor, k_KGD: Tensor, v_KGE: Tensor, shapes: TaskShapes, params: AttentionParams
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        check_tensors(q_QHD, k_KGD, v_KGE, shapes, params.causal)
        rows, heads, head_dim_qk = q_QHD.shape
        if not shapes.max_q or not shapes.max_k:
            lse_QH = q_QHD.new_full((rows, heads), -torch.inf, dtype=torch.float32)
            return q_QHD.new_zeros(rows, heads, v_KGE.shape[2]), lse_QH
        head_dim_p, head_dim_r = self._padded(head_dim_qk, v_KGE.shape[2], q_QHD.device)
        q_QHP, k_KGP, v_KGR = ready(q_QHD, head_dim_p), ready(k_KGD, head_dim_p), ready(v_KGE, head_dim_r)
        o_parts, lse_parts = [], []
        for tasks in _calls(shapes, self.forward_grid, heads):
            if not tasks.max_q or not tasks.max_k:  # filled in below
                o_parts.append(q_QHD.new_empty(tasks.q.stop - tasks.q.start, heads, v_KGE.shape[2]))
                lse_parts.append(q_QHD.new_empty(heads, tasks.q.stop - tasks.q.start, dtype=torch.float32))
                continue
            call = VarlenCall.build(shapes, tasks, params)
            o_QHR, lse_HQ = self._call_forward(
                some_rows(q_QHP, tasks.q), some_rows(k_KGP, tasks.k), some_rows(v_KGR, tasks.k), call
            )
            o_parts.append(unpadded(o_QHR, v_KGE.shape[2]))
            lse_parts.append(lse_HQ)
        o_QHE, lse_HQ = joined(o_parts), joined(lse_parts, dim=1)
        for rows_without_keys in without_partners(shapes)[0]:
            o_QHE[rows_without_keys] = 0
            lse_HQ[:, rows_without_keys] = -torch.inf
        return o_QHE, lse_HQ.T

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
        head_dim_p, head_dim_r = self._padded(q_QHD.shape[2], v_KGE.shape[2], q_QHD.device)
        q_QHP, k_KGP = ready(q_QHD, head_dim_p), ready(k_KGD, head_dim_p)
        v_KGR, do_QHR, o_QHR = ready(v_KGE, head_dim_r), ready(do_QHE, head_dim_r), ready(o_QHE, head_dim_r)
        parts = []
        for tasks in _calls(shapes, self.backward_grid, q_QHD.shape[1]):
            q_part_QHP, do_part_QHR, o_part_QHR = (some_rows(x, tasks.q) for x in (q_QHP, do_QHR, o_QHR))
            k_part_KGP, v_part_KGR = some_rows(k_KGP, tasks.k), some_rows(v_KGR, tasks.k)
            if not tasks.max_q or not tasks.max_k:  # filled in below
                parts.append((q_part_QHP, k_part_KGP, v_part_KGR))
                continue
            lse_part_HQ, call = some_rows(lse_QH, tasks.q).T.contiguous(), VarlenCall.build(shapes, tasks, params)
            parts.append(
                self._call_backward(do_part_QHR, q_part_QHP, k_part_KGP, v_part_KGR, o_part_QHR, lse_part_HQ, call)
            )
        dq_parts, dk_parts, dv_parts = zip(*parts, strict=True)
        dq_QHD = joined([unpadded(dq_QHP, q_QHD.shape[2]) for dq_QHP in dq_parts])
        dk_KGD = joined([unpadded(dk_KGP, k_KGD.shape[2]) for dk_KGP in dk_parts])
        dv_KGE = joined([unpadded(dv_KGR, v_KGE.shape[2]) for dv_KGR in dv_parts])
        rows_without_keys, keys_without_rows = without_partners(shapes)
        for rows in rows_without_keys:
            dq_QHD[rows] = 0
        for rows in keys_without_rows:
            dk_KGD[rows] = 0
            dv_KGE[rows] = 0
        return dq_QHD, dk_KGD, dv_KGE


def _calls(shapes: TaskShapes, grid: Grid | None, heads: int) -> Sequence[TaskRange]:
    """The kernel calls that compute all tasks."""
    return task_ranges(shapes, grid if grid is not None else Grid(by_q=0, by_k=0), heads)
