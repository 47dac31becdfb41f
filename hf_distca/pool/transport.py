"""What carries the rows of a call between a rank and a server: TCP, or NIXL where both ends have it.

A message travels on the connection between the two (`wire`). The rows that belong to it are carried by a transport,
which may use that connection, or put into the message where the rows lie. Over NIXL a rank's call says where its rows
lie and where the reply's belong; the server reads the former, and writes the latter before it sends the reply. The
rank's end moves nothing.

Shape suffixes: N rows; what follows a row's N is free.
"""

import base64
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from hf_distca.pool.memory import PROBE_BYTES, Arena, HostMemory, Memory
from hf_distca.pool.messages import Call, NixlPeer, Places, Process, RankWelcome, Reply, TensorSpec
from hf_distca.pool.nixl import Piece, Region, Space, own_process
from hf_distca.pool.wire import Buffer, Channel, Frame, LinkLost, MismatchError, ProtocolError

PROBE_S = 5.0
"""For the first contact with a rank over NIXL, at most."""


class TcpTransport:
    """Rows that follow their message on its connection; either end, and what every transport is like.

    One thread may send while another receives. Every error leaves a transport unusable. Rows lie in a `Memory` of the
    same make. The rank's end makes calls and the server's end answers them.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def send(
        self, message: Call | Reply, rows: Sequence[Tensor], timeout_s: float, answer: Sequence[Tensor] = ()
    ) -> None:
        """Send a message with its rows, and return when the rows of a reply may change again.

        Rows of a call must not change before its reply is received. LinkLost: the other end is gone, or stood still.

        Args:
            message: to be sent.
            rows: [N, …] each, contiguous.
            timeout_s: nothing may move for so long.
            answer: [N, …] each, contiguous: what the rows of the reply to this call are received into.
        """
        self._channel.send(message, _buffers(rows), timeout_s)

    def receive(self, frame: Frame, rows: Sequence[Tensor], timeout_s: float) -> None:
        """Receive the rows that belong to the last message that has come, before the next one is received.

        Args:
            frame: the message, a call or a reply. ProtocolError where it has another number of bytes than the rows.
            rows: [N, …] each, contiguous. After an error nobody writes to them any more.
            timeout_s: nothing may move for so long.
        """
        _check_size(frame, frame.payload, rows)
        self._channel.receive_payload(_buffers(rows), timeout_s)

    def close(self) -> None:
        """Let go of the other end; nobody uses this one any more, and its connection is down."""


class NixlRankEnd:
    """A rank's end of NIXL; `peer` is the server's process. See `TcpTransport`."""

    def __init__(self, channel: Channel, memory: Arena, peer: Process | None) -> None:
        self._channel = channel
        self._memory = memory
        self._peer = peer
        self._told = memory.slabs  # with the hello
        self._open: dict[int, list[Tensor]] = {}  # by id of the call; what a dict does is atomic

    def send(
        self, message: Call | Reply, rows: Sequence[Tensor], timeout_s: float, answer: Sequence[Tensor] = ()
    ) -> None:
        """See `TcpTransport.send`."""
        assert isinstance(message, Call)
        more = self._told != (slabs := self._memory.slabs)
        self._told = slabs
        places = Places(tuple(_pieces(rows)), tuple(_pieces(answer)), _metadata(self._memory) if more else "")
        self._open[message.call_id] = [*rows, *answer]
        self._channel.send(replace(message, places=places), timeout_s=timeout_s)

    def receive(self, frame: Frame, rows: Sequence[Tensor], timeout_s: float) -> None:
        """See `TcpTransport.receive`: they are there before the message is."""
        assert isinstance(frame.message, Reply)
        self._open.pop(frame.message.call_id, None)

    def close(self) -> None:
        """See `TcpTransport.close`."""
        for rows in self._open.values():
            self._memory.keep(rows, self._peer)
        self._open.clear()


class NixlServerEnd:
    """A server's end of NIXL, which moves the rows; LinkLost where it cannot reach the rank. See `TcpTransport`."""

    def __init__(self, channel: Channel, memory: Arena, peer: NixlPeer) -> None:
        self._channel = channel
        self._memory = memory
        self._peer = peer
        self._answers: dict[int, list[Piece]] = {}  # by id of the call; what a dict does is atomic
        memory.agent.meet(_binary(peer.metadata), peer.name)
        probe = memory.empty(TensorSpec("probe", "keys", (PROBE_BYTES // 2,), "bfloat16"), 1)
        try:
            self._move("READ", [probe], [Piece(peer.probe, PROBE_BYTES)], PROBE_S)
        except BaseException:
            self.close()
            raise

    def send(
        self, message: Call | Reply, rows: Sequence[Tensor], timeout_s: float, answer: Sequence[Tensor] = ()
    ) -> None:
        """See `TcpTransport.send`."""
        self._move("WRITE", rows, self._answers.pop(message.call_id, []), timeout_s)
        self._channel.send(message, timeout_s=timeout_s)

    def receive(self, frame: Frame, rows: Sequence[Tensor], timeout_s: float) -> None:
        """See `TcpTransport.receive`."""
        assert isinstance(frame.message, Call)
        call_id, places = frame.message.call_id, frame.message.places
        if places is None:
            raise ProtocolError(f"call {call_id} does not name the memory of its rows")
        _check_size(frame, sum(size for _, size in places.rows), rows)
        if places.metadata:
            self._memory.agent.learn(_binary(places.metadata), self._peer.name)
        self._answers[call_id] = [Piece(*piece) for piece in places.answer]
        self._move("READ", rows, [Piece(*piece) for piece in places.rows], timeout_s)

    def close(self) -> None:
        """See `TcpTransport.close`."""
        self._memory.agent.forget(self._peer.name)

    def _move(
        self, operation: Literal["READ", "WRITE"], rows: Sequence[Tensor], places: Sequence[Piece], timeout_s: float
    ) -> None:
        """Read or write rows; `places` are addresses of the rank, which NIXL compares with what it has registered."""
        own = _pieces(rows)
        if [piece.size for piece in own] != [piece.size for piece in places]:
            raise ProtocolError("the memory that the rank names differs in size from the tensors")
        local, remote = Region(self._memory.space, own), Region(Space(self._peer.memory, self._peer.device), places)
        try:
            self._memory.agent.transfer(operation, local, remote, self._peer.name, timeout_s, self._channel.hung_up)
        except BaseException:
            self._memory.keep(rows, self._peer.process)
            raise


Transport = TcpTransport | NixlRankEnd | NixlServerEnd


def offer(memory: Memory) -> NixlPeer | None:
    """Return what a rank says of NIXL in its hello."""
    if not isinstance(memory, Arena):
        return None
    agent, space = memory.agent, memory.space
    kind: Literal["DRAM", "VRAM"] = "DRAM" if space.kind == "DRAM" else "VRAM"
    return NixlPeer(agent.name, _metadata(memory), memory.probe.data_ptr(), kind, space.device, own_process())


def choose(channel: Channel, memory: Memory, peer: NixlPeer | None) -> tuple[Transport, RankWelcome]:
    """Choose what carries rows to a rank, by what its hello says of NIXL: the server's end, and its welcome.

    NIXL is tried, by reading a few bytes of the rank, where both ends have it. MismatchError: it was asked for at this
    end and cannot be used.
    """
    try:
        if isinstance(memory, HostMemory):
            raise LinkLost(f"at the server: {memory.why}")
        if peer is None:
            raise LinkLost("the rank does not use NIXL")
        return NixlServerEnd(channel, memory, peer), RankWelcome("nixl", "both ends have it", own_process())
    except LinkLost as error:
        if isinstance(memory, Arena) and memory.required:
            raise MismatchError(
                f"the server uses NIXL only, but this rank cannot: {error}; serve with --transport auto, or set "
                "attention_server_transport='nixl'"
            ) from error
        return TcpTransport(channel), RankWelcome("tcp", str(error)[:1000])


def chosen(channel: Channel, memory: Memory, welcome: RankWelcome) -> tuple[Transport, str]:
    """Return the rank's end that fits a server's welcome, and for messages which it is and why.

    MismatchError: NIXL was asked for at this end and the server does not take it.
    """
    if isinstance(memory, Arena) and welcome.transport == "nixl":
        return NixlRankEnd(channel, memory, welcome.process), f"NIXL ({welcome.why})"
    if isinstance(memory, Arena) and memory.required:
        raise MismatchError(
            f"attention_server_transport='nixl' is set, but the server does not use NIXL: {welcome.why}; serve with "
            "--transport nixl, or set attention_server_transport='auto'"
        )
    return TcpTransport(channel), f"TCP ({memory.why if isinstance(memory, HostMemory) else welcome.why})"


def _buffers(rows: Sequence[Tensor]) -> list[Buffer]:
    """Return the host memory of contiguous tensors that have rows; NumPy has no bfloat16."""
    return [x_N.view(-1).view(torch.uint8).numpy().data for x_N in rows if x_N.numel()]


def _pieces(rows: Sequence[Tensor]) -> list[Piece]:
    """Where contiguous tensors lie, those without rows left out."""
    return [Piece(x_N.data_ptr(), x_N.nbytes) for x_N in rows if x_N.numel()]


def _check_size(frame: Frame, size: int, rows: Sequence[Tensor]) -> None:
    expected = sum(x_N.nbytes for x_N in rows)
    if size != expected:
        name = type(frame.message).__name__
        raise ProtocolError(f"the rows of a {name} have {size} bytes, expected {expected}")


def _metadata(memory: Arena) -> str:
    return base64.b64encode(memory.agent.metadata()).decode()


def _binary(metadata: str) -> bytes:
    try:
        return base64.b64decode(metadata, validate=True)
    except ValueError as error:
        raise ProtocolError("the metadata of a NIXL agent is not base64") from error
