"""Memory that a process really has, as Linux counts it, and whether it keeps what it frees."""

import ctypes
import gc
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
"""Parameters of glibc's mallopt."""
LEAST_MAPPED = 1 << 16
"""Bytes from which on an allocation is mapped by itself, and goes back when it is freed: what is
resident follows tensors."""


def follow_tensors() -> None:
    """Let glibc give memory back when a tensor is freed; to be called before there are any."""
    libc = ctypes.CDLL(None)
    for parameter in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
        libc.mallopt(parameter, LEAST_MAPPED)


def keep_freed_memory() -> None:
    """Have glibc keep the memory that this process frees, as allocators of GPUs do.

    By default glibc returns some of it to the system, more by one strategy than by another. Every
    step then touches new pages, which took up to 2 % of a step.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(
        M_MMAP_MAX, 0
    )  # glibc otherwise maps large blocks one by one, and unmaps them when they are freed
    libc.mallopt(M_TRIM_THRESHOLD, -1)  # glibc otherwise returns free memory at the end of the heap


def begin_peak() -> int:
    """Forget the most resident memory there was so far; bytes that are resident now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    """Bytes: the most resident memory since `begin_peak`."""
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024
