"""The exchange of rows between ranks: started, then waited for, with work in between.

Shape suffixes: N rows, S rows sent, R rows received, B bytes of a row.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hf_distca.dispatch.arena import Arena
from hf_distca.dispatch.clock import Clock
from hf_distca.dispatch.groups import Groups
from hf_distca.dispatch.rows import ALL_ROWS, RowIndex, copy_rows

Column = tuple[tuple[int, ...], torch.dtype]
"""Shape of one row and dtype of a tensor that travels."""

ALIGNMENT = 8
"""Bytes. A column begins at a multiple of it, so that its numbers can be used where they lie."""


@dataclass(frozen=True)
class Traffic:
    """How many rows of one kind go to and come from each rank.

    Attributes:
        sent: rows to each rank, in the order of the ranks.
        received: rows from each rank.
        crossing: whether any rank sends such rows to another; the same on every rank.
    """

    sent: list[int]
    received: list[int]
    crossing: bool

    def reversed(self) -> "Traffic":
        """The same rows on their way back."""
        return Traffic(self.received, self.sent, self.crossing)


class _Buffers:
    """What one role's exchanges of one size send from and receive to; every layer of a plan uses it again.

    Attributes:
        sent_SB, received_RB: rows as bytes, their columns side by side.
        sent, received: the same memory by column, [rows, *row shape] each.
    """

    def __init__(
        self, arena: Arena, role: Hashable, traffic: Traffic, columns: Sequence[Column], device: torch.device
    ) -> None:
        offsets, row_bytes = [], 0
        for shape, dtype in columns:
            offsets.append(row_bytes)
            row_bytes += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self.sent_SB = arena.take((role, "sent"), sum(traffic.sent), row_bytes, device)
        # Where no row crosses a link, what goes anywhere goes to the rank itself.
        self.received_RB = self.sent_SB
        if traffic.crossing:
            self.received_RB = arena.take((role, "received"), sum(traffic.received), row_bytes, device)

        def by_column(rows_NB: Tensor) -> list[Tensor]:
            return [
                rows_NB[:, offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(-1, *shape)
                if len(rows_NB)
                else rows_NB.new_empty((0, *shape), dtype=dtype)
                for offset, (shape, dtype) in zip(offsets, columns, strict=True)
            ]

        self.sent, self.received = by_column(self.sent_SB), by_column(self.received_RB)


class PendingRows:
    """Rows on their way; `wait` hands them over.

    Args:
        received: where the rows will be, by column.
        work: the transfer; None where nothing crosses a link.
        clock: counts the time of the wait.
    """

    def __init__(self, received: list[Tensor], work: dist.Work | None, clock: Clock) -> None:
        self._received = received
        self._work = work
        self._clock = clock

    def complete(self) -> None:
        """Wait until the rows are here."""
        if self._work is not None:
            with self._clock.running(self._received[0].device):
                self._work.wait()
            self._work = None

    def wait(self) -> list[Tensor]:
        """The received tensors, one a column, each [R, *row shape].

        They lie in a buffer of the exchange and are gone when an exchange of the same role is started.
        """
        self.complete()
        return self._received


class Exchange:
    """Sends rows to the ranks that need them, all ranks in the same order.

    Attributes:
        clock: how long this rank waited.
    """

    def __init__(self, groups: Groups) -> None:
        self._group = groups.exchange
        self._arena = Arena()
        self._buffers: dict[Hashable, tuple[Hashable, _Buffers]] = {}  # by role, with the sizes they are for
        self.clock = Clock()

    def start(
        self, columns: Sequence[Tensor], traffic: Traffic, role: Hashable, rows: RowIndex = ALL_ROWS
    ) -> PendingRows:
        """Start an exchange of rows.

        Every rank calls it at the same point with the same columns and the same `traffic.crossing`.

        Args:
            columns: tensors from which rows are sent, [N, …] each; they travel side by side in one message per
                pair of ranks.
            traffic: how many rows go where.
            role: what the rows are; two exchanges that are on their way or in use at once have different ones.
            rows: the rows to send, of every column, ordered by receiving rank.
        """
        if not traffic.crossing and not any(traffic.sent):
            return PendingRows([column[:0] for column in columns], None, self.clock)
        kinds = tuple((column.shape[1:], column.dtype) for column in columns)
        size = (kinds, traffic)
        known = self._buffers.get(role)
        if known is None or known[0] != size:
            self._buffers.pop(role, None)  # its memory goes back before more is taken
            known = size, _Buffers(self._arena, role, traffic, kinds, columns[0].device)
            self._buffers[role] = known
        buffers = known[1]
        for target, column in zip(buffers.sent, columns, strict=True):
            copy_rows(target, column, rows)
        work = None
        if traffic.crossing:  # else every rank sees that no row moves, and issues nothing
            work = dist.all_to_all_single(
                buffers.received_RB,
                buffers.sent_SB,
                output_split_sizes=traffic.received,
                input_split_sizes=traffic.sent,
                group=self._group,
                async_op=True,
            )
        return PendingRows(buffers.received, work, self.clock)
