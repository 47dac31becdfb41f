"""What FlashAttention's varlen kernels share; `versions` has one class for each version.

They take all tasks at once, aligned bottom right. What differs from the contract is handled here:
head dims that must be multiples of 8, and for most kernels equal; rows that must begin at multiples
of 16 bytes; log-sum-exp as [H, Q]; tasks without rows or keys, of which some versions leave results
unset and call the log-sum-exp +inf; tasks of very different lengths (see `split`).

Shape suffixes: Q packed query rows, K packed key/value rows, H query heads, G key/value heads, D
head dim of queries and keys, E head dim of values, P and R the same head dims padded to what the
kernel takes.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import accumulate
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_distca.checks.kernel_rules import Kernels
from hf_distca.checks.refusal import PackageError
from hf_distca.kernel_names import KernelPackage, MissingPackageError

from .contract import ALIGNMENT, AttentionParams, Need, TaskShapes, check_tensors
from .split_calls import OF_LONGEST, OF_LONGEST_Q, task_ranges

MAX_HEAD_DIM = 256


class FlashVarlenKernel:
    """Kernel built on a FlashAttention varlen kernel. See `Kernel` for its public methods.

    Gradients are summed in an order that varies from run to run, unless
    torch.use_deterministic_algorithms(True) is set. Nothing here waits for the device.

    Raises:
        ImportError: the package is missing, broken, or too old.
    """

    name: str
    row_overhead = 64  # half a tile of 128 keys
    gather_cost = 0.0  # a GPU's memory is tens of times as fast as its links

    majors: Sequence[int] = range(8, 100)  # major compute capabilities of the GPUs that it runs on
    gpus = "8.0 (Ampere) or later"
    has_softcap = True
    # Thread blocks of a kernel whose number depends on the longest task.
    forward_grid, backward_grid = OF_LONGEST_Q, OF_LONGEST
    package: KernelPackage  # of kernels that do not come with torch
    functions: tuple[
        str, ...
    ]  # for forward and backward; then names that show a version to be new enough
    newer = "a newer one"
    # Arguments for cu_q, cu_k, the most rows and keys of a task, `AttentionParams.scale` and
    # `causal`.
    names = (
        "cu_seqlens_q",
        "cu_seqlens_k",
        "max_seqlen_q",
        "max_seqlen_k",
        "softmax_scale",
        "causal",
    )
    no_window: int | None = -1  # both sides of a window that sees all keys
    no_softcap: float | None = 0.0  # a forward's softcap where scores are not capped
    do_first = True  # the backward takes do before q; else behind o
    in_place = (
        True  # the backward writes dq, dk and dv into given tensors; else it returns new ones
    )
    forward_options: ClassVar[
        Mapping[str, Any]
    ] = {}  # further arguments of the function for this direction
    backward_options: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, module: Any = None, **options: Any) -> None:
        module = self.load() if module is None else module
        lacking = [name for name in self.functions if not hasattr(module, name)]
        if lacking:
            raise PackageError(
                f"kernel {self.name!r}: the {self.package.distribution} package has no "
                f"{' and '.join(lacking)}; install {self.newer}: {self.package.install}"
            )
        self._forward, self._backward = (getattr(module, name) for name in self.functions[:2])
        self._options = options

    @classmethod
    def load(cls) -> ModuleType:
        """Import the module.

        Raise MissingPackageError if the package is not installed, else PackageError.
        """
        package = cls.package
        try:
            return import_module(package.module)
        # Built for another torch or CUDA, a package fails with an OSError or an AttributeError as
        # well.
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            lacking = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing := package.missing():
                absent = f"{package.module}.".startswith(f"{lacking}.")
                raise MissingPackageError(missing if absent else f"{missing} ({why})") from error
            build = f"install a build for this torch and CUDA: {package.install}"
            module = (
                f"install what has {lacking}; PYTHONPATH ignores .pth files: add the folder that "
                "one names"
            )
            raise PackageError(
                f"kernel {cls.name!r}: the {package.distribution} package is installed, but cannot "
                f"be imported: {why}; {build if lacking is None else module}"
            ) from error

    def _padded(self, head_dim_qk: int, head_dim_v: int, device: torch.device) -> tuple[int, int]:
        """Return the least head dims that the kernel takes and that hold these.

        The two dims are the same multiple of 8.
        """
        return (-(-max(head_dim_qk, head_dim_v) // 8) * 8,) * 2

    def _check_version(self, need: Need, capability: tuple[int, int]) -> None:
        """Raise ValueError if this version of the kernel cannot do what is needed."""

    def check(self, need: Need, device: torch.device) -> None:
        """See `Kernel.check`."""
        name = self.name
        if device.type != "cuda":
            raise Kernels.NOT_ON_CUDA.error(kernel=name, device=device)
        capability = torch.cuda.get_device_capability(device)
        if capability[0] not in self.majors:
            older, newer = (
                "'reference', which runs on any",
                "'torch_varlen', which runs from 8.0 on",
            )
            raise Kernels.OTHER_GPU.error(
                kernel=name,
                gpus=self.gpus,
                capability=f"{capability[0]}.{capability[1]}",
                other=older if capability[0] < 8 else newer,
            )
        if need.dtype not in (torch.float16, torch.bfloat16):
            raise Kernels.DTYPE.error(kernel=name, dtype=need.dtype)
        if max(need.head_dim_qk, need.head_dim_v) > MAX_HEAD_DIM:
            raise Kernels.HEAD_DIM.error(
                kernel=name, most=MAX_HEAD_DIM, qk=need.head_dim_qk, v=need.head_dim_v
            )
        if need.params.softcap is not None and not self.has_softcap:
            raise Kernels.SOFTCAP.error(kernel=name, softcap=need.params.softcap)
        self._check_version(need, capability)

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
        heads = q_QHD.shape[1]
        head_dim_p, head_dim_r = self._padded(q_QHD.shape[2], v_KGE.shape[2], q_QHD.device)
        q_QHP, k_KGP, v_KGR = (
            _ready(q_QHD, head_dim_p),
            _ready(k_KGD, head_dim_p),
            _ready(v_KGE, head_dim_r),
        )
        o_parts, lse_parts = [], []
        for part, q_rows, k_rows in task_ranges(shapes, self.forward_grid, heads):
            q, k, v = _slice(q_QHP, q_rows), _slice(k_KGP, k_rows), _slice(v_KGR, k_rows)
            if part.max_q and part.max_k:
                options = {**self._arguments(part, params, self.no_softcap), **self.forward_options}
                o_QHR, lse_HQ, *_ = self._forward(q, k, v, **options)
            else:  # filled in below
                o_QHR = q.new_empty(len(q), heads, head_dim_r)
                lse_HQ = q.new_empty(heads, len(q), dtype=torch.float32)
            o_parts.append(o_QHR)
            lse_parts.append(lse_HQ)
        o_QHE = _joined(o_parts, v_KGE.shape[2])
        lse_HQ = _joined(lse_parts, dim=1)
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
        head_dim_p, head_dim_r = self._padded(q_QHD.shape[2], v_KGE.shape[2], q_QHD.device)
        # 1. Contiguous tensors, in head dims that the kernel takes.
        q_QHP, k_KGP = _ready(q_QHD, head_dim_p), _ready(k_KGD, head_dim_p)
        v_KGR, do_QHR, o_QHR = (
            _ready(v_KGE, head_dim_r),
            _ready(do_QHE, head_dim_r),
            _ready(o_QHE, head_dim_r),
        )
        # 2. One kernel call for each range of tasks.
        parts = []
        for part, q_rows, k_rows in task_ranges(shapes, self.backward_grid, q_QHD.shape[1]):
            do, q, o, lse = (_slice(x, q_rows) for x in (do_QHR, q_QHP, o_QHR, lse_QH))
            k, v = _slice(k_KGP, k_rows), _slice(v_KGR, k_rows)
            tensors = (do, q, k, v, o) if self.do_first else (q, k, v, o, do)
            options = {**self._arguments(part, params, no_softcap=0.0), **self._more_of_backward(q)}
            has_pairs = part.max_q and part.max_k
            if has_pairs and not self.in_place:
                parts.append(self._backward(*tensors, lse.T.contiguous(), **options)[:3])
                continue
            dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
            if has_pairs:  # else filled in below
                self._backward(*tensors, lse.T.contiguous(), dq=dq, dk=dk, dv=dv, **options)
            parts.append((dq, dk, dv))
        # 3. The gradients of all tasks. Kernels leave rows without keys, and keys without rows, as
        #    they find them.
        dq_parts, dk_parts, dv_parts = zip(*parts, strict=True)
        dq_QHD, dk_KGD = _joined(dq_parts, q_QHD.shape[2]), _joined(dk_parts, q_QHD.shape[2])
        dv_KGE = _joined(dv_parts, v_KGE.shape[2])
        rows_without_keys, keys_without_rows = _without_partners(shapes)
        for rows in rows_without_keys:
            dq_QHD[rows] = 0
        for keys in keys_without_rows:
            dk_KGD[keys] = dv_KGE[keys] = 0
        return dq_QHD, dk_KGD, dv_KGE

    def _more_of_backward(self, q_QHP: Tensor) -> dict[str, Any]:
        """Return the arguments that the function for the backward alone takes by name."""
        return {
            **self.backward_options,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }

    def _arguments(
        self, shapes: TaskShapes, params: AttentionParams, no_softcap: float | None
    ) -> dict[str, Any]:
        """Return the arguments that both functions take by name."""
        # With at most 1 row the kernels assume one row in *every* task, which empty tasks break.
        lengths = shapes.cu_q, shapes.cu_k, max(shapes.max_q, 2), shapes.max_k
        softcap = {}
        if self.has_softcap:
            softcap["softcap"] = no_softcap if params.softcap is None else params.softcap
        return {
            **dict(zip(self.names, (*lengths, params.scale, params.causal), strict=True)),
            "window_size_left": self.no_window if params.window is None else params.window - 1,
            "window_size_right": self.no_window if params.window is None else 0,
            **softcap,
            **self._options,
        }


def _ready(x: Tensor, head_dim: int) -> Tensor:
    """Pad with zeros to a head dim, which changes no score.

    Copy rows that are not dense and aligned.
    """
    if x.shape[-1] < head_dim:
        return pad(x, (0, head_dim - x.shape[-1]))
    step = ALIGNMENT // x.element_size()
    aligned = x.stride(-1) == 1 and not any(
        n % step for n in (x.storage_offset(), *x.stride()[:-1])
    )
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def _slice(x: Tensor, rows: slice) -> Tensor:
    """Return a view of some rows, or the tensor itself if these are all rows."""
    return x if rows == slice(0, x.shape[0]) else x[rows]


def _joined(parts: Sequence[Tensor], head_dim: int | None = None, dim: int = 0) -> Tensor:
    """Join tensors without their padding into a contiguous one."""
    cut = [x if head_dim in (None, x.shape[-1]) else x[..., :head_dim] for x in parts]
    return cut[0].contiguous() if len(cut) == 1 else torch.cat(cut, dim)


def _without_partners(shapes: TaskShapes) -> tuple[list[slice], list[slice]]:
    """Find the packed rows of tasks that lack the other side.

    These are query rows of tasks without keys, and key/value rows of tasks without query rows.
    """

    def spans(lens: Sequence[int], partner_lens: Sequence[int]) -> list[slice]:
        tasks = zip(accumulate(lens), lens, partner_lens, strict=True)
        return [
            slice(end - length, end) for end, length, partners in tasks if length and not partners
        ]

    q_lens, k_lens = shapes.q_lens, shapes.k_lens
    return shapes.once("without partners", lambda: (spans(q_lens, k_lens), spans(k_lens, q_lens)))
