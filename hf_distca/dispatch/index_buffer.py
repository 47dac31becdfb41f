"""Transfer of a bound plan's numbers to the device: many small tensors in one copy.

A copy per tensor would cost the host about ten microseconds, and from pageable memory a wait.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_distca.kernels.contract import aligned

CHUNK_BYTES = 1 << 22
"""Bytes of one copy, enough for a plan of some 50,000 rows per rank; larger plans take several copies."""


class IndexBuffer:
    """Buffer that places numbers on the host and returns device tensors, which hold them after `send`.

    Args:
        in_one_go: gather and add up rows by one kernel each, as on a GPU, instead of run by run, which is faster on a
            CPU; None chooses by device.
    """

    def __init__(self, device: torch.device, in_one_go: bool | None = None) -> None:
        self.device = device
        self.in_one_go = device.type != "cpu" if in_one_go is None else in_one_go
        self._host_B = self._device_B = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def place(self, numbers: NDArray[np.int64] | NDArray[np.int32]) -> Tensor:
        """Return the device tensor for the numbers, with their shape [N] and dtype."""
        dense: NDArray[Any] = np.ascontiguousarray(numbers)
        if self._used + max(dense.nbytes, 1) > len(self._host_B):
            self.send()
            size = max(CHUNK_BYTES, dense.nbytes)
            self._host_B = host_bytes(size, pinned=self.device.type == "cuda")
            on_host = self.device.type == "cpu"
            self._device_B = self._host_B if on_host else torch.empty(size, dtype=torch.uint8, device=self.device)
        start, stop = self._used, self._used + dense.nbytes
        self._host_B.numpy()[start:stop] = dense.view(np.uint8)
        self._used = aligned(stop)
        return self._device_B[start:stop].view(torch.from_numpy(dense[:0]).dtype)

    def another(self) -> "IndexBuffer":
        """Return an empty buffer with the same device and mode."""
        return IndexBuffer(self.device, self.in_one_go)

    def send(self) -> None:
        """Send the placed numbers without waiting for their arrival; the memory is not used for later numbers.

        Torch does not reuse pinned memory while a copy reads it, even after its tensor is freed.
        """
        if self._device_B is not self._host_B:
            self._device_B[: self._used].copy_(self._host_B[: self._used], non_blocking=True)
        self._host_B = self._device_B = torch.empty(0, dtype=torch.uint8)
        self._used = 0


def host_bytes(size: int, *, pinned: bool) -> Tensor:
    """Return [size] uint8 on the host with undefined contents; pinned memory is for copies to a GPU."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
