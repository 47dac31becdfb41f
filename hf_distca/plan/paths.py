"""Paths of prefix trees: which documents hold the rows that a document's rows see."""

import numpy as np

from hf_distca.plan import Branches
from hf_distca.plan.intervals import IntArray, Table


def along_paths(rows: Table, branches: Branches) -> tuple[Table, IntArray]:
    """Divide rows of paths among the documents that hold them.

    Args:
        rows: entries (document, start, stop): rows [start, stop) of the path of a document. The
            document may be counted as s · D + d, as windows in stages do.

    Returns:
        The pieces by (entry, start), and for each its entry.

    Raises:
        ValueError: A document has rows before its own, but no parent.
    """
    entry = np.arange(len(rows))
    found, entries = [rows[:0]], [entry[:0]]
    while len(rows):
        copy, document = np.divmod(rows["document"], len(branches.parents))
        first = branches.starts[document]
        own = rows.take(np.arange(len(rows)))
        own["start"] = np.maximum(rows["start"], first)
        is_own = own["start"] < own["stop"]
        found.append(own.compress(is_own))
        entries.append(entry[is_own])
        is_above = rows["start"] < first
        above = rows.compress(is_above)
        above["stop"] = np.minimum(above["stop"], first[is_above])
        parent = branches.parents[document[is_above]]
        if (parent < 0).any():
            raise ValueError("a document without a parent has no rows before its own")
        above["document"] = copy[is_above] * len(branches.parents) + parent
        rows, entry = above, entry[is_above]
    pieces, of_entry = np.concatenate(found), np.concatenate(entries)
    order = np.lexsort((pieces["start"], of_entry))
    return pieces.take(order), of_entry[order]
