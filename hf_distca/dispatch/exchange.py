"""The exchange of rows between ranks: started, then waited for, with work in between.

Shape suffixes: S rows sent, R rows received, B bytes of a row.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

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


class PendingRows:
    """Rows on their way; `wait` hands them over."""

    def __init__(
        self,
        exchange: "Exchange",
        columns: Sequence[Column],
        rows_RB: Tensor,
        work: dist.Work | None,
        sent_SB: Tensor,
    ) -> None:
        self._exchange = exchange
        self._columns = columns
        self._rows_RB = rows_RB
        self._work = work
        self._sent_SB = sent_SB  # must outlive the transfer

    def wait(self) -> list[Tensor]:
        """The received tensors, one a column, each [R, *row shape] and contiguous."""
        if self._work is not None:
            begin = time.perf_counter()
            self._work.wait()
            self._exchange.waited_s += time.perf_counter() - begin
        received, offset = [], 0
        for shape, dtype in self._columns:
            width = _row_bytes(shape, dtype)
            part_RB = self._rows_RB[:, offset : offset + width].contiguous()
            received.append(part_RB.view(dtype).view(part_RB.shape[0], *shape))
            offset += width
        return received


class Exchange:
    """Sends rows to the ranks that need them, all ranks in the same order.

    Attributes:
        waited_s: seconds that this rank stood in waits since it was last set to 0. On CUDA a wait only
            makes the stream wait, and this counts the host's time.
    """

    def __init__(self, groups: Groups) -> None:
        self._group = groups.exchange
        self.waited_s = 0.0

    def start(self, columns: Sequence[Tensor], traffic: Traffic) -> PendingRows:
        """Start an exchange of rows.

        Every rank calls it at the same point with the same columns and the same `traffic.crossing`.

        Args:
            columns: tensors with the rows to send, [S, …] each, ordered by receiving rank; they travel
                side by side in one message per pair of ranks.
            traffic: how many rows go where.
        """
        kinds = [(tuple(column.shape[1:]), column.dtype) for column in columns]
        parts_SB = [
            column.contiguous().view(column.shape[0], -1).view(torch.uint8)
            if column.shape[0]
            else column.new_empty((0, _row_bytes(*kind)), dtype=torch.uint8)
            for column, kind in zip(columns, kinds, strict=True)
        ]
        sent_SB = parts_SB[0] if len(parts_SB) == 1 else torch.cat(parts_SB, 1)
        if not traffic.crossing:
            # What goes anywhere goes to the rank itself; every rank sees this and issues nothing.
            return PendingRows(self, kinds, sent_SB, None, sent_SB)
        rows_RB = sent_SB.new_empty((sum(traffic.received), sent_SB.shape[1]))
        work = dist.all_to_all_single(
            rows_RB,
            sent_SB,
            output_split_sizes=list(traffic.received),
            input_split_sizes=list(traffic.sent),
            group=self._group,
            async_op=True,
        )
        return PendingRows(self, kinds, rows_RB, work, sent_SB)


def _row_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of one row."""
    size = dtype.itemsize
    for n in shape:
        size *= n
    return size
