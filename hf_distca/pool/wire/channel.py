"""Messages on an authenticated connection: a fixed head, a small JSON object, raw bytes.

    magic 4s | kind u8 | 3 unused | JSON bytes u32 | sequence u64 | payload bytes u64 | JSON | payload

Sizes are known before anything is allocated: JSON is limited here, the payload is received into buffers that the
caller made for it, after a look at what the message says it is.
"""

import contextlib
import json
import select
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import ip_address
from typing import Any

from hf_distca.pool.wire.errors import LinkLost, PeerLeft, ProtocolError

MAGIC = b"CAD1"
JSON_LIMIT = 64 * 1024
"""Bytes of a message's JSON object, at most."""

_HEAD = struct.Struct("!4sB3xIQQ")

Buffer = bytes | bytearray | memoryview
"""Anything that is C-contiguous will do; these are the types that say so."""

HELLO, WELCOME, REFUSED = 1, 2, 3
"""Kinds of messages that every connection has: who connects says who it is, and may go on, or reads why not."""


@dataclass(frozen=True)
class Frame:
    """The beginning of a message; its payload is still to be received.

    Attributes:
        kind: what it is.
        sequence: number that a reply repeats.
        header: its JSON object.
        payload: bytes that follow.
    """

    kind: IntEnum
    sequence: int
    header: dict[str, Any]
    payload: int


class Channel:
    """One end of an authenticated connection.

    One thread may send while another receives. Every error but a wrong use leaves the channel unusable: close it.

    Args:
        sock: a connected socket after the handshake.
        kinds: what messages may be; HELLO, WELCOME and REFUSED are among them.
    """

    def __init__(self, sock: socket.socket, kinds: type[IntEnum]) -> None:
        self._sock = sock
        self._kinds = kinds
        self._allowed: dict[int, float | None] = {socket.SO_SNDTIMEO: None, socket.SO_RCVTIMEO: None}
        # Buffer sizes are left alone: the system makes them larger as needed, and no longer does so once set.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    @property
    def peer_host(self) -> str:
        """Address of the other side."""
        return str(self._sock.getpeername()[0])

    @property
    def within_host(self) -> bool:
        """Whether the other side is on this host: at its own address, or at one that leads nowhere else."""
        peer = self.peer_host
        return peer == self._sock.getsockname()[0] or ip_address(peer).is_loopback

    def fileno(self) -> int:
        """For select: readable when a message or the end of the connection has come."""
        return self._sock.fileno()

    def hung_up(self) -> bool:
        """Whether the peer has closed the connection, asked without receiving; unread messages may still be there.

        Always False where the system cannot tell.
        """
        poll = select.poll()
        poll.register(self._sock, getattr(select, "POLLRDHUP", 0))
        return bool(poll.poll(0))

    def set_timeout(self, seconds: float | None) -> None:
        """How long a single send or receive may stand still; None for ever. For both directions."""
        self._sock.settimeout(seconds)

    def send(
        self,
        kind: int,
        header: dict[str, Any],
        buffers: Sequence[Buffer] = (),
        sequence: int = 0,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Send a message; returns when the system has taken all of it. Buffers are not copied before.

        Args:
            kind: what it is.
            header: its JSON object.
            buffers: the parts of its payload.
            sequence: number that a reply repeats.
            timeout_s: it may stand still for so long; None: for ever, or as `set_timeout` says.

        Raises:
            LinkLost: the connection broke or stood still.
            ValueError: the header is too large.
        """
        text = json.dumps(header, allow_nan=False).encode()
        if len(text) > JSON_LIMIT:
            raise ValueError(f"the JSON of a message is at most {JSON_LIMIT} bytes, got {len(text)}")
        parts = byte_views(buffers)
        head = _HEAD.pack(MAGIC, kind, len(text), sequence, sum(len(part) for part in parts))
        parts.insert(0, memoryview(head + text))
        try:
            self._allow(socket.SO_SNDTIMEO, timeout_s)
            while parts:
                sent = self._sock.sendmsg(parts)
                while parts and sent >= len(parts[0]):
                    sent -= len(parts.pop(0))
                if sent:
                    parts[0] = parts[0][sent:]
        except BlockingIOError as error:
            raise LinkLost(f"nothing could be sent for {timeout_s:g} s") from error
        except OSError as error:
            raise LinkLost(f"sending failed: {error}") from error

    def receive(self) -> Frame:
        """Receive the beginning of the next message.

        Raises:
            PeerLeft: the peer closed the connection after its last message.
            ProtocolError: what came is no message.
            LinkLost: the connection broke, was closed or stood still.
        """
        head = bytearray(_HEAD.size)
        self._allow(socket.SO_RCVTIMEO, None)
        if not self._receive_some(memoryview(head)[:1]):
            raise PeerLeft("the peer closed the connection")
        self.receive_into([memoryview(head)[1:]])
        magic, kind, json_bytes, sequence, payload = _HEAD.unpack(head)
        if magic != MAGIC:
            raise ProtocolError("what came is not a message of this protocol")
        try:
            known = self._kinds(kind)
        except ValueError as error:
            raise ProtocolError(f"a message of unknown kind {kind} came") from error
        if json_bytes > JSON_LIMIT:
            raise ProtocolError(
                f"a message says that its JSON is {json_bytes} bytes, at most {JSON_LIMIT} are allowed"
            )
        text = bytearray(json_bytes)
        self.receive_into([text])
        try:
            header = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ProtocolError("a message's header is not JSON") from error
        if not isinstance(header, dict):
            raise ProtocolError("a message's header is not a JSON object")
        return Frame(known, sequence, header, payload)

    def receive_into(self, buffers: Sequence[Buffer], *, timeout_s: float | None = None) -> None:
        """Receive the next bytes into writable buffers, one after another.

        Args:
            buffers: they are filled.
            timeout_s: it may stand still for so long; None: for ever, or as `set_timeout` says.

        Raises:
            LinkLost: the connection broke, was closed or stood still before they were full.
        """
        self._allow(socket.SO_RCVTIMEO, timeout_s)
        for view in byte_views(buffers):
            while view:
                count = self._receive_some(view)
                if not count:
                    raise LinkLost("the peer closed the connection in the middle of a message")
                view = view[count:]

    def _receive_some(self, view: memoryview) -> int:
        """As many bytes as come, mostly all; 0 at the end of the connection."""
        try:
            return self._sock.recv_into(view, 0, socket.MSG_WAITALL)  # fewer, larger reads than without the flag
        except BlockingIOError as error:
            raise LinkLost("nothing came for as long as it may take") from error
        except OSError as error:
            raise LinkLost(f"receiving failed: {error}") from error

    def _allow(self, direction: int, timeout_s: float | None) -> None:
        """Set how long the system lets one direction stand still, where that changes."""
        if self._allowed[direction] != timeout_s:
            seconds = 0.0 if timeout_s is None else max(timeout_s, 1e-6)  # to the system 0 is for ever
            whole = int(seconds)
            with contextlib.suppress(OSError):  # it is down already: the next call says so
                self._sock.setsockopt(
                    socket.SOL_SOCKET, direction, struct.pack("@ll", whole, int((seconds - whole) * 1e6))
                )
            self._allowed[direction] = timeout_s

    def shut_down(self) -> None:
        """End the connection: whoever sends or receives on it comes back with LinkLost."""
        with contextlib.suppress(OSError):  # it is down already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and give its resources back. No other thread may be using it."""
        self.shut_down()
        self._sock.close()


def byte_views(buffers: Sequence[Buffer]) -> list[memoryview]:
    """The buffers as flat bytes, without those that are empty."""
    views = (memoryview(buffer) for buffer in buffers)
    return [view.cast("B") for view in views if view.nbytes]
