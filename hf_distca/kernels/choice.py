"""Kernels by name, and which of them "auto" is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .contract import Kernel
from .cpu import CpuKernel
from .flash_attn_2 import FlashAttnKernel
from .flash_attn_3 import FlashAttn3Kernel
from .flash_attn_4 import FlashAttn4Kernel
from .params import AttentionParams
from .reference import ReferenceKernel
from .torch_varlen import TorchVarlenKernel

KERNELS: dict[str, type[Kernel]] = {
    "reference": ReferenceKernel,
    "cpu": CpuKernel,
    "torch_varlen": TorchVarlenKernel,
    "flash_attn": FlashAttnKernel,
    "flash_attn_3": FlashAttn3Kernel,
    "flash_attn_4": FlashAttn4Kernel,
}
KERNEL_NAMES = ("auto", *KERNELS)

FASTEST_FIRST = {
    9: ("flash_attn_3", "flash_attn_4", "torch_varlen", "flash_attn"),
    10: ("flash_attn_4", "torch_varlen", "flash_attn"),
}
"""By major compute capability. FlashAttention-3 and 4 were made for these GPUs and are up to twice as fast there as
FlashAttention-2, which the two others are; of these, torch's is there without installing anything."""
ELSEWHERE = ("torch_varlen", "flash_attn")


@dataclass(frozen=True)
class Need:
    """What one kind of a model's attention asks of a kernel.

    Attributes:
        dtype: of Q, K and V.
        head_dim_qk: of queries and keys.
        head_dim_v: of values.
        params: window and softcap.
    """

    dtype: torch.dtype
    head_dim_qk: int
    head_dim_v: int
    params: AttentionParams

    def check(self, kernel: Kernel, device: torch.device) -> None:
        """Raise ValueError if a kernel cannot do this on a device, see `Kernel.check`."""
        kernel.check(
            device=device,
            dtype=self.dtype,
            head_dim_qk=self.head_dim_qk,
            head_dim_v=self.head_dim_v,
            params=self.params,
        )


USUAL = Need(torch.bfloat16, 128, 128, AttentionParams(scale=128**-0.5))
"""What most models need; for a choice before the model is known."""


@dataclass(frozen=True)
class Choice:
    """The kernel that "auto" is.

    Attributes:
        kernel: it.
        passed_over: by name, why faster ones are not it.
    """

    kernel: Kernel
    passed_over: dict[str, str]


def get_kernel(name: str, device: torch.device, needs: Sequence[Need] = (), *, sm_margin: int = 0) -> Kernel:
    """Return a kernel by name.

    Args:
        name: "auto" (see `choose_kernel`); "reference", float64 with all scores at once, to check others against;
            "cpu"; "torch_varlen", the FlashAttention that comes with torch; "flash_attn", "flash_attn_3" and
            "flash_attn_4", that of these packages.
        device: where it will run.
        needs: what it must be able to do.
        sm_margin: streaming multiprocessors of a GPU to leave to what else runs there, by a kernel that can.

    Raises:
        ValueError: no kernel has this name, or it cannot do what is needed, or "auto" finds none that can.
        ImportError: the kernel's package is missing, or cannot be imported.
    """
    if name == "auto":
        return choose_kernel(device, needs, sm_margin=sm_margin).kernel
    if name not in KERNELS:
        raise ValueError(f"no kernel is named {name!r}; valid names: {', '.join(KERNEL_NAMES)}")
    kernel = FlashAttn3Kernel(sm_margin) if name == "flash_attn_3" else KERNELS[name]()
    for need in needs:
        need.check(kernel, device)
    return kernel


def choose_kernel(device: torch.device, needs: Sequence[Need] = (), *, sm_margin: int = 0) -> Choice:
    """Choose the fastest kernel that is installed and can do what is needed. Nothing is downloaded.

    Args:
        device: where it will run: on the CPU "cpu"; on CUDA see `FASTEST_FIRST`.
        needs: what it must be able to do; without any, what most models need.
        sm_margin: see `get_kernel`.

    Raises:
        ValueError: there is none: says of each why not.
    """
    if device.type == "cpu":
        cpu = CpuKernel()
        for need in needs:
            need.check(cpu, device)
        return Choice(cpu, {})
    if device.type != "cuda":
        raise ValueError(f"kernel 'auto' knows cpu and cuda devices, got {device}; 'reference' runs on any device")
    candidates: dict[str, Callable[[], Kernel]] = {
        "torch_varlen": TorchVarlenKernel,
        "flash_attn": FlashAttnKernel,
        "flash_attn_3": lambda: FlashAttn3Kernel(sm_margin, hub=False),
        "flash_attn_4": FlashAttn4Kernel,
    }
    major, minor = torch.cuda.get_device_capability(device)
    passed_over: dict[str, str] = {}
    for name in FASTEST_FIRST.get(major, ELSEWHERE):
        try:
            kernel = candidates[name]()
            for need in needs or (USUAL,):
                need.check(kernel, device)
        except (ImportError, ValueError) as error:
            passed_over[name] = str(error)
        else:
            return Choice(kernel, passed_over)
    reasons = "".join(f"\n- {reason}" for reason in passed_over.values())
    raise ValueError(
        f"no kernel that is installed can compute this model's attention on {device}, a GPU of compute capability "
        f"{major}.{minor}:{reasons}"
    )
