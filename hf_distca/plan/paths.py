"""Paths of prefix trees: which documents hold the rows that a document's rows see."""

import numpy as np

from hf_distca.plan import Branches
from hf_distca.plan.arrays import IntArray, Table


def along_paths(rows: Table, branches: Branches) -> tuple[Table, IntArray]:
    """Divide rows of paths among the documents that hold them.

    Args:
        rows: entries (document, start, stop): rows [start, stop) of the path of a document. The
            document may be counted as s · D + d, as windows in stages do.

    Returns:
        The parts by (entry, start), and the entry of each part.

    Raises:
        ValueError: A document has rows before its own, but no parent.
    """
    entry = np.arange(len(rows))
    parts = [rows[:0]]
    entries_of_parts = [entry[:0]]
    while len(rows):
        # 1. The last rows of a path belong to the document itself.
        copy, document = np.divmod(rows["document"], len(branches.parents))
        first_own = branches.starts[document]
        own_rows = rows.take(np.arange(len(rows)))
        own_rows["start"] = np.maximum(rows["start"], first_own)
        is_own = own_rows["start"] < own_rows["stop"]
        parts.append(own_rows.compress(is_own))
        entries_of_parts.append(entry[is_own])
        # 2. The rows before them are rows of the parent's path.
        is_above = rows["start"] < first_own
        rows_above = rows.compress(is_above)
        rows_above["stop"] = np.minimum(rows_above["stop"], first_own[is_above])
        parent = branches.parents[document[is_above]]
        if (parent < 0).any():
            raise ValueError("a document without a parent has no rows before its own")
        rows_above["document"] = copy[is_above] * len(branches.parents) + parent
        rows = rows_above
        entry = entry[is_above]
    all_parts = np.concatenate(parts)
    entry_of_part = np.concatenate(entries_of_parts)
    order = np.lexsort((all_parts["start"], entry_of_part))
    return all_parts.take(order), entry_of_part[order]
