"""The rank's end of the connection between one rank and one server."""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from hf_distca.pool.messages.call import Call, Reply
from hf_distca.pool.messages.hello import RankHello, Refusal
from hf_distca.pool.messages.kinds import SERVER_SERVICE, Kind
from hf_distca.pool.transport.contract import Memory, Transport
from hf_distca.pool.transport.negotiation import offer, taken
from hf_distca.pool.wire.channel import Buffer, Channel
from hf_distca.pool.wire.errors import LinkLost, MismatchError, ProtocolError
from hf_distca.pool.wire.handshake import connect
from hf_distca.pool.wire.outbox import Outbox


class PendingReply:
    """A reply on its way; `wait` hands over what the server says once its rows are in their tensors.

    Attributes:
        rows: where they are received.
        departed: when the call was ready to be sent, in the time of `time.perf_counter`.
        arrived: when the reply was complete.
    """

    def __init__(self, link: "ServerLink", rows: Sequence[Tensor]) -> None:
        self.rows = rows
        self.departed = self.arrived = 0.0
        self._link = link
        self._done = threading.Event()
        self._reply: Reply | None = None

    def wait(self, timeout_s: float) -> Reply:
        """Wait for the reply, and fail the link if it does not come in time.

        Args:
            timeout_s: how long from now on.

        Returns:
            What the server says beside the rows.

        Raises:
            LinkLost: the link has failed. What the tensors hold is undefined, and nobody writes to them any more.
        """
        if not self._done.wait(timeout_s):
            self._link.fail(f"no reply within {timeout_s:g} s")
        if self._reply is None:
            self._link.close()  # returns when no thread touches the tensors any more
        if self._reply is None:
            raise LinkLost(self._link.lost)
        return self._reply

    def settle(self, reply: Reply | None) -> None:
        """The link's word: the reply is complete, or (None) will not come."""
        if reply is not None:
            self._reply = reply
            self.arrived = time.perf_counter()
        self._done.set()


class ServerLink:
    """Calls to one server and their replies; nothing but `PendingReply.wait` blocks the caller.

    A link that failed once stays failed; a server that comes back gets a new one.

    Args:
        host: where the server listens.
        port: its TCP port.
        token: the run's token.
        rank: this one.
        ranks: number of ranks.
        connect_s: for connecting, the handshake and the server's welcome.
        rows_s: rows on their way there or back may stand still for so long.
        memory: where the rows of all calls lie.

    Attributes:
        name: HOST:PORT, for messages.
        within_host: whether the server is on this rank's host.
        carried_by: which transport carries rows, and why, for messages.

    Raises:
        MismatchError: the server refuses, or cannot carry rows as this rank must.
        LinkLost: the server cannot be reached, or has another token.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: bytes,
        rank: int,
        ranks: int,
        connect_s: float,
        rows_s: float,
        memory: Memory,
    ) -> None:
        self.name = f"{host}:{port}"
        self._rows_s = rows_s
        self._lock = threading.Lock()
        self._sequence = itertools.count(1)
        self._pending: dict[int, PendingReply] = {}
        self._lost: str | None = None
        self._channel = Channel(connect(host, port, token, SERVER_SERVICE, connect_s), Kind)
        try:
            self._channel.set_timeout(connect_s)
            self._channel.send(Kind.HELLO, {**RankHello(rank, ranks).header(), **offer(memory)})
            frame = self._channel.receive()
            if frame.kind is Kind.REFUSED:
                raise MismatchError(f"the server does not take this rank: {Refusal.read(frame.header).reason}")
            if frame.kind is not Kind.WELCOME:
                raise ProtocolError(f"the server answers {frame.kind.name}, expected WELCOME")
            self._channel.set_timeout(None)
            self.within_host = self._channel.within_host
            self._transport: Transport
            self._transport, self.carried_by = taken(self._channel, memory, frame.header)
        except LinkLost as error:
            self._channel.close()
            raise type(error)(f"server {self.name}: {error}") from error
        self._outbox = Outbox(self._channel, f"send {self.name}")
        self._closing = threading.Lock()
        self._receiver = threading.Thread(target=self._receive, name=f"receive {self.name}", daemon=True)
        self._receiver.start()

    @property
    def lost(self) -> str:
        """Why the link failed; empty while it works."""
        return "" if self._lost is None else f"server {self.name}: {self._lost}"

    def send(self, kind: Kind, header: dict[str, Any], buffers: Sequence[Buffer] = ()) -> None:
        """Queue a message that has no reply.

        Args:
            kind: what it is.
            header: its JSON object.
            buffers: its payload, part after part; they must not change before a later call's reply is here.

        Raises:
            LinkLost: the link has failed.
        """
        with self._lock:
            self._check()
            self._outbox.put(partial(self._channel.send, kind, header, buffers))

    def call(
        self,
        call: Call,
        rows: Sequence[Tensor],
        results: Sequence[Tensor],
        ready: Callable[[], None] | None = None,
    ) -> PendingReply:
        """Queue a call.

        Args:
            call: what the server is to compute.
            rows: as `call.request()` says, [N, …] each; they must not change before the reply is here.
            results: as `call.reply()` says; the reply's rows are received into them.
            ready: returns when the rows are in their place; called by the thread that sends.

        Raises:
            LinkLost: the link has failed.
        """
        reply = PendingReply(self, results)

        def depart() -> None:
            if ready is not None:
                ready()
            reply.departed = time.perf_counter()

        with self._lock:
            self._check()
            sequence = next(self._sequence)
            self._pending[sequence] = reply
            send = partial(self._transport.send, Kind.CALL, call.header(), rows, sequence, self._rows_s, results)
            self._outbox.put(send, ready=depart)
        return reply

    def fail(self, reason: str) -> None:
        """End the link because of something seen elsewhere; what is pending raises LinkLost with the reason."""
        with self._lock:
            if self._lost is not None:
                return
            self._lost = reason
            pending, self._pending = list(self._pending.values()), {}
        self._channel.shut_down()
        for reply in pending:
            reply.settle(None)

    def close(self) -> None:
        """End the link and wait until its threads are done with all tensors."""
        self.fail("closed by this rank")
        with self._closing:
            self._outbox.finish(0)
            self._receiver.join()
            self._transport.close()
            self._channel.close()

    def _check(self) -> None:
        if self._lost is not None:
            raise LinkLost(self.lost)

    def _receive(self) -> None:
        try:
            while True:
                frame = self._channel.receive()
                if frame.kind is Kind.REFUSED:
                    raise LinkLost(f"the server ended the connection: {Refusal.read(frame.header).reason}")
                if frame.kind is not Kind.REPLY:
                    raise ProtocolError(f"a {frame.kind.name} message came where only replies are expected")
                with self._lock:
                    pending = self._pending.get(frame.sequence)
                if pending is None:
                    raise ProtocolError("a reply came to a call that was not made")
                reply = Reply.read(frame.header)
                self._transport.receive(frame, pending.rows, self._rows_s)
                with self._lock:
                    self._pending.pop(frame.sequence, None)
                pending.settle(reply)
                del pending  # its tensors belong to the caller again
        except LinkLost as error:
            self.fail(str(error))
