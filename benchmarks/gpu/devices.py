"""The GPUs of this machine, asked of NVIDIA's driver: no torch is imported, which takes seconds.

Run: python benchmarks/gpu/devices.py; prints how many there are, and fails with status 3 where
there is none.
"""

import ctypes
import sys

NO_CUDA = 3
"""Exit status of what needs a GPU where there is none."""


def cuda_devices() -> int:
    """Number of GPUs that CUDA can use; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def why_none() -> str:
    return "no CUDA: NVIDIA's driver finds no GPU on this machine, so nothing was checked"


if __name__ == "__main__":
    found = cuda_devices()
    print(found if found else why_none())
    sys.exit(0 if found else NO_CUDA)
