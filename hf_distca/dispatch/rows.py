"""Gather and scatter of rows, without an index tensor where rows are contiguous.

Shape suffixes: N rows; the letters after a row's N are free.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_distca.dispatch.index_buffer import IndexBuffer
from hf_distca.kernels import merge_into

RowIndex = slice | tuple[slice, ...] | Tensor
"""Row numbers: a slice if contiguous, slices if a few runs, else an int64 tensor [N]."""

ALL_ROWS = slice(None)

FEW_RUNS = 8
"""Most runs of rows that the CPU copies run by run, which is faster than gathering row by row.

On a GPU each run would be another launch.
"""


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
