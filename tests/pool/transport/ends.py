"""Two ends of every transport there is, in one process: a transport is one more entry in MAKERS."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hf_distca.pool.messages.kinds import Kind
from hf_distca.pool.transport.contract import Memory, Transport
from hf_distca.pool.transport.tcp import HostMemory, TcpTransport
from hf_distca.pool.wire.channel import Channel


@dataclass
class End:
    """One end.

    Attributes:
        memory: where its rows lie.
        channel: its messages.
        transport: the rows that belong to them.
    """

    memory: Memory
    channel: Channel
    transport: Transport


@contextmanager
def tcp_ends() -> Iterator[tuple[End, End]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
    channels = Channel(left, Kind), Channel(right, Kind)
    yield tuple(End(HostMemory(torch.device("cpu")), channel, TcpTransport(channel)) for channel in channels)
    for channel in channels:
        channel.close()


MAKERS: dict[str, Callable[[], Iterator[tuple[End, End]]]] = {"tcp": tcp_ends}
