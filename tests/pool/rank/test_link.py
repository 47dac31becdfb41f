import contextlib
import threading
import time

import pytest
import torch

from hf_distca.pool.listener import Listener
from hf_distca.pool.memory import HostMemory
from hf_distca.pool.messages import Call, End, RankHello, RankWelcome, Reply
from hf_distca.pool.rank.members import SERVICE, ServerLink
from hf_distca.pool.token import make_token
from hf_distca.pool.wire import AuthenticationError, LinkLost
from tests.pool.servers import wait_until
from tests.pool.strangers import message

MEMORY = HostMemory(torch.device("cpu"))


def call(number=0):
    return Call(0, number, 0, None, "forward", 0.5, None, 4, 2, 16, 16, "float32")


def reply(number=0):
    return Reply(number, seconds=0.5, pairs=10)


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
        self.listener = Listener("127.0.0.1", 0, token, SERVICE, self.serve)

    def serve(self, channel, hello):
        self.hellos.append(hello)
        channel.send(RankWelcome("tcp", ""))
        while True:
            frame = channel.receive()
            payload = bytearray(frame.payload)
            channel.receive_payload([payload])
            if isinstance(frame.message, Call):
                self.answer(channel, frame.message.call_id, payload)
            else:
                self.sent.append((frame.message, bytes(payload)))

    def echo(self, channel, number, payload):
        channel.send(reply(number), [payload])


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
    link = ServerLink("127.0.0.1", server.listener.port, token, RankHello(1, 2), 60, 60, MEMORY)
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
    pending = link.call(call(), [rows(b"abcd"), rows(b"efgh")], [first, rest])
    assert pending.wait(60) == reply()
    assert bytes_of(first, rest) == b"abcdefgh"
    assert server.hellos == [RankHello(1, 2)]
    assert link.within_host


def test_a_payload_leaves_when_it_is_ready(link):
    payload, came, asked, written = buffer(2), buffer(2), threading.Event(), threading.Event()
    pending = link.call(call(), [payload], [came], lambda: asked.set() or written.wait(60))
    assert asked.wait(60)
    payload[:] = rows(b"ok")
    begin = time.perf_counter()
    written.set()
    pending.wait(60)
    assert bytes_of(came) == b"ok"
    assert begin <= pending.departed <= pending.arrived


def test_a_call_may_have_an_empty_reply(link):
    assert link.call(call(), [], []).wait(60) == reply()


def test_messages_arrive_before_later_calls(server, link):
    link.send(End(), [b"xyz"])
    link.call(call(), [rows(b"1")], [buffer(1)]).wait(60)
    assert server.sent == [(End(), b"xyz")]


def test_replies_may_come_in_another_order(server, link):
    frames = []

    def answer(*args):
        frames.append(args)
        if len(frames) == 3:
            for each in reversed(frames):
                server.echo(*each)

    server.answer = answer
    buffers = [buffer(2) for _ in range(3)]
    replies = [link.call(call(n), [rows([n, n])], [buffers[n]]) for n in range(3)]
    for pending in replies:
        pending.wait(60)
    assert [b.tolist() for b in buffers] == [[0, 0], [1, 1], [2, 2]]


def test_a_caller_never_waits_for_a_slow_server(server, link):
    server.answer = lambda *_: server.release.wait()
    # Would a call wait until the server has taken its rows, the second one would wait until the test's end.
    replies = [link.call(call(n), [torch.zeros(20_000_000, dtype=torch.uint8)], [buffer()]) for n in range(3)]
    with pytest.raises(LinkLost, match=r"no reply within 0\.3 s"):
        replies[0].wait(0.3)
    with pytest.raises(LinkLost, match=r"no reply within 0\.3 s"):
        replies[2].wait(60)


def failing(kind):
    """What a server does instead of answering, and what the rank is told."""

    def close(channel, number, payload):
        raise LinkLost("the test wants it so")

    def send(data):
        def answer(channel, number, payload):
            with contextlib.suppress(OSError):  # the rank may have closed after an earlier answer
                channel._sock.sendall(data(number))

        return answer

    def close_in_the_middle(*args):
        send(lambda n: message(reply(n), b"12345678")[:-4])(*args)
        close(*args)

    return {
        "closes": (close, "closed"),
        "closes in the middle": (close_in_the_middle, "closed"),
        "refuses": (lambda channel, *_: channel.refuse("no such plan"), "no such plan"),
        "says nothing": (lambda *_: None, "no reply within 0.5 s"),
        "too much": (send(lambda n: message(reply(n), b"123456789")), "9 bytes, expected 8"),
        "too little": (send(lambda n: message(reply(n), b"1234567")), "7 bytes, expected 8"),
        "huge": (send(lambda n: message(reply(n), payload_bytes=2**63)), "expected 8"),
        "unasked": (send(lambda n: message(reply(99), b"12345678")), "received a Reply that answers no call"),
        "other kind": (send(lambda n: message(call(n), b"12345678")), "received a Call that answers no call"),
        "garbage": (send(lambda n: b"\0" * 100), "does not follow the protocol"),
        "stops in the middle": (
            send(lambda n: message(reply(1), b"12345678")[:-4] if n == 1 else b""),
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
    first = link.call(call(1), [rows(b"12345678")], [target])
    second = link.call(call(2), [rows(b"12345678")], [other])
    both.set()
    with pytest.raises(LinkLost, match=said):
        first.wait(timeout_s)
    with pytest.raises(LinkLost, match=said):
        second.wait(60)
    with pytest.raises(LinkLost, match=said):
        link.call(call(), [], [])
    with pytest.raises(LinkLost, match=said):
        link.send(End())
    assert said in link.lost
    assert (other == 255).all()
    assert not any(thread.name.endswith(link._name) for thread in threading.enumerate())


def test_a_second_reply_is_refused_and_leaves_the_buffers_alone(server, link):
    def answer(channel, number, payload):
        server.echo(channel, number, payload)
        server.release.wait()
        server.echo(channel, number, b"again!!!")

    server.answer = answer
    target = buffer()
    link.call(call(), [rows(b"12345678")], [target]).wait(60)
    server.release.set()
    wait_until(lambda: link.lost)
    assert "received a Reply that answers no call" in link.lost
    link.close()
    assert bytes_of(target) == b"12345678"


def test_buffers_are_left_alone_after_a_loss(server, link):
    over = threading.Event()

    def answer(channel, number, payload):
        channel._sock.sendall(message(reply(number), b"12345678")[:-4])
        server.release.wait()
        with contextlib.suppress(OSError):
            channel._sock.sendall(b"5678")
        over.set()

    server.answer = answer
    first, rest = buffer(4), buffer(4)
    pending = link.call(call(), [], [first, rest])
    wait_until(lambda: first[-1] != 255)
    with pytest.raises(LinkLost, match=r"no reply within 0\.1 s"):
        pending.wait(0.1)
    assert not any(thread.name.endswith(link._name) for thread in threading.enumerate())  # nobody could write
    server.release.set()
    assert over.wait(60)
    assert bytes_of(first) == b"1234"
    assert (rest == 255).all()


def test_closing_ends_what_is_pending(server, link):
    server.answer = lambda *_: None
    pending = link.call(call(), [], [buffer()])
    link.close()
    link.close()
    with pytest.raises(LinkLost, match="closed by this rank"):
        pending.wait(60)


def test_a_wrong_token_is_said_at_once(server):
    with pytest.raises(AuthenticationError, match="another token"):
        ServerLink("127.0.0.1", server.listener.port, make_token(), RankHello(0, 1), 5, 5, MEMORY)


def test_a_refusal_of_the_rank_is_said(token):
    def serve(channel, hello):
        channel.refuse("rank 5 of 2")

    listener = Listener("127.0.0.1", 0, token, SERVICE, serve)
    with pytest.raises(LinkLost, match="rank 5 of 2"):
        ServerLink("127.0.0.1", listener.port, token, RankHello(1, 2), 5, 5, MEMORY)
    listener.close()
