"""What every transport must do, see `hf_distca.pool.transport.TcpTransport`."""

import threading

import pytest
import torch

from hf_distca.pool.messages import Alive, Reply, TensorSpec
from hf_distca.pool.wire import ProtocolError
from tests.pool.server.fake_ranks import FULL, make_call
from tests.pool.transport.ends import MAKERS, TRANSPORTS

Q = TensorSpec("q", "queries", (4, 16), "bfloat16")
LSE = TensorSpec("lse", "queries", (4,), "float32")


@pytest.fixture(params=TRANSPORTS)
def ends(request):
    with MAKERS[request.param]() as both:
        yield both


def random_rows(end, spec, rows, seed=0):
    """Random rows where the end can send them from."""
    generator = torch.Generator().manual_seed(seed)
    (staged,), ready = end.memory.stage([torch.randn((rows, *spec.shape), generator=generator).to(dtype_of(spec))])
    ready()
    return staged


def dtype_of(spec):
    return getattr(torch, spec.dtype)


def call(number=0):
    return make_call(0, number, 0, FULL, "forward")


def send_apart(end, rows, number=0, timeout_s=60):
    """Send a call on a thread, as a sender does."""
    thread = threading.Thread(target=end.transport.send, args=(call(number), rows, timeout_s))
    thread.start()
    return thread


def test_memory_is_contiguous_and_of_the_shape_that_was_asked_for(ends):
    for spec in (Q, LSE):
        rows = ends[0].memory.empty(spec, 7)
        assert (rows.shape, rows.dtype) == ((7, *spec.shape), dtype_of(spec))
        assert rows.is_contiguous()
        assert rows[2:5].is_contiguous()


@pytest.mark.parametrize("own", [False, True], ids=["from elsewhere", "from there"])
def test_what_is_staged_is_what_was_given(ends, own):
    memory, given = ends[0].memory, torch.arange(24.0).view(2, 3, 4)
    if own:
        given = memory.empty(TensorSpec("k", "keys", (3, 4), "float32"), 2).copy_(given)
    given = given.transpose(0, 1)
    (staged,), ready = memory.stage([given])
    ready()
    assert staged.is_contiguous()
    assert torch.equal(staged.cpu(), given)


def test_rows_arrive_with_their_message(ends):
    left, right = ends
    sent = [random_rows(left, Q, 5), random_rows(left, LSE, 3)]
    thread = send_apart(left, sent, 9)
    frame = right.channel.receive()
    assert frame.message == call(9)
    came = [right.memory.empty(Q, 5), right.memory.empty(LSE, 3)]
    right.transport.receive(frame, came, 60)
    thread.join()
    assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(sent, came, strict=True))


def test_rows_may_come_into_slices_and_be_sent_from_them(ends):
    left, right = ends
    sent, came = random_rows(left, Q, 10), right.memory.empty(Q, 10)
    came.zero_()
    thread = send_apart(left, [sent[2:5], sent[7:9]])
    right.transport.receive(right.channel.receive(), [came[0:3], came[8:10]], 60)
    thread.join()
    assert torch.equal(torch.cat([came[0:3], came[8:10]]).cpu(), torch.cat([sent[2:5], sent[7:9]]).cpu())
    assert not came[3:8].any()


def test_no_rows_are_nothing_to_send(ends):
    left, right = ends
    left.transport.send(call(), [random_rows(left, Q, 0)], 60)
    right.transport.receive(right.channel.receive(), [right.memory.empty(Q, 0)], 60)


def test_messages_and_words_keep_their_order_and_both_ways_go_at_once(ends):
    rank, server = ends
    calls, results = ([random_rows(end, Q, 3000, seed=n) for n in range(4)] for end in ends)
    came = [rank.memory.empty(Q, 3000) for _ in range(4)]

    def make_calls():
        for n, rows in enumerate(calls):
            rank.transport.send(call(n), [rows], 60, [came[n]])
            rank.channel.send(Alive())

    def answer():
        for n, rows in enumerate(results):
            frame = server.channel.receive()
            got = server.memory.empty(Q, 3000)
            server.transport.receive(frame, [got], 60)
            right.append((frame.message.call_id, torch.equal(got.cpu(), calls[n].cpu())))
            right.append(server.channel.receive().message)
            server.transport.send(Reply(n, 0.5, 7), [rows], 60)
            server.channel.send(Alive())

    right = []
    threads = [threading.Thread(target=run) for run in (make_calls, answer)]
    for thread in threads:
        thread.start()
    for n in range(4):
        frame = rank.channel.receive()
        rank.transport.receive(frame, [came[n]], 60)
        assert frame.message == Reply(n, 0.5, 7)
        assert torch.equal(came[n].cpu(), results[n].cpu())
        assert rank.channel.receive().message == Alive()
    for thread in threads:
        thread.join()
    assert right == [said for n in range(4) for said in ((n, True), Alive())]


def test_another_number_of_bytes_is_refused_and_nothing_is_written(ends):
    left, right = ends
    left.transport.send(call(), [random_rows(left, Q, 2)], 60)
    came = right.memory.empty(Q, 3)
    came.fill_(7.0)
    with pytest.raises(ProtocolError, match="256 bytes, expected 384"):
        right.transport.receive(right.channel.receive(), [came], 60)
    assert (came == 7.0).all()
