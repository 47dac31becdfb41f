"""Cutting tasks into parts that a kernel without bottom-right alignment or windows can compute.

Pure integers. A part is a batch of equally large blocks of rows and keys, evenly spaced, in which either
every row sees every key ("full"), or row i sees keys j <= i ("causal"), or row i sees keys j >= i ("anti";
the last two are square). All parts together hold each visible pair of row and key exactly once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Literal

from .params import AttentionParams
from .shapes import TaskShapes


@dataclass(frozen=True)
class Part:
    """`count` blocks; block b holds rows q_first + b·q_step + [0, q_rows) and keys likewise.

    Attributes:
        q_first: first packed row of block 0.
        q_rows: rows of a block, at least 1. The rows of different blocks never overlap.
        k_first: first packed key of block 0.
        k_rows: keys of a block, at least 1. The keys of different blocks may overlap.
        mask: which pairs of a block are visible.
        count: number of blocks.
        q_step: rows from one block to the next.
        k_step: keys from one block to the next.
    """

    q_first: int
    q_rows: int
    k_first: int
    k_rows: int
    mask: Literal["full", "causal", "anti"]
    count: int = 1
    q_step: int = 0
    k_step: int = 0


@dataclass(frozen=True)
class PartPlan:
    """All parts of a kernel call.

    Attributes:
        parts: the first part that touches a row is causal, if the kernel call is; later ones add to it.
        rows_in_order: the parts, one after another, hold every packed row once and in order.
        keys_in_order: likewise for the packed keys.
    """

    parts: tuple[Part, ...]
    rows_in_order: bool
    keys_in_order: bool


def plan_parts(shapes: TaskShapes, params: AttentionParams) -> PartPlan:
    """Cut all tasks of a kernel call into parts.

    Args:
        shapes: lengths of the tasks.
        params: the mask.
    """
    return _plan(shapes.q_lens, shapes.k_lens, params.causal, params.window)


# Every layer of a micro-batch asks for the same plan, in both directions.
@lru_cache(maxsize=256)
def _plan(q_lens: tuple[int, ...], k_lens: tuple[int, ...], causal: bool, window: int | None) -> PartPlan:
    parts: list[Part] = []
    q_starts, k_starts = accumulate(q_lens, initial=0), accumulate(k_lens, initial=0)
    tasks = zip(q_lens, k_lens, q_starts, k_starts, strict=False)
    for (q_len, k_len), group in groupby(tasks, key=lambda task: task[:2]):
        run = list(group)
        if not q_len or not k_len:
            continue
        _, _, q_first, k_first = run[0]
        for part in _task_parts(q_len, k_len, causal, window):
            moved = replace(part, q_first=q_first + part.q_first, k_first=k_first + part.k_first)
            parts.extend(_repeated(moved, len(run), q_len, k_len))
    return PartPlan(
        parts=tuple(parts),
        rows_in_order=_in_order([(p.q_first, p.q_rows, p.count, p.q_step) for p in parts], sum(q_lens)),
        keys_in_order=_in_order([(p.k_first, p.k_rows, p.count, p.k_step) for p in parts], sum(k_lens)),
    )


def _in_order(blocks: list[tuple[int, int, int, int]], total: int) -> bool:
    """Whether blocks (first, rows, count, step), one after another, are the rows 0 to total."""
    end = 0
    for first, rows, count, step in blocks:
        if first != end or (count > 1 and step != rows):
            return False
        end += rows * count
    return end == total


def _repeated(part: Part, tasks: int, q_len: int, k_len: int) -> Iterator[Part]:
    """The part once for each of `tasks` tasks of the same lengths that lie beside each other."""
    if part.count * part.q_step == q_len and part.count * part.k_step == k_len:
        yield replace(part, count=part.count * tasks)
    elif part.count < tasks:
        for b in range(part.count):
            q_first, k_first = part.q_first + b * part.q_step, part.k_first + b * part.k_step
            yield replace(part, q_first=q_first, k_first=k_first, count=tasks, q_step=q_len, k_step=k_len)
    else:
        for i in range(tasks):
            yield replace(part, q_first=part.q_first + i * q_len, k_first=part.k_first + i * k_len)


def _task_parts(q_len: int, k_len: int, causal: bool, window: int | None) -> Iterator[Part]:
    """The parts of one task whose rows and keys begin at 0."""
    if not causal:
        yield Part(0, q_len, 0, k_len, "full")
        return
    before = k_len - q_len  # keys before the first row's own
    # Rows that see all keys before them.
    head = q_len if window is None else min(max(window - 1 - before, 0), q_len)
    if head:
        yield Part(0, head, before, head, "causal")
        if before:
            yield Part(0, head, 0, before, "full")
    if window is not None and head < q_len:
        # The others in blocks of a few rows; the last block may be smaller.
        block = min(window, max(window // 2, 64), 256)
        blocks, rest = divmod(q_len - head, block)
        yield from _window_parts(head, block, blocks, before, window)
        yield from _window_parts(head + blocks * block, rest, 1, before, window)


def _window_parts(first: int, block: int, blocks: int, before: int, window: int) -> Iterator[Part]:
    """Blocks of `block` <= window rows each, from `first` on, whose keys the task's start does not cut off.

    The keys of a block, seen from its first row's own key at column 0, with n rows and window W:

        column  -W+1 ... -W+n-1 | -W+n ... -1 | 0 ... n-1
                anti, n-1 rows  | full        | causal
    """
    if not block or not blocks:
        return
    own = before + first
    step = {"count": blocks, "q_step": block, "k_step": block}
    yield Part(first, block, own, block, "causal", **step)
    if window > block:
        yield Part(first, block, own - window + block, window - block, "full", **step)
    if block > 1:
        yield Part(first, block - 1, own - window + 1, block - 1, "anti", **step)
