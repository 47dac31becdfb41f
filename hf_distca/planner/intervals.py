"""Intervals of rows, [start, stop) of documents: order, overlaps, unions and cuts.

Tables of dtype SEGMENT or TASK hold intervals with an owner: a rank or a worker.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

ROW_LIMIT = 1 << 32
"""More than the rows of any document, so that a document and a row fit into one number, which sorts quickly."""


@dataclass(frozen=True, eq=False)
class Intervals:
    """Intervals of rows, each of one document.

    Attributes:
        document: [n] document of each interval.
        start: [n] first row.
        stop: [n] one past the last row.
    """

    document: IntArray
    start: IntArray
    stop: IntArray

    @classmethod
    def of(cls, table: NDArray[np.void]) -> "Intervals":
        """Return the intervals of a table of segments or tasks."""
        return cls(table["document"], table["start"], table["stop"])

    def __len__(self) -> int:
        return len(self.document)

    def __getitem__(self, index: IntArray | NDArray[np.bool_]) -> "Intervals":
        return Intervals(self.document[index], self.start[index], self.stop[index])

    @property
    def lengths(self) -> IntArray:
        """[n] rows of each interval."""
        return self.stop - self.start

    def overlaps(self, ordered: "Intervals") -> "Overlaps":
        """Cut these intervals at the borders of a second set.

        Args:
            ordered: disjoint intervals in the order of (document, start) that together hold all rows of these
                intervals.
        """
        border = sortable(ordered.document, ordered.start)
        low = np.searchsorted(border, sortable(self.document, self.start), side="right") - 1
        high = np.searchsorted(border, sortable(self.document, self.stop - 1), side="right")
        counts = high - low
        which, other = np.repeat(np.arange(len(self)), counts), expand(low, counts)
        start = np.maximum(self.start[which], ordered.start[other])
        stop = np.minimum(self.stop[which], ordered.stop[other])
        return Overlaps(which, other, Intervals(ordered.document[other], start, stop))


@dataclass(frozen=True, eq=False)
class Overlaps:
    """Overlaps of intervals of two sets, in the order of the first set.

    Attributes:
        first: [n] index of the interval in the first set.
        second: [n] index of the interval in the second set.
        rows: [n] rows that are in both.
    """

    first: IntArray
    second: IntArray
    rows: Intervals


def by_document(table: NDArray[np.void]) -> NDArray[np.void]:
    """Sort segments or tasks by (document, start)."""
    ordered: NDArray[np.void] = table[np.lexsort((table["start"], table["document"]))]
    return ordered


def union(owner: IntArray, intervals: Intervals) -> tuple[IntArray, Intervals]:
    """Merge each owner's intervals so that no row is listed twice.

    Args:
        owner: [n] owner of each interval.
        intervals: [n] intervals, possibly overlapping or empty.

    Returns:
        Owners and intervals by (owner, document, start); an owner's intervals do not overlap, but may touch.
    """
    order = np.lexsort((intervals.start, intervals.document, owner))
    order = order[intervals.lengths[order] > 0]
    owner, intervals = owner[order], intervals[order]
    document, start, stop = intervals.document, intervals.start, intervals.stop
    # Earlier intervals of the same owner hold the document's rows up to `covered`.
    other = np.ones(len(order), bool)
    other[1:] = (owner[1:] != owner[:-1]) | (document[1:] != document[:-1])
    group = np.cumsum(other)
    covered = np.zeros_like(stop)
    if len(order):
        covered[1:] = np.maximum.accumulate(sortable(group, stop))[:-1] - sortable(group[1:], 0)
    start = np.maximum(start, covered)  # negative where another document's rows came before
    kept = stop > start
    return owner[kept], Intervals(document[kept], start[kept], stop[kept])


def merge_touching(table: NDArray[np.void], place: str) -> NDArray[np.void]:
    """Join segments or tasks that follow and touch each other in one place.

    Args:
        table: [n] in order of place.
        place: field that names the holder of the rows: "rank" or "worker".
    """
    touches = (
        (table[place][1:] == table[place][:-1])
        & (table["document"][1:] == table["document"][:-1])
        & (table["start"][1:] == table["stop"][:-1])
    )
    if not touches.any():
        return table
    first = np.flatnonzero(np.append(True, ~touches))
    last = np.append(first[1:], len(table)) - 1
    result: NDArray[np.void] = table[first]
    result["stop"] = table["stop"][last]
    return result


def grain(block: int, too_coarse: Callable[[int], bool]) -> int:
    """Return the coarsest multiple on which cuts may fall: a block, half a block, a quarter, … one row.

    Args:
        block: rows of a kernel block.
        too_coarse: whether rounding to multiples of so many rows moves too much; never called with 1.
    """
    rows = block
    while rows > 1 and too_coarse(rows):
        rows = -(-rows // 2)
    return rows


def expand(starts: IntArray, counts: IntArray) -> IntArray:
    """Return start, start + 1, … of every range, one range after another.

    Args:
        starts: [n] first number of each range.
        counts: [n] how many numbers each range has; 0 or more.
    """
    total = int(counts.sum())
    offsets = np.repeat(starts - (np.cumsum(counts) - counts), counts)
    return offsets + np.arange(total, dtype=np.int64)


def sortable(document: IntArray, row: IntArray | int) -> IntArray:
    """Return numbers that sort as (document, row)."""
    return document * ROW_LIMIT + row
