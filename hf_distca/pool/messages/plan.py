"""The PLAN message: a micro-batch's plan as a small JSON header and raw tables, and back with every number checked.

Tables are 64-bit integers in little-endian order, one after another: for each nano-batch the documents' lengths, the
segments, and the tasks of every kind of attention.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import SEGMENT, TASK, AttentionKind, Layout, NanoBatch, Plan
from hf_distca.planner.chunks import chunk_counts, layout_of_kind
from hf_distca.planner.intervals import Intervals, by_document
from hf_distca.pool.messages.call import HEAD_LIMIT
from hf_distca.pool.messages.fields import Fields
from hf_distca.pool.messages.hello import RANKS
from hf_distca.pool.wire.errors import ProtocolError

TABLE_LIMIT = 2**20
"""Rows of a table, at most."""

TOKEN_LIMIT = 2**24
"""Tokens of a nano-batch, at most."""

KEYS_PER_TOKEN = 4
"""K/V rows that all tasks of a worker may read, over TOKEN_LIMIT; a row that two tasks read counts twice."""

_NANO_BATCHES = 8
_KINDS = 16


@dataclass(frozen=True)
class PlanHeader:
    """What a PLAN message says about itself, checked.

    Attributes:
        plan_id: a later plan has a larger one.
        ranks: number of ranks.
        workers: number of workers, ranks first.
        worker: which of them the receiver is; it holds no rows.
        kinds: kinds of attention that there are tasks for.
        tables: for each nano-batch how many documents, segments, and tasks of every kind it has.
    """

    plan_id: int
    ranks: int
    workers: int
    worker: int
    kinds: tuple[AttentionKind, ...]
    tables: tuple[tuple[int, ...], ...]

    @classmethod
    def read(cls, header: dict[str, Any]) -> "PlanHeader":
        """From a message's header.

        Raises:
            ProtocolError: something is missing, of the wrong type or out of range.
        """
        fields = Fields("a plan", header)
        ranks = fields.whole("ranks", 1, RANKS)
        workers = fields.whole("workers", ranks + 1, 2 * RANKS)
        kinds = _read_kinds(fields)
        tables = fields.rows("tables", 1, _NANO_BATCHES)
        fields.require(
            all(len(counts) == 2 + len(kinds) for counts in tables)
            and all(type(count) is int and 0 <= count <= TABLE_LIMIT for counts in tables for count in counts),
            "tables",
            f"the sizes of {2 + len(kinds)} tables of at most {TABLE_LIMIT} rows for every nano-batch",
        )
        return cls(
            plan_id=fields.whole("plan_id"),
            ranks=ranks,
            workers=workers,
            worker=fields.whole("worker", ranks, workers - 1),
            kinds=kinds,
            tables=tuple(tuple(counts) for counts in tables),
        )

    @property
    def payload(self) -> int:
        """Bytes of the tables."""
        return sum(count * dtype.itemsize for _, count, dtype in self.each_table())

    def each_table(self) -> list[tuple[int, int, np.dtype[Any]]]:
        """Nano-batch, rows and dtype of every table."""
        dtypes = (np.dtype(np.int64), SEGMENT, *(TASK for _ in self.kinds))
        return [
            (nano_batch, count, dtype)
            for nano_batch, counts in enumerate(self.tables)
            for count, dtype in zip(counts, dtypes, strict=True)
        ]


def encode_plan(
    plan_id: int, worker: int, nano_batches: Sequence[NanoBatch]
) -> tuple[dict[str, Any], list[NDArray[np.uint8]]]:
    """A PLAN message for one server.

    Args:
        plan_id: of the plan; later plans have larger ones.
        worker: which worker of the plans the server is.
        nano_batches: of the micro-batch, all with the same kinds of attention.

    Returns:
        Header and payload.
    """
    kinds = list(nano_batches[0].plans)
    plan = nano_batches[0].plans[kinds[0]]
    tables = [
        [nano.layout.lengths, nano.layout.segments, *(nano.plans[kind].tasks for kind in kinds)]
        for nano in nano_batches
    ]
    header = {
        "plan_id": plan_id,
        "ranks": plan.layout.ranks,
        "workers": plan.workers,
        "worker": worker,
        "kinds": [astuple(kind) for kind in kinds],
        "tables": [[len(table) for table in row] for row in tables],
    }
    return header, [np.ascontiguousarray(table).view(np.uint8) for row in tables for table in row]


def decode_plan(header: PlanHeader, payload: bytes | bytearray) -> tuple[NanoBatch, ...]:
    """The nano-batches of a PLAN message.

    Args:
        header: its header.
        payload: its tables, header.payload bytes.

    Raises:
        ProtocolError: the tables are no plan, or one that is too large.
    """
    found: list[list[NDArray[Any]]] = [[] for _ in header.tables]
    offset = 0
    for nano_batch, count, dtype in header.each_table():
        found[nano_batch].append(np.frombuffer(payload, dtype, count, offset))
        offset += count * dtype.itemsize
    nano_batches = []
    for lengths, segments, *tasks in found:
        if len(lengths) and not (lengths.min() >= 1 and lengths.max() <= TOKEN_LIMIT >= lengths.sum()):
            raise ProtocolError(f"documents must have 1 token or more, and at most {TOKEN_LIMIT} in all")
        _check_rows(segments, lengths, "rank", header.ranks)
        _check_offsets(segments, header.ranks)
        layout = Layout(lengths, segments, header.ranks)
        plans = {}
        for kind, table in zip(header.kinds, tasks, strict=True):
            if kind.chunk is not None and chunk_counts(lengths, kind.chunk).sum() > TABLE_LIMIT:
                raise ProtocolError(f"chunks of {kind.chunk} rows are more than {TABLE_LIMIT} in all")
            seen = layout_of_kind(layout, kind)
            _check_rows(table, seen.lengths, "worker", header.workers)
            plans[kind] = Plan(seen, table, header.workers, kind.window)
            _check_keys(plans[kind], header.worker)
        nano_batches.append(NanoBatch(np.arange(len(lengths)), layout, plans))
    return tuple(nano_batches)


def _read_kinds(fields: Fields) -> tuple[AttentionKind, ...]:
    """The kinds of attention that a header lists, each as the six numbers of an AttentionKind."""
    listed = fields.rows("kinds", 1, _KINDS)
    for numbers in listed:
        fields.require(len(numbers) == 6, "kinds", "lists of six numbers each")
        window, *sizes, chunk = numbers
        fields.require(
            all(most is None or (type(most) is int and 1 <= most <= TOKEN_LIMIT * 128) for most in (window, chunk))
            and all(type(size) is int and 1 <= size <= HEAD_LIMIT for size in sizes)
            and sizes[0] % sizes[1] == 0,
            "kinds",
            f"lists of a window or null, query heads, key-value heads that divide them, and two sizes of heads, "
            f"at most {HEAD_LIMIT} each, and the rows of a chunk or null",
        )
    kinds = tuple(AttentionKind(*numbers) for numbers in listed)
    fields.require(len(set(kinds)) == len(kinds), "kinds", "kinds of attention that differ")
    return kinds


def _check_rows(table: NDArray[np.void], lengths: NDArray[np.int64], place: str, places: int) -> None:
    """Raise ProtocolError unless the table's ranges cover every document once and its places exist."""
    if len(table) and not (table[place].min() >= 0 and table[place].max() < places):
        raise ProtocolError(f"a {place} is not among 0 to {places - 1}")
    if len(table) and not (table["document"].min() >= 0 and table["document"].max() < len(lengths)):
        raise ProtocolError(f"a document is not among the {len(lengths)} of the plan")
    if not Intervals.of(table).covers_once(lengths):
        raise ProtocolError(f"the ranges of rows that have a {place} do not cover each document once")


def _check_offsets(segments: NDArray[np.void], ranks: int) -> None:
    """Raise ProtocolError unless every rank's rows lie one after another from 0 on."""
    ordered = segments[np.lexsort((segments["offset"], segments["rank"]))]
    rows = ordered["stop"] - ordered["start"]
    before = np.cumsum(rows) - rows
    of_rank = np.searchsorted(ordered["rank"], np.arange(ranks))
    rank_before = np.append(before, rows.sum())[of_rank]
    if not np.array_equal(ordered["offset"], before - rank_before[ordered["rank"]]):
        raise ProtocolError("the rows of a rank do not lie one after another")


def _check_keys(plan: Plan, worker: int) -> None:
    """Raise ProtocolError if the worker's tasks read too many K/V rows; a task that is cut reads them as often."""
    mine = plan.tasks["worker"] == worker
    cut = Intervals.of(plan.tasks[mine]).overlaps(Intervals.of(by_document(plan.layout.segments)))
    keys = (plan.tasks["stop"] - plan.first_key())[mine]
    if keys[cut.first].sum() > KEYS_PER_TOKEN * TOKEN_LIMIT:
        raise ProtocolError(f"the tasks of worker {worker} read more than {KEYS_PER_TOKEN * TOKEN_LIMIT} K/V rows")
