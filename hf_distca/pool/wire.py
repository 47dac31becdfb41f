"""Authenticated connections between ranks, servers and the directory, and their listener.

A message is its size in four bytes and JSON (`messages`), never a pickled object; rows follow their
message on the same socket. Both ends first prove that they know the run's token, by HMAC-SHA256
over two nonces. Nothing is encrypted: the token keeps strangers out of a network whose wires are
trusted.
"""

import contextlib
import hmac
import ipaddress
import itertools
import logging
import queue
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from hf_distca.dispatch.threads import join
from hf_distca.pool.messages import Message, Refused, decode, encode

logger = logging.getLogger(__name__)

VERSION = 5
"""Version of the protocol; both ends must have the same."""
MESSAGE_BYTES = 64 * 1024
"""Most bytes of a message without the rows that follow it."""

DIRECTORY = "directory"
SERVER = "attention server"
"""Names of the services, for the handshake."""

HANDSHAKES = 64
"""Most handshakes at once. One more ends the oldest: a peer that knows the token would have
finished it long ago."""

_GREETING = b"hf_distca "
_NONCE_BYTES = 32
_GREETING_LIMIT = 100
"""Most bytes of a greeting, of any version of the protocol."""
_SIZE_BYTES = 4
"""Bytes of a message's size, which stands before it."""
_SHORTEST_TIMEOUT_S = 1e-6
"""A time-out in place of 0, by which the system means for ever."""
_TICK_S = 0.2
"""Seconds after which a listener looks whether it is closed."""
_WARNINGS = 10
"""Refusals that a listener logs one by one."""

Buffer = bytes | bytearray | memoryview
M = TypeVar("M", bound=Message)


class LinkLost(ConnectionError):  # noqa: N818 - named for the event
    """A connection is gone, with all messages that had not arrived."""


class PeerLeft(LinkLost):
    """The peer closed the connection."""


class ProtocolError(LinkLost):
    """The peer sent something that it must not send."""


class MismatchError(ProtocolError):
    """Both peers follow the protocol and cannot work together; another try would end alike."""


class Channel:
    """One end of a connection; one thread may send while another receives.

    Sending and receiving raise LinkLost where the connection breaks or stands still for `timeout_s`
    (None: for ever). After an error the channel is of no more use.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.peer_host, port = sock.getpeername()[:2]
        self.name = f"{self.peer_host}:{port}"
        self.within_host = is_loopback(self.peer_host) or self.peer_host == sock.getsockname()[0]
        sock.settimeout(None)
        # Buffer sizes are left alone: the system makes them larger as needed, and no longer does so
        # once set.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # A host that vanished is noticed 20 + 4 * 5 s after it was last heard.
        for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._sock = sock
        self._timeouts: dict[int, float | None] = {
            socket.SO_SNDTIMEO: None,
            socket.SO_RCVTIMEO: None,
        }
        self._ended_because = ""

    def has_news(self, wait_s: float) -> bool:
        """Return whether something arrives, or the connection ends, within `wait_s` seconds."""
        return bool(select.select([self._sock], [], [], wait_s)[0])

    def hung_up(self) -> bool:
        """Return whether the peer has closed the connection.

        False where the system does not know.
        """
        poll = select.poll()
        poll.register(self._sock, getattr(select, "POLLRDHUP", 0))
        return bool(poll.poll(0))

    def prove(self, token: bytes, service: str, timeout_s: float, *, connects: bool) -> None:
        """Prove to each other that both ends know the token, within `timeout_s`.

        The proofs name the side, so that none can be sent back, and the service, so that a
        connection to the directory cannot be led to a server.

        ProtocolError: the peer does not know the token.
        """
        late = threading.Timer(
            timeout_s, self.shut_down, [f"the handshake timed out after {timeout_s:g} s"]
        )
        late.start()
        try:
            # 1. Exchange nonces.
            own_greeting = _greeting_of_version() + secrets.token_bytes(_NONCE_BYTES)
            self._send([own_greeting], None)
            peer_greeting = self._receive(_GREETING_LIMIT, None)
            _check_greeting(peer_greeting)

            # 2. Exchange proofs. The side that connects is "c", the side that accepts is "a".
            if connects:
                own_side = "c"
                peer_side = "a"
                nonces = own_greeting + peer_greeting
            else:
                own_side = "a"
                peer_side = "c"
                nonces = peer_greeting + own_greeting
            self._send([_proof(token, own_side, service, nonces)], None)
            expected = _proof(token, peer_side, service, nonces)
            if not hmac.compare_digest(self._receive(len(expected), None), expected):
                raise ProtocolError(
                    f"the peer has another token, or is another service than {service}; use the "
                    "token of this run"
                )
        finally:
            late.cancel()
            join(late)

    def send(
        self, message: Message, payload: Sequence[Buffer] = (), timeout_s: float | None = None
    ) -> None:
        """Send a message and its payload; return when the system has taken all of it."""
        parts = [memoryview(part).cast("B") for part in payload if memoryview(part).nbytes]
        self._send([encode(message, sum(map(len, parts))), *parts], timeout_s)

    def receive(self, timeout_s: float | None = None) -> tuple[Message, int]:
        """Receive the next message, and the number of payload bytes that follow it."""
        text = self._receive(MESSAGE_BYTES, timeout_s)
        try:
            return decode(text)
        except ValueError as error:
            raise ProtocolError(str(error)) from error

    def receive_payload(self, buffers: Sequence[Buffer], timeout_s: float | None = None) -> None:
        """Fill writable buffers, none of them empty, with what follows a message."""
        with self._losses("receiving", socket.SO_RCVTIMEO, timeout_s):
            for buffer in buffers:
                missing = memoryview(buffer).cast("B")
                while missing:
                    # MSG_WAITALL makes fewer and larger reads.
                    count = self._sock.recv_into(missing, 0, socket.MSG_WAITALL)
                    if not count:
                        raise PeerLeft("the peer closed the connection")
                    missing = missing[count:]

    def refuse(self, reason: str, timeout_s: float | None = None) -> None:
        """Send the reason why the connection ends."""
        self.send(Refused(reason[:1000]), timeout_s=timeout_s)

    def shut_down(self, reason: str = "") -> None:
        """End the connection: whoever sends or receives on it gets LinkLost, with the reason."""
        self._ended_because = self._ended_because or reason
        with contextlib.suppress(OSError):  # the connection is down already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and free its resources; no other thread may be using it."""
        self.shut_down()
        self._sock.close()

    def _send(self, parts: Sequence[Buffer], timeout_s: float | None) -> None:
        """Send parts in one call; the first part is the message, whose size goes before it."""
        message, *payload = parts
        size = len(message).to_bytes(_SIZE_BYTES, "big")
        unsent = [memoryview(part) for part in (size + message, *payload)]
        with self._losses("sending", socket.SO_SNDTIMEO, timeout_s):
            while unsent:
                count = self._sock.sendmsg(unsent)
                while unsent and count >= len(unsent[0]):
                    count -= len(unsent.pop(0))
                if unsent:
                    unsent[0] = unsent[0][count:]

    def _receive(self, limit: int, timeout_s: float | None) -> bytes:
        """Receive a message's bytes; ProtocolError where they are more than `limit`."""
        head = bytearray(_SIZE_BYTES)
        self.receive_payload([head], timeout_s)
        size = int.from_bytes(head, "big")
        if size > limit:
            raise ProtocolError(
                f"the peer sends a message of {size} bytes, at most {limit} are allowed"
            )
        text = bytearray(size)
        self.receive_payload([text], timeout_s)
        return bytes(text)

    @contextlib.contextmanager
    def _losses(self, action: str, direction: int, timeout_s: float | None) -> Iterator[None]:
        """Set the time-out of a direction; raise LinkLost for whatever ends a connection."""
        try:
            if self._timeouts[direction] != timeout_s:
                self._set_timeout(direction, timeout_s)
            yield
        except OSError as error:
            if self._ended_because:
                raise LinkLost(self._ended_because) from error
            if isinstance(error, LinkLost):
                raise
            if isinstance(error, BlockingIOError):
                raise LinkLost(f"{action} made no progress until the timeout") from error
            has_left = isinstance(error, BrokenPipeError | ConnectionResetError)
            kind = PeerLeft if has_left else LinkLost
            raise kind(f"{action} failed: {error}") from error

    def _set_timeout(self, direction: int, timeout_s: float | None) -> None:
        """Set the time-out of SO_SNDTIMEO or SO_RCVTIMEO, as seconds and microseconds."""
        seconds = 0.0 if timeout_s is None else max(timeout_s, _SHORTEST_TIMEOUT_S)
        value = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        self._sock.setsockopt(socket.SOL_SOCKET, direction, value)
        self._timeouts[direction] = timeout_s


def _greeting_of_version() -> bytes:
    """Return the part of a greeting before its nonce."""
    return _GREETING + b"%d " % VERSION


def _check_greeting(greeting: bytes) -> None:
    """Refuse the greeting of another protocol, or of another version."""
    if not greeting.startswith(_GREETING):
        raise ProtocolError("the peer does not speak this protocol")
    if not greeting.startswith(_greeting_of_version()):
        version = greeting.split(b" ")[1][:9].decode("ascii", "replace")
        raise ProtocolError(
            f"the peer speaks version {version}, expected {VERSION}; install the same "
            "hf_distca on all hosts"
        )


def _proof(token: bytes, side: str, service: str, nonces: bytes) -> bytes:
    """Return what proves that a side knows the token."""
    return hmac.digest(token, f"{side} {service} ".encode() + nonces, "sha256")


def is_loopback(host: str) -> bool:
    """Return whether a host is an address of the loopback; a name is not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def connect(
    host: str,
    port: int,
    token: bytes,
    service: str,
    hello: Message,
    welcome: type[M],
    timeout_s: float,
) -> tuple[Channel, M]:
    """Connect to a service, and return the connection and the answer to a hello.

    Args:
        welcome: type of the answer.
        timeout_s: for connecting, for the handshake and for the answer, each.

    Raises:
        MismatchError: the peer refuses.
    """
    try:
        channel = Channel(socket.create_connection((host, port), timeout_s))
    except (OSError, OverflowError) as error:  # OverflowError: there is no such port
        raise LinkLost(f"cannot connect to {host}:{port}: {error}") from error
    try:
        channel.prove(token, service, timeout_s, connects=True)
        channel.send(hello, timeout_s=timeout_s)
        answer, _ = channel.receive(timeout_s)
        if isinstance(answer, Refused):
            raise MismatchError(f"refused: {answer.reason}")
        if not isinstance(answer, welcome):
            raise ProtocolError(
                f"the peer answers {type(answer).__name__}, expected {welcome.__name__}"
            )
        return channel, answer
    except LinkLost as error:
        channel.close()
        raise type(error)(f"{host}:{port}: {error}") from error


class Outbox:
    """A thread that sends messages in order.

    A message that fails ends the connection; later messages are dropped.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"send {channel.name}", daemon=True)
        self._thread.start()

    def put(self, send: Callable[[], None]) -> None:
        """Queue a function that sends."""
        self._queue.put(send)

    def finish(self, timeout_s: float) -> None:
        """Send what is queued within `timeout_s`; then end the connection and the thread."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        self._channel.shut_down()
        join(self._thread)

    def _run(self) -> None:
        lost = False
        while (send := self._queue.get()) is not None:
            try:
                if not lost:
                    send()
            except LinkLost as error:
                lost = True
                self._channel.shut_down(str(error))
            del send  # nothing is kept while the queue is empty


class Listener:
    """Accepts connections, and serves each peer that proves to know the token in a thread.

    `serve` gets the connection and its first message; the connection is closed when it returns. The
    handshake may take `handshake_s`, and the first message as long again.

    The listener logs LinkLost, and sends a ProtocolError's text to the peer; a MismatchError is
    only sent. Strangers cost at most HANDSHAKES threads for `handshake_s` each.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: bytes,
        service: str,
        serve: Callable[[Channel, Message], None],
        handshake_s: float = 5.0,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=256)
        self._socket.settimeout(_TICK_S)
        self.host, self.port = self._socket.getsockname()[:2]
        self._token = token
        self._service = service
        self._serve = serve
        self._handshake_s = handshake_s
        self._refusals = itertools.count(1)
        self._lock = threading.Lock()
        self._peers: dict[Channel, threading.Thread] = {}
        self._strangers: dict[Channel, None] = {}  # in the handshake, oldest first
        self._closed = False
        self._thread = threading.Thread(
            target=self._accept_all, name=f"listen {self.port}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening, end all connections, and wait for the peers' threads."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # on Linux this ends `accept`
        join(self._thread)
        with self._lock:
            peers = dict(self._peers)
        for channel, thread in peers.items():
            channel.shut_down()
            join(thread)

    def _accept_all(self) -> None:
        while not self._closed:
            sock = None
            try:
                sock = self._socket.accept()[0]
                self._start_thread(Channel(sock))
            except TimeoutError:
                pass
            # RuntimeError: no more threads. OSError also means no more file descriptors.
            except (OSError, RuntimeError) as error:
                if sock is not None:
                    sock.close()
                if not self._closed:
                    self._warn(f"a connection could not be accepted: {error}")
                    time.sleep(0.01)  # the next try may fail at once too
        self._socket.close()

    def _start_thread(self, channel: Channel) -> None:
        """Start the thread of a peer, and end the oldest handshake where there are too many."""
        name = f"peer {channel.name}"
        thread = threading.Thread(target=self._meet, args=(channel,), name=name, daemon=True)
        with self._lock:
            if len(self._strangers) >= HANDSHAKES:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.shut_down("too many handshakes at once")
            thread.start()  # the thread waits for the lock before it ends
            self._peers[channel] = thread
            self._strangers[channel] = None

    def _meet(self, channel: Channel) -> None:
        """Serve one peer in its thread."""
        proved = False
        try:
            channel.prove(self._token, self._service, self._handshake_s, connects=False)
            proved = True
            with self._lock:
                self._strangers.pop(channel, None)
            self._serve(channel, channel.receive(self._handshake_s)[0])
        except PeerLeft:  # checks of open ports do so
            logger.info("%s left", channel.name)
        except LinkLost as error:
            # The peer of a MismatchError knows what to do.
            if not self._closed and not isinstance(error, MismatchError):
                self._warn(f"{'ended' if proved else 'refused'} {channel.name}: {error}")
            if proved and isinstance(error, ProtocolError):
                with contextlib.suppress(LinkLost):
                    channel.refuse(str(error), self._handshake_s)
        finally:
            with self._lock:
                self._strangers.pop(channel, None)
                del self._peers[channel]
            channel.close()

    def _warn(self, message: str) -> None:
        """Log a refusal: the first ten, and then one whenever their number has doubled."""
        count = next(self._refusals)
        is_power_of_two = count.bit_count() == 1
        if count <= _WARNINGS:
            logger.warning("%s", message)
        elif is_power_of_two:
            logger.warning("%d refusals so far, the latest: %s", count, message)
