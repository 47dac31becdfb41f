"""What only holds for rows over TCP: they wait in the connection."""

import threading
import time

import pytest
import torch

from hf_distca.pool.memory import Choice
from hf_distca.pool.messages import Reply, TensorSpec
from hf_distca.pool.wire import LinkLost
from tests.pool.transport.ends import MAKERS

HUGE = TensorSpec("k", "keys", (1024, 1024), "float32")


@pytest.fixture
def ends():
    with MAKERS[Choice.TCP]() as both:
        yield both


def send_in_vain(end, rows, timeout_s):
    """Send rows that nobody takes, on a thread that ends when that has failed."""

    def send():
        with pytest.raises(LinkLost):
            end.transport.send(Reply(0, 0.0, 0), [rows], timeout_s)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_neither_end_waits_for_ever(ends):
    left, right = ends
    thread = send_in_vain(left, torch.ones(20, *HUGE.shape), 0.2)
    begin = time.monotonic()
    message = right.channel.receive()
    thread.join(60)
    assert not thread.is_alive()
    assert time.monotonic() - begin > 0.1
    with pytest.raises(LinkLost):  # what was sent before is there, the rest never comes
        right.transport.receive(message, [right.memory.empty(HUGE, 20)], 0.1)


def test_the_other_ends_death_is_noticed(ends):
    left, right = ends
    thread = send_in_vain(left, torch.ones(20, *HUGE.shape), 60)
    message = right.channel.receive()
    left.channel.shut_down()
    with pytest.raises(LinkLost):
        right.transport.receive(message, [right.memory.empty(HUGE, 20)], 60)
    thread.join(60)
    assert not thread.is_alive()
