"""Calls to a server that answers them as the test says."""

import contextlib
import threading
import time

import pytest
import torch

from hf_distca.pool.messages import Call, End, RankHello, RankWelcome, Reply
from hf_distca.pool.rank.link import ServerLink
from hf_distca.pool.transport import Memory
from hf_distca.pool.wire import SERVER, LinkLost, Listener
from tests.pool.ends import CPU, TOKEN, make_call, message
from tests.pool.servers import wait_until


def reply(number):
    return Reply(number, seconds=0.5, pairs=10)


class Server:
    """Answers each call as the test says; `sent` are messages that were no calls."""

    def __init__(self):
        self.sent, self.answer, self.release = [], self.echo, threading.Event()
        self.listener = Listener("127.0.0.1", 0, TOKEN, SERVER, self.serve)

    def serve(self, channel, hello):
        assert hello == RankHello(1)
        channel.send(RankWelcome("TCP", "no RDMA"))
        while True:
            received, size = channel.receive()
            payload = bytearray(size)
            channel.receive_payload([payload])
            if isinstance(received, Call):
                self.answer(channel, received.call_id, payload)
            else:
                self.sent.append((received, bytes(payload)))

    def echo(self, channel, number, payload):
        channel.send(reply(number), [payload])


@pytest.fixture
def server():
    server = Server()
    yield server
    server.release.set()
    server.listener.close()


@pytest.fixture
def link(server):
    link = ServerLink("127.0.0.1", server.listener.port, TOKEN, RankHello(1), 60, 60, Memory(CPU))
    yield link
    link.close()


def rows(data):
    """Rows of one byte each."""
    return torch.tensor(list(data), dtype=torch.uint8)


def buffer(size=8):
    return torch.full((size,), 255, dtype=torch.uint8)


def start(link, number, *results, sends=b"12345678"):
    """A call by this number."""
    return link.call(make_call(number), [rows(sends)], dict(enumerate(results)))


def test_calls_leave_when_they_are_ready_and_replies_may_come_in_another_order(server, link):
    calls = []

    def answer(*args):
        calls.append(args)
        if len(calls) == 3:
            for each in reversed(calls):
                server.echo(*each)

    server.answer = answer
    link.send(End(), [b"xyz"])
    payload, came, rest, asked, written = buffer(2), buffer(1), buffer(1), threading.Event(), threading.Event()
    results = {"o": came, "lse": rest}
    first = link.call(make_call(0), [payload], results, lambda: asked.set() or written.wait(60))
    others = [buffer(2) for _ in range(2)]
    answers = [start(link, n, others[n - 1], sends=[n, n]) for n in (1, 2)]
    assert asked.wait(60)
    payload[:] = rows(b"ok")
    begin = time.perf_counter()
    written.set()
    assert [link.wait(each, 60).call_id for each in (first, *answers)] == [0, 1, 2]
    assert bytes([*came, *rest]) == b"ok"
    assert [each.tolist() for each in others] == [[1, 1], [2, 2]]
    assert begin <= first.departed <= first.arrived
    assert server.sent == [(End(), b"xyz")]
    assert (link.within_host, link.carried_by) == (True, "TCP (no RDMA)")
    server.answer = lambda *_: None
    pending = start(link, 3, buffer())
    for _ in range(2):
        link.close()
    with pytest.raises(LinkLost, match="closed by this rank"):
        link.wait(pending, 60)


def test_a_caller_never_waits_for_a_slow_server(server, link):
    server.answer = lambda *_: server.release.wait()
    # Would a call wait until the server has taken its rows, the second one would wait until the test's end.
    large = torch.zeros(20_000_000, dtype=torch.uint8)
    answers = [link.call(make_call(n), [large], {"o": buffer()}) for n in range(3)]
    for answer, timeout_s in ((answers[0], 0.3), (answers[2], 60)):
        with pytest.raises(LinkLost, match=r"no reply within 0\.3 s"):
            link.wait(answer, timeout_s)


def close(*_):
    raise LinkLost("the test wants it so")


def send(data, then=lambda *_: None):
    def answer(channel, number, payload):
        with contextlib.suppress(OSError):  # the rank may have closed after an earlier answer
            channel._sock.sendall(data(number))
        then()

    return answer


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (close, "closed"),
        (send(lambda n: message(reply(n), b"12345678")[:-4], close), "closed"),
        (lambda channel, *_: channel.refuse("no such plan"), "no such plan"),
        (lambda *_: None, "no reply within 0.5 s"),
        (send(lambda n: message(reply(n), b"123456789")), "9 bytes, expected 8"),
        (send(lambda n: message(reply(n), payload_bytes=2**63)), "expected 8"),
        (send(lambda n: message(reply(0), b"again!!!")), "received a Reply that answers no call"),
        (send(lambda n: message(make_call(n), b"12345678")), "received a Call that answers no call"),
        (send(lambda n: b"\0" * 100), "does not follow the protocol"),
    ],
)
def test_a_failed_link_says_why_and_stays_failed(server, link, answer, said):
    answered, target, other = buffer(), buffer(), buffer()
    link.wait(start(link, 0, answered), 60)
    both = threading.Event()
    server.answer = lambda *args: both.wait(60) and answer(*args)
    first, second = start(link, 1, target), start(link, 2, other)
    both.set()
    with pytest.raises(LinkLost, match=said):
        link.wait(first, 0.5 if said == "no reply within 0.5 s" else 60)
    for more in (lambda: link.wait(second, 60), lambda: start(link, 3), lambda: link.send(End())):
        with pytest.raises(LinkLost, match=said):
            more()
    assert said in link.lost
    assert bytes(answered) == b"12345678"
    assert (other == 255).all()
    assert not any(thread.name.endswith(link._name) for thread in threading.enumerate())


def test_buffers_are_left_alone_after_a_loss(server, link):
    over, written, receive = threading.Event(), threading.Event(), link._transport.receive

    def receive_slowly(*args):
        try:
            receive(*args)
        finally:
            time.sleep(0.2)
            written.set()

    def answer(*args):
        send(lambda n: message(reply(n), b"12345678")[:-4], server.release.wait)(*args)
        send(lambda n: b"5678", over.set)(*args)

    server.answer, link._transport.receive = answer, receive_slowly
    first, rest = buffer(4), buffer(4)
    pending = start(link, 0, first, rest)
    wait_until(lambda: first[-1] != 255)
    with pytest.raises(LinkLost, match=r"no reply within 0\.1 s"):
        link.wait(pending, 0.1)
    assert written.is_set()  # nobody writes any more
    server.release.set()
    assert over.wait(60)
    assert bytes(first) == b"1234"
    assert (rest == 255).all()
