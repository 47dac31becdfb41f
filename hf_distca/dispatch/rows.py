"""Row numbers on the device, and gather, scatter and sums of rows by them.

All index tensors of a plan go to the device in few copies: a copy per tensor would cost the host
about ten microseconds, and from pageable memory a wait.

Shape suffixes: N rows, S rows of one source of a sum, W rows of a sum that are written, A addends
of all of them; the letters after a row's letter are free.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_distca.kernels import merge_into
from hf_distca.kernels.contract import MAX_SOURCES, SOURCE_BITS, aligned
from hf_distca.plan.arrays import IntArray

CHUNK_BYTES = 1 << 22
"""Bytes of one copy, enough for a plan of some 50,000 rows per rank; larger plans take several
copies."""

RowIndex = slice | Tensor
"""Row numbers: a slice if contiguous, else an int64 tensor [N]."""

ALL_ROWS = slice(None)


class IndexBuffer:
    """Buffer that places numbers on the host and returns device tensors.

    The tensors hold the numbers after `send`.

    Args:
        in_one_go: sum rows of all sources by one kernel, instead of source by source; None: if not
            on the CPU.

    Attributes:
        memory: uint8 tensors on the device that hold all numbers.
    """

    def __init__(self, device: torch.device, in_one_go: bool | None = None) -> None:
        self.device = device
        self.in_one_go = device.type != "cpu" if in_one_go is None else in_one_go
        self.memory: list[Tensor] = []
        self._host_B = self._device_B = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def place(self, numbers: IntArray | NDArray[np.int32]) -> Tensor:
        """Return the device tensor for the numbers, with their shape [N] and dtype."""
        dense: NDArray[Any] = np.ascontiguousarray(numbers)
        if self._used + max(dense.nbytes, 1) > len(self._host_B):
            self.send()
            size = max(CHUNK_BYTES, dense.nbytes)
            self._host_B = host_bytes(size, pinned=self.device.type == "cuda")
            self._device_B = device_bytes(self._host_B, self.device)
            self.memory.append(self._device_B)
        start = self._used
        stop = self._used + dense.nbytes
        self._host_B.numpy()[start:stop] = dense.view(np.uint8)
        self._used = aligned(stop)
        return self._device_B[start:stop].view(torch.from_numpy(dense[:0]).dtype)

    def send(self) -> None:
        """Send the placed numbers without waiting for their arrival.

        Later numbers get other memory.

        Torch does not reuse pinned memory while a copy reads it, even after its tensor is freed.
        """
        if self._device_B is not self._host_B:
            self._device_B[: self._used].copy_(self._host_B[: self._used], non_blocking=True)
        self._host_B = self._device_B = torch.empty(0, dtype=torch.uint8)
        self._used = 0


def host_bytes(size: int, *, pinned: bool) -> Tensor:
    """Return [size] uint8 on the host; pinned memory is for copies to a GPU."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)


def device_bytes(host_B: Tensor, device: torch.device) -> Tensor:
    """Return [size] uint8 on a device, as much as on the host; on the CPU the host's own memory."""
    if device.type == "cpu":
        return host_B
    return torch.empty(len(host_B), dtype=torch.uint8, device=device)


def row_index(rows: IntArray, buffer: IndexBuffer) -> RowIndex:
    """Return an index of the given rows [N]; the index is valid once the buffer is sent."""
    if len(rows) == 0:
        return slice(0, 0)
    return (
        slice(int(rows[0]), int(rows[-1]) + 1) if (np.diff(rows) == 1).all() else buffer.place(rows)
    )


def take(x: Tensor, index: RowIndex) -> Tensor:
    """Return the indexed rows of x: x or a view of x for a slice, else a copy."""
    if isinstance(index, slice):
        return x if index.start == 0 and index.stop == x.shape[0] else x[index]
    return x.index_select(0, index)


def copy_rows(target: Tensor, x: Tensor, index: RowIndex) -> None:
    """Copy the indexed rows of x to a target of as many rows."""
    if isinstance(index, slice):
        target.copy_(x[index])
    else:
        torch.index_select(x, 0, index, out=target)


def put(x: Tensor, index: RowIndex, rows: Tensor) -> None:
    """Write rows to the indexed rows of x, in the dtype of x; the index names no row twice."""
    if isinstance(index, slice):
        x[index] = rows
    else:
        x.index_copy_(0, index, rows.to(x.dtype))


def merge_rows(
    o_NHE: Tensor, lse_NH: Tensor, index: RowIndex, o_part_SHE: Tensor, lse_part_SH: Tensor
) -> None:
    """Merge attention over further keys into the indexed rows of O and LSE.

    The index names no row twice.
    """
    if isinstance(index, slice):
        merge_into(o_NHE[index], lse_NH[index], o_part_SHE, lse_part_SH)
    else:
        merge_into(o_NHE, lse_NH, o_part_SHE, lse_part_SH, index)


class RowSum:
    """Sum of rows from several sources, such as gradients of tasks at the rows that the tasks read.

    A row without an addend is 0. Rows are added source by source, in order, in at least float32. If
    the first source has each row of the sum once and in order, the other sources are added to the
    first in place.

    Args:
        sources_S: for each source by name, the row of the sum to which each of the source's rows is
            added.
        in_place: whether the first source may be overwritten.
    """

    def __init__(
        self,
        sources_S: Mapping[Any, IntArray],
        rows: int,
        buffer: IndexBuffer,
        *,
        in_place: bool = True,
    ) -> None:
        if len(sources_S) > MAX_SOURCES:
            raise ValueError(f"a sum has at most {MAX_SOURCES} sources, got {len(sources_S)}")
        self.sources = tuple(sources_S)
        targets_S = list(sources_S.values())
        self._rows = rows
        self._in_place = in_place and names_all(targets_S[0], rows)
        self._table = (
            addend_table(targets_S, rows, self._in_place, buffer) if buffer.in_one_go else None
        )
        if self._table is None:
            self._rows_S = [row_index(targets, buffer) for targets in targets_S]
            # A sum of two addends is rounded once in any dtype.
            self._widen = bool((np.bincount(np.concatenate(targets_S)) > 2).any())

    def add_up(self, sources: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        """Return the sum, [N, …] in the dtype of the first source, which may be overwritten.

        Args:
            sources: [S, …] each, dense within a row, with the bound numbers of rows.
            out: where to write the sum, dense within a row; only for sums that overwrite no source.
        """
        base = sources[0]
        if out is None:
            out = base if self._in_place else base.new_empty((self._rows, *base.shape[1:]))
        if self._table is not None:
            if len(self._table[1]) > 1:  # rows are written
                torch.ops.hf_distca.sum_rows(out, *self._table, list(sources), self._in_place)
            return out
        total = out.to(torch.promote_types(out.dtype, torch.float32)) if self._widen else out
        if not self._in_place:
            total.zero_()
        for index, source in list(zip(self._rows_S, sources, strict=True))[self._in_place :]:
            if isinstance(index, slice):
                total[index].add_(source)
            else:
                total.index_add_(0, index, source.to(total.dtype))
        return out if total is out else out.copy_(total)


def addend_table(
    targets_S: Sequence[IntArray], rows: int, onto: bool, buffer: IndexBuffer
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the addends of a sum by row, for `hf_distca.kernels.fused_triton.sum_rows`.

    Args:
        targets_S: for each source, the row of the sum to which each of the source's rows is added.
        onto: whether the first source is added to in place.

    Returns:
        Three int32 tensors. rows_W: the rows that are written; None for all. ends_W [W + 1]: the
        first addend of each of these rows, then the number of addends. addends_A: the source and
        the row of each addend.
    """
    added = list(enumerate(targets_S))[onto:]
    targets = np.concatenate(
        [np.empty(0, np.int64), *(source_targets for _, source_targets in added)]
    )
    addends_of_sources = [
        np.arange(len(source_targets), dtype=np.int32) << SOURCE_BITS | source
        for source, source_targets in added
    ]
    addends = np.concatenate([np.empty(0, np.int32), *addends_of_sources])
    if (targets[1:] <= targets[:-1]).any():
        addends = addends[np.argsort(targets, kind="stable")]
    counts = np.bincount(targets, minlength=rows)
    written = np.flatnonzero(counts) if onto else None
    ends = np.concatenate([[0], np.cumsum(counts if written is None else counts[written])])
    rows_W = None if written is None else buffer.place(written.astype(np.int32))
    return rows_W, buffer.place(ends.astype(np.int32)), buffer.place(addends)


def names_all(targets: IntArray, rows: int) -> bool:
    """Return whether row numbers are 0 to rows - 1, once each and in order."""
    return len(targets) == rows and bool((targets[1:] > targets[:-1]).all())
