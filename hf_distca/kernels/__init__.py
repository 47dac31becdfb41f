"""Core attention kernels: one contract, implementations chosen by name."""

from .choice import KERNEL_NAMES, KERNELS, choose_kernel, get_kernel
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
