"""The trainer's end of the connection between one trainer and one server."""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from hf_distca.pool.messages.kinds import SERVER_SERVICE, Kind
from hf_distca.pool.wire.channel import Buffer, Channel, byte_views
from hf_distca.pool.wire.errors import LinkLost, ProtocolError
from hf_distca.pool.wire.handshake import connect
from hf_distca.pool.wire.outbox import Outbox


class PendingReply:
    """A reply on its way; `wait` hands over its header once its bytes are in the buffers.

    Attributes:
        views: the buffers as flat bytes.
        size: bytes that the reply must have.
        departed: when the request was ready to be sent, in the time of `time.perf_counter`.
        arrived: when the reply was complete.
    """

    def __init__(self, link: "ServerLink", buffers: Sequence[Buffer]) -> None:
        self.views = byte_views(buffers)
        self.size = sum(len(view) for view in self.views)
        self._link = link
        self._done = threading.Event()
        self._header: dict[str, Any] | None = None
        self.departed = self.arrived = 0.0

    def wait(self, timeout_s: float) -> dict[str, Any]:
        """Wait for the reply, and fail the link if it does not come in time.

        Args:
            timeout_s: how long from now on.

        Returns:
            The reply's JSON object.

        Raises:
            LinkLost: the link has failed. What the buffers hold is undefined, and nobody writes to them any more.
        """
        if not self._done.wait(timeout_s):
            self._link.fail(f"no reply within {timeout_s:g} s")
        if self._header is None:
            self._link.close()  # returns when no thread touches the buffers any more
        if self._header is None:
            raise LinkLost(self._link.lost)
        return self._header

    def settle(self, header: dict[str, Any] | None) -> None:
        """The link's word: the reply is complete, or (None) will not come."""
        if header is not None:
            self._header = header
            self.arrived = time.perf_counter()
        self._done.set()


class ServerLink:
    """Requests to one server and their replies; nothing but `PendingReply.wait` blocks the caller.

    A link that failed once stays failed; a server that comes back gets a new one.

    Args:
        host: where the server listens.
        port: its TCP port.
        token: the run's token.
        rank: this trainer.
        ranks: number of trainers.
        timeout_s: for connecting, the handshake and the server's welcome.

    Attributes:
        name: HOST:PORT, for messages.

    Raises:
        LinkLost: the server cannot be reached, has another token, or refuses.
    """

    def __init__(self, host: str, port: int, token: bytes, rank: int, ranks: int, timeout_s: float) -> None:
        self.name = f"{host}:{port}"
        self._lock = threading.Lock()
        self._sequence = itertools.count(1)
        self._pending: dict[int, PendingReply] = {}
        self._lost: str | None = None
        self._channel = Channel(connect(host, port, token, SERVER_SERVICE, timeout_s), Kind)
        try:
            self._channel.set_timeout(timeout_s)
            self._channel.send(Kind.HELLO, {"rank": rank, "ranks": ranks})
            frame = self._channel.receive()
            if frame.kind is not Kind.WELCOME:
                raise LinkLost(f"the server does not take this trainer: {frame.header.get('reason', frame.kind.name)}")
            self._channel.set_timeout(None)
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
            self._outbox.put(kind, header, buffers)

    def call(
        self,
        header: dict[str, Any],
        buffers: Sequence[Buffer],
        reply_buffers: Sequence[Buffer],
        ready: Callable[[], None] | None = None,
    ) -> PendingReply:
        """Queue a request.

        Args:
            header: its JSON object.
            buffers: its payload, part after part; they must not change before the reply is here.
            reply_buffers: writable; the reply's payload is received into them, part after part. It must have
                exactly their size.
            ready: waits until the payload is in its buffers, where something may still be writing to them; called
                by the thread that sends.

        Raises:
            LinkLost: the link has failed.
        """
        reply = PendingReply(self, reply_buffers)

        def depart() -> None:
            if ready is not None:
                ready()
            reply.departed = time.perf_counter()

        with self._lock:
            self._check()
            sequence = next(self._sequence)
            self._pending[sequence] = reply
            self._outbox.put(Kind.CALL, header, buffers, sequence, ready=depart)
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
        """End the link and wait until its threads are done with all buffers."""
        self.fail("closed by this trainer")
        with self._closing:
            self._outbox.finish(0)
            self._receiver.join()
            self._channel.close()

    def _check(self) -> None:
        if self._lost is not None:
            raise LinkLost(self.lost)

    def _receive(self) -> None:
        try:
            while True:
                frame = self._channel.receive()
                if frame.kind is Kind.REFUSED:
                    raise LinkLost(f"the server ended the connection: {frame.header.get('reason')}")
                if frame.kind is not Kind.REPLY:
                    raise ProtocolError(f"a {frame.kind.name} message came where only replies are expected")
                with self._lock:
                    reply = self._pending.get(frame.sequence)
                if reply is None:
                    raise ProtocolError("a reply came to a request that was not made")
                if frame.payload != reply.size:
                    raise ProtocolError(f"a reply has {frame.payload} bytes, expected {reply.size}")
                self._channel.receive_into(reply.views)
                with self._lock:
                    self._pending.pop(frame.sequence, None)
                reply.settle(frame.header)
                del reply  # its buffers belong to the caller again
        except LinkLost as error:
            self.fail(str(error))
