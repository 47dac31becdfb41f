"""Row numbers on the device, and gather and scatter of rows by them.

Contiguous rows need no index tensor. All index tensors of a plan go to the device in few copies: a copy per tensor
would cost the host about ten microseconds, and from pageable memory a wait.

Shape suffixes: N rows; the letters after a row's N are free.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_distca.kernels import merge_into
from hf_distca.kernels.contract import aligned

CHUNK_BYTES = 1 << 22
"""Bytes of one copy, enough for a plan of some 50,000 rows per rank; larger plans take several copies."""

RowIndex = slice | tuple[slice, ...] | Tensor
"""Row numbers: a slice if contiguous, slices if a few runs, else an int64 tensor [N]."""

ALL_ROWS = slice(None)

MAX_SOURCES = 6
"""Most sources of a sum of rows, see `hf_distca.dispatch.sums`."""

SOURCE_BITS = 3
"""Low bits of an addend that hold the index of its source; the bits above hold its row."""

FEW_RUNS = 8
"""Most runs of rows that the CPU copies run by run, which is faster than gathering row by row.

On a GPU each run would be another launch.
"""


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


def row_index(rows: NDArray[np.int64], buffer: IndexBuffer) -> RowIndex:
    """Return an index of the given rows [N]; the index is valid once the buffer is sent."""
    if len(rows) == 0:
        return slice(0, 0)
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    if len(breaks) >= (1 if buffer.in_one_go else FEW_RUNS):
        return buffer.place(rows)
    runs = tuple(slice(int(run[0]), int(run[-1]) + 1) for run in np.split(rows, breaks))
    return runs if len(runs) > 1 else runs[0]


def take(x: Tensor, index: RowIndex) -> Tensor:
    """Return the indexed rows of x: x or a view of it for a slice, else a copy."""
    if isinstance(index, slice):
        return x if index.start == 0 and index.stop == x.shape[0] else x[index]
    return torch.cat([x[run] for run in index]) if isinstance(index, tuple) else x.index_select(0, index)


def copy_rows(target: Tensor, x: Tensor, index: RowIndex) -> None:
    """Copy the indexed rows of x to a target of as many rows."""
    if isinstance(index, Tensor):
        torch.index_select(x, 0, index, out=target)
        return
    for run, part in run_by_run(index, target):
        part.copy_(x[run])


def put(x: Tensor, index: RowIndex, rows: Tensor) -> None:
    """Write rows to the indexed rows of x; the index names no row twice."""
    if isinstance(index, Tensor):
        x.index_copy_(0, index, rows)
        return
    for run, part in run_by_run(index, rows):
        x[run] = part


def add_rows(x: Tensor, index: RowIndex, rows: Tensor) -> None:
    """Add rows to the indexed rows of x, in the dtype of x; the index names no row twice."""
    if isinstance(index, Tensor):
        x.index_add_(0, index, rows.to(x.dtype))
        return
    for run, part in run_by_run(index, rows):
        x[run].add_(part)


def merge_rows(o_THE: Tensor, lse_TH: Tensor, index: RowIndex, o_part_QHE: Tensor, lse_part_QH: Tensor) -> None:
    """Merge attention over further keys into the indexed rows of O and LSE, see `merge_into`.

    The index names no row twice.
    """
    if isinstance(index, Tensor):
        merge_into(o_THE, lse_TH, o_part_QHE, lse_part_QH, index)
        return
    parts = zip(run_by_run(index, o_part_QHE), run_by_run(index, lse_part_QH), strict=True)
    for (run, o_part), (_, lse_part) in parts:
        merge_into(o_THE[run], lse_TH[run], o_part, lse_part)


def run_by_run(index: slice | tuple[slice, ...], rows: Tensor) -> list[tuple[slice, Tensor]]:
    """Return each run of an index with its share of the rows."""
    if isinstance(index, slice):
        return [(index, rows)]
    runs, position = [], 0
    for run in index:
        length = run.stop - run.start
        runs.append((run, rows[position : position + length]))
        position += length
    return runs


def addends_of(source: int, rows: int) -> NDArray[np.int32]:
    """Return each row of a source as an addend, in order: [rows] int32."""
    return np.arange(rows, dtype=np.int32) << SOURCE_BITS | source
