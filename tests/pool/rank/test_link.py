import contextlib
import json
import struct
import threading
import time

import pytest
import torch

from hf_distca.pool.messages.call import Call, Reply
from hf_distca.pool.messages.kinds import SERVER_SERVICE, Kind
from hf_distca.pool.rank.link import ServerLink
from hf_distca.pool.transport.tcp import HostMemory
from hf_distca.pool.wire import AuthenticationError, LinkLost, Listener, make_token
from tests.pool.servers import wait_until

MEMORY = HostMemory(torch.device("cpu"))
HEAD = struct.Struct("!4sB3xIQQ")
CALL = Call(0, 0, 0, None, "forward", 0.5, None, 4, 2, 16, 16, "float32")
REPLY = Reply(call_id=0, seconds=0.5, pairs=10)


def head(kind, sequence, payload_bytes):
    """A message's bytes before its rows; of a reply a sane one."""
    text = json.dumps(REPLY.header()).encode()
    return HEAD.pack(b"CAD1", kind, len(text), sequence, payload_bytes) + text


class Server:
    """Answers each call as the test says.

    Attributes:
        hellos: those of the ranks that came.
        sent: messages that were no calls.
    """

    def __init__(self, token):
        self.hellos = []
        self.sent = []
        self.answer = self.echo
        self.release = threading.Event()
        self.listener = Listener("127.0.0.1", 0, token, SERVER_SERVICE, Kind, self.serve)

    def serve(self, peer):
        self.hellos.append(peer.hello.header)
        peer.channel.send(Kind.WELCOME, {})
        while True:
            frame = peer.channel.receive()
            payload = bytearray(frame.payload)
            peer.channel.receive_into([payload])
            if frame.kind is Kind.CALL:
                self.answer(peer.channel, frame, payload)
            else:
                self.sent.append((frame.kind, frame.header, bytes(payload)))

    def echo(self, channel, frame, payload):
        channel.send(Kind.REPLY, REPLY.header(), [payload], frame.sequence)


@pytest.fixture
def token():
    return make_token()


@pytest.fixture
def server(token):
    server = Server(token)
    yield server
    server.release.set()
    server.listener.close()


@pytest.fixture
def link(server, token):
    link = ServerLink("127.0.0.1", server.listener.port, token, 1, 2, 60, 60, MEMORY)
    yield link
    link.close()


def rows(data):
    """Rows of one byte each."""
    return torch.tensor(list(data), dtype=torch.uint8)


def bytes_of(*tensors):
    return b"".join(x_N.numpy().tobytes() for x_N in tensors)


def buffer(size=8):
    return torch.full((size,), 255, dtype=torch.uint8)


def test_a_call_gets_its_reply_into_its_buffers(server, link):
    first, rest = buffer(3), buffer(5)
    reply = link.call(CALL, [rows(b"abcd"), rows(b"efgh")], [first, rest])
    assert reply.wait(60) == REPLY
    assert bytes_of(first, rest) == b"abcdefgh"
    assert server.hellos == [{"rank": 1, "ranks": 2}]
    assert link.within_host


def test_a_payload_leaves_when_it_is_ready(link):
    payload, came, asked, written = buffer(2), buffer(2), threading.Event(), threading.Event()
    reply = link.call(CALL, [payload], [came], lambda: asked.set() or written.wait(60))
    assert asked.wait(60)
    payload[:] = rows(b"ok")
    begin = time.perf_counter()
    written.set()
    reply.wait(60)
    assert bytes_of(came) == b"ok"
    assert begin <= reply.departed <= reply.arrived


def test_a_call_may_have_an_empty_reply(link):
    assert link.call(CALL, [], []).wait(60) == REPLY


def test_messages_arrive_before_later_calls(server, link):
    link.send(Kind.PLAN, {"plan_id": 3}, [b"xyz"])
    link.call(CALL, [rows(b"1")], [buffer(1)]).wait(60)
    assert server.sent == [(Kind.PLAN, {"plan_id": 3}, b"xyz")]


def test_replies_may_come_in_another_order(server, link):
    frames = []

    def answer(channel, frame, payload):
        frames.append((channel, frame, payload))
        if len(frames) == 3:
            for each in reversed(frames):
                server.echo(*each)

    server.answer = answer
    buffers = [buffer(2) for _ in range(3)]
    replies = [link.call(CALL, [rows([n, n])], [buffers[n]]) for n in range(3)]
    for reply in replies:
        reply.wait(60)
    assert [b.tolist() for b in buffers] == [[0, 0], [1, 1], [2, 2]]


def test_a_caller_never_waits_for_a_slow_server(server, link):
    server.answer = lambda *_: server.release.wait()
    # Would a call wait until the server has taken its rows, the second one would wait until the test's end.
    replies = [link.call(CALL, [torch.zeros(20_000_000, dtype=torch.uint8)], [buffer()]) for _ in range(3)]
    with pytest.raises(LinkLost, match=r"no reply within 0\.3 s"):
        replies[0].wait(0.3)
    with pytest.raises(LinkLost, match=r"no reply within 0\.3 s"):
        replies[2].wait(60)


def failing(kind):
    """What a server does instead of answering, and what the rank is told."""

    def close(channel, frame, payload):
        raise LinkLost("the test wants it so")

    def message(data):
        def answer(channel, frame, payload):
            with contextlib.suppress(OSError):  # the rank may have closed after an earlier answer
                channel._sock.sendall(data(frame))

        return answer

    return {
        "closes": (close, "closed"),
        "closes in the middle": (
            lambda channel, frame, payload: (
                (message(lambda f: head(7, f.sequence, 8) + b"1234"))(channel, frame, payload)
                or close(channel, frame, payload)
            ),
            "closed",
        ),
        "refuses": (
            lambda channel, frame, _: channel.send(Kind.REFUSED, {"reason": "no such plan"}),
            "no such plan",
        ),
        "says nothing": (lambda *_: None, "no reply within 0.5 s"),
        "too much": (
            message(lambda f: head(7, f.sequence, 9) + b"123456789"),
            "9 bytes, expected 8",
        ),
        "too little": (
            message(lambda f: head(7, f.sequence, 7) + b"1234567"),
            "7 bytes, expected 8",
        ),
        "huge": (message(lambda f: head(7, f.sequence, 2**63) + b""), "expected 8"),
        "unasked": (message(lambda f: head(7, 99, 8) + b"12345678"), "not made"),
        "other kind": (message(lambda f: head(6, f.sequence, 8) + b"12345678"), "CALL message"),
        "garbage": (message(lambda f: b"\0" * 100), "not a message"),
        "stops in the middle": (
            message(lambda f: head(7, 1, 8) + b"1234" if f.sequence == 1 else b""),
            "no reply within 0.5 s",
        ),
    }[kind]


@pytest.mark.parametrize(
    "kind",
    [
        "closes",
        "closes in the middle",
        "refuses",
        "says nothing",
        "too much",
        "too little",
        "huge",
        "unasked",
        "other kind",
        "garbage",
        "stops in the middle",
    ],
)
def test_a_failed_link_says_why_and_stays_failed(server, link, kind):
    answer, said = failing(kind)
    both = threading.Event()
    server.answer = lambda *args: both.wait(60) and answer(*args)
    timeout_s = 0.5 if said == "no reply within 0.5 s" else 60
    target, other = buffer(), buffer()
    first = link.call(CALL, [rows(b"12345678")], [target])
    second = link.call(CALL, [rows(b"12345678")], [other])
    both.set()
    with pytest.raises(LinkLost, match=said):
        first.wait(timeout_s)
    with pytest.raises(LinkLost, match=said):
        second.wait(60)
    with pytest.raises(LinkLost, match=said):
        link.call(CALL, [], [])
    with pytest.raises(LinkLost, match=said):
        link.send(Kind.PLAN, {})
    assert said in link.lost
    assert (other == 255).all()
    assert not any(thread.name.endswith(link.name) for thread in threading.enumerate())


def test_a_second_reply_is_refused_and_leaves_the_buffers_alone(server, link):
    def answer(channel, frame, payload):
        server.echo(channel, frame, payload)
        server.release.wait()
        server.echo(channel, frame, b"again!!!")

    server.answer = answer
    target = buffer()
    link.call(CALL, [rows(b"12345678")], [target]).wait(60)
    server.release.set()
    wait_until(lambda: link.lost)
    assert "a reply came to a call that was not made" in link.lost
    link.close()
    assert bytes_of(target) == b"12345678"


def test_buffers_are_left_alone_after_a_loss(server, link):
    over = threading.Event()

    def answer(channel, frame, payload):
        channel._sock.sendall(head(7, frame.sequence, 8) + b"1234")
        server.release.wait()
        with contextlib.suppress(OSError):
            channel._sock.sendall(b"5678")
        over.set()

    server.answer = answer
    first, rest = buffer(4), buffer(4)
    reply = link.call(CALL, [], [first, rest])
    wait_until(lambda: first[-1] != 255)
    with pytest.raises(LinkLost, match=r"no reply within 0\.1 s"):
        reply.wait(0.1)
    assert not any(thread.name.endswith(link.name) for thread in threading.enumerate())  # nobody could write
    server.release.set()
    assert over.wait(60)
    assert bytes_of(first) == b"1234"
    assert (rest == 255).all()


def test_closing_ends_what_is_pending(server, link):
    server.answer = lambda *_: None
    reply = link.call(CALL, [], [buffer()])
    link.close()
    link.close()
    with pytest.raises(LinkLost, match="closed by this rank"):
        reply.wait(60)


def test_a_wrong_token_is_said_at_once(server):
    with pytest.raises(AuthenticationError, match="another token"):
        ServerLink("127.0.0.1", server.listener.port, make_token(), 0, 1, 5, 5, MEMORY)


def test_a_refusal_of_the_rank_is_said(token):
    def serve(peer):
        peer.channel.send(Kind.REFUSED, {"reason": "rank 5 of 2"})

    listener = Listener("127.0.0.1", 0, token, SERVER_SERVICE, Kind, serve)
    with pytest.raises(LinkLost, match="rank 5 of 2"):
        ServerLink("127.0.0.1", listener.port, token, 5, 2, 5, 5, MEMORY)
    listener.close()
