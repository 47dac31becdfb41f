"""A dedicated attention server: it joins a run, serves its ranks, and leaves when training ends.

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
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_distca.dispatch.bound import BoundTasks
from hf_distca.dispatch.rows import IndexBuffer, RowSum, take
from hf_distca.dispatch.threads import REPORT_S
from hf_distca.dispatch.threads import join as join_thread
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
from hf_distca.units import counted

logger = logging.getLogger(__name__)

KEPT = 8
"""Number of the latest plans that are kept: more than ranks have in use at once."""
PLAN_WAIT_S = 30.0
"""Most seconds that a call waits for its plan."""
ROWS_S = 60.0
"""Most seconds for which travelling rows of a call or a reply may stand still."""

STATUS_S = 5.0
"""Least seconds between two reports of a server's work."""
_FLUSH_S = 1.0
"""Most seconds to send queued messages to a rank whose connection ends."""
_POLL_S = 0.2
"""Seconds after which a member of the directory looks whether it must leave."""
_RECHECK_S = 0.5
"""Seconds after which a call that waits for its plan looks whether its rank is gone."""
_WILDCARDS = ("0.0.0.0", "::")


class ServedTasks:
    """This server's tasks of one plan: one nano-batch, one kind of attention."""

    def __init__(self, plan: Plan, worker: int, buffer: IndexBuffer) -> None:
        routes = make_routes(plan, worker)
        keys = routes.stages[0].keys
        tasks = routes.stages[0].remote_query
        self.call_tasks = BoundTasks.bind(tasks, buffer)
        # For each kind of rows and each rank, the rank's slice of the received rows.
        self.rows: dict[str, list[slice]] = {}
        for kind, exchanged in (("queries", routes.queries), ("keys", keys)):
            stops = [0, *np.cumsum(exchanged.recv_counts[: plan.layout.ranks]).tolist()]
            self.rows[kind] = list(map(slice, stops, stops[1:]))
        # Adds up dK and dV of received rows.
        self.key_sums = RowSum({"tasks": tasks.k_rows}, self.rows["keys"][-1].stop, buffer)
        received = (routes.queries.recv_counts + keys.recv_counts)[: plan.layout.ranks]
        self.ranks = frozenset(np.flatnonzero(received).tolist())  # that send rows
        # Rows are counted from a task's first key on. With a window the window of the task's first
        # query begins there.
        self.pairs = int(np.sum(pairs(tasks.k_lens - tasks.q_lens, tasks.k_lens, plan.window)))


class RankLink:
    """The server's end of the connection to one rank."""

    def __init__(self, channel: Channel, hello: RankHello, memory: Memory) -> None:
        self.rank = hello.rank
        self.channel = channel
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
    """One call whose rows arrive from several ranks."""

    call: Call
    tasks: ServedTasks
    received: dict[str, Tensor]  # rows by the name of the tensor
    missing: set[int]  # ranks whose rows have not arrived
    links: dict[int, RankLink] = field(default_factory=dict)  # of ranks that made the call


class Activity(NamedTuple):
    """What a server has done so far."""

    ranks: int  # that are connected now
    tasks: int
    busy_s: float


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
        self._token = token
        self._device = device
        self._kernel = kernel
        self._choose = choose
        self._kernels: dict[Need, Kernel] = {}
        # Why no kernel of this server computes a call that fits a plan; the server then leaves.
        self._unable = ""
        self._memory = make_memory(transport, device, host)
        self.tasks = 0
        self.busy_s = 0.0
        self._stopping = threading.Event()
        # Calls whose rows are complete; None: compute no more.
        self._complete: queue.SimpleQueue[Assembly | None] = queue.SimpleQueue()
        # Each rank has a thread; this protects the next three, and tells of their changes.
        self._changed = threading.Condition()
        self._links: dict[int, RankLink] = {}  # by rank
        # By id of the plan: tasks by nano-batch and kind of attention.
        self._plans: dict[int, dict[tuple[int, AttentionKind], ServedTasks]] = {}
        self._open: dict[int, Assembly] = {}  # by id of the call
        self._computing = threading.Thread(target=self._compute_calls, name="compute", daemon=True)
        self._listener = Listener(host, port, token, SERVER, self._serve)
        self.host = self._listener.host
        self.port = self._listener.port
        self._computing.start()

    def run(
        self, join_host: str, join_port: int, wait_s: float, report: Callable[[str], None]
    ) -> None:
        """Join the run of a directory, and serve until the run ends or `stop` is called.

        `report` gets a line about the server's work now and then.

        LinkLost: joining took longer than `wait_s`, or joining again after the directory was lost.
        MismatchError: ranks cannot use this server, or its kernel cannot compute their calls.
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
        address = f"{join_host}:{join_port}"
        while not self._stopping.is_set():
            report(f"joining {address}")
            try:
                channel, member = join(
                    join_host, join_port, self._token, hello, wait_s, self._stopping.is_set
                )
            except LinkLost:
                if self._stopping.is_set():
                    break
                raise
            message = self._stay(channel, f"joined {address} as server {member}", report)
            channel.close()
            if isinstance(message, End):
                report("training has ended")
                return
            if isinstance(message, Refused):
                raise MismatchError(message.reason)
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
        """Be a member of the directory, and return its last message.

        Returns None where the directory is lost or this server must leave.

        Args:
            joined: the beginning of each report.
        """
        report(joined)
        reported = self._activity()
        begin = last_alive = last_report = time.monotonic()
        try:
            while not self._stopping.is_set() and not self._unable:
                if time.monotonic() - last_alive > ALIVE_S:
                    last_alive = time.monotonic()
                    channel.send(Alive(), timeout_s=ANSWER_S)
                if channel.has_news(_POLL_S):
                    return channel.receive(ANSWER_S)[0]
                # Report what changed, at most every STATUS_S; an idle server reports less often.
                seconds = time.monotonic() - begin
                if seconds < STATUS_S:
                    continue
                activity = self._activity()
                ranks = counted(activity.ranks, "rank")
                if activity != reported:
                    rate = (activity.tasks - reported.tasks) / seconds
                    busy = (activity.busy_s - reported.busy_s) / seconds
                    report(f"{joined}; {ranks}; {rate:.1f} tasks/s; busy {busy:.0%}")
                    last_report = time.monotonic()
                elif time.monotonic() - last_report > REPORT_S:
                    report(f"{joined}; {ranks}; still waiting for calls of ranks")
                    last_report = time.monotonic()
                reported = activity
                begin = time.monotonic()
        except LinkLost as error:
            logger.warning("lost the connection to the directory: %s", error)
        return None

    def _activity(self) -> Activity:
        return Activity(len(self._links), self.tasks, self.busy_s)

    def _serve(self, channel: Channel, hello: Message) -> None:
        """Serve one rank in its thread, until its connection ends."""
        if not isinstance(hello, RankHello):
            raise ProtocolError(f"a rank begins with its hello, got {type(hello).__name__}")
        with self._on_device():
            # 1. Replace an earlier link of the rank.
            link = RankLink(channel, hello, self._memory)
            with self._changed:
                previous = self._links.get(link.rank)
                if previous is not None:
                    self._remove(previous)
                    previous.refuse("the rank has connected again")
                self._links[link.rank] = link
                if link.rank == 0:
                    self._plans.clear()  # rank 0 may begin anew
            # 2. Take messages until the connection ends.
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
        """Forget a rank that is gone, and give up the calls that miss its rows.

        The connections of the other ranks in these calls end too.
        """
        if self._links.get(link.rank) is not link:
            return  # the rank has connected again
        del self._links[link.rank]
        for call_id, assembly in list(self._open.items()):
            if link.rank in assembly.missing:
                del self._open[call_id]
                for waiting_link in set(assembly.links.values()) - {link}:
                    waiting_link.refuse(f"rank {link.rank} left in the middle of call {call_id}")

    def _take(self, link: RankLink, message: Message, size: int) -> None:
        """Deal with one message that `size` bytes follow; LinkLost: the connection must end."""
        try:
            if isinstance(message, Call):
                self._take_call(link, message, size)
            elif isinstance(message, PlanTables) and link.rank == 0 and size == message.bytes:
                self._take_plan(link, message, size)
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

    def _take_call(self, link: RankLink, call: Call, size: int) -> None:
        """Receive a rank's rows of a call; the call is complete with the rows of the last rank."""
        assembly = self._begin(link, call)
        self._kernel_of(call)  # refuses a call that no kernel computes before its rows arrive
        slices = assembly.tasks.rows
        rows = [
            assembly.received[spec.name][slices[spec.rows][link.rank]] for spec in call.request()
        ]
        link.transport.receive(call, size, rows, ROWS_S)
        with self._changed:
            assembly.missing.discard(link.rank)
            was_given_up = self._open.get(call.call_id) is not assembly
            if not assembly.missing and not was_given_up:
                self._complete.put(self._open.pop(call.call_id))

    def _take_plan(self, link: RankLink, message: PlanTables, size: int) -> None:
        """Receive a plan, keep this server's tasks of it, and drop the oldest plan."""
        tables = bytearray(size)
        buffer = IndexBuffer(self._device)
        link.channel.receive_payload([tables], ROWS_S)
        tasks = {
            (nano_batch, kind): ServedTasks(plan, message.worker, buffer)
            for nano_batch, kind, plan in message.read(tables)
        }
        buffer.send()
        with self._changed:
            self._plans[message.plan_id] = tasks
            while len(self._plans) > KEPT:
                del self._plans[min(self._plans)]
            self._changed.notify_all()

    def _begin(self, link: RankLink, call: Call) -> Assembly:
        """Make room for the rows of a call that a rank begins to send.

        A call may overtake its plan, and waits for it then.

        LinkLost: the plan does not come, or does not fit, or a rank that has rows for the call is
        not connected.
        """
        deadline = time.monotonic() + PLAN_WAIT_S
        number = call.plan_id
        with self._changed:
            # 1. Wait for the plan.
            while number not in self._plans:
                if number < min(self._plans, default=0):
                    raise ProtocolError(
                        f"plan {number} is no longer kept; the latest is {max(self._plans)}"
                    )
                if time.monotonic() > deadline or link.gone or link.channel.hung_up():
                    raise ProtocolError(f"plan {number} did not arrive within {PLAN_WAIT_S:g} s")
                self._changed.wait(_RECHECK_S)

            # 2. Check that the call fits the plan, and that its ranks are connected.
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

            # 3. Take part in the call of other ranks, or open it.
            assembly = self._open.get(call.call_id)
            if assembly is None:
                received = {
                    spec.name: self._memory.empty(spec, tasks.rows[spec.rows][-1].stop)
                    for spec in call.request()
                }
                assembly = Assembly(call, tasks, received, missing=set(tasks.ranks))
                self._open[call.call_id] = assembly
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
                # Any error of the kernel, for instance out of memory: the server goes on.
                except Exception as error:
                    logger.exception("call %d failed", assembly.call.call_id)
                    for link in assembly.links.values():
                        link.refuse(f"call {assembly.call.call_id} failed: {error}")
                del assembly  # nothing is kept while there is nothing to do

    @torch.no_grad()
    def _compute_call(self, assembly: Assembly) -> None:
        """Compute a call whose rows are complete, and queue the replies."""
        call, tasks = assembly.call, assembly.tasks
        begin = time.perf_counter()
        results = self._run_kernel(assembly)
        staged, wait_for_copies = self._memory.stage(results)
        # On a GPU the call is computed once its results are in the host's memory.
        wait_for_copies()
        seconds = time.perf_counter() - begin
        self.busy_s += seconds
        self.tasks += len(tasks.call_tasks.shapes.q_lens)
        reply = Reply(call.call_id, seconds, tasks.pairs)
        for rank, link in assembly.links.items():
            rows = [
                x_N[tasks.rows[spec.rows][rank]]
                for spec, x_N in zip(call.reply(), staged, strict=True)
            ]
            link.outbox.put(partial(link.transport.send, reply, rows, ROWS_S))

    def _run_kernel(self, assembly: Assembly) -> tuple[Tensor, ...]:
        """Return the results of a call in the order of `Call.reply`, for the rows of all ranks."""
        call, tasks = assembly.call, assembly.tasks
        kernel = self._kernel_of(call)
        call_tasks = tasks.call_tasks
        params = params_of(call)
        rows = {
            name: x_N.to(self._device, non_blocking=True) for name, x_N in assembly.received.items()
        }
        q_QHD = rows["q"]
        k_KGD = take(rows["k"], call_tasks.k_rows)
        v_KGE = take(rows["v"], call_tasks.k_rows)
        if call.direction == "forward":
            return kernel.forward(q_QHD, k_KGD, v_KGE, call_tasks.shapes, params)
        dq_QHD, dk_KGD, dv_KGE = kernel.backward(
            rows["do"], q_QHD, k_KGD, v_KGE, rows["o"], rows["lse"], call_tasks.shapes, params
        )
        # Gradients of a row that several tasks read are added up in a fixed order.
        return dq_QHD, tasks.key_sums.add_up([dk_KGD]), tasks.key_sums.add_up([dv_KGE])

    def _on_device(self) -> AbstractContextManager[Any]:
        # A new thread has the first GPU as its current device, and Triton computes there.
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()


def params_of(call: Call) -> AttentionParams:
    """Return the kernel's parameters of a call."""
    return AttentionParams(scale=call.scale, window=call.kind.window, softcap=call.softcap)
