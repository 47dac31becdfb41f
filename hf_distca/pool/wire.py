"""Authenticated connections between ranks, servers and the directory.

`multiprocessing.connection` frames messages and limits their size; a message is JSON (`messages`), never a pickled
object. Rows follow their message on the same socket, straight from and into tensors: the library would copy what it
receives. Both sides first prove that they know the run's token, by HMAC-SHA256 over two nonces; the library's proof is
HMAC-MD5 in Python 3.11. Nothing is encrypted: the token keeps strangers out of a network whose wires are trusted.
"""

import contextlib
import hmac
import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from hf_distca.pool.messages import Message, Refused, decode, encode

VERSION = 3
"""Of messages and the handshake."""

MESSAGE_BYTES = 64 * 1024
"""Of a message without what follows it, at most."""

_GREETING = b"hf_distca "

Buffer = bytes | bytearray | memoryview
"""Anything C-contiguous; these are the types that say so."""

M = TypeVar("M", bound=Message)


class LinkLost(ConnectionError):  # noqa: N818 - says what happened
    """A connection is gone, and with it all that was on its way."""


class PeerLeft(LinkLost):
    """The peer closed the connection between two messages."""


class ProtocolError(LinkLost):
    """The peer sent something that it must not send."""


class MismatchError(ProtocolError):
    """Both peers are as they should be and cannot work together; another try would end alike."""


class AuthenticationError(LinkLost):
    """The peer does not know the run's token, or is another service."""


@dataclass(frozen=True)
class Frame:
    """A message that has come, and the number of bytes that follow it and are still to be received."""

    message: Message
    payload: int


class Channel:
    """One end of a connection. One thread may send while another receives; after an error it is of no more use."""

    def __init__(self, sock: socket.socket) -> None:
        self.peer_host, port = sock.getpeername()[:2]
        self.name = f"{self.peer_host}:{port}"
        self.within_host = is_within_host(sock.getsockname()[0], self.peer_host)
        sock.settimeout(None)
        # Buffer sizes are left alone: the system makes them larger as needed, and no longer does so once set.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._sock = sock
        self._framed: Connection[Any, Any] = Connection(os.dup(sock.fileno()))
        self._timeouts: dict[int, float | None] = {socket.SO_SNDTIMEO: None, socket.SO_RCVTIMEO: None}
        self._ended_because = ""

    def fileno(self) -> int:
        """Let `select` wait for a message or the end of the connection."""
        return self._sock.fileno()

    def hung_up(self) -> bool:
        """Whether the peer has closed the connection; False where the system cannot say."""
        poll = select.poll()
        poll.register(self._sock, getattr(select, "POLLRDHUP", 0))
        return bool(poll.poll(0))

    def prove(self, token: bytes, service: str, *, connects: bool) -> None:
        """Prove to each other that both ends know the token, one of which `connects` to a service of the other.

        The proofs name the side, so that none can be sent back, and the service, so that a connection to the directory
        cannot be led to a server.

        Raises:
            AuthenticationError: the other end has another token or is another service.
            ProtocolError: it is of another version, or something else.
            PeerLeft: it is gone.
        """
        greeting = _GREETING + b"%d " % VERSION
        ours = greeting + secrets.token_bytes(32)
        with self._losses("the handshake", lost=PeerLeft):
            self._framed.send_bytes(ours)
            theirs = self._framed.recv_bytes(100)
            if not theirs.startswith(greeting):
                found = theirs.removeprefix(_GREETING).split(b" ")[0][:9].decode("ascii", "replace")
                if not theirs.startswith(_GREETING):
                    raise ProtocolError("the peer does not speak this protocol")
                raise ProtocolError(
                    f"the peer speaks version {found}, expected {VERSION}; install the same hf_distca on all hosts"
                )
            nonces = ours + theirs if connects else theirs + ours
            own, other = (hmac.digest(token, f"{side} {service} ".encode() + nonces, "sha256") for side in ("c", "a"))
            if not connects:
                own, other = other, own
            self._framed.send_bytes(own)
            if not hmac.compare_digest(self._framed.recv_bytes(len(other)), other):
                raise AuthenticationError(
                    f"the peer has another token, or is another service than {service}; use the token of this run"
                )

    def send(self, message: Message, payload: Sequence[Buffer] = (), timeout_s: float | None = None) -> None:
        """Send a message and its payload, which is not copied; returns when the system has taken all of it.

        LinkLost: the connection broke, or nothing moved for `timeout_s`; None waits for ever.
        """
        parts = [memoryview(part).cast("B") for part in payload if memoryview(part).nbytes]
        with self._losses("sending"):
            self._allow(socket.SO_SNDTIMEO, timeout_s)
            self._framed.send_bytes(encode(message, sum(map(len, parts))))
            for part in parts:
                self._sock.sendall(part)

    def receive(self, timeout_s: float | None = None) -> Frame:
        """Receive the next message; `receive_payload` receives what follows it.

        Raises:
            PeerLeft: the peer closed the connection.
            ProtocolError: what came is no message.
            LinkLost: the connection broke, or nothing came for `timeout_s`.
        """
        with self._losses("receiving"):
            self._allow(socket.SO_RCVTIMEO, timeout_s)
            text = self._framed.recv_bytes(MESSAGE_BYTES)
        try:
            return Frame(*decode(text))
        except ValueError as error:
            raise ProtocolError(str(error)) from error

    def receive_payload(self, buffers: Sequence[Buffer], timeout_s: float | None = None) -> None:
        """Fill writable buffers with what follows a message; LinkLost where nothing comes for `timeout_s`."""
        with self._losses("receiving"):
            self._allow(socket.SO_RCVTIMEO, timeout_s)
            for view in (memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes):
                while view:
                    # With the flag there are fewer and larger reads.
                    count = self._sock.recv_into(view, 0, socket.MSG_WAITALL)
                    if not count:
                        raise LinkLost("the peer closed the connection in the middle of a message")
                    view = view[count:]

    def ask(self, hello: Message, welcome: type[M], timeout_s: float) -> M:
        """Send the first message of a connection and return the answer; MismatchError where the peer refuses."""
        self.send(hello, timeout_s=timeout_s)
        answer = self.receive(timeout_s).message
        if isinstance(answer, Refused):
            raise MismatchError(f"refused: {answer.reason}")
        if not isinstance(answer, welcome):
            raise ProtocolError(f"the peer answers {type(answer).__name__}, expected {welcome.__name__}")
        return answer

    def refuse(self, reason: str, timeout_s: float | None = None) -> None:
        """Tell the peer why the connection ends."""
        self.send(Refused(reason[:1000]), timeout_s=timeout_s)

    def shut_down(self, reason: str = "") -> None:
        """End the connection: whoever sends or receives on it gets LinkLost, with the reason where there is one."""
        self._ended_because = self._ended_because or reason
        with contextlib.suppress(OSError):  # it is down already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and give its resources back; no other thread may be using it."""
        self.shut_down()
        self._framed.close()
        self._sock.close()

    def _allow(self, direction: int, timeout_s: float | None) -> None:
        """Set how long the system lets one direction stand still, where that changes."""
        if self._timeouts[direction] != timeout_s:
            seconds = 0.0 if timeout_s is None else max(timeout_s, 1e-6)  # to the system 0 is for ever
            value = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
            self._sock.setsockopt(socket.SOL_SOCKET, direction, value)
            self._timeouts[direction] = timeout_s

    @contextlib.contextmanager
    def _losses(self, what: str, lost: type[LinkLost] = LinkLost) -> Iterator[None]:
        """Raise LinkLost for what ends a connection, and `lost` where the peer broke it."""
        try:
            yield
        except LinkLost:
            raise
        except BlockingIOError as error:
            raise LinkLost(f"{what} made no progress until the timeout") from error
        except EOFError as error:
            raise (LinkLost if self._ended_because else PeerLeft)(
                self._ended_because or "the peer closed the connection"
            ) from error
        except OSError as error:
            by_peer = isinstance(error, BrokenPipeError | ConnectionResetError) and not self._ended_because
            raise (lost if by_peer else LinkLost)(self._ended_because or f"{what} failed: {error}") from error


def is_within_host(own: str, other: str) -> bool:
    """Whether an address is this host's: its own on the connection, or one that leads nowhere else."""
    return own == other or ip_address(other).is_loopback


def connect(host: str, port: int, token: bytes, service: str, timeout_s: float) -> Channel:
    """Connect to a service and shake hands, all within `timeout_s`; errors as in `Channel.prove`."""
    try:
        channel = Channel(socket.create_connection((host, port), timeout_s))
    except OSError as error:
        raise LinkLost(f"cannot connect to {host}:{port}: {error}") from error
    late = threading.Timer(timeout_s, channel.shut_down, ["the handshake timed out"])
    late.start()
    try:
        channel.prove(token, service, connects=True)
    except LinkLost as error:
        channel.close()
        raise type(error)(f"{host}:{port}: {error}") from error
    finally:
        late.cancel()
        late.join()
    return channel
