"""Core attention kernels: one contract, implementations chosen by name.

`get_kernel` returns an implementation of `Kernel`, `choose_kernel` the fastest one that can do what a model needs.
"""

from .choice import KERNEL_NAMES, KERNELS, Choice, choose_kernel, get_kernel
from .contract import AttentionParams, Kernel, Need, TaskShapes
from .fused import merge_into

__all__ = [
    "KERNELS",
    "KERNEL_NAMES",
    "AttentionParams",
    "Choice",
    "Kernel",
    "Need",
    "TaskShapes",
    "choose_kernel",
    "get_kernel",
    "merge_into",
]
