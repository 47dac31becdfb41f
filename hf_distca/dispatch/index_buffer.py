"""The numbers of a bound plan on their way to the device: many small tensors, one copy.

A copy of its own for each would cost the host some ten microseconds, and from pageable memory the host would have to
wait for it.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_distca.kernels.contract import aligned

CHUNK_BYTES = 1 << 22
"""Room for the numbers of a plan of some 50000 rows a rank; what needs more takes several copies."""


class IndexBuffer:
    """Takes numbers on the host, and hands out tensors on the device that hold them once they have been sent.

    Args:
        device: where the tensors lie.
        in_one_go: whether rows are gathered, and added up, by one kernel each, as on a GPU, or run by run, which is
            faster on a CPU; None for what suits the device.
    """

    def __init__(self, device: torch.device, in_one_go: bool | None = None) -> None:
        self.device = device
        self.in_one_go = device.type != "cpu" if in_one_go is None else in_one_go
        self._host_B = self._device_B = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def place(self, numbers: NDArray[np.int64] | NDArray[np.int32]) -> Tensor:
        """The tensor that will hold the numbers, of their shape [N] and dtype."""
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
        """An empty one for the same device and use."""
        return IndexBuffer(self.device, self.in_one_go)

    def send(self) -> None:
        """Send what has been placed, without waiting for its arrival. Nothing can be placed in the same memory again.

        Torch keeps pinned memory that a copy still reads from being used again, whoever lets go of it.
        """
        if self._device_B is not self._host_B:
            self._device_B[: self._used].copy_(self._host_B[: self._used], non_blocking=True)
        self._host_B = self._device_B = torch.empty(0, dtype=torch.uint8)
        self._used = 0


def host_bytes(size: int, *, pinned: bool) -> Tensor:
    """[size] uint8 on the host, with undefined contents; pinned where a GPU copies from it."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
