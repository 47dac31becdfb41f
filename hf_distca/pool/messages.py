"""Messages between ranks, servers and the directory: plain structures, and a plan as raw tables.

A message travels as JSON: its name, its fields and the number of bytes that follow. `decode` checks
the types of all fields, and receivers compare sizes before they allocate memory. Peers know the
run's token: no more is checked.
"""

import json
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from typing import Any, Literal

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
    """How a server reaches a rank over NIXL: the rank's agent, and a few bytes of its memory (`probe`) to try."""

    name: str
    metadata: str
    probe: int
    memory: Literal["DRAM", "VRAM"]
    device: int


@dataclass(frozen=True)
class Places:
    """Address and bytes of each tensor of a call (`rows`) and of its reply (`answer`) in a rank's memory."""

    rows: tuple[tuple[int, int], ...]
    answer: tuple[tuple[int, int], ...]
    metadata: str  # empty unless the rank has registered more memory since its last call


@dataclass(frozen=True)
class RankHello:
    """The first message of a rank to a server."""

    rank: int
    nixl: NixlPeer | None = None
    why_tcp: str = ""  # the reason why rows travel over TCP, without `nixl`
    required: bool = False  # rows may travel only over NIXL


@dataclass(frozen=True)
class RankWelcome:
    """A server's answer to a rank: the transport and the reason for it."""

    transport: Literal["TCP", "NIXL"]
    why: str


@dataclass(frozen=True)
class ServerHello:
    """The first message of a server to the directory.

    An empty `host` means the address from which it connects.
    """

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
    """A micro-batch's plan, from rank 0 to the server that is worker `worker`.

    The tables follow.
    """

    plan_id: int  # a later plan has a larger one
    ranks: int
    workers: int
    worker: int
    kinds: tuple[AttentionKind, ...]
    tables: tuple[
        tuple[int, ...], ...
    ]  # of a nano-batch: numbers of documents, segments and tasks of every kind

    @property
    def bytes(self) -> int:
        """Bytes of all tables; ValueError: the numbers make no plan."""
        if not 0 < self.ranks <= self.worker < self.workers <= WORKERS:
            raise ValueError(
                f"worker {self.worker} is no server of {self.ranks} ranks and {self.workers} "
                "workers"
            )
        sizes = [
            count * dtype.itemsize for counts in self.tables for count, dtype in self._each(counts)
        ]
        if min(sizes, default=-1) < 0 or sum(sizes) > PLAN_BYTES:
            raise ValueError(f"tables of {sum(sizes)} bytes are not from 0 to {PLAN_BYTES}")
        return sum(sizes)

    def read(self, payload: bytearray) -> Iterator[tuple[int, AttentionKind, Plan]]:
        """Rebuild the plan of each nano-batch and kind of attention from the tables."""
        offset = 0
        for nano_batch, counts in enumerate(self.tables):
            found: list[NDArray[Any]] = []
            for count, dtype in self._each(counts):
                found.append(np.frombuffer(payload, dtype, count, offset))
                offset += found[-1].nbytes
            lengths, segments, *tasks = found
            layout = Layout(lengths, segments, self.ranks)
            for kind, table in zip(self.kinds, tasks, strict=True):
                yield (
                    nano_batch,
                    kind,
                    Plan(layout_of_kind(layout, kind), table, self.workers, kind.window),
                )

    def _each(self, counts: Sequence[int]) -> Iterator[tuple[int, np.dtype[Any]]]:
        return zip(counts, (np.dtype(np.int64), SEGMENT, *(TASK for _ in self.kinds)), strict=True)


def plan_tables(
    plan_id: int, worker: int, nano_batches: Sequence[NanoBatch]
) -> tuple[PlanTables, list[NDArray[np.uint8]]]:
    """Return the message that sends a plan to one of its workers, and the tables that follow."""
    plans = nano_batches[0].plans
    tables = [
        [nano.layout.lengths, nano.layout.segments, *(nano.plans[kind].tasks for kind in plans)]
        for nano in nano_batches
    ]
    counts = tuple(tuple(map(len, row)) for row in tables)
    plan = next(iter(plans.values()))
    message = PlanTables(plan_id, plan.layout.ranks, plan.workers, worker, tuple(plans), counts)
    return message, [np.ascontiguousarray(table).view(np.uint8) for row in tables for table in row]


@dataclass(frozen=True)
class Call:
    """One core attention that a rank asks of a server.

    All ranks that have rows for it send the same fields.

    Rows are in the order of `Routes.queries` and `Routes.keys`. They follow the message, or lie in
    `places`.
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

    def request(self) -> list[TensorSpec]:
        """List the tensors that a rank sends, in the order in which they travel."""
        names = (
            ("q", "k", "v") if self.direction == "forward" else ("q", "do", "o", "lse", "k", "v")
        )
        return list(map(self._spec, names))

    def reply(self) -> list[TensorSpec]:
        """List the tensors that a rank gets back."""
        return list(
            map(self._spec, ("o", "lse") if self.direction == "forward" else ("dq", "dk", "dv"))
        )

    def _spec(self, name: str) -> TensorSpec:
        kind, like = self.kind, name.removeprefix("d")
        if like == "lse":
            dtype = "float64" if self.dtype == "float64" else "float32"
            return TensorSpec(name, "queries", (kind.q_heads,), dtype)
        keys = like in ("k", "v")
        shape = (
            kind.kv_heads if keys else kind.q_heads,
            kind.dim_qk if like in ("q", "k") else kind.dim_v,
        )
        return TensorSpec(name, "keys" if keys else "queries", shape, self.dtype)


@dataclass(frozen=True)
class Reply:
    """Message beside the results of a call: seconds by the server's clock and query-key pairs of the tasks."""

    call_id: int
    seconds: float
    pairs: int


Message = (
    RankHello
    | RankWelcome
    | ServerHello
    | ServerWelcome
    | Refused
    | Alive
    | End
    | PlanTables
    | Call
    | Reply
)

_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in typing.get_args(Message)}


def encode(message: Message, payload: int) -> bytes:
    """Encode a message that announces this number of payload bytes."""
    return json.dumps(
        [type(message).__name__, message, payload], default=vars, allow_nan=False
    ).encode()


def decode(text: bytes) -> tuple[Message, int]:
    """Return a received message and the number of bytes that follow it.

    ValueError where it is none.
    """
    try:
        name, fields, payload = json.loads(text)
        message: Message = _typed(_KINDS[name], fields)
        return message, int(_typed(int, payload))
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"a received message does not follow the protocol: {error}") from error


def _typed(kind: Any, value: Any) -> Any:
    """Convert a JSON value to its annotated type; raise ValueError if it has another type."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        return kind(**{name: _typed(_hints(kind)[name], each) for name, each in value.items()})
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


_hints = cache(typing.get_type_hints)
