"""Messages between ranks, servers and the directory: plain structures, and a plan as raw tables.

A message travels as JSON: its name, its fields and the number of bytes that follow. `decode` checks the types of all
fields once. What a message says of sizes is compared with the plan before memory is allocated for it. Messages come
only from peers that know the run's token, and nothing further is checked.
"""

import json
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, is_dataclass
from functools import cache
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import SEGMENT, TASK, AttentionKind, Direction, Layout, NanoBatch, Plan
from hf_distca.planner.layout import layout_of_kind

WORKERS = 2**17
"""Ranks and servers of a plan, at most."""

PLAN_BYTES = 2**28
"""Tables of a plan, at most."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
"""Bytes of a number, by the name of its dtype."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a call or a reply: name as in the kernel contract, kind of its rows, shape of one row, dtype."""

    name: str
    rows: Literal["queries", "keys"]
    shape: tuple[int, ...]
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Process:
    """A process that peers can tell from every other: number and start within a system's space of numbers."""

    system: str
    number: int
    started: int


@dataclass(frozen=True)
class NixlPeer:
    """How a server reaches a rank over NIXL.

    Attributes:
        name: of the rank's agent.
        metadata: of the agent, in base64.
        probe: address of a few bytes that the server may read.
        memory: NIXL's name of the memory that holds the rank's rows.
        device: number of the GPU that has this memory.
        process: the rank's.
    """

    name: str
    metadata: str
    probe: int
    memory: Literal["DRAM", "VRAM"]
    device: int
    process: Process

    def __post_init__(self) -> None:
        _require(0 < self.probe < 2**63 and 0 <= self.device < 2**16, "the probe is at no address of a device")


@dataclass(frozen=True)
class Places:
    """Address and bytes of each tensor of a call (`rows`) and of its reply (`answer`) in a rank's memory.

    `metadata` is that of the rank's agent, in base64, where it has registered more memory since; else empty.
    """

    rows: tuple[tuple[int, ...], ...]
    answer: tuple[tuple[int, ...], ...]
    metadata: str

    def __post_init__(self) -> None:
        for piece in (*self.rows, *self.answer):
            _require(len(piece) == 2 and min(piece) > 0 and max(piece) < 2**63, f"{piece} is no address and size")


@dataclass(frozen=True)
class RankHello:
    """The first message of a rank to a server; `nixl` is None where the rank's rows travel over TCP."""

    rank: int
    ranks: int
    nixl: NixlPeer | None = None

    def __post_init__(self) -> None:
        _require(0 <= self.rank < self.ranks <= WORKERS, f"rank {self.rank} of {self.ranks} is none")


@dataclass(frozen=True)
class RankWelcome:
    """A server's answer to a rank: which transport it takes and why; `process` is the server's, for NIXL."""

    transport: Literal["tcp", "nixl"]
    why: str
    process: Process | None = None


@dataclass(frozen=True)
class ServerHello:
    """The first message of a server to the directory; an empty `host` means the address from which it connects."""

    host: str
    port: int
    device: str
    pairs_per_second: float

    def __post_init__(self) -> None:
        _require(0 < self.port < 65536, f"port {self.port} is none")
        _require(0 < self.pairs_per_second < 1e30, f"{self.pairs_per_second} pairs a second are no speed")


@dataclass(frozen=True)
class ServerWelcome:
    """The directory's answer to a server: the id of its membership."""

    server: int


@dataclass(frozen=True)
class Refused:
    """The last message before a connection ends, with the reason for people."""

    reason: str


@dataclass(frozen=True)
class Alive:
    """A server's word to the directory, every two seconds."""


@dataclass(frozen=True)
class End:
    """The directory's word to a server: training is over."""


@dataclass(frozen=True)
class PlanTables:
    """A micro-batch's plan, from rank 0 to the server that is worker `worker`; the tables follow.

    Attributes:
        plan_id: a later plan has a larger one.
        workers: number of workers, ranks first.
        kinds: the fields of each `AttentionKind` that has tasks.
        tables: for each nano-batch its numbers of documents, segments, and tasks of every kind of attention.
    """

    plan_id: int
    ranks: int
    workers: int
    worker: int
    kinds: tuple[tuple[int | None, ...], ...]
    tables: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        _require(0 < self.ranks <= self.worker < self.workers <= WORKERS, f"worker {self.worker} is no server")
        _require(
            all(len(counts) == 2 + len(self.kinds) and min(counts) >= 0 for counts in self.tables),
            "each nano-batch has documents, segments and the tasks of every kind",
        )
        _require(self.bytes <= PLAN_BYTES, f"tables of {self.bytes} bytes are more than {PLAN_BYTES}")

    @property
    def bytes(self) -> int:
        """Bytes of all tables."""
        return sum(count * dtype.itemsize for counts in self.tables for count, dtype in self._each(counts))

    def read(self, payload: bytearray) -> tuple[NanoBatch, ...]:
        """Rebuild the nano-batches from their tables."""
        kinds = [AttentionKind(*cast(tuple[Any, ...], numbers)) for numbers in self.kinds]
        offset, nano_batches = 0, []
        for counts in self.tables:
            found: list[NDArray[Any]] = []
            for count, dtype in self._each(counts):
                found.append(np.frombuffer(payload, dtype, count, offset))
                offset += found[-1].nbytes
            lengths, segments, *tasks = found
            layout, plans = Layout(lengths, segments, self.ranks), {}
            for kind, table in zip(kinds, tasks, strict=True):
                plans[kind] = Plan(layout_of_kind(layout, kind), table, self.workers, kind.window)
            nano_batches.append(NanoBatch(np.arange(len(lengths)), layout, plans))
        return tuple(nano_batches)

    def _each(self, counts: Sequence[int]) -> list[tuple[int, np.dtype[Any]]]:
        dtypes = (np.dtype(np.int64), SEGMENT, *(TASK for _ in self.kinds))
        return list(zip(counts, dtypes, strict=True))


def plan_tables(
    plan_id: int, worker: int, nano_batches: Sequence[NanoBatch]
) -> tuple[PlanTables, list[NDArray[np.uint8]]]:
    """Return the message that tells a plan to one of its workers, and its tables as bytes.

    All nano-batches have the same kinds of attention.
    """
    kinds = list(nano_batches[0].plans)
    plan = nano_batches[0].plans[kinds[0]]
    tables = [
        [nano.layout.lengths, nano.layout.segments, *(nano.plans[kind].tasks for kind in kinds)]
        for nano in nano_batches
    ]
    message = PlanTables(
        plan_id,
        plan.layout.ranks,
        plan.workers,
        worker,
        tuple(astuple(kind) for kind in kinds),
        tuple(tuple(len(table) for table in row) for row in tables),
    )
    return message, [np.ascontiguousarray(table).view(np.uint8) for row in tables for table in row]


@dataclass(frozen=True)
class Call:
    """One core attention that a rank asks of a server; all ranks that have rows for it send the same fields.

    Forward: q, k, v go to the server, o and lse come back. Backward: q, do, o, lse, k, v go, dq, dk, dv come back.
    Each tensor travels whole. Rows of the queries' kind are in the order of `Routes.queries`, rows of the keys' kind
    in that of `Routes.keys`. `AttentionParams` and `AttentionKind` describe the other fields.

    Attributes:
        call_id: the same on every rank, larger for later calls.
        nano_batch: index of the plan's nano-batch.
        dtype: of the tensors; lse is float32, or float64 where this is.
        places: where this rank's rows lie; None where they follow the message.
    """

    plan_id: int
    call_id: int
    nano_batch: int
    window: int | None
    direction: Direction
    scale: float
    softcap: float | None
    q_heads: int
    kv_heads: int
    dim_qk: int
    dim_v: int
    dtype: Literal["float32", "bfloat16", "float16", "float64"]
    chunk: int | None = None
    places: Places | None = field(default=None, compare=False)

    @property
    def kind(self) -> AttentionKind:
        """The layer's kind of attention."""
        return AttentionKind(self.window, self.q_heads, self.kv_heads, self.dim_qk, self.dim_v, self.chunk)

    def request(self) -> tuple[TensorSpec, ...]:
        """List the tensors that a rank sends."""
        q, k, v, o, lse = self._tensors()
        if self.direction == "forward":
            return q, k, v
        return q, TensorSpec("do", o.rows, o.shape, o.dtype), o, lse, k, v

    def reply(self) -> tuple[TensorSpec, ...]:
        """List the tensors that a rank gets back."""
        q, k, v, o, lse = self._tensors()
        if self.direction == "forward":
            return o, lse
        return tuple(TensorSpec(f"d{like.name}", like.rows, like.shape, like.dtype) for like in (q, k, v))

    def _tensors(self) -> tuple[TensorSpec, TensorSpec, TensorSpec, TensorSpec, TensorSpec]:
        wide = "float64" if self.dtype == "float64" else "float32"
        return (
            TensorSpec("q", "queries", (self.q_heads, self.dim_qk), self.dtype),
            TensorSpec("k", "keys", (self.kv_heads, self.dim_qk), self.dtype),
            TensorSpec("v", "keys", (self.kv_heads, self.dim_v), self.dtype),
            TensorSpec("o", "queries", (self.q_heads, self.dim_v), self.dtype),
            TensorSpec("lse", "queries", (self.q_heads,), wide),
        )


@dataclass(frozen=True)
class Reply:
    """A server's word beside the results of a call: seconds by its clock and query-key pairs of the tasks."""

    call_id: int
    seconds: float
    pairs: int


Message = RankHello | RankWelcome | ServerHello | ServerWelcome | Refused | Alive | End | PlanTables | Call | Reply

_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in typing.get_args(Message)}


def encode(message: Message, payload: int) -> bytes:
    """Encode a message that announces this number of payload bytes."""
    return json.dumps([type(message).__name__, message, payload], default=vars, allow_nan=False).encode()


def decode(text: bytes) -> tuple[Message, int]:
    """Return a message that has come and the number of bytes that follow it; ValueError where it is none."""
    try:
        name, fields, payload = json.loads(text, parse_constant=_no_number)
        message: Message = _typed(_KINDS[name], fields)
        return message, int(_typed(int, payload))
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"a received message does not follow the protocol: {error}") from error


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def _typed(kind: Any, value: Any) -> Any:
    """Convert a JSON value to its annotated type; raise ValueError if it has another type."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind) and isinstance(value, dict):
        message = cast(type, kind)
        hints = _hints(message)
        return message(**{name: _typed(hints[name], each) for name, each in value.items()})
    if origin is types.UnionType:
        return None if value is None and types.NoneType in inner else _typed(inner[0], value)
    if origin is tuple and isinstance(value, list):
        return tuple(_typed(inner[0], each) for each in value)
    if kind is float and type(value) is int:
        return float(value)
    if value in inner if origin is Literal else type(value) is kind:
        return value
    raise ValueError(f"{value!r:.60} is not of type {kind}")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _require(good: bool, otherwise: str) -> None:
    if not good:
        raise ValueError(otherwise)
