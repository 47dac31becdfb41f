"""Two ends of every transport there is, in one process."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from hf_distca.pool.nixl import is_installed
from hf_distca.pool.transport import Choice, Memory, Transport, choose, make_memory, rank_end, rank_hello
from hf_distca.pool.wire import Channel

CPU = torch.device("cpu")
needs_nixl = pytest.mark.skipif(not is_installed(), reason="needs nixl-cu12 or nixl-cu13")
TRANSPORTS = (Choice.TCP, pytest.param(Choice.NIXL, marks=needs_nixl))
"""For tests of each of them."""


@dataclass
class End:
    """One end: where its rows lie, its messages, and their rows."""

    memory: Memory
    channel: Channel
    transport: Transport


@cache
def memory_of(choice: Choice, _end: str) -> Memory:
    """One for each end of all tests: an agent takes a second to start."""
    return make_memory(choice, CPU, "127.0.0.1")


@contextmanager
def channels() -> Iterator[tuple[Channel, Channel]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
    both = Channel(left), Channel(right)
    yield both
    for channel in both:
        channel.close()


@contextmanager
def ends(choice: Choice) -> Iterator[tuple[End, End]]:
    """A rank's and a server's end."""
    left, right = memory_of(choice, "rank"), memory_of(choice, "server")
    with channels() as (near, far):
        server, welcome = choose(far, right, rank_hello(0, 1, left))
        assert welcome.transport == choice.upper()
        rank = rank_end(near, left, welcome)
        yield End(left, near, rank), End(right, far, server)
        for channel in (near, far):
            channel.shut_down()
        rank.close()
        server.close()
