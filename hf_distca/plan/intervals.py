"""Tables of rows [start, stop) of documents: order, overlaps, unions and cuts.

A table is a structured array with the fields document, start and stop, such as segments and tasks.
`take` and `compress` copy its entries some 20 times as fast as indexing with an array.
"""

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import TASK

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
Table = NDArray[np.void]

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


def by_document(table: Table) -> Table:
    """Sort a table by (document, start)."""
    return table.take(np.lexsort((table["start"], table["document"])))


def overlaps(table: Table, ordered: Table) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Cut the rows of a table at the borders of an ordered one: disjoint rows by (document, start) that hold them all.

    Returns:
        For each piece, in the order of `table`: its index in `table`, its index in `ordered`, start
        and stop.
    """
    border = sortable(ordered["document"], ordered["start"])
    low = np.searchsorted(border, sortable(table["document"], table["start"]), side="right") - 1
    counts = (
        np.searchsorted(border, sortable(table["document"], table["stop"] - 1), side="right") - low
    )
    which, other = np.repeat(np.arange(len(table)), counts), expand(low, counts)
    start = np.maximum(table["start"][which], ordered["start"][other])
    return which, other, start, np.minimum(table["stop"][which], ordered["stop"][other])


def joined(*tables: Table) -> Table:
    """Return the entries of several tables of the same fields, all of them int64."""
    return np.concatenate([table.view(np.int64) for table in tables]).view(tables[0].dtype)


def cut_at(table: Table, ordered: Table) -> tuple[Table, Table]:
    """Return the pieces of a table cut as in `overlaps`, and for each the entry of `ordered` that holds it."""
    which, other, start, stop = overlaps(table, ordered)
    pieces = table.take(which)
    pieces["start"], pieces["stop"] = start, stop
    return pieces, ordered.take(other)


def union(tasks: Table) -> Table:
    """Return the rows of each worker once, by (worker, document, start); rows may overlap."""
    tasks = tasks.take(np.lexsort((tasks["start"], tasks["document"], tasks["worker"])))
    if not len(tasks):
        return tasks
    # Earlier entries of the same worker hold the document's rows up to `covered`.
    worker, document, stop = tasks["worker"], tasks["document"], tasks["stop"]
    group = np.cumsum(
        np.append(False, (worker[1:] != worker[:-1]) | (document[1:] != document[:-1]))
    )
    covered = np.maximum.accumulate(sortable(group, stop))[:-1] - sortable(group[1:], 0)
    # Where another document's rows came before, `covered` is negative.
    tasks["start"][1:] = np.maximum(tasks["start"][1:], covered)
    return tasks.compress(stop > tasks["start"])


def merge_touching(table: Table, place: str = "document") -> Table:
    """Join entries that follow and touch each other, if the field `place` is equal, such as "rank" or "worker"."""
    touches = table["start"][1:] == table["stop"][:-1]
    for name in ("document", place):
        touches &= table[name][1:] == table[name][:-1]
    if not touches.any():
        return table
    first = np.flatnonzero(np.append(True, ~touches))
    joined = table.take(first)
    joined["stop"] = table["stop"][np.append(first[1:], len(table)) - 1]
    return joined


def grain(block: int, pairs_a_row: float, most: float) -> int:
    """Return the coarsest multiple for a cut that moves at most `most` pairs: a block, half a block, … one row."""
    rows = block
    while rows > 1 and rows * pairs_a_row > most:
        rows = -(-rows // 2)
    return rows


def expand(starts: IntArray, counts: IntArray) -> IntArray:
    """Return the numbers of [n] ranges, one range after another: `counts` numbers from each of `starts` on."""
    offsets = np.repeat(starts - (np.cumsum(counts) - counts), counts)
    return offsets + np.arange(len(offsets))


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
