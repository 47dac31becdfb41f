"""The exchange of rows between ranks: started, then waited for, with work in between.

Shape suffixes: S rows sent, R rows received, B bytes of a row.
"""

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hf_distca.dispatch.arena import Arena
from hf_distca.dispatch.groups import Groups

Column = tuple[tuple[int, ...], torch.dtype]
"""Shape of one row and dtype of a tensor that travels."""


@dataclass(frozen=True)
class Traffic:
    """How many rows of one kind go to and come from each rank.

    Attributes:
        sent: rows to each rank, in the order of the ranks.
        received: rows from each rank.
        crossing: whether any rank sends such rows to another; the same on every rank.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    crossing: bool

    def reversed(self) -> "Traffic":
        """The same rows on their way back."""
        return Traffic(self.received, self.sent, self.crossing)


class WaitClock:
    """Time that a rank stood still in waits for exchanges.

    On the CPU that is the caller's time. On CUDA a wait stops the stream and not the caller: events around it
    tell how long.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def wait(self, work: dist.Work, device: torch.device) -> None:
        """Wait for the work and count the time."""
        if device.type == "cuda":
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            work.wait()
            after.record()
            self._events.append((before, after))
        else:
            begin = time.perf_counter()
            work.wait()
            self._seconds += time.perf_counter() - begin

    def seconds(self) -> float:
        """Seconds so far. On CUDA it waits for the last counted wait to be over."""
        if self._events:
            self._events[-1][1].synchronize()
            self._seconds += sum(before.elapsed_time(after) for before, after in self._events) / 1000
            self._events.clear()
        return self._seconds


class PendingRows:
    """Rows on their way; `wait` hands them over."""

    def __init__(
        self,
        columns: Sequence[Column],
        rows_RB: Tensor,
        sent_SB: Tensor,
        work: dist.Work | None,
        clock: WaitClock,
    ) -> None:
        self._columns = columns
        self._rows_RB = rows_RB
        self._sent_SB = sent_SB  # must outlive the transfer
        self._work = work
        self._clock = clock

    def complete(self) -> None:
        """Wait until the rows are here."""
        if self._work is not None:
            self._clock.wait(self._work, self._rows_RB.device)
            self._work = None

    def wait(self) -> list[Tensor]:
        """The received tensors, one a column, each [R, *row shape].

        They lie in a buffer of the exchange and are gone when an exchange of the same role is started.
        """
        self.complete()
        received, offset = [], 0
        for shape, dtype in self._columns:
            width = _row_bytes(shape, dtype)
            part_RB = self._rows_RB[:, offset : offset + width]
            if offset % dtype.itemsize or self._rows_RB.stride(0) % dtype.itemsize:
                part_RB = part_RB.contiguous()
            received.append(part_RB.view(dtype).view(part_RB.shape[0], *shape))
            offset += width
        return received


class NoRows(PendingRows):
    """An exchange that moves nothing on any rank; it costs nothing per layer.

    Args:
        columns: tensors without rows.
    """

    def __init__(self, columns: Sequence[Tensor]) -> None:
        self._empty = list(columns)

    def complete(self) -> None:
        """There is nothing to wait for."""

    def wait(self) -> list[Tensor]:
        """The columns, without rows."""
        return self._empty


class Exchange:
    """Sends rows to the ranks that need them, all ranks in the same order.

    Attributes:
        clock: how long this rank waited.
    """

    def __init__(self, groups: Groups) -> None:
        self._group = groups.exchange
        self._arena = Arena()
        self.clock = WaitClock()

    def start(self, columns: Sequence[Tensor], traffic: Traffic, role: Hashable) -> PendingRows:
        """Start an exchange of rows.

        Every rank calls it at the same point with the same columns and the same `traffic.crossing`.

        Args:
            columns: tensors with the rows to send, [S, …] each, ordered by receiving rank; they travel
                side by side in one message per pair of ranks.
            traffic: how many rows go where.
            role: what the rows are; two exchanges that are on their way or in use at once have different ones.
        """
        if not traffic.crossing and columns[0].shape[0] == 0:
            return NoRows(columns)
        kinds = [(tuple(column.shape[1:]), column.dtype) for column in columns]
        row_bytes = sum(_row_bytes(*kind) for kind in kinds)
        device = columns[0].device
        sent_SB = self._arena.take((role, "sent"), columns[0].shape[0], row_bytes, device)
        offset = 0
        for column, kind in zip(columns, kinds, strict=True):
            width = _row_bytes(*kind)
            if column.shape[0]:
                rows = column.contiguous().view(column.shape[0], -1).view(torch.uint8)
                sent_SB[:, offset : offset + width] = rows
            offset += width
        if not traffic.crossing:
            # What goes anywhere goes to the rank itself; every rank sees this and issues nothing.
            return PendingRows(kinds, sent_SB, sent_SB, None, self.clock)
        rows_RB = self._arena.take((role, "received"), sum(traffic.received), row_bytes, device)
        work = dist.all_to_all_single(
            rows_RB,
            sent_SB,
            output_split_sizes=list(traffic.received),
            input_split_sizes=list(traffic.sent),
            group=self._group,
            async_op=True,
        )
        return PendingRows(kinds, rows_RB, sent_SB, work, self.clock)


def _row_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of one row."""
    size = dtype.itemsize
    for n in shape:
        size *= n
    return size
