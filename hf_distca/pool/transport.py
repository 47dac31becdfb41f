"""Transports of a call's rows between a rank and a server: TCP, or NIXL where both ends have it.

A message travels on the connection between the two (`wire`). Over TCP its rows follow on the same connection. Over
NIXL a rank's call names the places of its rows and of the reply's rows in the rank's memory: the server reads the
former, and writes the latter before it sends the reply. The rank's end moves nothing.

Shape suffixes: N rows; what follows a row's N is free.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from hf_distca.pool.memory import PROBE_BYTES, Arena, Memory
from hf_distca.pool.messages import Call, NixlPeer, Places, RankHello, RankWelcome, Reply, TensorSpec
from hf_distca.pool.nixl import Piece
from hf_distca.pool.wire import Buffer, Channel, LinkLost, MismatchError, ProtocolError

PROBE_S = 5.0
"""For the first contact with a rank over NIXL, at most."""


class TcpTransport:
    """Either end of TCP, and the interface of every transport. The rank's end makes calls, which the server's answers.

    One thread may send while another receives. After an error a transport is of no more use. Rows are contiguous,
    [N, …] each, lie in the `Memory` of the transport, and may stand still for `timeout_s`; then LinkLost.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def send(
        self, message: Call | Reply, rows: Sequence[Tensor], timeout_s: float, answer: Sequence[Tensor] = ()
    ) -> None:
        """Send a message with its rows; the rows of the reply to a call are received into `answer`.

        Rows of a call must not change before its reply is received, rows of a reply may change when this returns.
        """
        self._channel.send(message, _buffers(rows), timeout_s)

    def receive(self, message: Call | Reply, size: int, rows: Sequence[Tensor], timeout_s: float) -> None:
        """Receive the rows of the last received message, which `size` bytes follow; ProtocolError if rows differ.

        After an error nobody writes to the rows any more.
        """
        _check_size(message, size, rows)
        self._channel.receive_payload(_buffers(rows), timeout_s)

    def close(self) -> None:
        """Let go of the other end; nobody uses this one any more, and its connection is down."""


class NixlRankEnd:
    """A rank's end of NIXL."""

    def __init__(self, channel: Channel, memory: Arena) -> None:
        self._channel, self._memory = channel, memory
        self._known = memory.metadata  # from the hello
        self._open: dict[int, list[Tensor]] = {}  # by id of the call; single operations on a dict are atomic

    def send(
        self, message: Call | Reply, rows: Sequence[Tensor], timeout_s: float, answer: Sequence[Tensor] = ()
    ) -> None:
        """See `TcpTransport.send`."""
        assert isinstance(message, Call)
        metadata = self._memory.metadata
        news = "" if metadata == self._known else metadata
        self._known = metadata
        self._open[message.call_id] = [*rows, *answer]
        places = Places(tuple(_pieces(rows)), tuple(_pieces(answer)), news)
        self._channel.send(replace(message, places=places), timeout_s=timeout_s)

    def receive(self, message: Call | Reply, size: int, rows: Sequence[Tensor], timeout_s: float) -> None:
        """See `TcpTransport.receive`: the server has written the rows before it sent the message."""
        self._open.pop(message.call_id, None)

    def close(self) -> None:
        """See `TcpTransport.close`."""
        for rows in self._open.values():
            self._memory.keep(rows)
        self._open.clear()


class NixlServerEnd:
    """A server's end of NIXL, which moves the rows; LinkLost where it cannot reach the rank."""

    def __init__(self, channel: Channel, memory: Arena, peer: NixlPeer) -> None:
        self._channel, self._memory, self._peer = channel, memory, peer
        self._answers: dict[int, Sequence[Piece]] = {}  # by id of the call; single operations on a dict are atomic
        memory.agent.meet(peer.name, peer.metadata)
        probe = memory.empty(TensorSpec("probe", "keys", (PROBE_BYTES // 2,), "bfloat16"), 1)
        try:
            self._move("READ", [probe], [(peer.probe, PROBE_BYTES)], PROBE_S)
        except BaseException:
            self.close()
            raise

    def send(
        self, message: Call | Reply, rows: Sequence[Tensor], timeout_s: float, answer: Sequence[Tensor] = ()
    ) -> None:
        """See `TcpTransport.send`."""
        self._move("WRITE", rows, self._answers.pop(message.call_id, []), timeout_s)
        self._channel.send(message, timeout_s=timeout_s)

    def receive(self, message: Call | Reply, size: int, rows: Sequence[Tensor], timeout_s: float) -> None:
        """See `TcpTransport.receive`."""
        assert isinstance(message, Call)
        places = message.places
        if places is None:
            raise ProtocolError(f"call {message.call_id} does not name the memory of its rows")
        _check_size(message, sum(size for _, size in places.rows), rows)
        if places.metadata:
            self._memory.agent.learn(self._peer.name, places.metadata)
        self._answers[message.call_id] = places.answer
        self._move("READ", rows, places.rows, timeout_s)

    def close(self) -> None:
        """See `TcpTransport.close`."""
        self._memory.agent.forget(self._peer.name)

    def _move(
        self, operation: Literal["READ", "WRITE"], rows: Sequence[Tensor], places: Sequence[Piece], timeout_s: float
    ) -> None:
        """Read or write rows; `places` are addresses of the rank, which NIXL compares with what it has registered."""
        own, memory = _pieces(rows), self._memory
        if [size for _, size in own] != [size for _, size in places]:
            raise ProtocolError("the memory that the rank names differs in size from the tensors")
        try:
            memory.agent.transfer(
                operation, own, memory.space, places, self._peer, timeout_s, gone=self._channel.hung_up
            )
        except BaseException:
            memory.keep(rows)
            raise


Transport = TcpTransport | NixlRankEnd | NixlServerEnd


def rank_hello(rank: int, ranks: int, memory: Memory) -> RankHello:
    """Return the hello of a rank whose rows lie in this memory."""
    if not isinstance(memory, Arena):
        return RankHello(rank, ranks, why_tcp=memory.why)
    peer = NixlPeer(memory.agent.name, memory.metadata, memory.probe.data_ptr(), *memory.space)
    return RankHello(rank, ranks, peer, required=memory.required)


def choose(channel: Channel, memory: Memory, hello: RankHello) -> tuple[Transport, RankWelcome]:
    """Choose the transport between a server and a rank: NIXL where both have it and it works, else TCP.

    Returns the server's end, and the welcome to the rank. MismatchError: one end uses NIXL only, the other cannot.
    """
    why = hello.why_tcp
    if not isinstance(memory, Arena):
        why = why or f"at the server: {memory.why}"
    elif hello.nixl is not None:
        try:
            return NixlServerEnd(channel, memory, hello.nixl), RankWelcome("NIXL", "both ends have it")
        except LinkLost as error:
            why = str(error)
    if hello.required:
        raise MismatchError(
            f"attention_server_transport='nixl' is set, but the server does not use NIXL: {why}; serve with "
            "--transport nixl, or set attention_server_transport='auto'"
        )
    if isinstance(memory, Arena) and memory.required:
        raise MismatchError(
            f"the server uses NIXL only, but this rank cannot: {why}; serve with --transport auto, or set "
            "attention_server_transport='nixl'"
        )
    return TcpTransport(channel), RankWelcome("TCP", why[:1000])


def rank_end(channel: Channel, memory: Memory, welcome: RankWelcome) -> Transport:
    """Return the rank's end of the transport that a server has chosen."""
    if isinstance(memory, Arena) and welcome.transport == "NIXL":
        return NixlRankEnd(channel, memory)
    return TcpTransport(channel)


def _buffers(rows: Sequence[Tensor]) -> list[Buffer]:
    """Return the host memory of contiguous tensors that have rows; NumPy has no bfloat16."""
    return [x_N.view(-1).view(torch.uint8).numpy().data for x_N in rows if x_N.numel()]


def _pieces(rows: Sequence[Tensor]) -> list[Piece]:
    """Return where contiguous tensors lie, without those that have no rows."""
    return [(x_N.data_ptr(), x_N.nbytes) for x_N in rows if x_N.numel()]


def _check_size(message: Call | Reply, size: int, rows: Sequence[Tensor]) -> None:
    expected = sum(x_N.nbytes for x_N in rows)
    if size != expected:
        raise ProtocolError(f"the rows of a {type(message).__name__} have {size} bytes, expected {expected}")
