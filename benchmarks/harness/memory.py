"""Memory of a process: what it has resident, and the most it had."""

import ctypes
import resource

M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1


def return_freed_memory(above: int = 1 << 16) -> None:
    """Let the C library give freed memory back at once where it was larger than this, in bytes (glibc).

    Else the peak of a process is that of its allocator, which keeps what has been freed.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, above)
    libc.mallopt(M_TRIM_THRESHOLD, above)


def resident_bytes() -> int:
    """Bytes of this process that are in memory now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def forget_peak() -> None:
    """Let the peak begin with what is resident now (Linux)."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def peak_bytes() -> int:
    """The most bytes of this process that were in memory at once, since its start or `forget_peak`."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
