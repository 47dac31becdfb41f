"""Core attention kernels: one contract, implementations chosen by name.

`get_kernel` returns an implementation of `Kernel`, `choose_kernel` the fastest one that can do what a model needs;
`TaskShapes` and `AttentionParams` say what to compute; `merge_into` joins what the same rows found in two sets of
keys.
"""

from .choice import KERNEL_NAMES, KERNELS, Choice, Need, choose_kernel, get_kernel
from .contract import Kernel
from .merge import merge_into
from .params import AttentionParams
from .shapes import TaskShapes

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
