"""A dedicated attention server: it joins a training run, serves its ranks, and leaves when training ends."""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from hf_distca.dispatch.recorder import Recorder
from hf_distca.kernels import Kernel, Need
from hf_distca.kernels.speed import measure_speed
from hf_distca.pool.directory import Membership, State
from hf_distca.pool.messages.call import Call, Reply
from hf_distca.pool.messages.hello import ServerHello
from hf_distca.pool.messages.kinds import SERVER_SERVICE, Kind
from hf_distca.pool.messages.plan import PlanHeader, decode_plan
from hf_distca.pool.server.calls import Assembly, Calls
from hf_distca.pool.server.compute import compute, params_of
from hf_distca.pool.server.plans import PlanStore, ServedPlan
from hf_distca.pool.server.rank_link import RankLink
from hf_distca.pool.transport.choice import Choice, make_memory
from hf_distca.pool.wire import Frame, LinkLost, Listener, MismatchError, Peer, PeerLeft, ProtocolError

logger = logging.getLogger(__name__)

STATUS_S = 5.0
_POLL_S = 0.2
_WILDCARDS = ("0.0.0.0", "::")


class AttentionServer:
    """Computes core attention for the ranks of one run. It keeps plans, and nothing between calls.

    All ranks connect before the first call that needs their rows. Rank 0 sends PLAN messages; every rank that has rows
    for this server in a plan's nano-batch and kind of attention sends a CALL message for each direction of each layer.
    Whatever does not fit the plan ends the connection that it came on, and no other.

    Args:
        token: the run's token.
        device: where to compute.
        kernel: what computes.
        choose: finds another kernel for what `kernel` cannot do; None: there is none.
        host: address of the interface to listen on.
        port: TCP port; 0 for any that is free.
        plan_wait_s: how long a call may wait for its plan.
        rows_s: rows of a call or a reply may stand still on their way for so long.
        transport: what carries rows.

    Attributes:
        host: where it listens.
        port: where it listens.
        tasks: computed so far.

    Raises:
        OSError: the address cannot be listened on.
        ValueError: the transport cannot be used.
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
        plan_wait_s: float = 30.0,
        rows_s: float = 60.0,
        transport: Choice = Choice.TCP,
    ) -> None:
        self._token = token
        self._device = device
        self._kernel = kernel
        self._choose = choose
        self._kernels: dict[Need, Kernel] = {}
        self._plan_wait_s = plan_wait_s
        self._rows_s = rows_s
        self._plans = PlanStore()
        self._memory = make_memory(transport, device, host)
        self._calls = Calls(self._memory)
        self._stopping = threading.Event()
        self.tasks = 0
        # By the host's clock: a call is computed once its results are in the host's memory.
        self._recorder = Recorder(torch.device("cpu"))
        self._recording = self._recorder.listen("kernel")
        self._computing = threading.Thread(target=self._compute_calls, name="compute", daemon=True)
        self._listener = Listener(host, port, token, SERVER_SERVICE, Kind, self._serve)
        self.host, self.port = self._listener.host, self._listener.port
        self._computing.start()

    @property
    def busy_s(self) -> float:
        """Seconds spent on tasks so far."""
        return self._recorder.seconds("kernel")

    def run(self, join_host: str, join_port: int, wait_s: float, report: Callable[[str], None]) -> None:
        """Join a run and serve until it ends or `stop` is called.

        Args:
            join_host: where the run's directory listens.
            join_port: its TCP port.
            wait_s: how long to try to join, and again if the directory is lost.
            report: told what the server is doing, now and then, in a line.

        Raises:
            AuthenticationError: the directory has another token.
            MismatchError: ranks cannot use this server.
            LinkLost: the directory was not reached in time.
        """
        with self._on_device():
            speed = measure_speed(self._kernel, self._device)
        report(f"listening on {self.host}:{self.port}; {self._device} computes {speed / 1e6:.1f} M pairs/s")
        hello = ServerHello("" if self.host in _WILDCARDS else self.host, self.port, str(self._device), speed)
        where = f"{join_host}:{join_port}"
        while not self._stopping.is_set():
            report(f"joining {where}")
            try:
                member = Membership.join(join_host, join_port, self._token, hello, wait_s, self._stopping.is_set)
            except LinkLost:
                if self._stopping.is_set():
                    break
                raise
            state = self._stay(member, f"joined {where} as server {member.id}", report)
            member.close()
            if state is State.ENDED:
                report("training has ended")
                return
            if state is State.REFUSED:
                raise MismatchError(member.refusal)
        report("stopped")

    def stop(self) -> None:
        """Make `run` return soon; may be called from a signal handler."""
        self._stopping.set()

    def close(self) -> None:
        """End all connections; a call that is being computed is finished first."""
        self._listener.close()
        self._calls.close()
        self._computing.join()

    def _stay(self, member: Membership, joined: str, report: Callable[[str], None]) -> State:
        """Be a member until that ends or the server is stopped, and say what has changed."""
        report(joined)
        before, due = (self._calls.ranks, self.tasks, self.busy_s), time.monotonic() + STATUS_S
        while (state := member.poll(_POLL_S)) is State.JOINED and not self._stopping.is_set():
            late = time.monotonic() - due
            if late >= 0:
                now = (self._calls.ranks, self.tasks, self.busy_s)
                if now != before:
                    seconds = STATUS_S + late
                    rate, busy = (now[1] - before[1]) / seconds, (now[2] - before[2]) / seconds
                    report(f"{joined}; {now[0]} ranks; {rate:.1f} tasks/s; busy {busy:.0%}")
                before, due = now, time.monotonic() + STATUS_S
        return state

    def _serve(self, peer: Peer) -> None:
        """The thread of one rank."""
        with self._on_device():
            self._serve_rank(peer)

    def _serve_rank(self, peer: Peer) -> None:
        link = RankLink(peer, self._rows_s, self._memory)
        self._calls.join(link)
        if link.rank == 0:
            self._plans.clear()  # it may begin anew
        link.welcome()
        try:
            while True:
                self._take(link, link.channel.receive())
        except PeerLeft:
            raise
        except LinkLost as error:
            link.refuse(str(error))
            raise
        finally:
            self._calls.leave(link)
            link.finish()

    def _take(self, link: RankLink, frame: Frame) -> None:
        """Deal with one message.

        Raises:
            LinkLost: it cannot be dealt with; the connection must end.
        """
        try:
            if frame.kind is Kind.CALL:
                self._take_call(link, frame)
            elif frame.kind is Kind.PLAN and link.rank == 0:
                self._take_plan(link, frame)
            else:
                raise ProtocolError(f"{link.name} must not send this {frame.kind.name} message")
        except ValueError as error:
            raise ProtocolError(str(error)) from error

    def _take_plan(self, link: RankLink, frame: Frame) -> None:
        header = PlanHeader.read(frame.header)
        if frame.payload != header.payload:
            raise ProtocolError(f"plan {header.plan_id} has {frame.payload} bytes of tables, it says {header.payload}")
        tables = bytearray(frame.payload)
        link.channel.receive_into([tables])
        self._plans.add(header.plan_id, ServedPlan(header, decode_plan(header, tables), self._device))

    def _take_call(self, link: RankLink, frame: Frame) -> None:
        call = Call.read(frame.header)
        plan = self._plans.get(call.plan_id, self._plan_wait_s, link.is_gone)
        tasks = plan.tasks.get((call.nano_batch, call.kind))
        if tasks is None or link.rank >= plan.ranks:
            raise ProtocolError(f"plan {call.plan_id} has no tasks of nano-batch {call.nano_batch}, {call.kind}")
        self._kernel_of(call)
        assembly = self._calls.begin(link, call, tasks, frame.sequence, link.transport.size(frame))
        link.transport.receive(frame, assembly.rows_of(link.rank), link.rows_s)
        self._calls.arrived(link, assembly)

    def _kernel_of(self, call: Call) -> Kernel:
        """The kernel that computes a call.

        Raises:
            ValueError: none can.
        """
        need = Need(getattr(torch, call.dtype), call.dim_qk, call.dim_v, params_of(call))
        if need not in self._kernels:
            try:
                self._kernel.check(need, self._device)
                self._kernels[need] = self._kernel
            except ValueError:
                if self._choose is None:
                    raise
                self._kernels[need] = self._choose(need)
        return self._kernels[need]

    def _compute_calls(self) -> None:
        """The computing thread."""
        with self._on_device():
            while (assembly := self._calls.next()) is not None:
                try:
                    self._compute_call(assembly)
                except Exception as error:  # of the kernel, for instance out of memory: the server goes on
                    logger.exception("call %d failed", assembly.call.call_id)
                    for link, _ in assembly.links.values():
                        link.refuse(f"call {assembly.call.call_id} failed: {error}")
                del assembly  # nothing is kept while there is nothing to do

    def _on_device(self) -> AbstractContextManager[Any]:
        """For what a thread does on the server's GPU: each thread begins with the first one, and Triton takes that."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _compute_call(self, assembly: Assembly) -> None:
        call, tasks = assembly.call, assembly.tasks
        with self._recorder.span("kernel", "tasks", pairs=tasks.pairs):
            results = compute(call, tasks, assembly.received, self._kernel_of(call), self._memory, self._device)
        (span,) = self._recording.take()
        self.tasks += len(tasks.group.shapes.q_lens)
        reply = Reply(call.call_id, span.end - span.begin, span.pairs)
        for rank, (link, sequence) in assembly.links.items():
            own = [results[spec.name][tasks.rows[spec.rows][rank]] for spec in call.reply()]
            link.reply(reply, own, sequence, partial(self._calls.replied, link))
