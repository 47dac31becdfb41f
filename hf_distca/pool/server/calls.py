"""Calls at a server: the plans they are made by, the ranks they come from, and their rows, put together.

Shape suffixes: N rows; what follows a row's N is free.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hf_distca.dispatch.bound import BoundGroup
from hf_distca.dispatch.rows import IndexBuffer, RowSum
from hf_distca.plan import AttentionKind, Plan
from hf_distca.planner.cost import pairs
from hf_distca.planner.routes import make_routes
from hf_distca.pool.listener import Outbox
from hf_distca.pool.memory import Memory
from hf_distca.pool.messages import Call, PlanTables, RankHello, Reply
from hf_distca.pool.transport import choose
from hf_distca.pool.wire import Channel, LinkLost, ProtocolError

KEPT = 8
"""Number of the latest plans that are kept: more than ranks have in use at once."""

PLAN_WAIT_S = 30.0
"""Most seconds that a call waits for its plan."""

ROWS_S = 60.0
"""Most seconds for which travelling rows of a call or a reply may stand still."""

_FLUSH_S = 1.0


class ServedTasks:
    """This server's tasks of one plan: one nano-batch, one kind of attention.

    Attributes:
        key_sums: how dK and dV of received rows are added up.
        rows: for each kind of rows ("queries", "keys") and each rank, the rank's slice of the received rows.
        totals: for each kind, how many rows come from all ranks.
        ranks: ranks that have rows here.
    """

    def __init__(self, plan: Plan, worker: int, buffer: IndexBuffer) -> None:
        routes = make_routes(plan, worker)
        keys, tasks = routes.stages[0].keys, routes.stages[0].remote_query
        self.group = BoundGroup(tasks, buffer)
        self.rows: dict[str, list[slice]] = {}
        self.totals: dict[str, int] = {}
        for kind, exchanged in (("queries", routes.queries), ("keys", keys)):
            counts = exchanged.recv_counts[: plan.layout.ranks]
            stops = np.cumsum(counts)
            self.rows[kind] = [slice(int(stop - count), int(stop)) for stop, count in zip(stops, counts, strict=True)]
            self.totals[kind] = int(counts.sum())
        self.key_sums = RowSum({"tasks": tasks.k_rows}, self.totals["keys"], buffer)
        received = (routes.queries.recv_counts + keys.recv_counts)[: plan.layout.ranks]
        self.ranks = frozenset(np.flatnonzero(received).tolist())
        # Counted from a task's first key on; with a window that is where the first row's window begins.
        self.pairs = int(np.sum(pairs(tasks.k_lens - tasks.q_lens, tasks.k_lens, plan.window)))


ServedPlan = dict[tuple[int, AttentionKind], ServedTasks]
"""A plan as one server uses it: tasks by nano-batch and kind of attention."""


def served_plan(message: PlanTables, tables: bytearray, device: torch.device) -> ServedPlan:
    """Make this server's tasks of a received plan."""
    buffer = IndexBuffer(device)
    served = {
        (nano_batch, kind): ServedTasks(plan, message.worker, buffer)
        for nano_batch, kind, plan in message.read(tables)
    }
    buffer.send()
    return served


class RankLink:
    """The server's end of the connection to one rank."""

    def __init__(self, channel: Channel, hello: RankHello, memory: Memory) -> None:
        self.rank, self.channel = hello.rank, channel
        self.transport, self.welcome = choose(channel, memory, hello)
        self.gone = False  # nothing from this rank counts any more
        self.outbox = Outbox(channel)

    def reply(self, reply: Reply, rows: Sequence[Tensor]) -> None:
        """Queue a reply."""
        self.outbox.put(partial(self.transport.send, reply, rows, ROWS_S))

    def refuse(self, reason: str) -> None:
        """Send the rank the reason, then end the connection; its own thread notices."""
        self.gone = True
        self.outbox.put(partial(self.channel.refuse, reason))
        self.outbox.put(self.channel.shut_down)

    def finish(self) -> None:
        """Send what is queued, within reason, and end the connection."""
        self.gone = True
        self.outbox.finish(_FLUSH_S)
        self.transport.close()


@dataclass(eq=False)
class Assembly:
    """The rows of one call: `received` from all ranks but those still `missing`, over the `links` by rank."""

    call: Call
    tasks: ServedTasks
    received: dict[str, Tensor]
    missing: set[int]
    links: dict[int, RankLink] = field(default_factory=dict)

    def rows_of(self, rank: int) -> list[Tensor]:
        """Return the slices that one rank's rows go into, in the order in which it sends them."""
        own = self.tasks.rows
        return [self.received[spec.name][own[spec.rows][rank]] for spec in self.call.request()]


class Calls:
    """The latest plans, and the calls that are made of them: puts calls together and hands out the complete ones.

    All ranks' threads and the computing one use it. Rows are received in `memory`. A rank has at most two calls in
    flight, one of each nano-batch: nothing else limits them here.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._changed = threading.Condition()
        self._plans: dict[int, ServedPlan] = {}
        self._links: dict[int, RankLink] = {}
        self._open: dict[int, Assembly] = {}  # by id of the call
        self._complete: list[Assembly] = []
        self._closed = False

    @property
    def ranks(self) -> int:
        """Number of ranks that are connected."""
        return len(self._links)

    def join(self, link: RankLink) -> None:
        """Take in a rank that has connected; an older connection of the rank is ended."""
        with self._changed:
            older = self._links.get(link.rank)
            if older is not None:
                self._remove(older)
                older.refuse("the rank has connected again")
            self._links[link.rank] = link
            if link.rank == 0:
                self._plans.clear()  # rank 0 may begin anew

    def leave(self, link: RankLink) -> None:
        """Give up the calls that miss rows of a rank that is gone, and refuse the others in them."""
        with self._changed:
            self._remove(link)
            self._changed.notify_all()

    def add_plan(self, plan_id: int, plan: ServedPlan) -> None:
        """Add a plan and forget the oldest."""
        with self._changed:
            self._plans[plan_id] = plan
            while len(self._plans) > KEPT:
                del self._plans[min(self._plans)]
            self._changed.notify_all()

    def begin(self, link: RankLink, call: Call) -> Assembly:
        """Make room for the rows of a call that a rank begins to send, once its plan is here: a call may overtake it.

        LinkLost: the plan does not come, or does not fit, or a rank that has rows for the call is not connected.
        """
        deadline = time.monotonic() + PLAN_WAIT_S
        number = call.plan_id
        with self._changed:
            while number not in self._plans:
                if number < min(self._plans, default=0):
                    raise ProtocolError(f"plan {number} is no longer kept; the latest is {max(self._plans)}")
                if time.monotonic() > deadline or link.gone or link.channel.hung_up():
                    raise ProtocolError(f"plan {number} did not arrive within {PLAN_WAIT_S:g} s")
                self._changed.wait(0.5)
            tasks = self._plans[number].get((call.nano_batch, call.kind))
            if tasks is None or link.rank not in tasks.ranks:
                raise ProtocolError(
                    f"plan {number} has no tasks of nano-batch {call.nano_batch}, {call.kind}, for rank {link.rank}"
                )
            absent = tasks.ranks - self._links.keys()
            if absent or link.gone:
                rank = min(absent, default=link.rank)
                raise LinkLost(f"call {call.call_id} needs rows of rank {rank}, which is not connected")
            assembly = self._open.get(call.call_id)
            if assembly is None:
                received = {spec.name: self._memory.empty(spec, tasks.totals[spec.rows]) for spec in call.request()}
                assembly = self._open[call.call_id] = Assembly(call, tasks, received, set(tasks.ranks))
            if assembly.call != call or link.rank in assembly.links:
                raise ProtocolError(f"call {call.call_id} differs from the call of other ranks, or was made twice")
            assembly.links[link.rank] = link
            return assembly

    def arrived(self, link: RankLink, assembly: Assembly) -> None:
        """Note that all rows of a rank are in their place."""
        with self._changed:
            assembly.missing.discard(link.rank)
            call_id = assembly.call.call_id
            if not assembly.missing and self._open.get(call_id) is assembly:  # else the call was given up
                del self._open[call_id]
                self._complete.append(assembly)
                self._changed.notify_all()

    def next(self) -> Assembly | None:
        """Wait for the next complete call; None after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._complete or self._closed)
            return None if self._closed else self._complete.pop(0)

    def close(self) -> None:
        """Hand out no more calls."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _remove(self, link: RankLink) -> None:
        if self._links.get(link.rank) is not link:
            return  # the rank has connected again
        del self._links[link.rank]
        for call_id, assembly in list(self._open.items()):
            if link.rank in assembly.missing:
                del self._open[call_id]
                for other in assembly.links.values():
                    if other is not link:
                        other.refuse(f"rank {link.rank} left in the middle of call {call_id}")
