"""Plans of sequences that share prefixes: the rows that ranks hold, and the sequences they serve.

Documents of a plan are those of `SharedPrefixes`, and then fillers. A row of a shared prefix is
held once and is a row of several sequences.
"""

from dataclasses import replace

import numpy as np

from hf_distca.plan import Branches, MicroBatchPlan
from hf_distca.plan.intervals import (
    ROWS,
    IntArray,
    Table,
    by_document,
    overlaps,
    rows_before_in,
    table_of,
)
from hf_distca.plan.paths import along_paths
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.prefixes import SharedPrefixes
from hf_distca.planner.settings import PlanSettings

NO_DOCUMENT = -1
"""Document of the rows of a filler."""

HELD = np.dtype(
    [(name, np.int64) for name in ("rank", "micro_batch", "document", "start", "stop", "offset")]
)
"""Rows [start, stop) of a document, held by one rank from row `offset` on."""


def plan_documents(
    shared: SharedPrefixes, documents: IntArray, fillers: int, settings: PlanSettings
) -> MicroBatchPlan:
    """Plan some of the documents, whole trees, and fillers of one token for ranks without rows."""
    lengths = np.append(shared.lengths[documents], np.ones(fillers, np.int64))
    number = np.full(len(shared.lengths) + 1, -1)  # the last one is for documents without parent
    number[documents] = np.arange(len(documents))
    parents = np.append(number[shared.branches.parents[documents]], np.full(fillers, -1))
    starts = np.append(shared.branches.starts[documents], np.zeros(fillers, np.int64))
    plan = plan_micro_batch(lengths.tolist(), settings, Branches(parents, starts))
    return replace(plan, fillers=fillers)


def held_rows(plan: MicroBatchPlan, micro_batch: int, documents: IntArray) -> Table:
    """Return [entries] of dtype HELD: rows of one micro-batch by nano-batch, rank and row.

    Offsets are left at 0, see `with_offsets`.

    Args:
        documents: of the micro-batch, without fillers.
    """
    # Fillers come after all other documents of a micro-batch.
    padded_documents = np.append(documents, np.full(plan.fillers, NO_DOCUMENT))
    parts = []
    for nano in plan.nano_batches:
        segments = nano.layout.segments
        part = np.zeros(len(segments), HELD)
        for name in ("rank", "start", "stop"):
            part[name] = segments[name]
        part["micro_batch"] = micro_batch
        part["document"] = padded_documents[nano.documents[segments["document"]]]
        parts.append(part)
    return np.concatenate(parts)


def with_offsets(rows_of_ranks: Table) -> Table:
    """Return entries of dtype HELD by rank, whose rows follow each other on each rank."""
    rows_of_ranks = rows_of_ranks.take(np.argsort(rows_of_ranks["rank"], kind="stable"))
    rows_of_ranks["offset"] = rows_before_in(rows_of_ranks, "rank")
    return rows_of_ranks


def rows_read(
    rows_of_ranks: Table, shared: SharedPrefixes, lengths: IntArray
) -> tuple[Table, IntArray]:
    """Return the rows of all sequences, by rank: entries of dtype HELD, and the sequence of each.

    Args:
        rows_of_ranks: all rows of all documents, from `with_offsets`.
        lengths: [sequences] tokens of each sequence.
    """
    # 1. The documents whose rows make up each sequence.
    whole_sequences = table_of(ROWS, document=shared.ends, stop=lengths)
    on_path, sequence = along_paths(whole_sequences, shared.branches)
    rows_of_documents = by_document(
        rows_of_ranks.compress(rows_of_ranks["document"] != NO_DOCUMENT)
    )
    # 2. The ranks that hold these rows.
    piece, entry, start, stop = overlaps(on_path, rows_of_documents)
    source_rows = rows_of_documents.take(entry)
    source_rows["offset"] += start - source_rows["start"]
    source_rows["start"], source_rows["stop"] = start, stop
    order = np.argsort(source_rows["rank"], kind="stable")
    return source_rows.take(order), sequence[piece][order]
