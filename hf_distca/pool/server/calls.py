"""Calls at a server: the plans they are made by, the ranks they come from, and their rows, put together and computed.

Shape suffixes: Q received query rows, R received key/value rows, K key/value rows of the kernel call, H query heads,
G key/value heads, D head dim of queries and keys, E head dim of values; N rows of either kind.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hf_distca.dispatch.bound import BoundGroup
from hf_distca.dispatch.rows import IndexBuffer, RowSum, take
from hf_distca.kernels import AttentionParams, Kernel
from hf_distca.plan import AttentionKind, Plan
from hf_distca.planner.cost import pairs
from hf_distca.planner.routes import make_routes
from hf_distca.pool.listener import Outbox
from hf_distca.pool.memory import Memory
from hf_distca.pool.messages import Call, PlanTables, RankHello, Reply
from hf_distca.pool.transport import choose
from hf_distca.pool.wire import Channel, LinkLost, ProtocolError

KEPT = 8
"""So many of the latest plans are kept: more than ranks have in use at once."""

IN_FLIGHT = 4
"""Calls of one rank that are received, computed or replied to at once; further ones wait in the network.

Ranks issue calls in one order, so the oldest call can always be completed: no rank's later calls hold up its rows.
"""

_FLUSH_S = 1.0


class ServedTasks:
    """This server's tasks of one plan: one nano-batch, one kind of attention.

    Attributes:
        group: the tasks, as index tensors.
        key_sums: how dK and dV of received rows are added up.
        rows: for each kind of rows ("queries", "keys") and each rank, which of the received rows are its own.
        totals: for each kind, how many rows come from all ranks.
        ranks: those that have rows here.
        pairs: query-key pairs of all tasks.
    """

    def __init__(self, plan: Plan, worker: int, buffer: IndexBuffer) -> None:
        routes = make_routes(plan, worker)
        stage = routes.stages[0]
        self.group = BoundGroup(stage.visiting, buffer)
        self.rows: dict[str, list[slice]] = {}
        self.totals: dict[str, int] = {}
        for kind, messages in (("queries", routes.queries), ("keys", stage.keys)):
            counts = messages.recv_counts[: plan.layout.ranks]
            stops = np.cumsum(counts)
            self.rows[kind] = [slice(int(stop - count), int(stop)) for stop, count in zip(stops, counts, strict=True)]
            self.totals[kind] = int(counts.sum())
        self.key_sums = RowSum({"tasks": stage.visiting.k_rows}, self.totals["keys"], buffer)
        self.ranks = frozenset(
            rank
            for rank, parts in enumerate(zip(self.rows["queries"], self.rows["keys"], strict=True))
            if any(part.stop > part.start for part in parts)
        )
        # Counted from a task's first key on; with a window that is where the first row's window begins.
        q_lens, k_lens = stage.visiting.q_lens, stage.visiting.k_lens
        self.pairs = int(np.sum(pairs(k_lens - q_lens, k_lens, plan.window)))


ServedPlan = dict[tuple[int, AttentionKind], ServedTasks]
"""A plan as one server uses it: tasks by nano-batch and kind of attention."""


def served_plan(message: PlanTables, tables: bytearray, device: torch.device) -> ServedPlan:
    """Make this server's tasks of a plan that has come."""
    buffer = IndexBuffer(device)
    plan = {
        (nano_batch, kind): ServedTasks(plan, message.worker, buffer)
        for nano_batch, nano in enumerate(message.read(tables))
        for kind, plan in nano.plans.items()
    }
    buffer.send()
    return plan


class RankLink:
    """The server's end of the connection to one rank; rows may stand still on their way for `rows_s`."""

    def __init__(self, channel: Channel, hello: RankHello, rows_s: float, memory: Memory) -> None:
        self.rank = hello.rank
        self.channel = channel
        self.rows_s = rows_s
        self.transport, self._welcome = choose(channel, memory, hello.nixl)
        self.in_flight = 0  # calls that have begun and whose replies are not sent; guarded by `Calls`
        self.gone = False  # nothing that comes from it counts any more
        self._outbox = Outbox(channel)

    def welcome(self) -> None:
        """Tell the rank that it is connected."""
        self._outbox.put(partial(self.channel.send, self._welcome))

    def reply(self, reply: Reply, rows: Sequence[Tensor], sent: Callable[[], None]) -> None:
        """Queue a reply; `sent` is called when it has left, or never will."""
        self._outbox.put(partial(self.transport.send, reply, rows, self.rows_s), sent)

    def refuse(self, reason: str) -> None:
        """Tell the rank why, then end the connection; its own thread notices."""
        self.gone = True
        self._outbox.put(partial(self.channel.refuse, reason), self.channel.shut_down)

    def is_gone(self) -> bool:
        """Whether the rank has left or was refused."""
        return self.gone or self.channel.hung_up()

    def finish(self) -> None:
        """Send what is queued, within reason, and end the connection."""
        self.gone = True
        self._outbox.finish(_FLUSH_S)
        self.transport.close()


@dataclass(eq=False)
class Assembly:
    """The rows of one call."""

    call: Call
    tasks: ServedTasks
    received: dict[str, Tensor]  # the tensors of call.request() by name: rows of all ranks
    missing: set[int]  # ranks whose rows are not complete
    links: dict[int, RankLink] = field(default_factory=dict)  # who sends rows, by rank
    lost: bool = False  # a rank that has rows for it is gone

    def rows_of(self, rank: int) -> list[Tensor]:
        """Return the slices that one rank's rows go into, in the order in which it sends them."""
        own = self.tasks.rows
        return [self.received[spec.name][own[spec.rows][rank]] for spec in self.call.request()]


class Calls:
    """The latest plans, and the calls that are made of them: puts calls together and hands out the complete ones.

    Used by all ranks' threads and the computing one. Rows are received in `memory`.
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
        """Take in a rank that has connected; an older connection of it is ended."""
        with self._changed:
            older = self._links.get(link.rank)
            if older is not None:
                self._remove(older)
                older.refuse("the rank has connected again")
            self._links[link.rank] = link
            if link.rank == 0:
                self._plans.clear()  # it may begin anew

    def add_plan(self, plan_id: int, plan: ServedPlan) -> None:
        """Add a plan and forget the oldest."""
        with self._changed:
            self._plans[plan_id] = plan
            while len(self._plans) > KEPT:
                del self._plans[min(self._plans)]
            self._changed.notify_all()

    def plan(self, plan_id: int, timeout_s: float, give_up: Callable[[], bool]) -> ServedPlan:
        """Return a plan, which a rank's call may overtake: wait for it, and ask `give_up` twice a second.

        ProtocolError: it is not kept any more, or does not come.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while plan_id not in self._plans:
                if plan_id < min(self._plans, default=0):
                    raise ProtocolError(f"plan {plan_id} is no longer kept; the latest is {max(self._plans)}")
                if time.monotonic() > deadline or give_up():
                    raise ProtocolError(f"plan {plan_id} did not arrive within {timeout_s:g} s")
                self._changed.wait(0.5)
            return self._plans[plan_id]

    def leave(self, link: RankLink) -> None:
        """Give up the calls that miss rows of a rank that is gone, and tell the others in them."""
        with self._changed:
            self._remove(link)
            self._changed.notify_all()

    def begin(self, link: RankLink, call: Call, tasks: ServedTasks) -> Assembly:
        """Make room for the rows of a call that a rank begins to send.

        Raises:
            ProtocolError: it is not what other ranks say of the call.
            LinkLost: the rank, or another one that has rows for the call, is not connected.
        """
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
                received = {spec.name: self._memory.empty(spec, tasks.totals[spec.rows]) for spec in call.request()}
                assembly = Assembly(call, tasks, received, set(tasks.ranks))
                self._open[call.call_id] = assembly
            if assembly.call != call or link.rank in assembly.links:
                raise ProtocolError(f"call {call.call_id} differs from the call of other ranks, or was made twice")
            assembly.links[link.rank] = link
            link.in_flight += 1
            return assembly

    def arrived(self, link: RankLink, assembly: Assembly) -> None:
        """Note that all rows of a rank are in their place."""
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
        """Note that a reply has left: the rank may have another call."""
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
                for other in assembly.links.values():
                    if other is not link:
                        other.refuse(f"rank {link.rank} left in the middle of call {call_id}")


def params_of(call: Call) -> AttentionParams:
    """Return the kernel's parameters of a call."""
    return AttentionParams(scale=call.scale, window=call.window, softcap=call.softcap)


@torch.no_grad()
def compute(assembly: Assembly, kernel: Kernel, memory: Memory, device: torch.device) -> dict[str, Tensor]:
    """Compute a call whose rows are complete.

    Returns:
        The tensors of call.reply() by name, rows of all ranks, ready to be sent. Forward: o_QHE and lse_QH. Backward:
        dq_QHD, and dk_RGD and dv_RGE, in which the tasks that read a row are summed in a fixed order.
    """
    call, tasks, group = assembly.call, assembly.tasks, assembly.tasks.group
    rows = {name: rows_N.to(device, non_blocking=True) for name, rows_N in assembly.received.items()}
    q_QHD, k_KGD, v_KGE = rows["q"], take(rows["k"], group.k_rows), take(rows["v"], group.k_rows)
    results: tuple[Tensor, ...]
    if call.direction == "forward":
        results = kernel.forward(q_QHD, k_KGD, v_KGE, group.shapes, params_of(call))
    else:
        do_QHE, o_QHE, lse_QH = (rows[name] for name in ("do", "o", "lse"))
        dq_QHD, dk_KGD, dv_KGE = kernel.backward(
            do_QHE, q_QHD, k_KGD, v_KGE, o_QHE, lse_QH, group.shapes, params_of(call)
        )
        results = dq_QHD, tasks.key_sums.add_up([dk_KGD]), tasks.key_sums.add_up([dv_KGE])
    staged, ready = memory.stage(results)
    ready()
    return dict(zip((spec.name for spec in call.reply()), staged, strict=True))
