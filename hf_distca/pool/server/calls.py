"""Calls on their way: rows of several trainers put together, computed when all are there."""

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_distca.pool.messages.call import Call
from hf_distca.pool.server.plans import ServedTasks
from hf_distca.pool.server.rank_link import RankLink
from hf_distca.pool.transport.host_memory import as_bytes, empty_rows
from hf_distca.pool.wire import LinkLost, ProtocolError
from hf_distca.pool.wire.channel import Buffer

IN_FLIGHT = 4
"""Calls of one trainer that are received, computed or replied to at once; further ones wait in the network.

Trainers issue calls in one order, so the oldest call can always be completed: no trainer's later calls hold up its
rows.
"""


@dataclass(eq=False)
class Assembly:
    """The rows of one call.

    Attributes:
        call: what is to be computed.
        tasks: which tasks.
        columns: the columns of call.request() by name: rows of all trainers, on the host.
        links: who sends rows, and the sequence number of its message.
        missing: trainers whose rows are not complete.
        lost: a trainer that has rows for it is gone.
    """

    call: Call
    tasks: ServedTasks
    columns: dict[str, Tensor]
    links: dict[int, tuple[RankLink, int]] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    lost: bool = False

    def parts(self, rank: int) -> list[Buffer]:
        """The memory for one trainer's rows, in the order in which it sends them."""
        own = self.tasks.rows
        return [as_bytes(self.columns[column.name][own[column.rows][rank]]).data for column in self.call.request()]


class Calls:
    """Puts calls together and hands out the complete ones. Used by all trainers' threads and the computing one.

    Args:
        device: where calls are computed.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._changed = threading.Condition()
        self._links: dict[int, RankLink] = {}
        self._open: dict[int, Assembly] = {}  # by number of the call
        self._complete: list[Assembly] = []
        self._closed = False

    @property
    def trainers(self) -> int:
        """Number of trainers that are connected."""
        return len(self._links)

    def join(self, link: RankLink) -> None:
        """A trainer has connected; an older connection of it is ended."""
        with self._changed:
            older = self._links.get(link.rank)
            if older is not None:
                self._remove(older)
                older.refuse("the trainer has connected again")
            self._links[link.rank] = link

    def leave(self, link: RankLink) -> None:
        """A trainer is gone; calls that miss its rows are given up, and the others in them are told."""
        with self._changed:
            self._remove(link)
            self._changed.notify_all()

    def begin(self, link: RankLink, call: Call, tasks: ServedTasks, sequence: int, payload: int) -> Assembly:
        """A trainer's message of a call has begun: check it, and make room for its rows.

        Args:
            link: the trainer.
            call: what it asks for.
            tasks: the tasks that the call means.
            sequence: of its message.
            payload: bytes that follow.

        Raises:
            ProtocolError: it does not fit the plan or what other trainers say of the call.
            LinkLost: the trainer, or another one that has rows for the call, is not connected.
        """
        request = call.request()
        rows = {kind: parts[link.rank] for kind, parts in tasks.rows.items()}
        expected = sum(column.row_bytes * (rows[column.rows].stop - rows[column.rows].start) for column in request)
        if link.rank not in tasks.trainers or payload != expected:
            raise ProtocolError(f"call {call.number} has {payload} bytes, by plan {call.plan} it has {expected}")
        with self._changed:
            while link.in_flight >= IN_FLIGHT:
                if link.is_gone():
                    raise LinkLost("the trainer left")
                self._changed.wait(0.5)
            if link.gone:
                raise LinkLost("the connection has ended")
            absent = tasks.trainers - self._links.keys()
            if absent:
                raise LinkLost(f"call {call.number} needs rows of trainer {min(absent)}, which is not connected")
            assembly = self._open.get(call.number)
            if assembly is None:
                columns = {
                    column.name: empty_rows(column, tasks.totals[column.rows], self._pinned) for column in request
                }
                assembly = Assembly(call, tasks, columns, missing=set(tasks.trainers))
                self._open[call.number] = assembly
            if assembly.call != call or link.rank in assembly.links:
                raise ProtocolError(f"call {call.number} is not the one that others made, or was made twice")
            assembly.links[link.rank] = (link, sequence)
            link.in_flight += 1
            return assembly

    def arrived(self, link: RankLink, assembly: Assembly) -> None:
        """All rows of a trainer are in their place."""
        with self._changed:
            assembly.missing.discard(link.rank)
            if not assembly.missing and not assembly.lost:
                del self._open[assembly.call.number]
                self._complete.append(assembly)
                self._changed.notify_all()

    def next(self) -> Assembly | None:
        """Wait for the next complete call; None after `close`."""
        with self._changed:
            while not self._complete and not self._closed:
                self._changed.wait()
            return None if self._closed else self._complete.pop(0)

    def replied(self, link: RankLink) -> None:
        """A reply has left: the trainer may have another call."""
        with self._changed:
            link.in_flight -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Hand out no more calls."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _remove(self, link: RankLink) -> None:
        if self._links.get(link.rank) is not link:
            return  # it has connected again
        del self._links[link.rank]
        for number, assembly in list(self._open.items()):
            if link.rank in assembly.missing:
                assembly.lost = True
                del self._open[number]
                for other, _ in assembly.links.values():
                    if other is not link:
                        other.refuse(f"trainer {link.rank} left in the middle of call {number}")
