"""Core attention kernels: one contract, implementations chosen by name.

`get_kernel` returns an implementation of `Kernel`; `TaskShapes` and `AttentionParams` say what to compute;
`merge` joins what the same rows found in two sets of keys.
"""

import torch

from .contract import KERNEL_NAMES, AttentionParams, Kernel, TaskShapes
from .cpu import CpuKernel
from .flash_attn_package import FlashAttnKernel
from .merge import merge
from .reference import ReferenceKernel
from .torch_varlen import TorchVarlenKernel

__all__ = ["KERNEL_NAMES", "AttentionParams", "Kernel", "TaskShapes", "get_kernel", "merge"]


def get_kernel(name: str, device: torch.device) -> Kernel:
    """Return a kernel by name.

    Args:
        name: "auto" ("cpu" on the CPU, "torch_varlen" on CUDA); "reference", float64 with all scores at once,
            to check others against; "cpu"; "torch_varlen", the FlashAttention that comes with torch;
            "flash_attn", the flash-attn package.
        device: where it will run.

    Raises:
        ValueError: no kernel has this name, or "auto" knows none for the device.
        ImportError: "flash_attn" without the package.
    """
    if name == "auto":
        choice = {"cpu": "cpu", "cuda": "torch_varlen"}.get(device.type)
        if choice is None:
            raise ValueError(f"kernel 'auto' knows cpu and cuda devices, got {device}; 'reference' runs on any device")
        name = choice
    kernels: dict[str, type[Kernel]] = {
        "reference": ReferenceKernel,
        "cpu": CpuKernel,
        "torch_varlen": TorchVarlenKernel,
        "flash_attn": FlashAttnKernel,
    }
    if name not in kernels:
        raise ValueError(f"no kernel is named {name!r}; valid names: {', '.join(KERNEL_NAMES)}")
    return kernels[name]()
