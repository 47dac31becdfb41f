"""Exchanges between the segments of a cut document, for modules that mix its rows in order.

A short convolution needs the rows before a segment, its halo. A recurrence needs the state that the
earlier segments leave. Both tables follow from the layout alone, so that every rank makes matching
ones.
"""

from dataclasses import dataclass

import numpy as np

from hf_distca.plan import Layout
from hf_distca.plan.intervals import (
    ROWS,
    IntArray,
    Table,
    by_document,
    expand,
    overlaps,
    row_counts,
    table_of,
)
from hf_distca.plan.routes import ExchangedRows


@dataclass(frozen=True, eq=False)
class Halos:
    """Rows of one rank in an extended row that has room for halos.

    Before every segment there is a halo of `width` rows.

    A halo holds the document's rows before the segment; where the document has none it stays zero,
    as a causal convolution pads.
    """

    rows: int  # of the extended row
    places: IntArray  # [local rows] place of each local row
    messages: ExchangedRows  # halo rows that lie on other ranks
    received_places: IntArray  # places of the received rows, in the order of the sending ranks
    local_rows: IntArray  # local rows that are a halo on this rank too
    local_places: IntArray  # their places


@dataclass(frozen=True, eq=False)
class Chains:
    """States that the cut segments of one rank need of other segments of their documents.

    States are numbered: first the states of this rank's cut segments, in row order, then states
    that arrive. Forward, states of earlier segments arrive. Backward, gradients of later segments
    return.
    """

    cut: IntArray  # this rank's segments of cut documents, among all its segments
    # States that go to other ranks, one for each pair of an earlier and a later segment.
    messages: ExchangedRows
    received: IntArray  # for each arriving state, the cut segment of this rank that needs it
    earlier: tuple[
        tuple[int, ...], ...
    ]  # for each cut segment, states of all earlier segments, in document order
    later: tuple[
        tuple[int, ...], ...
    ]  # for each cut segment, gradients of all later segments, in document order


def halos(layout: Layout, rank: int, width: int) -> Halos:
    """Return the places of a rank's rows and halos.

    They serve a convolution whose kernel has width + 1 rows.
    """
    segments = layout.segments
    nth = np.arange(len(segments)) - np.searchsorted(segments["rank"], segments["rank"])
    begins = segments["offset"] + width * nth  # of each halo, in the extended row of its rank
    first = np.maximum(segments["start"] - width, 0)
    before = table_of(ROWS, document=segments["document"], start=first, stop=segments["start"])
    ordered = by_document(segments)
    reader, other, start, stop = overlaps(before, ordered)
    holder = ordered.take(other)
    source, target = (
        np.repeat(ranks, stop - start) for ranks in (holder["rank"], segments["rank"][reader])
    )
    row = expand(holder["offset"] + start - holder["start"], stop - start)
    place = expand(begins[reader] + width + start - segments["start"][reader], stop - start)
    _, received, messages = _messages(source, target, row, rank, layout.ranks)
    stays = (source == rank) & (target == rank)
    sizes = row_counts(layout.of_rank(rank))
    local = int(sizes.sum())
    return Halos(
        rows=local + width * len(sizes),
        places=np.arange(local) + width * np.repeat(np.arange(1, len(sizes) + 1), sizes),
        messages=messages,
        received_places=place[received],
        local_rows=row[stays],
        local_places=place[stays],
    )


def chains(layout: Layout, rank: int) -> Chains:
    """Return which states a rank's cut segments exchange with other segments."""
    segments = layout.segments
    order, _, earlier, later = chained(segments)
    count = np.bincount(segments["document"])[segments["document"]]
    mine = np.flatnonzero(segments["rank"] == rank)
    cut = np.flatnonzero(count[mine] > 1)
    number = np.full(len(segments), -1)  # of the states of this rank's cut segments
    number[mine[cut]] = np.arange(len(cut))
    from_, to = order[earlier], order[later]
    source, target = segments["rank"][from_], segments["rank"][to]
    sent, received, messages = _messages(source, target, number[from_], rank, layout.ranks)
    state, gradient = number[from_], number[to]
    state[received] = len(cut) + np.arange(len(received))
    gradient[sent] = len(cut) + np.arange(len(sent))
    before, after = (
        tuple(tuple(of_pairs[number[ends] == segment].tolist()) for segment in range(len(cut)))
        for of_pairs, ends in ((state, to), (gradient, from_))
    )
    return Chains(cut, messages, number[to[received]], before, after)


def chained(segments: Table) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Return the segments in document order, and the pairs of segments of a document.

    Each pair has an earlier and a later segment.

    Returns:
        [segments] indices of segments in document order; [segments] number of earlier segments of
        the document; [pairs] place in this order of the earlier segment; [pairs] place of the later
        one, ascending.
    """
    order = np.lexsort((segments["start"], segments["document"]))
    document = segments["document"][order]
    first = np.searchsorted(document, document)
    nth = np.arange(len(order)) - first
    return order, nth, expand(first, nth), np.repeat(np.arange(len(order)), nth)


def _messages(
    source: IntArray, target: IntArray, item: IntArray, rank: int, ranks: int
) -> tuple[IntArray, IntArray, ExchangedRows]:
    """Return which transfers a rank sends and receives, and their messages.

    Transfers are in the order in which they travel.

    Args:
        source: [transfers] rank that has an item, which does not travel if `target` is the same.
        item: [transfers] number of the item at its source.
    """
    travels, numbers, counts = source != target, [], []
    for here, there in ((source, target), (target, source)):
        mine = np.flatnonzero((here == rank) & travels)
        numbers.append(mine[np.argsort(there[mine], kind="stable")])
        counts.append(np.bincount(there[mine], minlength=ranks))
    (sent, received), (to, of) = numbers, counts
    return sent, received, ExchangedRows(item[sent], to, of, crossing=bool(travels.any()))
