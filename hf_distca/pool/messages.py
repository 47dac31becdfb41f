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

from hf_distca.plan import (
    SEGMENT,
    TASK,
    AttentionKind,
    Branches,
    Direction,
    Layout,
    NanoBatch,
    Plan,
)
from hf_distca.planner.layout import layout_of_kind

WORKERS = 2**17
"""Most ranks and servers of a plan."""
PLAN_BYTES = 2**28
"""Most bytes of a plan's tables."""
NO_BRANCHES = Branches(np.zeros(0, np.int64), np.zeros(0, np.int64))
"""Sent in place of branches without prefix sharing."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a call or a reply."""

    name: str  # as in the kernel contract
    rows: Literal["queries", "keys"]  # kind of its rows
    shape: tuple[int, ...]  # of one row
    dtype: str


@dataclass(frozen=True)
class NixlPeer:
    """What a server must know to reach a rank's memory over NIXL."""

    name: str  # of the rank's agent
    metadata: str  # of the agent, in base64
    probe: int  # address of a few bytes that the server reads to try the link
    memory: Literal["DRAM", "VRAM"]
    device: int


@dataclass(frozen=True)
class Places:
    """Address and bytes of each tensor of a call and of its reply in a rank's memory."""

    rows: tuple[tuple[int, int], ...]  # of the call
    answer: tuple[tuple[int, int], ...]  # of the reply
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
    # A tuple for each nano-batch: its numbers of documents, of parents and of first rows (both 0 if
    # there is no prefix sharing), of segments, and of tasks of each kind.
    tables: tuple[tuple[int, ...], ...]

    @property
    def bytes(self) -> int:
        """Bytes of all tables; ValueError: the numbers make no plan."""
        if not 0 < self.ranks <= self.worker < self.workers <= WORKERS:
            raise ValueError(
                f"worker {self.worker} is no server of {self.ranks} ranks and {self.workers} "
                "workers"
            )
        sizes = [
            count * dtype.itemsize
            for counts in self.tables
            for count, dtype in self._counts_and_dtypes(counts)
        ]
        if min(sizes, default=-1) < 0 or sum(sizes) > PLAN_BYTES:
            raise ValueError(f"tables of {sum(sizes)} bytes are not from 0 to {PLAN_BYTES}")
        return sum(sizes)

    def read(self, payload: bytearray) -> Iterator[tuple[int, AttentionKind, Plan]]:
        """Rebuild the plan of each nano-batch and kind of attention from the tables."""
        offset = 0
        for nano_batch, counts in enumerate(self.tables):
            tables: list[NDArray[Any]] = []
            for count, dtype in self._counts_and_dtypes(counts):
                table = np.frombuffer(payload, dtype, count, offset)
                offset += table.nbytes
                tables.append(table)
            lengths, parents, starts, segments, *task_tables = tables
            branches = Branches(parents, starts) if len(parents) else None
            layout = Layout(lengths, segments, self.ranks, branches)
            for kind, tasks in zip(self.kinds, task_tables, strict=True):
                kind_layout = layout_of_kind(layout, kind)
                yield nano_batch, kind, Plan(kind_layout, tasks, self.workers, kind.window)

    def _counts_and_dtypes(self, counts: Sequence[int]) -> Iterator[tuple[int, np.dtype[Any]]]:
        """Yield the number of entries, and the dtype, of each table of a nano-batch."""
        numbers = np.dtype(np.int64)
        dtypes = [numbers, numbers, numbers, SEGMENT] + [TASK] * len(self.kinds)
        return zip(counts, dtypes, strict=True)


def plan_tables(
    plan_id: int, worker: int, nano_batches: Sequence[NanoBatch]
) -> tuple[PlanTables, list[NDArray[np.uint8]]]:
    """Return the message that sends a plan to one of its workers, and the tables that follow."""
    first_plans = nano_batches[0].plans
    kinds = tuple(first_plans)
    plan = first_plans[kinds[0]]
    counts: list[tuple[int, ...]] = []
    payload: list[NDArray[np.uint8]] = []
    for nano_batch in nano_batches:
        task_tables = [nano_batch.plans[kind].tasks for kind in kinds]
        layout = nano_batch.layout
        branches = layout.branches or NO_BRANCHES
        document_tables = [layout.lengths, branches.parents, branches.starts]
        tables = [*document_tables, layout.segments, *task_tables]
        counts.append(tuple(len(table) for table in tables))
        payload += [np.ascontiguousarray(table).view(np.uint8) for table in tables]
    message = PlanTables(plan_id, plan.layout.ranks, plan.workers, worker, kinds, tuple(counts))
    return message, payload


_REQUESTED = {"forward": ("q", "k", "v"), "backward": ("q", "do", "o", "lse", "k", "v")}
_REPLIED = {"forward": ("o", "lse"), "backward": ("dq", "dk", "dv")}
"""Names of the tensors of a call and of its reply, by the direction."""


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
        return [self._spec(name) for name in _REQUESTED[self.direction]]

    def reply(self) -> list[TensorSpec]:
        """List the tensors that a rank gets back."""
        return [self._spec(name) for name in _REPLIED[self.direction]]

    def _spec(self, name: str) -> TensorSpec:
        """Return the shape and dtype of a tensor by name; gradients have it too."""
        kind = self.kind
        tensor = name.removeprefix("d")
        if tensor == "lse":
            dtype = "float64" if self.dtype == "float64" else "float32"
            return TensorSpec(name, "queries", (kind.q_heads,), dtype)
        dim = kind.dim_qk if tensor in ("q", "k") else kind.dim_v
        if tensor in ("k", "v"):
            return TensorSpec(name, "keys", (kind.kv_heads, dim), self.dtype)
        return TensorSpec(name, "queries", (kind.q_heads, dim), self.dtype)


@dataclass(frozen=True)
class Reply:
    """Message beside the results of a call."""

    call_id: int
    seconds: float  # of the computation, by the server's clock
    pairs: int  # query-key pairs of the tasks


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
    fields = [type(message).__name__, message, payload]
    return json.dumps(fields, default=vars, allow_nan=False).encode()


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
    origin = typing.get_origin(kind)
    parameters = typing.get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        hints = _hints(kind)
        return kind(**{name: _typed(hints[name], content) for name, content in value.items()})
    if origin is types.UnionType:  # a type or None
        is_none = value is None and types.NoneType in parameters
        return None if is_none else _typed(parameters[0], value)
    if origin is tuple and isinstance(value, list):
        kinds = parameters[:1] * len(value) if parameters[-1] is Ellipsis else parameters
        entries = zip(kinds, value, strict=True)
        return tuple(_typed(entry_kind, entry) for entry_kind, entry in entries)
    if kind is float and type(value) is int:
        return float(value)
    if origin is Literal and value in parameters:
        return value
    if origin is not Literal and type(value) is kind:
        return value
    raise ValueError(f"{value!r:.60} is not of type {kind}")


_hints = cache(typing.get_type_hints)
