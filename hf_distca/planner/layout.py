"""Layouts: which rank holds which rows of a micro-batch's documents."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from hf_distca.checks.capacity_rules import Capacity
from hf_distca.plan import SEGMENT, AttentionKind, Branches, Layout
from hf_distca.plan.arrays import IntArray, Table
from hf_distca.plan.cost import as_lengths
from hf_distca.plan.intervals import (
    ROWS,
    expand,
    merge_touching,
    overlaps,
    rows_before_in,
    table_of,
)
from hf_distca.units import counted


def fixed_layout(rank_lengths: Sequence[Sequence[int]], ranks: int | None = None) -> Layout:
    """Return the layout of documents that are already placed.

    Args:
        rank_lengths: one list of documents' lengths per rank, possibly empty. If `ranks` is k times
            the number of lists, a list is divided evenly over k consecutive ranks; the first ranks
            get the rows that are left over.

    Raises:
        ValueError: a length below 1, or a number of lists that does not divide the ranks.
    """
    ranks = len(rank_lengths) if ranks is None else ranks
    if not rank_lengths or ranks < 1 or ranks % len(rank_lengths):
        raise ValueError(
            f"got {len(rank_lengths)} rows of documents for {ranks} ranks; give one row per rank, "
            "or one row per k consecutive ranks with ranks = k * rows"
        )
    lengths = as_lengths(list(chain(*rank_lengths)))
    # Number the tokens of all documents from 0 on, list after list, and cut them where a document
    # or a rank begins.
    stops = np.append(0, np.cumsum(lengths))
    list_stops = stops[np.cumsum([len(documents) for documents in rank_lengths])][:, None]
    list_starts = np.append(0, list_stops[:-1])[:, None]
    ranks_of_list = ranks // len(rank_lengths)
    share, more_rows = np.divmod(list_stops - list_starts, ranks_of_list)
    rank_in_list = np.arange(ranks_of_list)
    rank_starts = list_starts + rank_in_list * share + np.minimum(rank_in_list, more_rows)
    rank_starts = rank_starts.ravel()
    cuts = np.union1d(stops, rank_starts)
    begin = cuts[:-1]
    end = cuts[1:]
    document = np.searchsorted(stops, begin, "right") - 1
    segments = table_of(
        SEGMENT,
        document=document,
        start=begin - stops[document],
        stop=end - stops[document],
        # If several ranks begin at the same token, all but the last are empty.
        rank=np.searchsorted(rank_starts, begin, "right") - 1,
    )
    return assemble(lengths, segments, ranks)


def check_capacity(lengths: IntArray, ranks: int, rows_per_rank: int) -> None:
    """Raise ValueError unless `ranks` ranks of `rows_per_rank` rows can hold the documents."""
    total = int(lengths.sum())
    if total > ranks * rows_per_rank:
        raise Capacity.DOCUMENTS_BEYOND_RANKS.error(
            documents=counted(len(lengths), "document"),
            tokens=counted(total, "token"),
            ranks=counted(ranks, "rank"),
            rows=rows_per_rank,
            capacity=ranks * rows_per_rank,
        )


def assemble(
    lengths: IntArray, segments: Table, ranks: int, *, by_document: bool = False
) -> Layout:
    """Return the layout of segments, whose rows follow each other on every rank.

    Args:
        segments: [segments] of dtype SEGMENT; offsets need not be set.
        by_document: whether each rank has its rows by document and row; otherwise in the order of
            the segments.
    """
    if by_document:
        order = np.lexsort((segments["start"], segments["document"], segments["rank"]))
    else:
        order = np.argsort(segments["rank"], kind="stable")
    segments = merge_touching(segments.take(order), "rank")
    segments["offset"] = rows_before_in(segments, "rank")
    return Layout(lengths, segments, ranks)


def layout_of_rows(lengths: IntArray, segments: Table, ranks: int) -> tuple[IntArray, Layout]:
    """Return the documents that segments are of, in their order, and the layout of these documents.

    Args:
        segments: as in `assemble`; document numbers become those of the layout.
    """
    documents, segments["document"] = np.unique(segments["document"], return_inverse=True)
    return documents, assemble(lengths[documents], segments, ranks, by_document=True)


def layout_of_kind(layout: Layout, kind: AttentionKind) -> Layout:
    """Return the layout as one kind of layer sees it.

    With chunked attention each chunk is a document.
    """
    if kind.chunk is None:
        return layout
    first_chunk = layout.own_starts // kind.chunk  # of each document
    counts = -(-layout.lengths // kind.chunk) - first_chunk
    document = np.repeat(np.arange(len(counts)), counts)
    number = expand(first_chunk, counts)
    start = kind.chunk * number
    stop = np.minimum(start + kind.chunk, layout.lengths[document])
    first_row = np.maximum(start, layout.own_starts[document])
    chunks = table_of(ROWS, document=document, start=first_row, stop=stop)
    branches = None
    if layout.branches is not None:
        # A chunk that begins before its document continues the parent's chunk of this number.
        parent = layout.branches.parents[document]
        first_of = np.cumsum(counts) - counts
        parents = np.where(first_row > start, first_of[parent] + number - first_chunk[parent], -1)
        branches = Branches(parents, first_row - start)
    segment, chunk, part_start, part_stop = overlaps(layout.segments, chunks)
    segments = layout.segments.take(segment)
    segments["offset"] += part_start - segments["start"]
    segments["document"] = chunk
    segments["start"] = part_start - start[chunk]
    segments["stop"] = part_stop - start[chunk]
    return Layout(stop - start, segments, layout.ranks, branches)


def mirrored(layout: Layout) -> Layout:
    """Return the layout with its ranks in reverse order."""
    segments = layout.segments.take(
        np.lexsort((layout.segments["offset"], -layout.segments["rank"]))
    )
    segments["rank"] = layout.ranks - 1 - segments["rank"]
    return replace(layout, segments=segments)
