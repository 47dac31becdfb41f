"""Tables of rows [start, stop) of documents: order, overlaps, unions and cuts.

A table is a structured array with the fields document, start and stop, such as segments and tasks.
`take` and `compress` copy its entries some 20 times as fast as indexing with an array.
"""

from itertools import pairwise

import numpy as np

from hf_distca.plan import TASK
from hf_distca.plan.arrays import IntArray, Table

ROWS = np.dtype([("document", np.int64), ("start", np.int64), ("stop", np.int64)])
"""Rows [start, stop) of a document."""
ROW_LIMIT = 1 << 32
"""More than the rows of any document, so that a document and a row fit into one number, which sorts
quickly."""


def table_of(dtype: np.dtype[np.void], **columns: IntArray | int) -> Table:
    """Return a table of the given columns.

    `document` gives its length, and missing columns are 0.
    """
    table = np.zeros(np.size(columns["document"]), dtype)
    for name, values in columns.items():
        table[name] = values
    return table


def row_counts(table: Table) -> IntArray:
    """Return [n] rows of each entry."""
    return np.asarray(table["stop"] - table["start"])


def rows_before(table: Table) -> IntArray:
    """Return [n] rows of all earlier entries."""
    rows = row_counts(table)
    return np.cumsum(rows) - rows


def rows_before_in(table: Table, place: str) -> IntArray:
    """Return [n] rows of all earlier entries at the same place.

    The table is sorted by the field `place`, such as "rank".
    """
    earlier_rows = rows_before(table)
    return np.asarray(earlier_rows - earlier_rows[np.searchsorted(table[place], table[place])])


def by_document(table: Table) -> Table:
    """Sort a table by (document, start)."""
    return table.take(np.lexsort((table["start"], table["document"])))


def overlaps(table: Table, ordered: Table) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Cut the entries of a table where the entries of an ordered table begin.

    Args:
        ordered: disjoint entries by (document, start), which hold all rows of `table`.

    Returns:
        For each part, in the order of `table`: the index of its entry in `table`, the index of the
        entry in `ordered` that holds it, start and stop.
    """
    # (document, row) as one number: the last border up to a row begins the entry that holds it.
    borders = sortable(ordered["document"], ordered["start"])
    first_rows = sortable(table["document"], table["start"])
    last_rows = sortable(table["document"], table["stop"] - 1)
    first_holder = np.searchsorted(borders, first_rows, side="right") - 1
    counts = np.searchsorted(borders, last_rows, side="right") - first_holder
    entry = np.repeat(np.arange(len(table)), counts)
    holder = expand(first_holder, counts)
    start = np.maximum(table["start"][entry], ordered["start"][holder])
    stop = np.minimum(table["stop"][entry], ordered["stop"][holder])
    return entry, holder, start, stop


def joined(*tables: Table) -> Table:
    """Return the entries of several tables of the same fields, all of them int64."""
    return np.concatenate([table.view(np.int64) for table in tables]).view(tables[0].dtype)


def cut_at(table: Table, ordered: Table) -> tuple[Table, Table]:
    """Return a table cut as in `overlaps`, and the entry of `ordered` that holds each part."""
    entry, holder, start, stop = overlaps(table, ordered)
    parts = table.take(entry)
    parts["start"] = start
    parts["stop"] = stop
    return parts, ordered.take(holder)


def union(tasks: Table) -> Table:
    """Return the rows of each worker once, by (worker, document, start); rows may overlap."""
    tasks = tasks.take(np.lexsort((tasks["start"], tasks["document"], tasks["worker"])))
    if not len(tasks):
        return tasks
    worker, document, stop = tasks["worker"], tasks["document"], tasks["stop"]
    is_new = (worker[1:] != worker[:-1]) | (document[1:] != document[:-1])
    number = np.cumsum(np.append(False, is_new))  # of the pair of a worker and a document
    # Earlier entries of the same pair hold the document's rows up to `covered`. Where the entry
    # before is of another pair, `covered` is negative.
    covered = np.maximum.accumulate(sortable(number, stop))[:-1] - sortable(number[1:], 0)
    tasks["start"][1:] = np.maximum(tasks["start"][1:], covered)
    return tasks.compress(stop > tasks["start"])


def merge_touching(table: Table, place: str = "document") -> Table:
    """Join entries that follow and touch each other.

    Args:
        place: field that has to be equal, such as "rank" or "worker".
    """
    touches = table["start"][1:] == table["stop"][:-1]
    for name in ("document", place):
        touches &= table[name][1:] == table[name][:-1]
    if not touches.any():
        return table
    first_entry = np.flatnonzero(np.append(True, ~touches))
    last_entry = np.append(first_entry[1:], len(table)) - 1
    merged_table = table.take(first_entry)
    merged_table["stop"] = table["stop"][last_entry]
    return merged_table


def grain(block: int, pairs_a_row: float, most_pairs: float) -> int:
    """Return the coarsest multiple for a cut that moves at most `most_pairs` pairs.

    The multiples are a block, half a block, … one row.
    """
    rows = block
    while rows > 1 and rows * pairs_a_row > most_pairs:
        rows = ceil_div(rows, 2)
    return rows


def split_at(values: IntArray, starts: IntArray) -> list[IntArray]:
    """Split an array where its second part starts, its third one, and so on.

    `np.split` returns the same, and takes many times as long for many parts.
    """
    bounds = [0, *starts.tolist(), len(values)]
    return [values[start:stop] for start, stop in pairwise(bounds)]


def ceil_div(dividend: int, divisor: int) -> int:
    """Return the quotient, rounded up."""
    return -(-dividend // divisor)


def expand(starts: IntArray, counts: IntArray) -> IntArray:
    """Return the numbers of [n] ranges, one range after another.

    Args:
        starts: [n] first number of each range.
        counts: [n] numbers of each range.
    """
    offsets = np.repeat(starts - (np.cumsum(counts) - counts), counts)
    return offsets + np.arange(len(offsets))


def rounds_of(numbers: IntArray) -> list[IntArray]:
    """Divide the entries of an array of row numbers into rounds in which no row comes twice."""
    by_row = np.argsort(numbers, kind="stable")
    nth = np.empty(len(numbers), np.int64)
    nth[by_row] = np.arange(len(numbers)) - np.searchsorted(numbers[by_row], numbers[by_row])
    return [np.flatnonzero(nth == number) for number in range(int(nth.max(initial=-1)) + 1)]


def numbered(counts: IntArray) -> tuple[IntArray, IntArray]:
    """Return the owner of each of many things, and the number of the thing at its owner.

    Args:
        counts: [owners] number of things of each owner.
    """
    return np.repeat(np.arange(len(counts)), counts), expand(np.zeros_like(counts), counts)


def sortable(document: IntArray, row: IntArray | int) -> IntArray:
    """Return numbers that sort as (document, row)."""
    return document * ROW_LIMIT + row


def moved_by(table: Table, rows: int) -> Table:
    """Return the table with all rows counted higher by `rows`."""
    table = table.take(np.arange(len(table)))
    table["start"] += rows
    table["stop"] += rows
    return table


def local_tasks(segments: Table) -> Table:
    """Return [tasks] of dtype TASK: every rank computes the rows of its segments."""
    document, start, stop, rank = (segments[name] for name in ("document", "start", "stop", "rank"))
    return merged(table_of(TASK, document=document, start=start, stop=stop, worker=rank))


def merged(tasks: Table) -> Table:
    """Sort tasks by (worker, document, start) and join tasks that touch."""
    tasks = tasks.take(np.lexsort((tasks["start"], tasks["document"], tasks["worker"])))
    return merge_touching(tasks, "worker")
