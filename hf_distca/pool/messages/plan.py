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
from hf_distca.planner.intervals import Intervals, by_document
from hf_distca.pool.messages.call import HEAD_LIMIT

TABLE_LIMIT = 2**20
"""Rows of a table, at most."""

TOKEN_LIMIT = 2**24
"""Tokens of a nano-batch, at most."""

KEYS_PER_TOKEN = 4
"""K/V rows that all tasks of a worker may read, over TOKEN_LIMIT; a row that two tasks read counts twice."""

_NANO_BATCHES = 8
_KINDS = 16
_RANKS = 2**16


@dataclass(frozen=True)
class PlanHeader:
    """What a PLAN message says about itself, checked.

    Attributes:
        plan: its number; a later plan has a larger one.
        ranks: number of trainers.
        workers: number of workers, trainers first.
        worker: which of them the receiver is; it holds no rows.
        kinds: kinds of attention that there are tasks for.
        tables: for each nano-batch how many documents, segments, and tasks of every kind it has.
    """

    plan: int
    ranks: int
    workers: int
    worker: int
    kinds: tuple[AttentionKind, ...]
    tables: tuple[tuple[int, ...], ...]

    @property
    def payload(self) -> int:
        """Bytes of the tables."""
        return sum(count * dtype.itemsize for _, count, dtype in self._columns())

    def _columns(self) -> list[tuple[int, int, np.dtype[Any]]]:
        """Nano-batch, rows and dtype of every table."""
        dtypes = (np.dtype(np.int64), SEGMENT, *(TASK for _ in self.kinds))
        return [
            (number, count, dtype)
            for number, counts in enumerate(self.tables)
            for count, dtype in zip(counts, dtypes, strict=True)
        ]


def encode_plan(
    number: int, worker: int, nano_batches: Sequence[NanoBatch]
) -> tuple[dict[str, Any], list[NDArray[np.uint8]]]:
    """A PLAN message for one server.

    Args:
        number: of the plan; later plans have larger ones.
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
        "plan": number,
        "ranks": plan.layout.ranks,
        "workers": plan.workers,
        "worker": worker,
        "kinds": [astuple(kind) for kind in kinds],
        "tables": [[len(table) for table in row] for row in tables],
    }
    return header, [np.ascontiguousarray(table).view(np.uint8) for row in tables for table in row]


def read_plan_header(header: dict[str, Any]) -> PlanHeader:
    """The header of a PLAN message.

    Raises:
        ValueError: something is missing, of the wrong type or out of range.
    """
    ranks = _number(header, "ranks", 1, _RANKS)
    workers = _number(header, "workers", ranks + 1, 2 * _RANKS)
    kinds, tables = _read_kinds(header.get("kinds")), header.get("tables")
    if (
        not isinstance(tables, list)
        or not 1 <= len(tables) <= _NANO_BATCHES
        or not all(isinstance(counts, list) and len(counts) == 2 + len(kinds) for counts in tables)
        or not all(type(count) is int and 0 <= count <= TABLE_LIMIT for counts in tables for count in counts)
    ):
        raise ValueError(
            f"a plan must give the sizes of its tables for 1 to {_NANO_BATCHES} nano-batches, {2 + len(kinds)} each "
            f"of at most {TABLE_LIMIT} rows, got {tables!r:.100}"
        )
    return PlanHeader(
        plan=_number(header, "plan", 0, 2**62),
        ranks=ranks,
        workers=workers,
        worker=_number(header, "worker", ranks, workers - 1),
        kinds=kinds,
        tables=tuple(tuple(counts) for counts in tables),
    )


def decode_plan(header: PlanHeader, payload: bytes | bytearray) -> tuple[NanoBatch, ...]:
    """The nano-batches of a PLAN message.

    Args:
        header: its header.
        payload: its tables, header.payload bytes.

    Raises:
        ValueError: the tables are no plan, or one that is too large.
    """
    found: list[list[NDArray[Any]]] = [[] for _ in header.tables]
    offset = 0
    for number, count, dtype in header._columns():
        found[number].append(np.frombuffer(payload, dtype, count, offset))
        offset += count * dtype.itemsize
    nano_batches = []
    for lengths, segments, *tasks in found:
        if len(lengths) and not (lengths.min() >= 1 and lengths.max() <= TOKEN_LIMIT >= lengths.sum()):
            raise ValueError(f"documents must have 1 token or more, and at most {TOKEN_LIMIT} in all")
        _check_rows(segments, lengths, "rank", header.ranks)
        _check_offsets(segments, header.ranks)
        layout = Layout(lengths, segments, header.ranks)
        plans = {}
        for kind, table in zip(header.kinds, tasks, strict=True):
            _check_rows(table, lengths, "worker", header.workers)
            plans[kind] = Plan(layout, table, header.workers, kind.window)
            _check_keys(plans[kind], header.worker)
        nano_batches.append(NanoBatch(np.arange(len(lengths)), layout, plans))
    return tuple(nano_batches)


def _read_kinds(listed: Any) -> tuple[AttentionKind, ...]:
    """The kinds of attention that a header lists, each as the five numbers of an AttentionKind."""
    error = ValueError(f"a plan must list its kinds of attention, 1 to {_KINDS} different ones, got {listed!r:.100}")
    if not isinstance(listed, list) or not 1 <= len(listed) <= _KINDS:
        raise error
    for numbers in listed:
        if not isinstance(numbers, list) or len(numbers) != 5:
            raise error
        window, *sizes = numbers
        if not (window is None or (type(window) is int and 1 <= window <= TOKEN_LIMIT * 128)):
            raise error
        if not all(type(size) is int and 1 <= size <= HEAD_LIMIT for size in sizes):
            raise error
    kinds = tuple(AttentionKind(*numbers) for numbers in listed)
    if len(set(kinds)) != len(kinds):
        raise error
    return kinds


def _number(header: dict[str, Any], name: str, least: int, most: int) -> int:
    value = header.get(name)
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} of a plan must be a whole number from {least} to {most}, got {value!r:.40}")
    return value


def _check_rows(table: NDArray[np.void], lengths: NDArray[np.int64], place: str, places: int) -> None:
    """Raise ValueError unless the table's ranges cover every document once and its places exist."""
    if len(table) and not (table[place].min() >= 0 and table[place].max() < places):
        raise ValueError(f"a {place} is not among 0 to {places - 1}")
    if len(table) and not (table["document"].min() >= 0 and table["document"].max() < len(lengths)):
        raise ValueError(f"a document is not among the {len(lengths)} of the plan")
    if not Intervals.of(table).covers_once(lengths):
        raise ValueError(f"the ranges of rows that have a {place} do not cover each document once")


def _check_offsets(segments: NDArray[np.void], ranks: int) -> None:
    """Raise ValueError unless every rank's rows lie one after another from 0 on."""
    ordered = segments[np.lexsort((segments["offset"], segments["rank"]))]
    rows = ordered["stop"] - ordered["start"]
    before = np.cumsum(rows) - rows
    of_rank = np.searchsorted(ordered["rank"], np.arange(ranks))
    rank_before = np.append(before, rows.sum())[of_rank]
    if not np.array_equal(ordered["offset"], before - rank_before[ordered["rank"]]):
        raise ValueError("the rows of a rank do not lie one after another")


def _check_keys(plan: Plan, worker: int) -> None:
    """Raise ValueError if the worker's tasks read too many K/V rows; a task that segments cut reads them as often."""
    mine = plan.tasks["worker"] == worker
    cut = Intervals.of(plan.tasks[mine]).overlaps(Intervals.of(by_document(plan.layout.segments)))
    keys = (plan.tasks["stop"] - plan.first_key())[mine]
    if keys[cut.first].sum() > KEYS_PER_TOKEN * TOKEN_LIMIT:
        raise ValueError(f"the tasks of worker {worker} read more than {KEYS_PER_TOKEN * TOKEN_LIMIT} K/V rows")
