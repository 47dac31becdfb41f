"""The handshake: both sides prove that they know the run's token, without sending it.

    connecting                                  accepting
    HEAD, nonce a                        ->
                                         <-     HEAD, nonce b, HMAC(token, accepting label, a, b)
    HMAC(token, connecting label, a, b)  ->
                                         <-     ACCEPTED

The labels name the side, so that no proof can be sent back to where it came from, and the service, so that the
directory's connections cannot be led to a server. All messages have fixed sizes.

Each side is a generator of `(bytes to send, size of the next message)`, which is sent the messages: it can be
driven by a blocking socket or by a selector.
"""

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Generator

from hf_distca.pool.wire.errors import AuthenticationError, LinkLost, ProtocolError

MAGIC = b"HFCA"
VERSION = 2
NONCE_BYTES = 32
PROOF_BYTES = 32
ACCEPTED = b"\x01"

_HEAD = struct.Struct(f"!4sH{NONCE_BYTES}s")

Steps = Generator[tuple[bytes, int], bytes, None]


def connecting_side(token: bytes, service: str) -> Steps:
    """The steps of the side that connects.

    Args:
        token: the run's token.
        service: what it expects to be connected to.

    Raises:
        AuthenticationError: the other side has another token or is another service.
        ProtocolError: it does not speak this protocol.
    """
    ours = secrets.token_bytes(NONCE_BYTES)
    answer = yield _HEAD.pack(MAGIC, VERSION, ours), _HEAD.size + PROOF_BYTES
    theirs = _nonce(answer[: _HEAD.size])
    if not hmac.compare_digest(answer[_HEAD.size :], _proof(token, "accepting", service, ours, theirs)):
        raise AuthenticationError(f"the peer has another token, or is no {service}; use the token of this run")
    accepted = yield _proof(token, "connecting", service, ours, theirs), len(ACCEPTED)
    if accepted != ACCEPTED:
        raise ProtocolError("the handshake did not end as it should")


def accepting_side(token: bytes, service: str) -> Steps:
    """The steps of the side that was connected to; arguments and errors as for `connecting_side`."""
    theirs = _nonce((yield b"", _HEAD.size))
    ours = secrets.token_bytes(NONCE_BYTES)
    answer = _HEAD.pack(MAGIC, VERSION, ours) + _proof(token, "accepting", service, theirs, ours)
    proof = yield answer, PROOF_BYTES
    if not hmac.compare_digest(proof, _proof(token, "connecting", service, theirs, ours)):
        raise AuthenticationError("the peer has another token")
    yield ACCEPTED, 0


def connect(host: str, port: int, token: bytes, service: str, timeout_s: float) -> socket.socket:
    """Connect and shake hands.

    Args:
        host: name or address.
        port: TCP port.
        token: the run's token.
        service: what listens there.
        timeout_s: for all of it.

    Returns:
        The socket; blocking, without a timeout.

    Raises:
        LinkLost: nobody answers in time, or one of its kinds from `connecting_side`.
    """
    deadline = time.monotonic() + timeout_s
    try:
        sock = socket.create_connection((host, port), timeout_s)
    except OSError as error:
        raise LinkLost(f"cannot connect to {host}:{port}: {error}") from error
    try:
        steps = connecting_side(token, service)
        send, size = next(steps)
        while True:
            sock.settimeout(max(deadline - time.monotonic(), 1e-3))
            sock.sendall(send)
            try:
                send, size = steps.send(_read(sock, size, deadline))
            except StopIteration:
                break
        sock.settimeout(None)
        return sock
    except LinkLost as error:
        sock.close()
        raise type(error)(f"{host}:{port}: {error}") from error
    except OSError as error:
        sock.close()
        raise LinkLost(f"{host}:{port}: handshake failed: {error}") from error


def _read(sock: socket.socket, size: int, deadline: float) -> bytes:
    """Exactly `size` bytes, before the deadline."""
    message = b""
    while len(message) < size:
        sock.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = sock.recv(size - len(message))
        if not part:
            raise LinkLost("the peer closed the connection during the handshake")
        message += part
    return message


def _nonce(head: bytes) -> bytes:
    """The nonce of the other side's first message."""
    magic, version, nonce = _HEAD.unpack(head)
    if magic != MAGIC:
        raise ProtocolError("the peer does not speak this protocol")
    if version != VERSION:
        raise ProtocolError(f"the peer speaks version {version}, expected {VERSION}; install the same hf_distca")
    return bytes(nonce)


def _proof(token: bytes, side: str, service: str, connecting: bytes, accepting: bytes) -> bytes:
    label = f"hf_distca {VERSION} {side} {service}\0".encode()
    return hmac.digest(token, label + connecting + accepting, "sha256")
