"""Listening for peers: strangers are turned away before anything they say is believed."""

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from hf_distca.pool.wire.channel import HELLO, REFUSED, Channel, Frame
from hf_distca.pool.wire.errors import LinkLost, MismatchError, PeerLeft, ProtocolError
from hf_distca.pool.wire.handshake import Steps, accepting_side

logger = logging.getLogger(__name__)

HANDSHAKES = 64
"""Handshakes under way at once; one more ends the oldest, which a peer that knows the token has long finished."""

_TICK_S = 0.2


@dataclass(frozen=True)
class Peer:
    """A peer that knows the token.

    Attributes:
        channel: the connection to it; closed by the listener when the peer's function returns.
        hello: its first message.
        name: address and port, for messages.
    """

    channel: Channel
    hello: Frame
    name: str


class SparingLog:
    """Warnings, a few in every interval; the rest are counted.

    Args:
        most: warnings per interval.
        interval_s: its length.
    """

    def __init__(self, most: int = 10, interval_s: float = 10.0) -> None:
        self._most = most
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._begin = time.monotonic()
        self._count = 0

    def warning(self, message: str) -> None:
        """Log it, or count it."""
        with self._lock:
            now = time.monotonic()
            if now - self._begin >= self._interval_s:
                self._tell_rest()
                self._begin = now
            self._count += 1
            if self._count <= self._most:
                logger.warning("%s", message)

    def close(self) -> None:
        """Log how many were counted and not logged."""
        with self._lock:
            self._tell_rest()

    def _tell_rest(self) -> None:
        if self._count > self._most:
            logger.warning("%d more refusals like these", self._count - self._most)
        self._count = 0


class _Handshake:
    """A connection whose peer has not yet proved anything."""

    def __init__(self, sock: socket.socket, name: str, steps: Steps, deadline: float) -> None:
        self.sock = sock
        self.name = name
        self.deadline = deadline
        self._steps = steps
        self._message = b""
        self._missing = next(steps)[1]

    def advance(self) -> bool:
        """Take what has come; whether the handshake is complete.

        Raises:
            OSError: it failed; LinkLost is one.
        """
        part = self.sock.recv(self._missing)
        if not part:
            raise LinkLost("the peer left during the handshake")
        self._message += part
        self._missing -= len(part)
        if self._missing:
            return False
        answer, self._missing = self._steps.send(self._message)
        self._message = b""
        if self.sock.send(answer) != len(answer):
            raise LinkLost("the peer takes nothing")
        return self._missing == 0


class Listener:
    """Accepts connections and gives each peer that knows the token a thread.

    One thread carries all handshakes out, so that a slow or silent peer costs a socket for a short time and
    nothing else. Nothing that a peer sends ends the listener.

    Args:
        host: address of the interface to listen on.
        port: TCP port; 0 for any that is free.
        token: the run's token.
        service: what listens here.
        kinds: what messages may be.
        serve: called with each peer on a thread of its own. LinkLost that it raises is logged; of its
            kinds, ProtocolError is told to the peer too: no message to it may be unfinished then. MismatchError is
            told to the peer alone.
        handshake_s: time that a peer has to prove itself, and again for its first message.

    Attributes:
        host: where it listens.
        port: where it listens.

    Raises:
        OSError: the address cannot be listened on.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: bytes,
        service: str,
        kinds: type[IntEnum],
        serve: Callable[[Peer], None],
        handshake_s: float = 5.0,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=256)
        self._socket.setblocking(False)
        self.host, self.port = self._socket.getsockname()[:2]
        self._token = token
        self._service = service
        self._kinds = kinds
        self._serve = serve
        self._handshake_s = handshake_s
        self._log = SparingLog()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._handshakes: dict[socket.socket, _Handshake] = {}  # oldest first
        self._lock = threading.Lock()
        self._peers: dict[threading.Thread, Channel] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"listen {self.port}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more, end all connections, and wait for the peers' threads."""
        with self._lock:
            self._closed = True
        self._thread.join()
        with self._lock:
            peers = dict(self._peers)
        for channel in peers.values():
            channel.shut_down()
        for thread in peers:
            thread.join()
        self._log.close()

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(_TICK_S):
                if key.fileobj is self._socket:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._handshakes:
                    self._advance(self._handshakes[key.fileobj])
            now = time.monotonic()
            for late in [handshake for handshake in self._handshakes.values() if handshake.deadline < now]:
                self._refuse(late, f"no handshake within {self._handshake_s:g} s")
        for handshake in list(self._handshakes.values()):
            self._forget(handshake).close()
        self._selector.close()
        self._socket.close()

    def _accept(self) -> None:
        try:
            sock, address = self._socket.accept()
        except OSError as error:  # also when there are no more file descriptors
            self._log.warning(f"a connection could not be accepted: {error}")
            time.sleep(0.01)
            return
        if len(self._handshakes) >= HANDSHAKES:
            self._refuse(next(iter(self._handshakes.values())), "too many handshakes at once")
        sock.setblocking(False)
        steps = accepting_side(self._token, self._service)
        deadline = time.monotonic() + self._handshake_s
        self._handshakes[sock] = _Handshake(sock, f"{address[0]}:{address[1]}", steps, deadline)
        self._selector.register(sock, selectors.EVENT_READ)

    def _advance(self, handshake: _Handshake) -> None:
        try:
            if not handshake.advance():
                return
        except OSError as error:
            self._refuse(handshake, str(error))
            return
        sock = self._forget(handshake)
        sock.setblocking(True)
        try:
            channel = Channel(sock, self._kinds)
        except OSError as error:
            sock.close()
            self._log.warning(f"lost {handshake.name}: {error}")
            return
        name = handshake.name
        thread = threading.Thread(target=self._meet, args=(channel, name), name=f"peer {name}", daemon=True)
        with self._lock:
            self._peers[thread] = channel
        try:
            thread.start()
        except RuntimeError as error:
            with self._lock:
                del self._peers[thread]
            channel.close()
            self._log.warning(f"{name} cannot be served: {error}")

    def _refuse(self, handshake: _Handshake, reason: str) -> None:
        self._forget(handshake).close()
        self._log.warning(f"refused {handshake.name}: {reason}")

    def _forget(self, handshake: _Handshake) -> socket.socket:
        del self._handshakes[handshake.sock]
        self._selector.unregister(handshake.sock)
        return handshake.sock

    def _meet(self, channel: Channel, name: str) -> None:
        """The thread of one peer."""
        try:
            channel.set_timeout(self._handshake_s)
            hello = channel.receive()
            if hello.kind != HELLO or hello.payload:
                got = f"{hello.kind.name} with {hello.payload} bytes"
                raise ProtocolError(f"the first message must be HELLO without a payload, got {got}")
            channel.set_timeout(None)
            self._serve(Peer(channel, hello, name))
        except PeerLeft:
            logger.info("%s left", name)
        except LinkLost as error:
            if not self._closed and not isinstance(error, MismatchError):  # the peer is told, and knows what to do
                self._log.warning(f"ended {name}: {error}")
            if isinstance(error, ProtocolError):
                with contextlib.suppress(LinkLost):
                    channel.set_timeout(self._handshake_s)
                    channel.send(REFUSED, {"reason": str(error)[:1000]})
        finally:
            channel.close()
            with self._lock:
                del self._peers[threading.current_thread()]
