"""Exchange of rows between ranks, and the memory in which rows travel.

Shape suffixes: N rows; B bytes of a row.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from hf_distca.dispatch.groups import Groups
from hf_distca.dispatch.rows import ALL_ROWS, RowIndex, copy_rows
from hf_distca.kernels.contract import aligned

LAYOUTS_KEPT = 8
"""Buffer layouts kept per slot: one per direction and kind of attention, of which models have up to four."""
STEPS_PER_OCTAVE = 4
"""Sizes of memory per doubling: at most a fifth is unused, and memory rarely grows."""


@dataclass(frozen=True)
class Route:
    """Rows of one kind that go from ranks to other ranks, and back.

    Attributes:
        sent: rows to each rank.
        received: rows from each rank.
        crossing: whether any rank sends such rows to another; the same on every rank.
        rows: the rows to send, ordered by receiving rank; not compared.
        forwarded: received rows that then go to other ranks of the node; its ranks are those of the node. None if no
            rank forwards rows.
    """

    sent: list[int]
    received: list[int]
    crossing: bool
    rows: RowIndex = field(default_factory=lambda: ALL_ROWS, compare=False)
    forwarded: "Route | None" = None

    def reversed(self) -> "Route":
        """Return the route of the rows' return, on which no rank forwards rows."""
        return Route(self.received, self.sent, self.crossing)


class ExchangeBuffer:
    """Rows of one slot, from their departure to their return.

    Rows return from the memory in which they arrived, to the memory from which they were sent. Every layer of a plan
    uses the buffer again. One transfer is under way at a time: `wait` follows each method that starts a transfer.

    Attributes:
        sent: columns of rows at the rank that holds them, ordered by receiving rank: [rows, *row shape] each.
        received: columns of rows at the rank that reads them, in the order of the sending ranks; rows that other ranks
            of the node forwarded follow.
        forwarded: columns of received rows that this rank forwards, ordered by receiving rank.
    """

    def __init__(self, groups: Groups, route: Route, layout: "_Layout", memory_NB: Mapping[str, Tensor]) -> None:
        self.route, self.layout = route, layout
        sent_NB = memory_NB["sent"]
        received_NB = memory_NB.get("received", sent_NB)
        self.sent, self.received, self.forwarded = layout.columns_of(sent_NB), layout.columns_of(received_NB), []
        self._first_hop = sent_NB, received_NB
        if route.forwarded is not None:
            self.forwarded = layout.columns_of(memory_NB["forwarded"])
            count = sum(route.received)
            self._first_hop = sent_NB, received_NB[:count]
            self._second_hop = memory_NB["forwarded"], received_NB[count:]
        self._groups = groups
        self._work: dist.Work | None = None
        self._arriving = self.received

    def send(self, columns: Sequence[Tensor] = (), rows: RowIndex = ALL_ROWS) -> Self:
        """Start to send rows of the columns, ordered by receiving rank, to the ranks that read the rows.

        Args:
            columns: [N, …] each; none if the rows are in `sent` already.
        """
        _fill(self.sent, columns, rows)
        return self._start(self.route, self._groups.exchange, self._first_hop, self.received)

    def forward(self, rows: RowIndex) -> Self:
        """Start to send received rows on to other ranks of the node; `rows` are ordered by receiving rank."""
        _fill(self.forwarded, self.received, rows)
        return self._start(self.route.forwarded, self._groups.node, self._second_hop, self.received)

    def return_forwarded(self) -> Self:
        """Start to send rows in `received` back to the ranks that forwarded them."""
        route = self.route.forwarded and self.route.forwarded.reversed()
        return self._start(route, self._groups.node, self._second_hop[::-1], self.forwarded)

    def return_received(self, columns: Sequence[Tensor] = ()) -> Self:
        """Start to send rows back to the ranks that hold them; without columns the rows are in `received` already."""
        _fill(self.received, columns, ALL_ROWS)
        return self._start(self.route.reversed(), self._groups.exchange, self._first_hop[::-1], self.sent)

    @property
    def under_way(self) -> bool:
        """Whether `wait` may block."""
        return self._work is not None

    def wait(self) -> list[Tensor]:
        """Return the columns that have arrived; the next transfer of the slot may overwrite them."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        return self._arriving

    def _start(
        self, route: Route | None, group: dist.ProcessGroup | None, hop: tuple[Tensor, Tensor], arriving: list[Tensor]
    ) -> Self:
        """Start an exchange of rows as bytes, unless nothing crosses a link on any rank."""
        assert route is not None  # rows are forwarded only where the route says so
        self._arriving = arriving
        if route.crossing:
            from_NB, to_NB = hop
            self._work = dist.all_to_all_single(
                to_NB,
                from_NB,
                output_split_sizes=route.received,
                input_split_sizes=route.sent,
                group=group,
                async_op=True,
            )
        return self


def _fill(targets: Sequence[Tensor], columns: Sequence[Tensor], rows: RowIndex) -> None:
    if columns and len(targets[0]):
        for target, column in zip(targets, columns, strict=True):
            copy_rows(target, column, rows)


class _Layout:
    """Shape of a row, and dtype, of columns that travel side by side in one message per pair of ranks."""

    def __init__(self, columns: Sequence[tuple[Sequence[int], torch.dtype]]) -> None:
        self.columns = columns
        widths = [math.prod(shape) * dtype.itemsize for shape, dtype in columns]
        *self._offsets, self.row_bytes = accumulate(map(aligned, widths), initial=0)

    def columns_of(self, rows_NB: Tensor) -> list[Tensor]:
        """Return views of each column in rows of bytes."""
        return [
            rows_NB[:, offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(-1, *shape)
            if len(rows_NB)
            else rows_NB.new_empty((0, *shape), dtype=dtype)
            for offset, (shape, dtype) in zip(self._offsets, self.columns, strict=True)
        ]


class Exchange:
    """Memory of all exchanges, which every layer uses again.

    Sizes of exchanges change with each plan: memory of a slot grows in few steps and never shrinks, against
    fragmentation. On CUDA one stream uses the memory and waits for the exchanges, in the order of calls.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._buffers: dict[Hashable, list[ExchangeBuffer]] = {}  # by slot, one per layout
        self._memory_B: dict[tuple[Hashable, str], Tensor] = {}

    def buffer(self, slot: Hashable, route: Route, like: Sequence[Tensor]) -> ExchangeBuffer:
        """Return the buffer of a slot for rows of a route; its contents are those of the slot's last buffer.

        Every rank starts the same transfers in the same order, with the same columns and the same `route.crossing`.

        Args:
            slot: rows that are under way or in use at once need different slots.
            like: one tensor per column, with the column's row shape, dtype and device.
        """
        if self._groups.closed:
            self._groups.check_open()
        columns = [(x.shape[1:], x.dtype) for x in like]
        known = self._buffers.setdefault(slot, [])
        for buffer in known:
            if buffer.route == route and buffer.layout.columns == columns:
                return buffer
        layout = _Layout(columns)
        rows = {"sent": sum(route.sent)}
        if route.crossing:  # else each rank sends rows to itself only: one memory is both
            rows["received"] = sum(route.received)
        if route.forwarded is not None:
            rows["received"] += sum(route.forwarded.received)
            rows["forwarded"] = sum(route.forwarded.sent)
        if all(self._has((slot, part), count * layout.row_bytes) for part, count in rows.items()):
            del known[: 1 - LAYOUTS_KEPT]  # drop layouts of earlier plans
        else:
            known.clear()  # free the memory before more is taken
        memory_NB = {part: self._take((slot, part), count, layout, like[0].device) for part, count in rows.items()}
        known.append(ExchangeBuffer(self._groups, route, layout, memory_NB))
        return known[-1]

    def size(self) -> int:
        """Return the bytes of all slots."""
        return sum(memory_B.numel() for memory_B in self._memory_B.values())

    def _take(self, part: tuple[Hashable, str], rows: int, layout: _Layout, device: torch.device) -> Tensor:
        """Return a part of a slot's memory as [rows, bytes of a row], with undefined contents."""
        size = rows * layout.row_bytes
        if not self._has(part, size):
            # Free the old memory first: both at once would raise the peak.
            self._memory_B.pop(part, None)
            self._memory_B[part] = torch.empty(rounded_up(size), dtype=torch.uint8, device=device)
        return self._memory_B[part][:size].view(rows, layout.row_bytes)

    def _has(self, part: tuple[Hashable, str], size: int) -> bool:
        return part in self._memory_B and self._memory_B[part].numel() >= size


def rounded_up(size: int) -> int:
    """Round up to the next of STEPS_PER_OCTAVE equally spaced sizes between powers of two, at least 4096 bytes.

    >>> [rounded_up(size) for size in (0, 4096, 4097, 6000, 8192, 8193)]
    [4096, 4096, 5120, 6144, 8192, 10240]
    """
    size = max(size, 4096)
    step = max(1, (1 << (size - 1).bit_length()) // (2 * STEPS_PER_OCTAVE))
    return -(-size // step) * step
