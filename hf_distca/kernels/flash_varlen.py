"""What FlashAttention's varlen kernels have in common, whichever package they come from.

With causal=True they align rows with keys at the bottom right, which is exactly a task, and take all tasks
at once. What differs from the contract is handled here: head dims that must be multiples of 8, and for most kernels
one; rows that must begin at multiples of 16 bytes; log-sum-exp as [H, Q]; tasks without rows or keys, of which some
versions leave results unset and call the log-sum-exp +inf; tasks of very different lengths (see `split`).

Shape suffixes: Q packed query rows, K packed key/value rows, H query heads, G key/value heads, D head dim of
queries and keys, E head dim of values, P and R the same head dims padded to what the kernel takes.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from .contract import AttentionParams, TaskShapes, check_tensors
from .split import Grid, TaskRange, task_ranges

MAX_HEAD_DIM = 256
ALIGNMENT = 16
"""Bytes that kernels load at once."""


@dataclass(frozen=True)
class VarlenCall:
    """The arguments of a varlen kernel besides its tensors of rows.

    Attributes:
        shapes: of all tasks, of which the call computes a range.
        cu_q: [tasks + 1] int32, first row of each task, then the total.
        cu_k: likewise for keys.
        max_q: no task has more rows.
        max_k: no task has more keys.
        scale: factor on the scores.
        causal: aligned bottom right; otherwise every row sees every key.
        window_left: keys seen before the row's own, None: all.
        window_right: keys seen after the row's own, None: as `causal` says.
        softcap: bound of the scores, 0: none.
    """

    shapes: TaskShapes
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    scale: float
    causal: bool
    window_left: int | None
    window_right: int | None
    softcap: float

    @staticmethod
    def build(shapes: TaskShapes, tasks: TaskRange, params: AttentionParams) -> "VarlenCall":
        """Translate what the contract says."""
        return VarlenCall(
            shapes=shapes,
            cu_q=tasks.cu_q,
            cu_k=tasks.cu_k,
            # At 1 the kernels assume one row in *every* task, which empty tasks break. It is only a bound.
            max_q=max(tasks.max_q, 2),
            max_k=tasks.max_k,
            scale=params.scale,
            causal=params.causal,
            window_left=None if params.window is None else params.window - 1,
            window_right=None if params.window is None else 0,
            softcap=params.softcap or 0.0,
        )

    def window(self) -> dict[str, int]:
        """The window as FlashAttention-2 and 3 are told of it: -1 for all."""
        left, right = self.window_left, self.window_right
        return {
            "window_size_left": -1 if left is None else left,
            "window_size_right": -1 if right is None else right,
        }


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
        q_QHP, k_KGP, v_KGR = _ready(q_QHD, head_dim_p), _ready(k_KGD, head_dim_p), _ready(v_KGE, head_dim_r)
        o_parts, lse_parts = [], []
        for tasks in _calls(shapes, self.forward_grid, heads):
            if not tasks.max_q or not tasks.max_k:  # filled in below
                o_parts.append(q_QHD.new_empty(tasks.q.stop - tasks.q.start, heads, v_KGE.shape[2]))
                lse_parts.append(q_QHD.new_empty(heads, tasks.q.stop - tasks.q.start, dtype=torch.float32))
                continue
            call = VarlenCall.build(shapes, tasks, params)
            o_QHR, lse_HQ = self._call_forward(
                _rows(q_QHP, tasks.q), _rows(k_KGP, tasks.k), _rows(v_KGR, tasks.k), call
            )
            o_parts.append(_unpadded(o_QHR, v_KGE.shape[2]))
            lse_parts.append(lse_HQ)
        o_QHE, lse_HQ = _joined(o_parts), _joined(lse_parts, dim=1)
        for rows_without_keys in _without_partners(shapes)[0]:
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
        q_QHP, k_KGP = _ready(q_QHD, head_dim_p), _ready(k_KGD, head_dim_p)
        v_KGR, do_QHR, o_QHR = _ready(v_KGE, head_dim_r), _ready(do_QHE, head_dim_r), _ready(o_QHE, head_dim_r)
        parts = []
        for tasks in _calls(shapes, self.backward_grid, q_QHD.shape[1]):
            q_part_QHP, do_part_QHR, o_part_QHR = (_rows(x, tasks.q) for x in (q_QHP, do_QHR, o_QHR))
            k_part_KGP, v_part_KGR = _rows(k_KGP, tasks.k), _rows(v_KGR, tasks.k)
            if not tasks.max_q or not tasks.max_k:  # filled in below
                parts.append((q_part_QHP, k_part_KGP, v_part_KGR))
                continue
            lse_part_HQ, call = _rows(lse_QH, tasks.q).T.contiguous(), VarlenCall.build(shapes, tasks, params)
            parts.append(
                self._call_backward(do_part_QHR, q_part_QHP, k_part_KGP, v_part_KGR, o_part_QHR, lse_part_HQ, call)
            )
        dq_parts, dk_parts, dv_parts = zip(*parts, strict=True)
        dq_QHD = _joined([_unpadded(dq_QHP, q_QHD.shape[2]) for dq_QHP in dq_parts])
        dk_KGD = _joined([_unpadded(dk_KGP, k_KGD.shape[2]) for dk_KGP in dk_parts])
        dv_KGE = _joined([_unpadded(dv_KGR, v_KGE.shape[2]) for dv_KGR in dv_parts])
        rows_without_keys, keys_without_rows = _without_partners(shapes)
        for rows in rows_without_keys:
            dq_QHD[rows] = 0
        for rows in keys_without_rows:
            dk_KGD[rows] = 0
            dv_KGE[rows] = 0
        return dq_QHD, dk_KGD, dv_KGE


def _calls(shapes: TaskShapes, grid: Grid | None, heads: int) -> Sequence[TaskRange]:
    """The calls that compute all tasks."""
    return task_ranges(shapes, grid if grid is not None else Grid(by_q=0, by_k=0), heads)


def _ready(x: Tensor, head_dim: int) -> Tensor:
    """Padded to a head dim (zeros change no score and add empty columns), dense and aligned; itself where it is so."""
    if x.shape[-1] < head_dim:
        return pad(x, (0, head_dim - x.shape[-1]))
    step = ALIGNMENT // x.element_size()
    aligned = x.stride(-1) == 1 and not any(n % step for n in (x.storage_offset(), *x.stride()[:-1]))
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def _rows(x: Tensor, rows: slice) -> Tensor:
    """Some rows; x itself where they are all."""
    return x if rows == slice(0, x.shape[0]) else x[rows]


def _unpadded(x: Tensor, head_dim: int) -> Tensor:
    """The columns that were there before padding."""
    return x if x.shape[-1] == head_dim else x[..., :head_dim]


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """All parts, contiguous; a single one that is contiguous already is itself the result."""
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(list(parts), dim)


def _without_partners(shapes: TaskShapes) -> tuple[list[slice], list[slice]]:
    """Packed query rows of tasks without keys, and packed key/value rows of tasks without rows."""
    return shapes.once(
        "without partners",
        lambda: (
            list(_spans(shapes.q_lens, without=shapes.k_lens)),
            list(_spans(shapes.k_lens, without=shapes.q_lens)),
        ),
    )


def _spans(lens: Sequence[int], without: Sequence[int]) -> Iterator[slice]:
    """The packed positions of each task that has positions here but none on the other side."""
    starts = accumulate(lens, initial=0)
    for start, here, there in zip(starts, lens, without, strict=False):
        if here and not there:
            yield slice(start, start + here)
