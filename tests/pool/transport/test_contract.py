"""What every transport must do, see `hf_distca.pool.transport.TcpTransport`."""

import threading

import pytest
import torch

from hf_distca.pool import nixl
from hf_distca.pool.messages import TensorSpec
from hf_distca.pool.wire import ProtocolError
from tests.pool.server.fake_ranks import FULL, make_call
from tests.pool.transport.ends import TRANSPORTS, ends

Q = TensorSpec("q", "queries", (4, 16), "bfloat16")
LSE = TensorSpec("lse", "queries", (4,), "float32")


@pytest.fixture(params=TRANSPORTS)
def both(request, monkeypatch):
    monkeypatch.setattr(nixl, "CHUNK_BYTES", 100_000)  # rows of some tests take several transfers
    with ends(request.param) as made:
        yield made


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


def test_what_is_staged_is_what_was_given(both):
    given = torch.arange(24.0).view(2, 3, 4).transpose(0, 1)
    (staged,), ready = both[0].memory.stage([given])
    ready()
    assert staged.is_contiguous()
    assert torch.equal(staged.cpu(), given)


def test_rows_come_with_their_message_into_slices_and_from_them(both):
    left, right = both
    sent, lse, came = random_rows(left, Q, 10), random_rows(left, LSE, 3), right.memory.empty(Q, 10).zero_()
    assert (came.shape, came.dtype, came.is_contiguous()) == ((10, *Q.shape), dtype_of(Q), True)
    rows = [sent[2:5], sent[7:9], lse, random_rows(left, Q, 0)]
    thread = threading.Thread(target=left.transport.send, args=(call(9), rows, 60))
    thread.start()
    message, size = right.channel.receive()
    assert message == call(9)
    got_lse = right.memory.empty(LSE, 3)
    right.transport.receive(message, size, [came[0:3], came[8:10], got_lse, right.memory.empty(Q, 0)], 60)
    thread.join()
    assert torch.equal(torch.cat([came[0:3], came[8:10]]).cpu(), torch.cat([sent[2:5], sent[7:9]]).cpu())
    assert torch.equal(got_lse.cpu(), lse.cpu())
    assert not came[3:8].any()


def test_another_number_of_bytes_is_refused_and_nothing_is_written(both):
    left, right = both
    left.transport.send(call(), [random_rows(left, Q, 2)], 60)
    came = right.memory.empty(Q, 3).fill_(7.0)
    with pytest.raises(ProtocolError, match="256 bytes, expected 384"):
        right.transport.receive(*right.channel.receive(), [came], 60)
    assert (came == 7.0).all()
