"""Calls on their way: rows of several ranks put together, computed when all are there."""

import threading
from dataclasses import dataclass, field

from torch import Tensor

from hf_distca.pool.messages.call import Call
from hf_distca.pool.server.plans import ServedTasks
from hf_distca.pool.server.rank_link import RankLink
from hf_distca.pool.transport.contract import Memory
from hf_distca.pool.wire import LinkLost, ProtocolError

IN_FLIGHT = 4
"""Calls of one rank that are received, computed or replied to at once; further ones wait in the network.

Ranks issue calls in one order, so the oldest call can always be completed: no rank's later calls hold up its rows.
"""


@dataclass(eq=False)
class Assembly:
    """The rows of one call.

    Attributes:
        call: what is to be computed.
        tasks: which tasks.
        received: the tensors of call.request() by name: rows of all ranks.
        links: who sends rows, by rank, and the sequence number of its message.
        missing: ranks whose rows are not complete.
        lost: a rank that has rows for it is gone.
    """

    call: Call
    tasks: ServedTasks
    received: dict[str, Tensor]
    links: dict[int, tuple[RankLink, int]] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    lost: bool = False

    def rows_of(self, rank: int) -> list[Tensor]:
        """Where one rank's rows go, in the order in which it sends them."""
        own = self.tasks.rows
        return [self.received[spec.name][own[spec.rows][rank]] for spec in self.call.request()]


class Calls:
    """Puts calls together and hands out the complete ones. Used by all ranks' threads and the computing one.

    Args:
        memory: where rows are received.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._changed = threading.Condition()
        self._links: dict[int, RankLink] = {}
        self._open: dict[int, Assembly] = {}  # by id of the call
        self._complete: list[Assembly] = []
        self._closed = False

    @property
    def ranks(self) -> int:
        """Number of ranks that are connected."""
        return len(self._links)

    def join(self, link: RankLink) -> None:
        """A rank has connected; an older connection of it is ended."""
        with self._changed:
            older = self._links.get(link.rank)
            if older is not None:
                self._remove(older)
                older.refuse("the rank has connected again")
            self._links[link.rank] = link

    def leave(self, link: RankLink) -> None:
        """A rank is gone; calls that miss its rows are given up, and the others in them are told."""
        with self._changed:
            self._remove(link)
            self._changed.notify_all()

    def begin(self, link: RankLink, call: Call, tasks: ServedTasks, sequence: int, size: int) -> Assembly:
        """A rank's message of a call has begun: check it, and make room for its rows.

        Args:
            link: the rank.
            call: what it asks for.
            tasks: the tasks that the call means.
            sequence: of its message.
            size: bytes of its rows.

        Raises:
            ProtocolError: it does not fit the plan or what other ranks say of the call.
            LinkLost: the rank, or another one that has rows for the call, is not connected.
        """
        request = call.request()
        rows = {kind: parts[link.rank] for kind, parts in tasks.rows.items()}
        expected = sum(spec.row_bytes * (rows[spec.rows].stop - rows[spec.rows].start) for spec in request)
        if link.rank not in tasks.ranks or size != expected:
            raise ProtocolError(f"call {call.call_id} has {size} bytes, by plan {call.plan_id} it has {expected}")
        with self._changed:
            while link.in_flight >= IN_FLIGHT:
                if link.is_gone():
                    raise LinkLost("the rank left")
                self._changed.wait(0.5)
            if link.gone:
                raise LinkLost("the connection has ended")
            absent = tasks.ranks - self._links.keys()
            if absent:
                raise LinkLost(f"call {call.call_id} needs rows of rank {min(absent)}, which is not connected")
            assembly = self._open.get(call.call_id)
            if assembly is None:
                received = {spec.name: self._memory.empty(spec, tasks.totals[spec.rows]) for spec in request}
                assembly = Assembly(call, tasks, received, missing=set(tasks.ranks))
                self._open[call.call_id] = assembly
            if assembly.call != call or link.rank in assembly.links:
                raise ProtocolError(f"call {call.call_id} is not the one that others made, or was made twice")
            assembly.links[link.rank] = (link, sequence)
            link.in_flight += 1
            return assembly

    def arrived(self, link: RankLink, assembly: Assembly) -> None:
        """All rows of a rank are in their place."""
        with self._changed:
            assembly.missing.discard(link.rank)
            if not assembly.missing and not assembly.lost:
                del self._open[assembly.call.call_id]
                self._complete.append(assembly)
                self._changed.notify_all()

    def next(self) -> Assembly | None:
        """Wait for the next complete call; None after `close`."""
        with self._changed:
            while not self._complete and not self._closed:
                self._changed.wait()
            return None if self._closed else self._complete.pop(0)

    def replied(self, link: RankLink) -> None:
        """A reply has left: the rank may have another call."""
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
        for call_id, assembly in list(self._open.items()):
            if link.rank in assembly.missing:
                assembly.lost = True
                del self._open[call_id]
                for other, _ in assembly.links.values():
                    if other is not link:
                        other.refuse(f"rank {link.rank} left in the middle of call {call_id}")
