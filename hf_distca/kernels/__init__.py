"""Core attention kernels: one contract, implementations chosen by name."""

from hf_distca.kernel_names import KERNEL_NAMES

from .choice import KERNELS, choose_kernel, get_kernel
from .contract import AttentionParams, Kernel, Need, TaskShapes
from .fused import merge_into

__all__ = [
    "KERNELS",
    "KERNEL_NAMES",
    "AttentionParams",
    "Kernel",
    "Need",
    "TaskShapes",
    "choose_kernel",
    "get_kernel",
    "merge_into",
]
