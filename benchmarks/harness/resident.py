"""Memory that a process really has, as Linux counts it: for figures of a process of its own."""

import ctypes
import gc
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""
LEAST_MAPPED = 1 << 16
"""Bytes from which on an allocation is mapped by itself, and goes back when it is freed: what is resident follows
tensors."""


def follow_tensors() -> None:
    """Let glibc give memory back when a tensor is freed; to be called before there are any."""
    libc = ctypes.CDLL(None)
    for parameter in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
        libc.mallopt(parameter, LEAST_MAPPED)


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
