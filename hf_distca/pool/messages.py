"""Messages between ranks, servers and the directory: plain structures, and a plan as raw tables.

A message travels as JSON: its name, its fields and the number of bytes that follow. `decode` checks the types of all
fields once. Sizes are compared with the plan before memory is allocated. Messages come only from peers that know the
run's token, and nothing further is checked.
"""

import json
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import SEGMENT, TASK, AttentionKind, Direction, Layout, NanoBatch, Plan
from hf_distca.planner.layout import layout_of_kind

WORKERS = 2**17
"""Most ranks and servers of a plan."""

PLAN_BYTES = 2**28
"""Most bytes of a plan's tables."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a call or a reply: name as in the kernel contract, kind of its rows, shape of one row, dtype."""

    name: str
    rows: Literal["queries", "keys"]
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class NixlPeer:
    """How a server reaches a rank over NIXL.

    Attributes:
        name: name of the rank's agent.
        metadata: the agent's, in base64.
        probe: address of a few bytes that the server may read.
        memory: NIXL's name of the memory that holds the rank's rows.
        device: number of the GPU that has this memory.
    """

    name: str
    metadata: str
    probe: int
    memory: Literal["DRAM", "VRAM"]
    device: int


@dataclass(frozen=True)
class Places:
    """Address and bytes of each tensor of a call (`rows`) and of its reply (`answer`) in a rank's memory.

    `metadata` is that of the rank's agent, in base64, where the agent has registered more memory since; else empty.
    """

    rows: tuple[tuple[int, int], ...]
    answer: tuple[tuple[int, int], ...]
    metadata: str


@dataclass(frozen=True)
class RankHello:
    """The first message of a rank to a server.

    Attributes:
        nixl: None where the rank's rows travel over TCP.
        why_tcp: the reason where they do.
        required: whether rows may travel only over NIXL.
    """

    rank: int
    ranks: int
    nixl: NixlPeer | None = None
    why_tcp: str = ""
    required: bool = False


@dataclass(frozen=True)
class RankWelcome:
    """A server's answer to a rank: the transport and the reason for it."""

    transport: Literal["TCP", "NIXL"]
    why: str


@dataclass(frozen=True)
class ServerHello:
    """The first message of a server to the directory; an empty `host` means the address from which it connects."""

    host: str
    port: int
    device: str
    pairs_per_second: float


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
    """Message of a server to the directory every two seconds."""


@dataclass(frozen=True)
class End:
    """Message of the directory to a server: training is over."""


@dataclass(frozen=True)
class PlanTables:
    """A micro-batch's plan, from rank 0 to the server that is worker `worker`; the tables follow.

    Attributes:
        plan_id: a later plan has a larger one.
        workers: number of workers, ranks first.
        kinds: kinds of attention that have tasks.
        tables: for each nano-batch its numbers of documents, segments, and tasks of every kind of attention.
    """

    plan_id: int
    ranks: int
    workers: int
    worker: int
    kinds: tuple[AttentionKind, ...]
    tables: tuple[tuple[int, ...], ...]

    @property
    def bytes(self) -> int:
        """Bytes of all tables; ValueError where the numbers make no plan."""
        if not 0 < self.ranks <= self.worker < self.workers <= WORKERS:
            raise ValueError(f"worker {self.worker} is no server of {self.ranks} ranks and {self.workers} workers")
        total = sum(count * dtype.itemsize for counts in self.tables for count, dtype in self._each(counts))
        if min((count for counts in self.tables for count in counts), default=-1) < 0 or total > PLAN_BYTES:
            raise ValueError(f"tables of {total} bytes are not from 0 to {PLAN_BYTES}")
        return total

    def read(self, payload: bytearray) -> Iterator[NanoBatch]:
        """Rebuild the nano-batches from their tables; ValueError where the tables make no plan."""
        offset = 0
        for counts in self.tables:
            found: list[NDArray[Any]] = []
            for count, dtype in self._each(counts):
                found.append(np.frombuffer(payload, dtype, count, offset))
                offset += found[-1].nbytes
            lengths, segments, *tasks = found
            _check_rows("segments", lengths, segments, "rank", self.ranks)
            layout, plans = Layout(lengths, segments, self.ranks), {}
            for kind, table in zip(self.kinds, tasks, strict=True):
                seen = layout_of_kind(layout, kind)
                _check_rows("tasks", seen.lengths, table, "worker", self.workers)
                plans[kind] = Plan(seen, table, self.workers, kind.window)
            yield NanoBatch(np.arange(len(lengths)), layout, plans)

    def _each(self, counts: Sequence[int]) -> list[tuple[int, np.dtype[Any]]]:
        dtypes = (np.dtype(np.int64), SEGMENT, *(TASK for _ in self.kinds))
        return list(zip(counts, dtypes, strict=True))


def _check_rows(name: str, lengths: NDArray[np.int64], table: NDArray[Any], holder: str, holders: int) -> None:
    """Raise ValueError unless a table has as many rows as the documents, and only rows and workers that exist."""
    document, start, stop, worker = (table[column] for column in ("document", "start", "stop", holder))
    least = min(numbers.min(initial=0) for numbers in (lengths, document, start, worker))
    exist = least == 0 and document.max(initial=-1) < len(lengths) and worker.max(initial=-1) < holders
    if not exist or np.any(start >= stop) or np.any(stop > lengths[document]):
        raise ValueError(f"the {name} of a plan have a document, rows or a {holder} that do not exist")
    if np.sum(stop - start) != lengths.sum():
        raise ValueError(f"the {name} of a plan do not cover its documents")


def plan_tables(
    plan_id: int, worker: int, nano_batches: Sequence[NanoBatch]
) -> tuple[PlanTables, list[NDArray[np.uint8]]]:
    """Return the message that sends a plan to one of its workers, and its tables as bytes.

    All nano-batches have the same kinds of attention.
    """
    kinds = tuple(nano_batches[0].plans)
    plan = nano_batches[0].plans[kinds[0]]
    tables = [
        [nano.layout.lengths, nano.layout.segments, *(nano.plans[kind].tasks for kind in kinds)]
        for nano in nano_batches
    ]
    counts = tuple(tuple(map(len, row)) for row in tables)
    message = PlanTables(plan_id, plan.layout.ranks, plan.workers, worker, kinds, counts)
    return message, [np.ascontiguousarray(table).view(np.uint8) for row in tables for table in row]


@dataclass(frozen=True)
class Call:
    """One core attention that a rank asks of a server; all ranks that have rows for it send the same fields.

    Forward: q, k, v go to the server, o and lse come back. Backward: q, do, o, lse, k, v go, dq, dk, dv come back.
    Each tensor travels whole. Rows of the queries' kind are in the order of `Routes.queries`, rows of the keys' kind
    in that of `Routes.keys`.

    Attributes:
        call_id: the same on every rank, larger for later calls.
        nano_batch: index of the plan's nano-batch.
        dtype: of the tensors; lse is float32, or float64 where this is.
        places: where this rank's rows lie; None where they follow the message.
    """

    plan_id: int
    call_id: int
    nano_batch: int
    kind: AttentionKind
    direction: Direction
    scale: float
    softcap: float | None
    dtype: Literal["float32", "bfloat16", "float16", "float64"]
    places: Places | None = field(default=None, compare=False)

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
        kind, wide = self.kind, "float64" if self.dtype == "float64" else "float32"
        return (
            TensorSpec("q", "queries", (kind.q_heads, kind.dim_qk), self.dtype),
            TensorSpec("k", "keys", (kind.kv_heads, kind.dim_qk), self.dtype),
            TensorSpec("v", "keys", (kind.kv_heads, kind.dim_v), self.dtype),
            TensorSpec("o", "queries", (kind.q_heads, kind.dim_v), self.dtype),
            TensorSpec("lse", "queries", (kind.q_heads,), wide),
        )


@dataclass(frozen=True)
class Reply:
    """Message beside the results of a call: seconds by the server's clock and query-key pairs of the tasks."""

    call_id: int
    seconds: float
    pairs: int


Message = RankHello | RankWelcome | ServerHello | ServerWelcome | Refused | Alive | End | PlanTables | Call | Reply

_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in typing.get_args(Message)}


def encode(message: Message, payload: int) -> bytes:
    """Encode a message that announces this number of payload bytes."""
    return json.dumps([type(message).__name__, message, payload], default=vars, allow_nan=False).encode()


def decode(text: bytes) -> tuple[Message, int]:
    """Return a received message and the number of bytes that follow it; ValueError where it is none."""
    try:
        name, fields, payload = json.loads(text)
        message: Message = _typed(_KINDS[name], fields)
        return message, int(_typed(int, payload))
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"a received message does not follow the protocol: {error}") from error


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
        kinds = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        return tuple(_typed(*each) for each in zip(kinds, value, strict=True))
    if kind is float and type(value) is int:
        return float(value)
    if value in inner if origin is Literal else type(value) is kind:
        return value
    raise ValueError(f"{value!r:.60} is not of type {kind}")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)
