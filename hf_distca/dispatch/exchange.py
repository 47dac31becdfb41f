"""The exchange of rows between ranks: started, then waited for, with work in between.

Shape suffixes: N rows, S rows sent, R rows received, B bytes of a row.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from hf_distca.dispatch.arena import Arena
from hf_distca.dispatch.groups import Groups
from hf_distca.dispatch.rows import ALL_ROWS, RowIndex, copy_rows
from hf_distca.kernels.alignment import aligned

Column = tuple[tuple[int, ...], torch.dtype]
"""Shape of one row and dtype of a tensor that travels."""

SIZES_KEPT = 8
"""A plan's exchanges of one role have a size for each kind of attention and direction, of which models have up to
four; what is kept of them is where columns lie in memory that is there anyway."""


@dataclass(frozen=True)
class Traffic:
    """How many rows of one kind go to and come from each rank.

    Attributes:
        sent: rows to each rank, in the order of the ranks.
        received: rows from each rank.
        crossing: whether any rank sends such rows to another; the same on every rank.
        back: whether the rows have gone the other way before.
    """

    sent: list[int]
    received: list[int]
    crossing: bool
    back: bool = False

    def reversed(self) -> "Traffic":
        """The same rows on their way back."""
        return Traffic(self.received, self.sent, self.crossing, not self.back)


class _Size:
    """What the buffers of an exchange must hold.

    Attributes:
        columns: the tensors that travel side by side.
        traffic: how many rows of them.
        offsets: where in a row each column begins, in bytes.
        row_bytes: bytes of a row.
        rows: by buffer ("sent", "received"), its rows.
    """

    def __init__(self, columns: list[Column], traffic: Traffic) -> None:
        self.columns, self.traffic = columns, traffic
        widths = [math.prod(shape) * dtype.itemsize for shape, dtype in columns]
        *self.offsets, self.row_bytes = accumulate(map(aligned, widths), initial=0)
        self.rows = {"sent": sum(traffic.sent)}
        if traffic.crossing:  # else what goes anywhere goes to the rank itself: one buffer is both
            self.rows["received"] = sum(traffic.received)

    def place(self, name: str) -> str:
        """Where in a role's memory a buffer lies."""
        return {"sent": "received", "received": "sent"}[name] if self.traffic.back and self.traffic.crossing else name


class _Buffers:
    """What one role's exchanges of one size send from and receive to; every layer of a plan uses it again.

    Rows that go back are sent from where they were received, and received where they were sent from.

    Attributes:
        size: of the exchanges.
        sent_SB, received_RB: rows as bytes, their columns side by side.
        sent, received: the same memory by column, [rows, *row shape] each.
    """

    def __init__(self, arena: Arena, role: Hashable, size: _Size, device: torch.device) -> None:
        self.size = size
        taken = {
            name: arena.take((role, size.place(name)), rows, size.row_bytes, device)
            for name, rows in size.rows.items()
        }
        self.sent_SB = taken["sent"]
        self.received_RB = taken.get("received", self.sent_SB)

        def by_column(rows_NB: Tensor) -> list[Tensor]:
            return [
                rows_NB[:, offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(-1, *shape)
                if len(rows_NB)
                else rows_NB.new_empty((0, *shape), dtype=dtype)
                for offset, (shape, dtype) in zip(size.offsets, size.columns, strict=True)
            ]

        self.sent, self.received = by_column(self.sent_SB), by_column(self.received_RB)


class PendingRows:
    """Rows on their way; `wait` hands them over.

    Args:
        received: where the rows will be, by column.
        work: the transfer; None where nothing crosses a link.
    """

    def __init__(self, received: list[Tensor], work: dist.Work | None) -> None:
        self._received = received
        self._work = work

    @property
    def under_way(self) -> bool:
        """Whether there may be something to wait for."""
        return self._work is not None

    def wait(self) -> list[Tensor]:
        """The received tensors, one a column, each [R, *row shape].

        They lie in a buffer of the exchange and are gone when an exchange of the same role is begun, in either
        direction.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._received


class Message:
    """Rows that this rank is about to send.

    Attributes:
        columns: where the rows go before `send`, ordered by receiving rank; one tensor [S, …] a column, dense within
            a row.
    """

    def __init__(self, buffers: _Buffers, group: dist.ProcessGroup | None) -> None:
        self.columns = buffers.sent
        self._buffers, self._group = buffers, group

    def send(self) -> PendingRows:
        """Start the exchange."""
        buffers, traffic, work = self._buffers, self._buffers.size.traffic, None
        if traffic.crossing:  # else every rank sees that no row moves, and issues nothing
            work = dist.all_to_all_single(
                buffers.received_RB,
                buffers.sent_SB,
                output_split_sizes=traffic.received,
                input_split_sizes=traffic.sent,
                group=self._group,
                async_op=True,
            )
        return PendingRows(buffers.received, work)


class Exchange:
    """Sends rows to the ranks that need them, all ranks in the same order.

    Args:
        groups: the ranks.
    """

    def __init__(self, groups: Groups) -> None:
        self._group = groups.exchange
        self._arena = Arena()
        self._buffers: dict[Hashable, list[_Buffers]] = {}  # by role, one a size

    def start(
        self, columns: Sequence[Tensor], traffic: Traffic, role: Hashable, rows: RowIndex = ALL_ROWS
    ) -> PendingRows:
        """Start an exchange of rows that lie elsewhere.

        Args:
            columns: tensors from which rows are sent, [N, …] each.
            traffic: as in `open`.
            role: as in `open`.
            rows: the rows to send, of every column, ordered by receiving rank.
        """
        kinds: list[Column] = [(column.shape[1:], column.dtype) for column in columns]
        message = self.open(kinds, traffic, role, columns[0].device)
        if any(traffic.sent):
            for target, column in zip(message.columns, columns, strict=True):
                copy_rows(target, column, rows)
        return message.send()

    def open(self, columns: list[Column], traffic: Traffic, role: Hashable, device: torch.device) -> Message:
        """Make room for rows that are to be sent, so that what computes them can write them there.

        Every rank opens and sends the same messages in the same order, with the same columns and the same
        `traffic.crossing`.

        Args:
            columns: that travel side by side in one message per pair of ranks.
            traffic: how many rows go where.
            role: what the rows are, there and back; two exchanges that are on their way or in use at once have
                different ones.
            device: where the rows are.
        """
        return Message(self._laid_out(role, columns, traffic, device), self._group)

    def _laid_out(self, role: Hashable, columns: list[Column], traffic: Traffic, device: torch.device) -> _Buffers:
        """The buffers of a role for exchanges of this size."""
        known = self._buffers.setdefault(role, [])
        for buffers in known:
            if buffers.size.traffic == traffic and buffers.size.columns == columns:
                return buffers
        size = _Size(columns, traffic)
        if all(self._arena.holds((role, size.place(name)), rows * size.row_bytes) for name, rows in size.rows.items()):
            del known[: 1 - SIZES_KEPT]  # what earlier plans left
        else:
            known.clear()  # the memory goes back before more is taken
        known.append(_Buffers(self._arena, role, size, device))
        return known[-1]
