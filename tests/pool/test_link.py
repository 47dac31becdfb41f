"""Calls to a server whose end of the connection the test has."""

import contextlib
import threading
import time

import pytest
import torch

from hf_distca.pool.messages import End, RankHello, RankWelcome, Reply
from hf_distca.pool.rank.link import ServerLink
from hf_distca.pool.transport import Memory
from hf_distca.pool.wire import LinkLost
from tests.pool.ends import CPU, TOKEN, channels, make_call, message
from tests.pool.servers import wait_until

pytestmark = pytest.mark.timeout(100)  # whoever waits for ever has failed


@pytest.fixture
def ends(monkeypatch):
    """A rank's link, and the server's channel."""
    with channels() as (near, far):
        connected = near, RankWelcome("TCP", "no RDMA")
        monkeypatch.setattr("hf_distca.pool.rank.link.connect", lambda *_: connected)
        link = ServerLink("127.0.0.1", 4000, TOKEN, RankHello(1), 60, 60, Memory(CPU))
        yield link, far
        link.close()


def rows(data):
    """Rows of one byte each."""
    return torch.tensor(list(data), dtype=torch.uint8)


def buffer(size=8):
    return torch.full((size,), 255, dtype=torch.uint8)


def start(link, number, *results, sends=b"12345678", ready=lambda: None):
    """A call by this number."""
    sent = sends if isinstance(sends, torch.Tensor) else rows(sends)
    return link.call(make_call(number), [sent], dict(enumerate(results)), ready)


def reply(number):
    return Reply(number, seconds=0.5, pairs=10)


def taken(far):
    """The next message at the server, with its payload."""
    received, size = far.receive(60)
    payload = bytearray(size)
    far.receive_payload([payload], 60)
    return received, bytes(payload)


def test_calls_leave_when_they_are_ready_and_replies_may_come_in_another_order(ends):
    link, far = ends
    payload, came, rest, asked, written = buffer(2), buffer(1), buffer(1), threading.Event(), threading.Event()
    link.send(End(), [b"xyz"])
    first = start(link, 0, came, rest, sends=payload, ready=lambda: asked.set() or written.wait(60))
    others = [buffer(2) for _ in range(2)]
    answers = [start(link, n, others[n - 1], sends=[n, n]) for n in (1, 2)]
    assert asked.wait(60)
    payload[:] = rows(b"ok")
    begin = time.perf_counter()
    written.set()
    sent = [taken(far) for _ in range(4)]
    assert sent == [(End(), b"xyz"), (make_call(0), b"ok"), (make_call(1), b"\1\1"), (make_call(2), b"\2\2")]
    for call, data in reversed(sent[1:]):
        far.send(reply(call.call_id), [data])
    assert [link.wait(each, 60) for each in (first, *answers)] == [reply(0), reply(1), reply(2)]
    assert bytes([*came, *rest]) == b"ok"
    assert [each.tolist() for each in others] == [[1, 1], [2, 2]]
    assert begin <= first.departed <= first.arrived
    assert (link.within_host, link.carried_by) == (True, "TCP (no RDMA)")
    pending = start(link, 3, buffer())
    for _ in range(2):
        link.close()
    with pytest.raises(LinkLost, match="closed by this rank"):
        link.wait(pending, 60)


def test_a_caller_never_waits_for_a_slow_server(ends):
    # Would a call wait until the server has taken its rows, the second one would wait until the test's end.
    link, large = ends[0], torch.zeros(20_000_000, dtype=torch.uint8)
    answers = [start(link, number, buffer(), sends=large) for number in range(3)]
    for answer, timeout_s in ((answers[0], 0.3), (answers[2], 60)):
        with pytest.raises(LinkLost, match=r"no reply within 0\.3 s"):
            link.wait(answer, timeout_s)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (message(reply(1), b"12345678")[:-4], "closed"),
        (b"", "no reply within 0.5 s"),
        (message(reply(1), b"123456789"), "9 bytes, expected 8"),
        (message(reply(1), payload_bytes=2**63), "expected 8"),
        (message(reply(0), b"again!!!"), "received a Reply that answers no call"),
        (message(make_call(1), b"12345678"), "received a Call that answers no call"),
        (b"\0" * 100, "does not follow the protocol"),
        (None, "no such plan"),
    ],
)
def test_a_failed_link_says_why_and_stays_failed(ends, sent, said):
    (link, far), answered, other = ends, buffer(), buffer()
    done = start(link, 0, answered)
    far.send(reply(0), [taken(far)[1]])
    link.wait(done, 60)
    first, second = start(link, 1, buffer()), start(link, 2, other)
    if sent is None:
        far.refuse(said)
    else:
        far._sock.sendall(sent)
    if said == "closed":
        far.shut_down()
    with pytest.raises(LinkLost, match=said):
        link.wait(first, 0.5 if said == "no reply within 0.5 s" else 60)
    for more in (lambda: link.wait(second, 60), lambda: start(link, 3), lambda: link.send(End())):
        with pytest.raises(LinkLost, match=said):
            more()
    assert said in link.lost
    assert bytes(answered) == b"12345678"
    assert (other == 255).all()
    assert not any(thread.name.endswith(link.name) for thread in threading.enumerate())


def test_buffers_are_left_alone_after_a_loss(ends):
    (link, far), first, rest, written = ends, buffer(4), buffer(4), threading.Event()
    receive = link._transport.receive

    def receive_slowly(*args):
        try:
            receive(*args)
        finally:
            time.sleep(0.2)
            written.set()

    link._transport.receive = receive_slowly
    pending = start(link, 0, first, rest)
    far._sock.sendall(message(reply(0), b"12345678")[:-4])
    wait_until(lambda: first[-1] != 255)
    with pytest.raises(LinkLost, match=r"no reply within 0\.1 s"):
        link.wait(pending, 0.1)
    assert written.is_set()  # nobody writes any more
    with contextlib.suppress(OSError):
        far._sock.sendall(b"5678")
    assert bytes(first) == b"1234"
    assert (rest == 255).all()
