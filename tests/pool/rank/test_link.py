"""Calls to a server that answers them as the test says."""

import contextlib
import threading
import time

import pytest
import torch

from hf_distca.pool.messages import Call, End, RankHello, RankWelcome, Reply
from hf_distca.pool.rank.link import ServerLink
from hf_distca.pool.transport import Memory
from hf_distca.pool.wire import SERVER, LinkLost, Listener, MismatchError, ProtocolError
from tests.pool.server.fake_ranks import FULL, make_call
from tests.pool.servers import TOKEN, wait_until
from tests.pool.strangers import message

MEMORY = Memory(torch.device("cpu"))


def call(number=0):
    return make_call(0, number, 0, FULL, "forward")


def reply(number=0):
    return Reply(number, seconds=0.5, pairs=10)


class Server:
    """Answers each call as the test says: `hellos` of ranks that came, `sent` messages that were no calls."""

    def __init__(self):
        self.hellos, self.sent = [], []
        self.answer = self.echo
        self.release = threading.Event()
        self.listener = Listener("127.0.0.1", 0, TOKEN, SERVER, self.serve)

    def serve(self, channel, hello):
        self.hellos.append(hello)
        if hello.rank == 5:
            raise MismatchError("rank 5 of 2")
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


def connected(server, rank=1, token=TOKEN):
    return ServerLink("127.0.0.1", server.listener.port, token, RankHello(rank, 2), 60, 60, MEMORY)


@pytest.fixture
def link(server):
    link = connected(server)
    yield link
    link.close()


def named(*tensors):
    """Results by name."""
    return dict(enumerate(tensors))


def rows(data):
    """Rows of one byte each."""
    return torch.tensor(list(data), dtype=torch.uint8)


def bytes_of(*tensors):
    return b"".join(x_N.numpy().tobytes() for x_N in tensors)


def buffer(size=8):
    return torch.full((size,), 255, dtype=torch.uint8)


def test_a_call_gets_its_reply_into_its_buffers_after_earlier_messages(server, link):
    first, rest = buffer(3), buffer(5)
    link.send(End(), [b"xyz"])
    answer = link.call(call(), [rows(b"abcd"), rows(b"efgh")], named(first, rest))
    assert link.wait(answer, 60) == reply()
    assert bytes_of(first, rest) == b"abcdefgh"
    assert server.hellos == [RankHello(1, 2)]
    assert server.sent == [(End(), b"xyz")]
    assert (link.within_host, link.carried_by) == (True, "TCP (no RDMA)")


def test_a_payload_leaves_when_it_is_ready(link):
    payload, came, asked, written = buffer(2), buffer(2), threading.Event(), threading.Event()
    answer = link.call(call(), [payload], named(came), lambda: asked.set() or written.wait(60))
    assert asked.wait(60)
    payload[:] = rows(b"ok")
    begin = time.perf_counter()
    written.set()
    link.wait(answer, 60)
    assert bytes_of(came) == b"ok"
    assert begin <= answer.departed <= answer.arrived


def test_replies_may_come_in_another_order(server, link):
    calls = []

    def answer(*args):
        calls.append(args)
        if len(calls) == 3:
            for each in reversed(calls):
                server.echo(*each)

    server.answer = answer
    buffers = [buffer(2) for _ in range(3)]
    for each in [link.call(call(n), [rows([n, n])], named(buffers[n])) for n in range(3)]:
        link.wait(each, 60)
    assert [b.tolist() for b in buffers] == [[0, 0], [1, 1], [2, 2]]


def test_a_caller_never_waits_for_a_slow_server(server, link):
    server.answer = lambda *_: server.release.wait()
    # Would a call wait until the server has taken its rows, the second one would wait until the test's end.
    answers = [link.call(call(n), [torch.zeros(20_000_000, dtype=torch.uint8)], named(buffer())) for n in range(3)]
    for answer, timeout_s in ((answers[0], 0.3), (answers[2], 60)):
        with pytest.raises(LinkLost, match=r"no reply within 0\.3 s"):
            link.wait(answer, timeout_s)


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


FAILING = {
    "closes": (close, "closed"),
    "closes in the middle": (close_in_the_middle, "closed"),
    "refuses": (lambda channel, *_: channel.refuse("no such plan"), "no such plan"),
    "says nothing": (lambda *_: None, "no reply within 0.5 s"),
    "too much": (send(lambda n: message(reply(n), b"123456789")), "9 bytes, expected 8"),
    "huge": (send(lambda n: message(reply(n), payload_bytes=2**63)), "expected 8"),
    "unasked": (send(lambda n: message(reply(99), b"12345678")), "received a Reply that answers no call"),
    "other kind": (send(lambda n: message(call(n), b"12345678")), "received a Call that answers no call"),
    "garbage": (send(lambda n: b"\0" * 100), "does not follow the protocol"),
}


@pytest.mark.parametrize("kind", FAILING)
def test_a_failed_link_says_why_and_stays_failed(server, link, kind):
    answer, said = FAILING[kind]
    both = threading.Event()
    server.answer = lambda *args: both.wait(60) and answer(*args)
    target, other = buffer(), buffer()
    first = link.call(call(1), [rows(b"12345678")], named(target))
    second = link.call(call(2), [rows(b"12345678")], named(other))
    both.set()
    with pytest.raises(LinkLost, match=said):
        link.wait(first, 0.5 if said == "no reply within 0.5 s" else 60)
    for more in (
        lambda: link.wait(second, 60),
        lambda: link.call(call(), [], {}),
        lambda: link.send(End()),
    ):
        with pytest.raises(LinkLost, match=said):
            more()
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
    link.wait(link.call(call(), [rows(b"12345678")], named(target)), 60)
    server.release.set()
    wait_until(lambda: link.lost)
    assert "received a Reply that answers no call" in link.lost
    link.close()
    assert bytes_of(target) == b"12345678"


def test_buffers_are_left_alone_after_a_loss(server, link):
    over, written, receive = threading.Event(), threading.Event(), link._transport.receive

    def receive_slowly(*args):
        try:
            receive(*args)
        finally:
            time.sleep(0.2)
            written.set()

    def answer(channel, number, payload):
        channel._sock.sendall(message(reply(number), b"12345678")[:-4])
        server.release.wait()
        with contextlib.suppress(OSError):
            channel._sock.sendall(b"5678")
        over.set()

    server.answer = answer
    link._transport.receive = receive_slowly
    first, rest = buffer(4), buffer(4)
    pending = link.call(call(), [], named(first, rest))
    wait_until(lambda: first[-1] != 255)
    with pytest.raises(LinkLost, match=r"no reply within 0\.1 s"):
        link.wait(pending, 0.1)
    assert written.is_set()  # nobody writes any more
    server.release.set()
    assert over.wait(60)
    assert bytes_of(first) == b"1234"
    assert (rest == 255).all()


def test_closing_ends_what_is_pending(server, link):
    server.answer = lambda *_: None
    pending = link.call(call(), [], named(buffer()))
    link.close()
    link.close()
    with pytest.raises(LinkLost, match="closed by this rank"):
        link.wait(pending, 60)


def test_a_server_that_does_not_let_the_rank_in_is_an_error_at_once(server):
    with pytest.raises(ProtocolError, match="another token"):
        connected(server, token=bytes(32))
    with pytest.raises(MismatchError, match="refused: rank 5 of 2"):
        connected(server, rank=5)
