"""Exchange of rows between ranks: start, other work, wait.

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
from hf_distca.kernels.contract import aligned

Column = tuple[tuple[int, ...], torch.dtype]
"""Shape of one row and dtype of a tensor that travels."""

SIZES_KEPT = 8
"""Buffer layouts kept per role; layouts are views of memory that exists anyway.

A plan has one per direction and kind of attention, and models have up to four kinds.
"""


@dataclass(frozen=True)
class Traffic:
    """Rows of one kind that go to and come from each rank.

    Attributes:
        sent: rows to each rank.
        received: rows from each rank.
        crossing: whether any rank sends such rows to another; the same on every rank.
        back: whether the rows return to the ranks that sent them.
        passed_on: rows then forwarded inside the node, by the ranks of the node; None if no rank forwards rows.
    """

    sent: list[int]
    received: list[int]
    crossing: bool
    back: bool = False
    passed_on: "Traffic | None" = None

    def reversed(self) -> "Traffic":
        """Return the traffic of the same rows on their way back."""
        passed_back = self.passed_on and self.passed_on.reversed()
        return Traffic(self.received, self.sent, self.crossing, not self.back, passed_back)


class _Size:
    """Sizes of an exchange's buffers.

    Attributes:
        offsets: first byte of each column in a row.
        rows: rows of each buffer ("sent", "received", "passed on"). Forwarded rows lie behind the received ones, from
            where they also return.
    """

    def __init__(self, columns: list[Column], traffic: Traffic) -> None:
        self.columns, self.traffic = columns, traffic
        widths = [math.prod(shape) * dtype.itemsize for shape, dtype in columns]
        *self.offsets, self.row_bytes = accumulate(map(aligned, widths), initial=0)
        self.rows = {"sent": sum(traffic.sent)}
        if traffic.crossing:  # else each rank sends rows to itself only: one buffer is both
            self.rows["received"] = sum(traffic.received)
        if traffic.passed_on is not None:
            at_others, here = sum(traffic.passed_on.sent), sum(traffic.passed_on.received)
            if traffic.back:
                at_others, here = here, at_others
            self.rows["sent" if traffic.back else "received"] += here
            self.rows["passed on"] = at_others

    def place(self, name: str) -> str:
        """Return the part of a role's memory in which a buffer lies."""
        back = self.traffic.back and self.traffic.crossing
        return {"sent": "received", "received": "sent"}.get(name, name) if back else name


class _Buffers:
    """Buffers of one role's exchanges of one size, reused by every layer of a plan.

    Rows return from the memory in which they arrived, to the memory from which they were sent.

    Attributes:
        sent, received, passed_on: by column, [rows, *row shape] each.
        first_hop: received rows and sent rows as bytes, columns side by side.
        second_hop: the same of forwarded rows.
    """

    def __init__(self, arena: Arena, role: Hashable, size: _Size, device: torch.device) -> None:
        self.size = size
        taken = {
            name: arena.take((role, size.place(name)), rows, size.row_bytes, device)
            for name, rows in size.rows.items()
        }
        sent_SB = taken["sent"]
        received_RB = taken.get("received", sent_SB)

        def by_column(rows_NB: Tensor) -> list[Tensor]:
            return [
                rows_NB[:, offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(-1, *shape)
                if len(rows_NB)
                else rows_NB.new_empty((0, *shape), dtype=dtype)
                for offset, (shape, dtype) in zip(size.offsets, size.columns, strict=True)
            ]

        self.sent, self.received = by_column(sent_SB), by_column(received_RB)
        self.first_hop = received_RB, sent_SB
        traffic = size.traffic
        if traffic.passed_on is not None:
            passed_on_NB = taken["passed on"]
            self.passed_on = by_column(passed_on_NB)
            sent, received = sum(traffic.sent), sum(traffic.received)
            self.first_hop = received_RB[:received], sent_SB[:sent]
            there, back = (received_RB[received:], passed_on_NB), (passed_on_NB, sent_SB[sent:])
            self.second_hop = back if traffic.back else there


class PendingRows:
    """Rows on their way; `wait` returns them.

    Args:
        received: where the rows will be, by column.
        work: the transfer; None if nothing crosses a link.
    """

    def __init__(self, received: list[Tensor], work: dist.Work | None) -> None:
        self._received = received
        self._work = work

    @property
    def under_way(self) -> bool:
        """Whether `wait` may block."""
        return self._work is not None

    def wait(self) -> list[Tensor]:
        """Return the received tensors, one per column, [R, *row shape] each.

        The tensors lie in a buffer of the exchange, which the next exchange of the same role overwrites, in either
        direction.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._received


class Message:
    """Rows that this rank is about to send.

    Attributes:
        columns: memory to fill before `send`, ordered by receiving rank; one tensor [S, …] per column, dense within a
            row. On the way back, forwarded rows follow, which `pass_on` sends.
        received: memory in which rows arrive, in the order of the sending ranks; forwarded rows follow.
    """

    def __init__(self, buffers: _Buffers, group: dist.ProcessGroup | None, node: dist.ProcessGroup | None) -> None:
        self.columns, self.received = buffers.sent, buffers.received
        self._buffers, self._group, self._node = buffers, group, node

    @property
    def passed_on(self) -> list[Tensor]:
        """Memory for rows to forward, ordered by receiving rank, and for these rows when they return."""
        return self._buffers.passed_on

    def send(self) -> PendingRows:
        """Start the exchange."""
        buffers, traffic = self._buffers, self._buffers.size.traffic
        return PendingRows(buffers.received, _started(buffers.first_hop, traffic, self._group))

    def pass_on(self) -> PendingRows:
        """Start the exchange inside nodes.

        `PendingRows.wait` then returns all received rows, or on the way back the forwarded rows.
        """
        buffers, traffic = self._buffers, self._buffers.size.traffic
        assert traffic.passed_on is not None
        work = _started(buffers.second_hop, traffic.passed_on, self._node)
        return PendingRows(buffers.passed_on if traffic.back else buffers.received, work)


def _started(hop: tuple[Tensor, Tensor], traffic: Traffic, group: dist.ProcessGroup | None) -> dist.Work | None:
    """Start an exchange of rows as bytes; None if nothing crosses a link."""
    if not traffic.crossing:  # no rank of the group issues a collective
        return None
    received_RB, sent_SB = hop
    work: dist.Work = dist.all_to_all_single(
        received_RB,
        sent_SB,
        output_split_sizes=traffic.received,
        input_split_sizes=traffic.sent,
        group=group,
        async_op=True,
    )
    return work


class Exchange:
    """Exchange of rows, in the same order on all ranks."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._arena = Arena()
        self._buffers: dict[Hashable, list[_Buffers]] = {}  # by role, one per size

    def start(
        self, columns: Sequence[Tensor], traffic: Traffic, role: Hashable, rows: RowIndex = ALL_ROWS
    ) -> PendingRows:
        """Start an exchange of rows that lie elsewhere.

        Args:
            columns: tensors whose rows are sent, [N, …] each.
            traffic: as in `open`.
            role: as in `open`.
            rows: rows to send of every column, ordered by receiving rank.
        """
        kinds: list[Column] = [(column.shape[1:], column.dtype) for column in columns]
        message = self.open(kinds, traffic, role, columns[0].device)
        if any(traffic.sent):
            for target, column in zip(message.columns, columns, strict=True):
                copy_rows(target, column, rows)
        return message.send()

    def pass_on(self, columns: Sequence[Tensor], traffic: Traffic, role: Hashable, rows: RowIndex) -> PendingRows:
        """Forward received rows inside nodes, see `Traffic.passed_on`.

        Args:
            columns: the received rows, in the memory of the exchange.
            traffic: traffic of the exchange that received the rows.
            role: role of that exchange.
            rows: received rows to forward, ordered by receiving rank.
        """
        kinds: list[Column] = [(column.shape[1:], column.dtype) for column in columns]
        message = self.open(kinds, traffic, role, columns[0].device)
        if len(message.passed_on[0]):
            for target, column in zip(message.passed_on, columns, strict=True):
                copy_rows(target, column, rows)
        return message.pass_on()

    def open(self, columns: list[Column], traffic: Traffic, role: Hashable, device: torch.device) -> Message:
        """Reserve memory for rows to send, so that the code that computes rows can write them there.

        Every rank opens and sends the same messages in the same order, with the same columns and the same
        `traffic.crossing`.

        Args:
            columns: columns that travel side by side in one message per pair of ranks.
            role: identity of the rows, there and back; exchanges that are under way or in use at once need different
                roles.
        """
        if self._groups.closed:
            self._groups.check_open()
        return Message(self._laid_out(role, columns, traffic, device), self._groups.exchange, self._groups.node)

    def _laid_out(self, role: Hashable, columns: list[Column], traffic: Traffic, device: torch.device) -> _Buffers:
        """Return the buffers of a role for exchanges of this size."""
        known = self._buffers.setdefault(role, [])
        for buffers in known:
            if buffers.size.traffic == traffic and buffers.size.columns == columns:
                return buffers
        size = _Size(columns, traffic)
        if all(self._arena.holds((role, size.place(name)), rows * size.row_bytes) for name, rows in size.rows.items()):
            del known[: 1 - SIZES_KEPT]  # drop layouts of earlier plans
        else:
            known.clear()  # free the memory before more is taken
        known.append(_Buffers(self._arena, role, size, device))
        return known[-1]
