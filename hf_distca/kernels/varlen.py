"""FlashAttention's varlen kernels, from torch and from packages, whose differences `versions` lists.

They take all tasks at once, aligned bottom right. What differs from the contract is handled here: head dims that must
be multiples of 8, and for most kernels equal; rows that must begin at multiples of 16 bytes; log-sum-exp as [H, Q];
tasks without rows or keys, of which some versions leave results unset and call the log-sum-exp +inf; tasks of very
different lengths (see `split`).

Shape suffixes: Q packed query rows, K packed key/value rows, H query heads, G key/value heads, D head dim of
queries and keys, E head dim of values, P and R the same head dims padded to what the kernel takes.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl
from torch.nn.functional import pad

from .contract import ALIGNMENT, AttentionParams, Need, TaskShapes, check_tensors
from .split import task_ranges
from .versions import FLASH_ATTN, FLASH_ATTN_3, FLASH_ATTN_4, TORCH_VARLEN, MissingPackageError, Version

MAX_HEAD_DIM = 256
HUB_BUILD, HUB_VERSION = "kernels-community/flash-attn3", 1
FIRST_WITH_FA4_WINDOWS = (2, 13)


class FlashVarlenKernel:
    """Kernel built on a FlashAttention varlen kernel. See `Kernel` for its public methods.

    Gradients are summed in an order that varies from run to run, unless torch.use_deterministic_algorithms(True) is
    set. Nothing here waits for the device.

    Raises:
        ImportError: the package is missing, broken, or too old.
    """

    version: ClassVar[Version]
    name: str
    # Half a tile of 128 keys.
    row_overhead = 64
    # A GPU's memory is tens of times as fast as its links.
    gather_cost = 0.0

    def __init__(self, module: Any = None, **options: Any) -> None:
        module = self.version.load() if module is None else module
        self._forward, self._backward = self.version.functions_of(module)
        self._options = options

    def _padded(self, head_dim_qk: int, head_dim_v: int, device: torch.device) -> tuple[int, int]:
        """Return the least head dims that the kernel takes and that hold these: equal multiples of 8."""
        return (-(-max(head_dim_qk, head_dim_v) // 8) * 8,) * 2

    def _refusal(self, need: Need, capability: tuple[int, int]) -> str | None:
        """Return the error's text for what only this kernel cannot do."""
        return None

    def check(self, need: Need, device: torch.device) -> None:
        """See `Kernel.check`."""
        if device.type != "cuda":
            raise ValueError(f"kernel {self.name!r} computes on CUDA, got {device}; on the CPU use 'cpu'")
        capability = torch.cuda.get_device_capability(device)
        if capability[0] not in self.version.majors:
            others = "'reference' runs on any" if capability[0] < 8 else "'torch_varlen' runs from 8.0 on"
            raise ValueError(
                f"kernel {self.name!r} needs a GPU of compute capability {self.version.gpus}, got "
                f"{capability[0]}.{capability[1]}; {others}"
            )
        if need.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"kernel {self.name!r} computes in float16 and bfloat16, got {need.dtype}: train in bfloat16 "
                "(bf16=True), or use 'reference', which takes any dtype but keeps all scores of a task in memory"
            )
        if max(need.head_dim_qk, need.head_dim_v) > MAX_HEAD_DIM:
            raise ValueError(
                f"kernel {self.name!r} takes head dims up to {MAX_HEAD_DIM}, got {need.head_dim_qk} for "
                f"queries and keys and {need.head_dim_v} for values; 'reference' takes any"
            )
        if need.params.softcap is not None and not self.version.softcap:
            raise ValueError(
                f"kernel {self.name!r} does not support softcap, got {need.params.softcap}; set attention_kernel to "
                "'flash_attn', 'flash_attn_3' or 'flash_attn_4'"
            )
        if refusal := self._refusal(need, capability):
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
        for part, q_rows, k_rows in task_ranges(shapes, self.version.forward_grid, heads):
            q, k, v = _slice(q_QHP, q_rows), _slice(k_KGP, k_rows), _slice(v_KGR, k_rows)
            if part.max_q and part.max_k:
                o_QHR, lse_HQ = self._call_forward(q, k, v, part, params)
            else:  # filled in below
                o_QHR, lse_HQ = q.new_empty(len(q), heads, head_dim_r), q.new_empty(heads, len(q), dtype=torch.float32)
            o_parts.append(o_QHR)
            lse_parts.append(lse_HQ)
        o_QHE, lse_HQ = _joined(o_parts, v_KGE.shape[2]), _joined(lse_parts, dim=1)
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
        inputs = q_QHD, k_KGD, v_KGE
        if not shapes.max_q or not shapes.max_k:
            dq_QHD, dk_KGD, dv_KGE = (x.new_zeros(x.shape) for x in inputs)
            return dq_QHD, dk_KGD, dv_KGE
        head_dim_p, head_dim_r = self._padded(q_QHD.shape[2], v_KGE.shape[2], q_QHD.device)
        q_QHP, k_KGP = _ready(q_QHD, head_dim_p), _ready(k_KGD, head_dim_p)
        v_KGR, do_QHR, o_QHR = _ready(v_KGE, head_dim_r), _ready(do_QHE, head_dim_r), _ready(o_QHE, head_dim_r)
        parts = []
        for part, q_rows, k_rows in task_ranges(shapes, self.version.backward_grid, q_QHD.shape[1]):
            do, q, o, lse = (_slice(x, q_rows) for x in (do_QHR, q_QHP, o_QHR, lse_QH))
            k, v = _slice(k_KGP, k_rows), _slice(v_KGR, k_rows)
            if part.max_q and part.max_k:
                parts.append(self._call_backward((do, q, k, v, o, lse.T.contiguous()), part, params))
            else:  # filled in below
                parts.append((q, k, v))
        dq_QHD, dk_KGD, dv_KGE = (
            _joined(of_all, x.shape[2]) for of_all, x in zip(zip(*parts, strict=True), inputs, strict=True)
        )
        rows_without_keys, keys_without_rows = _without_partners(shapes)
        for gradient, without in (
            (dq_QHD, rows_without_keys),
            (dk_KGD, keys_without_rows),
            (dv_KGE, keys_without_rows),
        ):
            for rows in without:
                gradient[rows] = 0
        return dq_QHD, dk_KGD, dv_KGE

    def _call_forward(
        self, q_QHP: Tensor, k_KGP: Tensor, v_KGR: Tensor, shapes: TaskShapes, params: AttentionParams
    ) -> tuple[Tensor, Tensor]:
        """Return o_QHR and lse_HQ of one call."""
        softcap = self.version.no_softcap if params.softcap is None else params.softcap
        options = {**self._arguments(shapes, params), **self.version.forward}
        o_QHR, lse_HQ, *_ = self._forward(q_QHP, k_KGP, v_KGR, softcap=softcap, **options)
        return o_QHR, lse_HQ

    def _call_backward(
        self, tensors: tuple[Tensor, ...], shapes: TaskShapes, params: AttentionParams
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq_QHP, dk_KGP and dv_KGR of one call, from do, q, k, v, o and lse_HQ."""
        do_QHR, q_QHP, k_KGP, v_KGR, o_QHR, lse_HQ = tensors
        options = {**self._arguments(shapes, params), **self.version.backward, "softcap": params.softcap or 0.0}
        options["deterministic"] = torch.are_deterministic_algorithms_enabled()
        if not self.version.in_place:
            dq_QHP, dk_KGP, dv_KGR, *_ = self._backward(q_QHP, k_KGP, v_KGR, o_QHR, do_QHR, lse_HQ, **options)
            return dq_QHP, dk_KGP, dv_KGR
        dq_QHP, dk_KGP, dv_KGR = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_QHP, k_KGP, v_KGR))
        self._backward(*tensors, dq=dq_QHP, dk=dk_KGP, dv=dv_KGR, **options)
        return dq_QHP, dk_KGP, dv_KGR

    def _arguments(self, shapes: TaskShapes, params: AttentionParams) -> dict[str, Any]:
        """Return the arguments that both functions take by name."""
        no_window, window = self.version.no_window, params.window
        cu_q, cu_k, max_q, max_k = _lengths(shapes)
        return {
            "cu_seqlens_q": cu_q,
            "cu_seqlens_k": cu_k,
            "max_seqlen_q": max_q,
            "max_seqlen_k": max_k,
            "softmax_scale": params.scale,
            self.version.causal: params.causal,
            "window_size_left": no_window if window is None else window - 1,
            "window_size_right": no_window if window is None else 0,
            **self._options,
        }


class FlashAttnKernel(FlashVarlenKernel):
    """FlashAttention-2 of the flash-attn package, 2.7 or later."""

    name = "flash_attn"
    version = FLASH_ATTN


class FlashAttn3Kernel(FlashVarlenKernel):
    """FlashAttention-3 of the flash_attn_3 package, or of its build on the Hugging Face hub.

    Args:
        sm_margin: streaming multiprocessors that a forward leaves to exchanges: its blocks stay for the whole kernel
            call. Blocks of a backward end one by one; the operator takes the number there too.
        hub: without the package, take the hub's build by the `kernels` package, which downloads it.
    """

    name = "flash_attn_3"
    version = FLASH_ATTN_3

    def __init__(self, sm_margin: int = 0, *, hub: bool = True) -> None:
        try:
            self.version.load()  # registers the operators
        except MissingPackageError:
            operators = _hub_operators() if hub else None
            if operators is None:
                raise
        else:
            operators = torch.ops.flash_attn_3
        super().__init__(operators, sm_margin=sm_margin)

    def _padded(self, head_dim_qk: int, head_dim_v: int, device: torch.device) -> tuple[int, int]:
        if 128 < head_dim_qk <= 192 and 96 < head_dim_v <= 128:  # it was made for the 192 and 128 of latent attention
            return -(-head_dim_qk // 8) * 8, -(-head_dim_v // 8) * 8
        return super()._padded(head_dim_qk, head_dim_v, device)

    def _refusal(self, need: Need, capability: tuple[int, int]) -> str | None:
        return _not_deterministic(self.name, need)


class FlashAttn4Kernel(FlashVarlenKernel):
    """FlashAttention-4 of the flash-attn-4 package; the first kernel call of each kind compiles some seconds."""

    name = "flash_attn_4"
    version = FLASH_ATTN_4

    def _padded(self, head_dim_qk: int, head_dim_v: int, device: torch.device) -> tuple[int, int]:
        return _head_dims_of_4(head_dim_qk, head_dim_v, torch.cuda.get_device_capability(device)[0])

    def _refusal(self, need: Need, capability: tuple[int, int]) -> str | None:
        dims = need.head_dim_qk, need.head_dim_v
        if capability[0] == 10 and _head_dims_of_4(*dims, 10) == (256, 256):
            for option, value in {"softcap": need.params.softcap, "window": need.params.window}.items():
                if value is not None:
                    return (
                        f"kernel {self.name!r} has no {option} for head dims of {dims[0]} and {dims[1]} on Blackwell, "
                        f"got {value}; 'flash_attn' has"
                    )
        return None


class TorchVarlenKernel(FlashVarlenKernel):
    """`aten::_flash_attention_forward` and `_backward`: FlashAttention-2, unless the process has activated 3 or 4.

    torch.nn.attention.activate_flash_attention_impl does so; the kernel then has the limits of that version.
    """

    name = "torch_varlen"
    version = TORCH_VARLEN

    def __init__(self) -> None:
        pass  # calls no package

    def _refusal(self, need: Need, capability: tuple[int, int]) -> str | None:
        active = current_flash_attention_impl()
        if active is None:
            return None
        gpu = f"a GPU of compute capability {capability[0]}.{capability[1]}"
        undo = "call torch.nn.attention.restore_flash_attention_impl(), or use a kernel of another name"
        if (active, capability[0]) not in (("FA3", 9), ("FA4", 9), ("FA4", 10)):
            return f"{active} is activated in torch, which does not run on {gpu} so; {undo}"
        if active == "FA3":
            return _not_deterministic(self.name, need)
        version, window = tuple(int(part) for part in torch.__version__.split(".")[:2]), need.params.window
        if window is not None and version < FIRST_WITH_FA4_WINDOWS:
            return (
                f"FA4 is activated in torch, and torch {torch.__version__} gives it no windows, got {window}; {undo}"
            )
        head_dim = -(-max(need.head_dim_qk, need.head_dim_v) // 8) * 8
        if _head_dims_of_4(head_dim, head_dim, capability[0]) != (head_dim, head_dim):
            return f"FA4 is activated in torch, and has no head dim of {head_dim} on {gpu}; {undo}"
        return None

    def _call_forward(
        self, q_QHP: Tensor, k_KGP: Tensor, v_KGR: Tensor, shapes: TaskShapes, params: AttentionParams
    ) -> tuple[Tensor, Tensor]:
        o_QHR, lse_HQ, *_ = torch.ops.aten._flash_attention_forward.default(
            *(q_QHP, k_KGP, v_KGR, *_lengths(shapes)),
            *(0.0, params.causal, False),  # dropout_p, is_causal, return_debug_mask
            **_scale_and_window(params),
        )
        return o_QHR, lse_HQ

    def _call_backward(
        self, tensors: tuple[Tensor, ...], shapes: TaskShapes, params: AttentionParams
    ) -> tuple[Tensor, Tensor, Tensor]:
        # The state of a random number generator that nothing draws from without dropout.
        rng_state, unused = tensors[0].new_empty(2, dtype=torch.uint64), tensors[0].new_empty(0)
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward.default(
            *(*tensors, *_lengths(shapes)),
            *(0.0, params.causal, rng_state, unused),  # dropout_p, is_causal
            **_scale_and_window(params),
        )
        return grads


def _lengths(shapes: TaskShapes) -> tuple[Tensor, Tensor, int, int]:
    """Return cu_q, cu_k, and bounds of the tasks' rows and keys."""
    # At 1 the kernels assume one row in *every* task, which empty tasks break.
    return shapes.cu_q, shapes.cu_k, max(shapes.max_q, 2), shapes.max_k


def _ready(x: Tensor, head_dim: int) -> Tensor:
    """Pad with zeros to a head dim, which changes no score; copy rows that are not dense and aligned."""
    if x.shape[-1] < head_dim:
        return pad(x, (0, head_dim - x.shape[-1]))
    step = ALIGNMENT // x.element_size()
    aligned = x.stride(-1) == 1 and not any(n % step for n in (x.storage_offset(), *x.stride()[:-1]))
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def _slice(x: Tensor, rows: slice) -> Tensor:
    """Return some rows; all of them without a view."""
    return x if rows == slice(0, x.shape[0]) else x[rows]


def _joined(parts: Sequence[Tensor], head_dim: int | None = None, dim: int = 0) -> Tensor:
    """Join tensors without their padding into a contiguous one."""
    cut = [x if head_dim in (None, x.shape[-1]) else x[..., :head_dim] for x in parts]
    return cut[0].contiguous() if len(cut) == 1 else torch.cat(cut, dim)


def _without_partners(shapes: TaskShapes) -> tuple[list[slice], list[slice]]:
    """Find the packed query rows of tasks without keys, and the packed key/value rows of tasks without rows."""

    def spans(lens: Sequence[int], others: Sequence[int]) -> Iterator[slice]:
        for start, here, there in zip(accumulate(lens, initial=0), lens, others, strict=False):
            if here and not there:
                yield slice(start, start + here)

    q_lens, k_lens = shapes.q_lens, shapes.k_lens
    return shapes.once("without partners", lambda: (list(spans(q_lens, k_lens)), list(spans(k_lens, q_lens))))


def _scale_and_window(params: AttentionParams) -> dict[str, Any]:
    left, right = (None, None) if params.window is None else (params.window - 1, 0)
    return {"scale": params.scale, "window_size_left": left, "window_size_right": right}


def _head_dims_of_4(head_dim_qk: int, head_dim_v: int, major: int) -> tuple[int, int]:
    """Return the least head dims of FlashAttention-4 that hold these, of at most 256 each.

    Hopper (major 9) takes any multiples of 8 up to 256; Blackwell those up to 128, (192, 128) and (256, 256).
    """
    dim_qk, dim_v = -(-head_dim_qk // 8) * 8, -(-head_dim_v // 8) * 8
    if major == 9 or max(dim_qk, dim_v) <= 128:
        return dim_qk, dim_v
    return (192, 128) if dim_qk <= 192 and dim_v <= 128 else (256, 256)


def _not_deterministic(name: str, need: Need) -> str | None:
    """Return the error's text where a deterministic backward is asked for that FlashAttention-3 does not have."""
    if max(need.head_dim_qk, need.head_dim_v) <= 192 or not torch.are_deterministic_algorithms_enabled():
        return None
    return (
        f"kernel {name!r} has no deterministic backward for head dims above 192, got {need.head_dim_qk} for queries "
        f"and keys and {need.head_dim_v} for values; leave torch.use_deterministic_algorithms(False), or use "
        "'flash_attn'"
    )


def _hub_operators() -> Any:
    """Return the operators of the hub's build; None without the `kernels` package."""
    try:
        from kernels import get_kernel
    except ModuleNotFoundError as error:
        if error.name != "kernels":  # it is there, and what it needs is not
            raise
        return None
    return get_kernel(HUB_BUILD, version=HUB_VERSION).ops
