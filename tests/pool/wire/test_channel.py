import socket
import struct
import threading

import numpy as np
import pytest

from hf_distca.pool.messages.kinds import Kind
from hf_distca.pool.wire import Channel, LinkLost, Outbox, ProtocolError
from hf_distca.pool.wire.channel import JSON_LIMIT

HEAD = struct.Struct("!4sB3xIQQ")


@pytest.fixture
def ends():
    """A raw socket and a channel, connected."""
    server = socket.create_server(("127.0.0.1", 0))
    raw = socket.create_connection(server.getsockname())
    sock, _ = server.accept()
    server.close()
    sock.settimeout(5)
    raw.settimeout(5)
    channel = Channel(sock, Kind)
    yield raw, channel
    raw.close()
    channel.close()


@pytest.mark.parametrize(
    ("own", "peer", "within"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.2", True),
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("::1", "::1", True),
        ("fe80::1%eth0", "fe80::2%eth0", False),
    ],
)
def test_whether_the_other_side_is_on_this_host(own, peer, within):
    class Connected:
        def setsockopt(self, *option):
            pass

        def getsockname(self):
            return own, 1

        def getpeername(self):
            return peer, 2

    assert Channel(Connected(), Kind).within_host is within


def test_a_message_is_the_bytes_that_are_documented(ends):
    raw, channel = ends
    channel.send(Kind.CALL, {"a": 1}, [b"xy", np.arange(2, dtype=np.int16), b""], sequence=7)
    expected = HEAD.pack(b"CAD1", 6, 8, 7, 6) + b'{"a": 1}' + b"xy\0\0\1\0"
    assert raw.recv(1000) == expected
    raw.sendall(expected)
    frame = channel.receive()
    assert (frame.kind, frame.sequence, frame.header, frame.payload) == (Kind.CALL, 7, {"a": 1}, 6)
    first, rest = bytearray(2), np.zeros((1, 2), np.int16)
    channel.receive_into([first, np.zeros((0, 3)), rest])
    assert first == b"xy"
    assert rest.tolist() == [[0, 1]]


def test_large_payloads_arrive_whole(ends):
    raw, channel = ends
    sent = np.random.default_rng(0).integers(0, 255, 30_000_000, dtype=np.uint8)
    other = Channel(raw.dup(), Kind)
    thread = threading.Thread(target=other.send, args=(Kind.REPLY, {}, [sent[:7], sent[7:]]))
    thread.start()
    assert channel.receive().payload == sent.nbytes
    came = np.zeros_like(sent)
    channel.receive_into([came[:11_000_000], came[11_000_000:]])
    thread.join()
    other.close()
    assert np.array_equal(sent, came)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (HEAD.pack(b"CAD2", 6, 0, 0, 0), "not a message"),
        (HEAD.pack(b"CAD1", 0, 2, 0, 0), "unknown kind 0"),
        (HEAD.pack(b"CAD1", 6, JSON_LIMIT + 1, 0, 0), "at most 65536"),
        (HEAD.pack(b"CAD1", 6, 2**32 - 1, 0, 2**64 - 1), "at most 65536"),
        (HEAD.pack(b"CAD1", 6, 0, 0, 0), "not JSON"),
        (HEAD.pack(b"CAD1", 6, 2, 0, 0) + b"{]", "not JSON"),
        (HEAD.pack(b"CAD1", 6, 2, 0, 0) + b"[]", "not a JSON object"),
        (HEAD.pack(b"CAD1", 6, 2, 0, 0) + b"\xff\xff", "not JSON"),
        (HEAD.pack(b"CAD1", 6, JSON_LIMIT, 0, 0) + b"[" * JSON_LIMIT, "not JSON"),
    ],
)
def test_what_is_no_message_is_refused(ends, message, said):
    raw, channel = ends
    raw.sendall(message)
    with pytest.raises(ProtocolError, match=said):
        channel.receive()


def test_a_message_that_breaks_off_is_a_lost_link(ends):
    raw, channel = ends
    raw.sendall(HEAD.pack(b"CAD1", 6, 10, 0, 0) + b"{")
    raw.close()
    with pytest.raises(LinkLost, match="closed"):
        channel.receive()


def test_messages_behind_one_that_failed_are_let_go_unsent(ends):
    def fail():
        raise LinkLost("closed")

    done = []
    outbox = Outbox(ends[1], "send")
    outbox.put(fail, sent=lambda: done.append("first over"))
    outbox.put(
        lambda: done.append("sent"), ready=lambda: done.append("second ready"), sent=lambda: done.append("second over")
    )
    outbox.finish(60)
    assert done == ["first over", "second ready", "second over"]


def test_a_header_that_is_too_large_is_not_sent(ends):
    _, channel = ends
    with pytest.raises(ValueError, match="at most 65536 bytes"):
        channel.send(Kind.CALL, {"a": "x" * JSON_LIMIT})
