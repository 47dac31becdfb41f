"""The two ends of rows over NIXL. See `Transport`.

A rank's call says where its rows lie and where the reply's belong; the server reads the former, and writes the latter
before it sends the reply's word. The rank's end moves nothing.

Shape suffixes: N rows; what follows a row's N is free.
"""

import base64
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import Tensor

from hf_distca.pool.messages.fields import Fields
from hf_distca.pool.messages.tensor_spec import TensorSpec
from hf_distca.pool.transport.nixl.agent import Piece, Region, Space
from hf_distca.pool.transport.nixl.arena import PROBE_BYTES, Arena
from hf_distca.pool.transport.nixl.process import Process
from hf_distca.pool.wire.channel import Channel, Frame
from hf_distca.pool.wire.errors import ProtocolError

TENSORS = 16
"""Of a call or its reply, at most."""

PROBE_S = 5.0
"""For the first contact with a rank, at most."""

METADATA_LIMIT = 32 * 1024
"""Characters of an agent's metadata, at most."""

_ROWS, _ANSWER, _BYTES, _MEMORY = "nixl_rows", "nixl_answer", "nixl_bytes", "nixl_memory"


@dataclass(frozen=True)
class Introduction:
    """What a rank says of its agent in its hello.

    Attributes:
        name: of the agent.
        metadata: of the agent, in base64.
        probe: address of its `Arena.probe`.
        space: which memory its rows are in.
        process: which process it is in.
    """

    name: str
    metadata: str
    probe: int
    space: Space
    process: Process

    @classmethod
    def of(cls, memory: Arena) -> "Introduction":
        """Of this process's agent."""
        metadata = base64.b64encode(memory.agent.metadata()).decode()
        return cls(memory.agent.name, metadata, memory.probe.data_ptr(), memory.space, Process.own())

    def header(self) -> dict[str, Any]:
        """As a part of a message's header."""
        return asdict(self) | {"space": self.space._asdict()}

    @classmethod
    def read(cls, header: Any) -> "Introduction":
        """From a part of a message's header.

        Raises:
            ProtocolError: it is not sane.
        """
        fields = Fields("a NIXL agent", header if isinstance(header, dict) else {})
        return cls(
            name=fields.text("name", 64),
            metadata=fields.text("metadata", METADATA_LIMIT),
            probe=fields.whole("probe", 1),
            space=_read_space(header.get("space")),
            process=read_process(header.get("process")),
        )


def read_process(header: Any) -> Process:
    """A peer's process from a part of a message's header.

    Raises:
        ProtocolError: it is not sane.
    """
    fields = Fields("a process", header if isinstance(header, dict) else {})
    return Process(fields.text("system", 128), fields.whole("number", 1), fields.whole("started"))


def _read_space(header: Any) -> Space:
    fields = Fields("a space of memory", header if isinstance(header, dict) else {})
    return Space(fields.one_of("kind", ("DRAM", "VRAM")), fields.whole("device"))


class NixlRankEnd:
    """A rank's end.

    Args:
        channel: the connection of the messages.
        memory: where the rows lie.
        peer: the server's process.
    """

    def __init__(self, channel: Channel, memory: Arena, peer: Process) -> None:
        self._channel = channel
        self._memory = memory
        self._peer = peer
        self._told = memory.slabs  # with the hello
        self._lock = threading.Lock()
        self._open: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    def send(
        self,
        kind: int,
        header: dict[str, Any],
        rows: Sequence[Tensor],
        sequence: int,
        timeout_s: float,
        answer: Sequence[Tensor] = (),
    ) -> None:
        """See `Transport.send`."""
        places: dict[str, Any] = {_ROWS: _pieces(rows), _ANSWER: _pieces(answer)}
        if self._told != (slabs := self._memory.slabs):
            places[_MEMORY] = base64.b64encode(self._memory.agent.metadata()).decode()
            self._told = slabs
        with self._lock:
            self._open[sequence] = [*rows], [*answer]
        self._channel.send(kind, {**header, **places}, sequence=sequence, timeout_s=timeout_s)

    def size(self, message: Frame) -> int:
        """See `Transport.size`."""
        return Fields("a message with rows", message.header).whole(_BYTES)

    def receive(self, message: Frame, rows: Sequence[Tensor], timeout_s: float) -> None:
        """See `Transport.receive`: they are there before the message is."""
        _check_size(message, self.size(message), rows)
        with self._lock:
            self._open.pop(message.sequence, None)

    def close(self) -> None:
        """See `Transport.close`."""
        with self._lock:
            under_way, self._open = self._open, {}
        for rows, answer in under_way.values():
            self._memory.keep([*rows, *answer], self._peer)


class NixlServerEnd:
    """A server's end, which moves the rows.

    Args:
        channel: the connection of the messages.
        memory: where the rows lie.
        peer: the rank's agent.

    Raises:
        LinkLost: the rank cannot be reached over NIXL.
    """

    def __init__(self, channel: Channel, memory: Arena, peer: Introduction) -> None:
        self._channel = channel
        self._memory = memory
        self._peer = peer
        self._lock = threading.Lock()
        self._answers: dict[int, list[Piece]] = {}
        memory.agent.meet(_metadata(peer.metadata), peer.name)
        probe = memory.empty(TensorSpec("probe", "keys", (PROBE_BYTES // 2,), "bfloat16"), 1)
        try:
            self._move("READ", self._local([probe]), self._remote([Piece(peer.probe, PROBE_BYTES)]), [probe], PROBE_S)
        except BaseException:
            self.close()
            raise

    def send(
        self,
        kind: int,
        header: dict[str, Any],
        rows: Sequence[Tensor],
        sequence: int,
        timeout_s: float,
        answer: Sequence[Tensor] = (),
    ) -> None:
        """See `Transport.send`."""
        with self._lock:
            places = self._answers.pop(sequence, [])
        local, remote = self._local(rows), self._remote(places)
        if local.sizes != remote.sizes:
            raise ProtocolError("the rank has room for other rows than those of the reply")
        self._move("WRITE", local, remote, rows, timeout_s)
        self._channel.send(kind, {**header, _BYTES: sum(local.sizes)}, sequence=sequence, timeout_s=timeout_s)

    def size(self, message: Frame) -> int:
        """See `Transport.size`."""
        return sum(piece.size for piece in _read_pieces(message, _ROWS))

    def receive(self, message: Frame, rows: Sequence[Tensor], timeout_s: float) -> None:
        """See `Transport.receive`."""
        local, remote = self._local(rows), self._remote(_read_pieces(message, _ROWS))
        _check_size(message, sum(remote.sizes), rows)
        if local.sizes != remote.sizes:
            raise ProtocolError(f"the rows of a {message.kind.name} are cut in another way than its tensors")
        if _MEMORY in message.header:
            metadata = _metadata(Fields("a call", message.header).text(_MEMORY, METADATA_LIMIT))
            self._memory.agent.learn(metadata, self._peer.name)
        with self._lock:
            self._answers[message.sequence] = _read_pieces(message, _ANSWER)
        self._move("READ", local, remote, rows, timeout_s)

    def close(self) -> None:
        """See `Transport.close`."""
        self._memory.agent.forget(self._peer.name)

    def _local(self, rows: Sequence[Tensor]) -> Region:
        return Region(self._memory.space, _pieces(rows))

    def _remote(self, pieces: list[Piece]) -> Region:
        return Region(self._peer.space, pieces)

    def _move(
        self,
        operation: Literal["READ", "WRITE"],
        local: Region,
        remote: Region,
        rows: Sequence[Tensor],
        timeout_s: float,
    ) -> None:
        try:
            self._memory.agent.transfer(operation, local, remote, self._peer.name, timeout_s, self._channel.hung_up)
        except BaseException:
            self._memory.keep(rows, self._peer.process)
            raise


def _metadata(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise ProtocolError("the metadata of a NIXL agent is not base64") from error


def _pieces(rows: Sequence[Tensor]) -> list[Piece]:
    """Where contiguous tensors lie, those without rows left out."""
    return [Piece(x_N.data_ptr(), x_N.nbytes) for x_N in rows if x_N.numel()]


def _read_pieces(message: Frame, name: str) -> list[Piece]:
    """Where a peer's rows lie; of use in descriptors of remote memory only, which NIXL checks.

    Raises:
        ProtocolError: it is not sane.
    """
    fields = Fields("a message with rows", message.header)
    pieces = fields.rows(name, 0, TENSORS)
    sane = all(
        len(piece) == 2 and all(type(number) is int and 0 < number < 2**63 for number in piece) for piece in pieces
    )
    fields.require(sane, name, "addresses and sizes")
    return [Piece(*piece) for piece in pieces]


def _check_size(message: Frame, size: int, rows: Sequence[Tensor]) -> None:
    expected = sum(x_N.nbytes for x_N in rows)
    if size != expected:
        raise ProtocolError(f"the rows of a {message.kind.name} have {size} bytes, expected {expected}")
