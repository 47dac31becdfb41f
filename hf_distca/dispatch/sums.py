"""Sums of rows that come from several tensors, such as gradients of tasks at the rows that the tasks read.

The addends are known when a plan is bound. Every layer then adds them up in one go and in the same order.

Shape suffixes: S rows of one source, N rows of the sum, W rows of the sum that are written, A addends of all of them;
the letters after a row's letter are free.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_distca.dispatch.rows import MAX_SOURCES, IndexBuffer, RowIndex, addends_of, put, row_index, run_by_run, take
from hf_distca.kernels.merge import define_operator

IntArray = NDArray[np.int64]


class RowSum:
    """Sum of rows from several sources; a row without an addend is 0.

    Rows are added source by source, in order, in at least float32. If the first source has each row of the sum once
    and in order, the other sources are added to it in place.

    Args:
        sources_S: for each source, the row of the sum to which each of its rows is added.
        buffer: to be sent before the sum is used.
        in_place: whether the first source may be overwritten.

    Raises:
        ValueError: there are more than MAX_SOURCES sources.
    """

    def __init__(
        self, sources_S: Sequence[IntArray], rows: int, buffer: IndexBuffer, *, in_place: bool = True
    ) -> None:
        if len(sources_S) > MAX_SOURCES:
            raise ValueError(f"a sum has at most {MAX_SOURCES} sources, got {len(sources_S)}")
        self._rows = rows
        self._in_place = in_place and len(sources_S[0]) == rows and _increasing(sources_S[0])
        table = _Addends if buffer.in_one_go else _Steps
        self._table: _Addends | _Steps = table(sources_S, rows, self._in_place, buffer)

    def add_up(self, sources: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        """Return the sum, [N, …] in the dtype of the sources.

        Args:
            sources: [S, …] each, dense within a row, with the bound numbers of rows. The first may be overwritten.
            out: where to write the sum, dense within a row; only for sums that overwrite no source.
        """
        base = sources[0]
        if out is None:
            out = base if self._in_place else base.new_empty((self._rows, *base.shape[1:]))
        self._table.add_up(sources, out)
        return out


class _Addends:
    """Sum that one kernel computes from the addends of each row.

    Attributes:
        rows_W: int32, the rows that are written; None: all.
        ends_W: [W + 1] int32, the first addend of each of these rows, then the number of addends.
        addends_A: int32, source and row of each.
        onto: whether the addends are added to present values.
    """

    def __init__(self, sources_S: Sequence[IntArray], rows: int, onto: bool, buffer: IndexBuffer) -> None:
        parts = [(np.empty(0, np.int32), np.empty(0, np.int32))]
        for source, targets in enumerate(sources_S):
            if source or not onto:
                addends = addends_of(source, len(targets))
                parts.append((targets.astype(np.int32), addends))
        targets, addends = (np.concatenate(column) for column in zip(*parts, strict=True))
        if not _increasing(targets):
            addends = addends[np.argsort(targets, kind="stable")]
        counts = np.bincount(targets, minlength=rows)
        written = np.flatnonzero(counts) if onto else None
        ends = np.concatenate([[0], np.cumsum(counts if written is None else counts[written])])
        self.rows_W = None if written is None else buffer.place(written.astype(np.int32))
        self.ends_W = buffer.place(ends.astype(np.int32))
        self.addends_A = buffer.place(addends)
        self.onto = onto
        self._written = len(ends) - 1

    def add_up(self, sources: Sequence[Tensor], out: Tensor) -> None:
        if self._written:
            torch.ops.hf_distca.sum_rows(out, self.rows_W, self.ends_W, self.addends_A, list(sources), self.onto)


@dataclass(frozen=True)
class _Step:
    """Rows of one source, each added to another row of the sum.

    Attributes:
        members: rows of the source, in the same order.
        first: whether these rows of the sum have no earlier addend.
    """

    source: int
    rows: RowIndex
    members: RowIndex
    first: bool


class _Steps:
    """Sum that torch's operators compute run by run, mostly on slices."""

    def __init__(self, sources_S: Sequence[IntArray], rows: int, onto: bool, buffer: IndexBuffer) -> None:
        added = np.full(rows, int(onto))
        self._onto = onto
        self._steps = []
        for source, targets in enumerate(sources_S):
            for members in _increasing_runs(targets) if source or not onto else ():
                fresh = added[targets[members]] == 0
                for first, part in ((True, members[fresh]), (False, members[~fresh])):
                    if len(part):
                        self._steps.append(
                            _Step(source, row_index(targets[part], buffer), row_index(part, buffer), first)
                        )
                added[targets[members]] += 1
        self._without = row_index(np.flatnonzero(added == 0), buffer)
        # A sum of two addends is rounded once in any dtype.
        self._widen = bool((added > 2).any())

    def add_up(self, sources: Sequence[Tensor], out: Tensor) -> None:
        dtype = torch.promote_types(out.dtype, torch.float32) if self._widen else out.dtype
        total = out
        if dtype != out.dtype:
            total = out.to(dtype) if self._onto else out.new_empty(out.shape, dtype=dtype)
        for step in self._steps:
            addends = take(sources[step.source], step.members)
            if step.first:
                put(total, step.rows, addends.to(dtype))
            elif isinstance(step.rows, Tensor):
                total.index_add_(0, step.rows, addends.to(dtype))
            else:
                for run, part in run_by_run(step.rows, addends):
                    total[run].add_(part)
        if isinstance(self._without, Tensor):
            total.index_fill_(0, self._without, 0)
        else:
            for run, _ in run_by_run(self._without, total):
                total[run] = 0
        if total is not out:
            out.copy_(total)


def _increasing(targets: IntArray) -> bool:
    """Return whether row numbers strictly increase, so that none occurs twice."""
    return bool((targets[1:] > targets[:-1]).all())


def _increasing_runs(targets: IntArray) -> list[IntArray]:
    """Return positions in a sequence of row numbers, split where the numbers do not increase."""
    if not len(targets):
        return []
    return np.split(np.arange(len(targets)), np.flatnonzero(targets[1:] <= targets[:-1]) + 1)


def _sum_rows_on_cuda(
    out: Tensor, rows: Tensor | None, ends: Tensor, addends: Tensor, sources: list[Tensor], onto: bool
) -> None:
    from hf_distca.dispatch.sums_triton import sum_rows

    sum_rows(out, rows, ends, addends, sources, onto)


define_operator(
    "sum_rows(Tensor(a!) out, Tensor? rows, Tensor ends, Tensor addends, Tensor[] sources, bool onto) -> ()",
    _sum_rows_on_cuda,
)
