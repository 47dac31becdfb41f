"""Index of rows on a device: gather, scatter and add, without an index tensor where rows are contiguous.

Shape suffixes: N rows; what follows a row's N is free.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

RowIndex = slice | tuple[slice, ...] | Tensor
"""Row numbers: a slice where they are contiguous, slices where they are a few runs, else an int64 tensor [N]."""

ALL_ROWS = slice(None)

FEW_RUNS = 8
"""Up to so many runs are copied run by run: that is faster than gathering row by row, and adds in place."""


def row_index(rows: NDArray[np.int64], device: torch.device) -> RowIndex:
    """Make an index of the given rows, of shape [N]."""
    if len(rows) == 0:
        return slice(0, 0)
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    if len(breaks) >= FEW_RUNS:
        return torch.from_numpy(rows).to(device, non_blocking=True)
    runs = tuple(slice(int(run[0]), int(run[-1]) + 1) for run in np.split(rows, breaks))
    return runs if len(runs) > 1 else runs[0]


def take(x: Tensor, index: RowIndex) -> Tensor:
    """The rows of x that the index names: x itself or a view of it where it is a slice, else a copy."""
    if isinstance(index, slice):
        return x if index.start == 0 and index.stop == x.shape[0] else x[index]
    return torch.cat([x[run] for run in index]) if isinstance(index, tuple) else x.index_select(0, index)


def copy_rows(target: Tensor, x: Tensor, index: RowIndex) -> None:
    """Copy the rows of x that the index names to a target of as many rows."""
    if isinstance(index, tuple):
        for run, part in _run_by_run(index, target):
            part.copy_(x[run])
    else:
        target.copy_(take(x, index))


def put(x: Tensor, index: RowIndex, rows: Tensor) -> None:
    """Write rows to where the index says; the index names no row twice."""
    if isinstance(index, Tensor):
        x.index_copy_(0, index, rows)
        return
    for run, part in _run_by_run(index, rows):
        x[run] = part


def _run_by_run(index: slice | tuple[slice, ...], rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Each run with its share of the rows."""
    if isinstance(index, slice):
        yield index, rows
        return
    position = 0
    for run in index:
        length = run.stop - run.start
        yield run, rows[position : position + length]
        position += length


def add_rounds(rows: NDArray[np.int64], device: torch.device) -> list[tuple[RowIndex, RowIndex]]:
    """Split an index that names rows more than once into rounds in which each row occurs once.

    Adding round after round gives sums in a fixed order, on every device.

    Returns:
        For each round the rows to add to, and where in the sequence of addends their addends are.
    """
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    first = np.searchsorted(ordered, ordered, side="left")
    occurrence = np.empty(len(rows), np.int64)
    occurrence[order] = np.arange(len(rows)) - first
    rounds = []
    for number in range(int(occurrence.max(initial=-1)) + 1):
        members = np.flatnonzero(occurrence == number)
        rounds.append((row_index(rows[members], device), row_index(members, device)))
    return rounds


class RowSum:
    """Sum of contributions to rows, in the order in which they are added.

    Accumulates in float32 where the contributions are narrower. What is added belongs to the sum from then on, unless
    it is borrowed: a single contribution to all rows is passed through, further ones are added to it.

    Args:
        shape: of the sum, rows first.
        like: gives dtype and device of the result.
    """

    def __init__(self, shape: tuple[int, ...], like: Tensor) -> None:
        self._shape = shape
        self._like = like
        self._whole: Tensor | None = None  # one contribution that covers every row
        self._sum: Tensor | None = None
        self._all = slice(0, shape[0])
        self._gaps = [self._all]  # runs of the sum to which nothing has been added yet

    def add(self, index: RowIndex, rows: Tensor, *, borrowed: bool = False) -> None:
        """Add rows to where the index says; the index names no row twice.

        Args:
            index: rows of the sum.
            rows: what to add.
            borrowed: the rows lie in a buffer that will be used again and must not be passed through.
        """
        if rows.shape[0] == 0:
            return
        if self._sum is None and self._whole is None and index == self._all and not borrowed:
            self._whole = rows
            return
        if self._sum is None:
            wide = torch.promote_types(self._like.dtype, torch.float32)
            if self._whole is not None:
                self._sum, self._whole, self._gaps = self._whole.to(wide), None, []
            else:
                self._sum = torch.empty(self._shape, dtype=wide, device=self._like.device)
        if isinstance(index, Tensor):
            self._close_gaps(self._all)
            self._sum.index_add_(0, index, rows.to(self._sum.dtype))
            return
        for run, part in _run_by_run(index, rows):
            if any(gap.start <= run.start and run.stop <= gap.stop for gap in self._gaps):
                self._sum[run] = part  # touches half of the memory that zeros and adding would
                self._close_gaps(run, zero=False)
            else:
                self._close_gaps(run)
                self._sum[run].add_(part)

    def add_all(self, rounds: list[tuple[RowIndex, RowIndex]], rows: Tensor) -> None:
        """Add rows to where the rounds of `add_rounds` say."""
        for index, members in rounds:
            self.add(index, take(rows, members))

    def result(self) -> Tensor:
        """The sum, of the shape and dtype asked for."""
        if self._whole is not None:
            return self._whole
        if self._sum is None:
            return self._like.new_zeros(self._shape)
        self._close_gaps(self._all)
        return self._sum.to(self._like.dtype)

    def _close_gaps(self, run: slice, *, zero: bool = True) -> None:
        """From now on the rows of a run have addends; where they had none, they are zero first."""
        assert self._sum is not None
        left = []
        for gap in self._gaps:
            start, stop = max(gap.start, run.start), min(gap.stop, run.stop)
            if start >= stop:
                left.append(gap)
                continue
            if zero:
                self._sum[start:stop] = 0
            left += [part for part in (slice(gap.start, start), slice(stop, gap.stop)) if part.start < part.stop]
        self._gaps = left
