"""A dedicated attention server: it joins a training run, serves its ranks, and leaves when training ends.

Shape suffixes: Q received query rows, R received key/value rows, K key/value rows of the kernel
call, H query heads, G key/value heads, D head dim of queries and keys, E head dim of values; N rows
of either kind.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_distca.dispatch.bound import BoundTasks
from hf_distca.dispatch.rows import IndexBuffer, RowSum, take
from hf_distca.kernels import AttentionParams, Kernel, Need
from hf_distca.kernels.speed import measure_speed
from hf_distca.plan import AttentionKind, Plan
from hf_distca.plan.cost import pairs
from hf_distca.plan.routes import make_routes
from hf_distca.pool.directory import ALIVE_S, ANSWER_S, join
from hf_distca.pool.messages import (
    Alive,
    Call,
    End,
    Message,
    PlanTables,
    RankHello,
    Refused,
    Reply,
    ServerHello,
)
from hf_distca.pool.transport import Choice, Memory, choose, make_memory
from hf_distca.pool.wire import (
    SERVER,
    Channel,
    LinkLost,
    Listener,
    MismatchError,
    Outbox,
    PeerLeft,
    ProtocolError,
)
from hf_distca.waiting import REPORT_S
from hf_distca.waiting import join as join_thread

logger = logging.getLogger(__name__)

KEPT = 8
"""Number of the latest plans that are kept: more than ranks have in use at once."""
PLAN_WAIT_S = 30.0
"""Most seconds that a call waits for its plan."""
ROWS_S = 60.0
"""Most seconds for which travelling rows of a call or a reply may stand still."""

STATUS_S = 5.0
_FLUSH_S = 1.0
_POLL_S = 0.2
_WILDCARDS = ("0.0.0.0", "::")


class ServedTasks:
    """This server's tasks of one plan: one nano-batch, one kind of attention."""

    def __init__(self, plan: Plan, worker: int, buffer: IndexBuffer) -> None:
        routes = make_routes(plan, worker)
        keys, tasks = routes.stages[0].keys, routes.stages[0].remote_query
        self.call_tasks = BoundTasks.bind(tasks, buffer)
        # For each kind of rows and each rank, the rank's slice of the received rows.
        self.rows: dict[str, list[slice]] = {}
        for kind, exchanged in (("queries", routes.queries), ("keys", keys)):
            stops = [0, *np.cumsum(exchanged.recv_counts[: plan.layout.ranks]).tolist()]
            self.rows[kind] = list(map(slice, stops, stops[1:]))
        # Adds up dK and dV of received rows.
        self.key_sums = RowSum({"tasks": tasks.k_rows}, self.rows["keys"][-1].stop, buffer)
        received = (routes.queries.recv_counts + keys.recv_counts)[: plan.layout.ranks]
        self.ranks = frozenset(np.flatnonzero(received).tolist())  # which have rows here
        # Counted from a task's first key on; with a window that is where the first row's window
        # begins.
        self.pairs = int(np.sum(pairs(tasks.k_lens - tasks.q_lens, tasks.k_lens, plan.window)))


class RankLink:
    """The server's end of the connection to one rank."""

    def __init__(self, channel: Channel, hello: RankHello, memory: Memory) -> None:
        self.rank, self.channel = hello.rank, channel
        self.transport, self.welcome = choose(channel, memory, hello)
        self.gone = False  # nothing from this rank counts any more
        self.outbox = Outbox(channel)

    def refuse(self, reason: str) -> None:
        """Send the rank the reason, then end the connection; its own thread notices."""
        self.gone = True
        self.outbox.put(partial(self.channel.refuse, reason))
        self.outbox.put(self.channel.shut_down)


@dataclass(eq=False)
class Assembly:
    """The rows of one call: `received` from all ranks but those still `missing`, over the `links` by rank."""

    call: Call
    tasks: ServedTasks
    received: dict[str, Tensor]
    missing: set[int]
    links: dict[int, RankLink] = field(default_factory=dict)


class AttentionServer:
    """Computes core attention for the ranks of one run. It keeps plans, and nothing between calls.

    All ranks connect before the first call that needs their rows. Rank 0 sends plans; every rank
    that has rows here in a plan's nano-batch and kind of attention sends a call for each direction
    of each layer. What does not fit the plan ends the connection that it came on, and no other. A
    rank has at most two calls in flight, one of each nano-batch.

    `choose` finds another kernel for what `kernel` cannot do. Without `choose`, or where it finds
    none, the server refuses the call and leaves the run. ValueError where the transport cannot be
    used.
    """

    def __init__(
        self,
        token: bytes,
        device: torch.device,
        kernel: Kernel,
        *,
        choose: Callable[[Need], Kernel] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        transport: Choice = Choice.TCP,
    ) -> None:
        self._token, self._device, self._kernel, self._choose = token, device, kernel, choose
        self._kernels: dict[Need, Kernel] = {}
        # Why no kernel of this server computes a call that fits a plan; the server then leaves.
        self._unable = ""
        self._memory = make_memory(transport, device, host)
        self.tasks, self.busy_s = 0, 0.0
        self._stopping = threading.Event()
        self._complete: queue.SimpleQueue[Assembly | None] = (
            queue.SimpleQueue()
        )  # None: compute no more
        self._changed = threading.Condition()  # for what stands below: each rank has a thread
        self._links: dict[int, RankLink] = {}  # by rank
        # By id of the plan: tasks by nano-batch and kind of attention.
        self._plans: dict[int, dict[tuple[int, AttentionKind], ServedTasks]] = {}
        self._open: dict[int, Assembly] = {}  # by id of the call
        self._computing = threading.Thread(target=self._compute_calls, name="compute", daemon=True)
        self._listener = Listener(host, port, token, SERVER, self._serve)
        self.host, self.port = self._listener.host, self._listener.port
        self._computing.start()

    def run(
        self, join_host: str, join_port: int, wait_s: float, report: Callable[[str], None]
    ) -> None:
        """Join the run whose directory listens at an address, and serve until it ends or `stop` is called.

        LinkLost: joining took longer than `wait_s`, or joining again after the directory was lost.
        MismatchError: ranks cannot use this server, or its kernel cannot compute their calls.
        `report` gets a line about the server's work now and then.
        """
        with self._on_device():
            speed = measure_speed(self._kernel, self._device)
        report(
            f"listening on {self.host}:{self.port}; {self._device} computes {speed / 1e6:.1f} M "
            "pairs/s"
        )
        hello = ServerHello(
            "" if self.host in _WILDCARDS else self.host, self.port, str(self._device), speed
        )
        where = f"{join_host}:{join_port}"
        while not self._stopping.is_set():
            report(f"joining {where}")
            try:
                channel, member = join(
                    join_host, join_port, self._token, hello, wait_s, self._stopping.is_set
                )
            except LinkLost:
                if self._stopping.is_set():
                    break
                raise
            last = self._stay(channel, f"joined {where} as server {member}", report)
            channel.close()
            if isinstance(last, End):
                report("training has ended")
                return
            if isinstance(last, Refused):
                raise MismatchError(last.reason)
            if self._unable:
                raise MismatchError(self._unable)
        report("stopped")

    def stop(self) -> None:
        """Make `run` return soon; may be called from a signal handler."""
        self._stopping.set()

    def close(self) -> None:
        """End all connections; calls whose rows are complete are computed first."""
        self._listener.close()
        self._complete.put(None)
        join_thread(self._computing)

    def _stay(self, channel: Channel, joined: str, report: Callable[[str], None]) -> Message | None:
        """Be a member until a last message comes, or (None) the directory is lost or this server must leave."""
        report(joined)
        before = (len(self._links), self.tasks, self.busy_s)
        begin = last_alive = last_call = time.monotonic()
        try:
            while not self._stopping.is_set() and not self._unable:
                if time.monotonic() - last_alive > ALIVE_S:
                    last_alive = time.monotonic()
                    channel.send(Alive(), timeout_s=ANSWER_S)
                if channel.has_news(_POLL_S):
                    return channel.receive(ANSWER_S)[0]
                seconds = time.monotonic() - begin
                if seconds >= STATUS_S:
                    now = (len(self._links), self.tasks, self.busy_s)
                    if now != before:
                        rate, busy = (now[1] - before[1]) / seconds, (now[2] - before[2]) / seconds
                        report(f"{joined}; {now[0]} ranks; {rate:.1f} tasks/s; busy {busy:.0%}")
                        last_call = time.monotonic()
                    elif time.monotonic() - last_call > REPORT_S:
                        report(f"{joined}; {now[0]} ranks; still waiting for calls of ranks")
                        last_call = time.monotonic()
                    before, begin = now, time.monotonic()
        except LinkLost as error:
            logger.warning("lost the connection to the directory: %s", error)
        return None

    def _serve(self, channel: Channel, hello: Message) -> None:
        """Serve one rank in its thread."""
        if not isinstance(hello, RankHello):
            raise ProtocolError(f"a rank begins with its hello, got {type(hello).__name__}")
        with self._on_device():
            link = RankLink(channel, hello, self._memory)
            with self._changed:
                older = self._links.get(link.rank)
                if older is not None:
                    self._remove(older)
                    older.refuse("the rank has connected again")
                self._links[link.rank] = link
                if link.rank == 0:
                    self._plans.clear()  # rank 0 may begin anew
            link.outbox.put(partial(channel.send, link.welcome))
            try:
                while True:
                    self._take(link, *channel.receive())
            except PeerLeft:
                raise
            except LinkLost as error:
                link.refuse(str(error))
                raise
            finally:
                link.gone = True
                with self._changed:
                    self._remove(link)
                    self._changed.notify_all()
                link.outbox.finish(_FLUSH_S)
                link.transport.close()

    def _remove(self, link: RankLink) -> None:
        """Give up the calls that miss rows of a rank that is gone, and refuse the other ranks in these calls."""
        if self._links.get(link.rank) is not link:
            return  # the rank has connected again
        del self._links[link.rank]
        for call_id, assembly in list(self._open.items()):
            if link.rank in assembly.missing:
                del self._open[call_id]
                for other in set(assembly.links.values()) - {link}:
                    other.refuse(f"rank {link.rank} left in the middle of call {call_id}")

    def _take(self, link: RankLink, message: Message, size: int) -> None:
        """Deal with one message that `size` bytes follow; LinkLost: the connection must end."""
        try:
            if isinstance(message, Call):
                assembly = self._begin(link, message)
                self._kernel_of(message)
                own = assembly.tasks.rows
                rows = [
                    assembly.received[spec.name][own[spec.rows][link.rank]]
                    for spec in message.request()
                ]
                link.transport.receive(message, size, rows, ROWS_S)
                with self._changed:
                    assembly.missing.discard(link.rank)
                    if (
                        not assembly.missing and self._open.get(message.call_id) is assembly
                    ):  # else it was given up
                        self._complete.put(self._open.pop(message.call_id))
            elif isinstance(message, PlanTables) and link.rank == 0 and size == message.bytes:
                tables, buffer = bytearray(size), IndexBuffer(self._device)
                link.channel.receive_payload([tables], ROWS_S)
                plan = {
                    (nano_batch, kind): ServedTasks(plan, message.worker, buffer)
                    for nano_batch, kind, plan in message.read(tables)
                }
                buffer.send()
                with self._changed:
                    self._plans[message.plan_id] = plan
                    while len(self._plans) > KEPT:
                        del self._plans[min(self._plans)]
                    self._changed.notify_all()
            else:
                name = type(message).__name__
                raise ProtocolError(f"rank {link.rank} sent an unexpected {name} with {size} bytes")
        except (
            ArithmeticError,
            LookupError,
            MemoryError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise ProtocolError(
                f"the server cannot use this {type(message).__name__}: {error}"
            ) from error

    def _begin(self, link: RankLink, call: Call) -> Assembly:
        """Make room for the rows of a call that a rank begins to send, once its plan is here: a call may overtake it.

        LinkLost: the plan does not come, or does not fit, or a rank that has rows for the call is
        not connected.
        """
        deadline = time.monotonic() + PLAN_WAIT_S
        number = call.plan_id
        with self._changed:
            while number not in self._plans:
                if number < min(self._plans, default=0):
                    raise ProtocolError(
                        f"plan {number} is no longer kept; the latest is {max(self._plans)}"
                    )
                if time.monotonic() > deadline or link.gone or link.channel.hung_up():
                    raise ProtocolError(f"plan {number} did not arrive within {PLAN_WAIT_S:g} s")
                self._changed.wait(0.5)
            tasks = self._plans[number].get((call.nano_batch, call.kind))
            if tasks is None or link.rank not in tasks.ranks:
                raise ProtocolError(
                    f"plan {number} has no tasks of nano-batch {call.nano_batch}, {call.kind}, for "
                    f"rank {link.rank}"
                )
            absent = tasks.ranks - self._links.keys()
            if absent or link.gone:
                rank = min(absent, default=link.rank)
                raise LinkLost(
                    f"call {call.call_id} needs rows of rank {rank}, which is not connected"
                )
            assembly = self._open.get(call.call_id)
            if assembly is None:
                received = {
                    spec.name: self._memory.empty(spec, tasks.rows[spec.rows][-1].stop)
                    for spec in call.request()
                }
                assembly = self._open[call.call_id] = Assembly(
                    call, tasks, received, set(tasks.ranks)
                )
            if assembly.call != call or link.rank in assembly.links:
                raise ProtocolError(
                    f"call {call.call_id} differs from the call of other ranks, or was made twice"
                )
            assembly.links[link.rank] = link
            return assembly

    def _kernel_of(self, call: Call) -> Kernel:
        """Return the kernel that computes a call which fits a plan.

        ValueError: none can, and the server leaves.
        """
        need = Need(getattr(torch, call.dtype), call.kind.dim_qk, call.kind.dim_v, params_of(call))
        if need not in self._kernels:
            try:
                self._kernels[need] = self._choose_kernel(need)
            except ValueError as error:
                self._unable = (
                    f"{error}. Ranks need that of this server; start it with --attention-kernel "
                    "auto, or with the name of a kernel that can"
                )
                raise
        return self._kernels[need]

    def _choose_kernel(self, need: Need) -> Kernel:
        """Return this server's kernel, or another one only where `choose` may find it.

        ValueError: none can.
        """
        try:
            self._kernel.check(need, self._device)
        except ValueError:
            if self._choose is None:
                raise
            return self._choose(need)
        return self._kernel

    def _compute_calls(self) -> None:
        """Compute calls in the order of arrival, in one thread."""
        with self._on_device():
            while (assembly := self._complete.get()) is not None:
                try:
                    self._compute_call(assembly)
                except (
                    Exception
                ) as error:  # the kernel's, for instance out of memory: the server goes on
                    logger.exception("call %d failed", assembly.call.call_id)
                    for link in assembly.links.values():
                        link.refuse(f"call {assembly.call.call_id} failed: {error}")
                del assembly  # nothing is kept while there is nothing to do

    @torch.no_grad()
    def _compute_call(self, assembly: Assembly) -> None:
        """Compute a call whose rows are complete, and queue the replies."""
        call, tasks = assembly.call, assembly.tasks
        kernel, group, params = self._kernel_of(call), tasks.call_tasks, params_of(call)
        begin = time.perf_counter()
        rows = {
            name: x_N.to(self._device, non_blocking=True) for name, x_N in assembly.received.items()
        }
        q_QHD, k_KGD, v_KGE = (
            rows["q"],
            take(rows["k"], group.k_rows),
            take(rows["v"], group.k_rows),
        )
        results: tuple[Tensor, ...]
        if call.direction == "forward":
            results = kernel.forward(q_QHD, k_KGD, v_KGE, group.shapes, params)
        else:
            do_QHE, o_QHE, lse_QH = (rows[name] for name in ("do", "o", "lse"))
            dq_QHD, dk_KGD, dv_KGE = kernel.backward(
                do_QHE, q_QHD, k_KGD, v_KGE, o_QHE, lse_QH, group.shapes, params
            )
            # Tasks that read a row are summed in a fixed order.
            results = dq_QHD, tasks.key_sums.add_up([dk_KGD]), tasks.key_sums.add_up([dv_KGE])
        staged, ready = self._memory.stage(results)
        ready()  # on a GPU the call is computed once its results are in the host's memory
        seconds = time.perf_counter() - begin
        self.busy_s += seconds
        self.tasks += len(group.shapes.q_lens)
        for rank, link in assembly.links.items():
            own = [
                x_N[tasks.rows[spec.rows][rank]]
                for spec, x_N in zip(call.reply(), staged, strict=True)
            ]
            link.outbox.put(
                partial(link.transport.send, Reply(call.call_id, seconds, tasks.pairs), own, ROWS_S)
            )

    def _on_device(self) -> AbstractContextManager[Any]:
        # A thread begins with the first GPU, and Triton takes that.
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()


def params_of(call: Call) -> AttentionParams:
    """Return the kernel's parameters of a call."""
    return AttentionParams(scale=call.scale, window=call.kind.window, softcap=call.softcap)
