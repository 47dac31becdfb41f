"""Exchange of rows between ranks, and the memory in which rows travel.

Shape suffixes: N rows; B bytes of a row.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from hf_distca.dispatch.process_groups import Groups
from hf_distca.dispatch.rows import ALL_ROWS, IndexBuffer, RowIndex, copy_rows, row_index
from hf_distca.kernels.contract import aligned
from hf_distca.plan.arrays import IntArray
from hf_distca.plan.routes import ExchangedRows

LAYOUTS_KEPT = 8
"""Buffer layouts kept per slot: one per direction and kind of attention, of which models have up to
four."""
STEPS_PER_OCTAVE = 4
"""Sizes of memory per doubling: at most a fifth is unused, and memory rarely grows."""
Columns = list[tuple[torch.Size, torch.dtype]]
"""Row shape and dtype of columns that travel side by side."""


@dataclass(frozen=True)
class Route:
    """Rows of one kind that go from ranks to other ranks, and back."""

    sent: list[int]  # [ranks] number of rows to each rank of the pod
    received: list[int]  # [ranks] from each rank
    crossing: bool  # whether any rank sends such rows to another; the same on every rank
    # The rows to send, by receiving rank.
    rows: RowIndex = field(default_factory=lambda: ALL_ROWS, compare=False)
    forwarded: "Route | None" = (
        None  # received rows that go on to other ranks of the node; None if no rank has any
    )


def bound_route(
    messages: ExchangedRows, buffer: IndexBuffer, peers: slice | IntArray = ALL_ROWS
) -> Route:
    """Return the route of the rows that these peers exchange.

    Rows of further workers come last and are left out.
    """
    sent, received = messages.send_counts[peers].tolist(), messages.recv_counts[peers].tolist()
    return Route(
        sent, received, messages.crossing, row_index(messages.send_rows[: sum(sent)], buffer)
    )


class ExchangeBuffer:
    """Rows of one slot, from their departure to their return.

    Rows return from the memory in which they arrived, to the memory from which they were sent.
    Every layer of a plan uses the buffer again. One transfer is under way at a time: `wait` follows
    each method that starts a transfer.

    Attributes:
        sent: [rows, *row shape] columns at the rank that holds the rows, ordered by receiving rank.
        received: columns at the rank that reads them, by sending rank; rows that the node forwarded
            follow.
        forwarded: columns of received rows that this rank forwards, ordered by receiving rank.
    """

    def __init__(
        self, groups: Groups, route: Route, columns: Columns, memory_B: Mapping[str, Tensor]
    ) -> None:
        self.route = route
        self.columns = columns
        width = _row_bytes(columns)
        memory_NB = {part: bytes_B.view(-1, width) for part, bytes_B in memory_B.items()}
        sent_NB = memory_NB["sent"]
        # One memory serves both where no row crosses a link.
        received_NB = memory_NB.get("received", sent_NB)
        self.sent = _views(sent_NB, columns)
        self.received = _views(received_NB, columns)
        self.forwarded = []
        count = sum(route.received)
        self._hops = [(route, sent_NB, received_NB[:count])]
        if route.forwarded is not None:
            self.forwarded = _views(memory_NB["forwarded"], columns)
            self._hops.append((route.forwarded, memory_NB["forwarded"], received_NB[count:]))
        self._groups = groups  # not their process groups, which end when the groups are closed
        self._work: dist.Work | None = None
        self._arriving = self.received

    def send(self, columns: Sequence[Tensor] = (), rows: RowIndex = ALL_ROWS) -> Self:
        """Start to send rows of the columns, by receiving rank.

        Without columns the rows are in `sent` already.
        """
        _fill(self.sent, columns, rows)
        return self._start(0, self.received)

    def forward(self, rows: RowIndex) -> Self:
        """Start to send received rows on to other ranks of the node.

        `rows` are ordered by receiving rank.
        """
        _fill(self.forwarded, self.received, rows)
        return self._start(1, self.received)

    def return_forwarded(self) -> Self:
        """Start to send rows in `received` back to the ranks that forwarded them."""
        return self._start(1, self.forwarded, back=True)

    def return_received(self, columns: Sequence[Tensor] = ()) -> Self:
        """Start to send rows back to the ranks that hold them.

        Without columns the rows are in `received` already.
        """
        _fill(self.received, columns, ALL_ROWS)
        return self._start(0, self.sent, back=True)

    @property
    def under_way(self) -> bool:
        """Whether `wait` may block."""
        return self._work is not None

    def wait(self) -> list[Tensor]:
        """Return the columns that have arrived.

        The next transfer of the slot may overwrite them.
        """
        work = self._work
        self._work = None
        if work is not None:
            with self._groups.waits.of("rows of other ranks"):
                work.wait()
        return self._arriving

    def _start(self, hop: int, arriving: list[Tensor], *, back: bool = False) -> Self:
        """Start an exchange of rows as bytes, unless nothing crosses a link on any rank."""
        route, outgoing_NB, incoming_NB = self._hops[hop]
        sent, received = route.sent, route.received
        group = self._groups.node if hop else self._groups.pods[len(sent)]
        if back:
            outgoing_NB, incoming_NB, sent, received = incoming_NB, outgoing_NB, received, sent
        self._arriving = arriving
        if route.crossing:
            self._work = dist.all_to_all_single(
                incoming_NB, outgoing_NB, received, sent, group=group, async_op=True
            )
        return self


def _fill(targets: Sequence[Tensor], columns: Sequence[Tensor], rows: RowIndex) -> None:
    if columns and len(targets[0]):
        for target, column in zip(targets, columns, strict=True):
            copy_rows(target, column, rows)


def _row_bytes(columns: Columns) -> int:
    return sum(aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in columns)


def _views(rows_NB: Tensor, columns: Columns) -> list[Tensor]:
    views = []
    start = 0
    for shape, dtype in columns:
        width = math.prod(shape) * dtype.itemsize
        column_NB = rows_NB[:, start : start + width]
        start += aligned(width)
        empty = not len(rows_NB)
        views.append(
            rows_NB.new_empty((0, *shape), dtype=dtype)
            if empty
            else column_NB.view(dtype).view(-1, *shape)
        )
    return views


class Exchange:
    """Memory of all exchanges, which every layer uses again.

    Sizes of exchanges change with each plan: memory of a slot grows in few steps and never shrinks,
    against fragmentation. On CUDA one stream uses the memory and waits for the exchanges, in the
    order of calls.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._buffers: dict[Hashable, list[ExchangeBuffer]] = {}  # by slot, one per layout
        # By slot, and part of `ExchangeBuffer`.
        self._memory_B: dict[Hashable, dict[str, Tensor]] = {}

    def buffer(self, slot: Hashable, route: Route, templates: Sequence[Tensor]) -> ExchangeBuffer:
        """Return the buffer of a slot for rows of a route.

        Its contents are those of the slot's last buffer.

        Args:
            slot: rows that are under way or in use at once need different slots.
            templates: one tensor per column, with the column's row shape, dtype and device; the
                same on every rank.
        """
        if self._groups.closed:
            self._groups.check_open()
        columns = [(x.shape[1:], x.dtype) for x in templates]
        layouts = self._buffers.setdefault(slot, [])
        for buffer in layouts:
            if buffer.route == route and buffer.columns == columns:
                return buffer
        rows = {"sent": sum(route.sent)}
        if route.crossing:
            rows["received"] = sum(route.received)
        if route.forwarded is not None:
            rows["received"] += sum(route.forwarded.received)
            rows["forwarded"] = sum(route.forwarded.sent)
        memory_B = self._memory_B.setdefault(slot, {})
        sizes = {part: count * _row_bytes(columns) for part, count in rows.items()}
        grows = [
            part
            for part, size in sizes.items()
            if part not in memory_B or len(memory_B[part]) < size
        ]
        if grows:  # free the memory before more is taken
            layouts.clear()
        else:
            del layouts[: 1 - LAYOUTS_KEPT]  # drop layouts of earlier plans
        for part in grows:
            memory_B.pop(part, None)
            memory_B[part] = torch.empty(
                rounded_up(sizes[part]), dtype=torch.uint8, device=templates[0].device
            )
        parts_B = {part: memory_B[part][:size] for part, size in sizes.items()}
        layouts.append(ExchangeBuffer(self._groups, route, columns, parts_B))
        return layouts[-1]

    def size(self) -> int:
        """Return the bytes of all slots."""
        return sum(
            part_B.numel() for memory_B in self._memory_B.values() for part_B in memory_B.values()
        )


def rounded_up(size: int) -> int:
    """Round up to the next of STEPS_PER_OCTAVE equally spaced sizes between powers of two.

    The least size is 4096 bytes.

    >>> [rounded_up(size) for size in (0, 4096, 4097, 6000, 8192, 8193)]
    [4096, 4096, 5120, 6144, 8192, 10240]
    """
    size = max(size, 4096)
    step = max(1, (1 << (size - 1).bit_length()) // (2 * STEPS_PER_OCTAVE))
    return -(-size // step) * step
