"""Exchanges between the segments of a cut document, for modules that mix its rows in order.

A short convolution needs the rows before a segment, its halo. A recurrence needs the state that the
earlier segments leave. Both tables follow from the layout alone, so that every rank makes matching
ones.
"""

from dataclasses import dataclass

import numpy as np

from hf_distca.plan import Layout
from hf_distca.plan.arrays import IntArray, Table
from hf_distca.plan.intervals import ROWS, by_document, expand, overlaps, row_counts, table_of
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
    # For each cut segment, states of all earlier segments, in document order.
    earlier: tuple[tuple[int, ...], ...]
    # For each cut segment, gradients of all later segments, in document order.
    later: tuple[tuple[int, ...], ...]


def halos(layout: Layout, rank: int, width: int) -> Halos:
    """Return the places of a rank's rows and halos.

    The halos are those of a convolution whose kernel has width + 1 rows.
    """
    segments = layout.segments
    # 1. Rows of halos: parts [start, stop) of a document, each held by one segment.
    halo_starts = np.maximum(segments["start"] - width, 0)
    halo_rows = table_of(
        ROWS, document=segments["document"], start=halo_starts, stop=segments["start"]
    )
    ordered = by_document(segments)
    reader, holder_index, start, stop = overlaps(halo_rows, ordered)
    holder = ordered.take(holder_index)
    # 2. Of each row, where the row is and where it goes in the extended row of the reader's rank,
    #    in which every segment has its halo before it.
    segment_of_rank = np.arange(len(segments)) - np.searchsorted(segments["rank"], segments["rank"])
    halo_offsets = segments["offset"] + width * segment_of_rank
    source = np.repeat(holder["rank"], stop - start)
    target = np.repeat(segments["rank"][reader], stop - start)
    row = expand(holder["offset"] + start - holder["start"], stop - start)
    place = expand(halo_offsets[reader] + width + start - segments["start"][reader], stop - start)
    # 3. The rows that this rank sends, receives, and has itself.
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
    # 1. Numbers of the states of this rank's cut segments; -1 for all other segments.
    segments_of_document = np.bincount(segments["document"])[segments["document"]]
    rank_segments = np.flatnonzero(segments["rank"] == rank)
    cut = np.flatnonzero(segments_of_document[rank_segments] > 1)
    number = np.full(len(segments), -1)
    number[rank_segments[cut]] = np.arange(len(cut))
    # 2. Pairs of an earlier and a later segment, and the states that travel for them.
    order, _, earlier_place, later_place = chained(segments)
    earlier = order[earlier_place]
    later = order[later_place]
    sent, received, messages = _messages(
        segments["rank"][earlier], segments["rank"][later], number[earlier], rank, layout.ranks
    )
    # 3. Of each pair, the number of the state that the later segment reads, and of the gradient
    #    that the earlier segment reads. Those that arrive are numbered after the rank's own.
    state = number[earlier]
    state[received] = len(cut) + np.arange(len(received))
    gradient = number[later]
    gradient[sent] = len(cut) + np.arange(len(sent))
    return Chains(
        cut=cut,
        messages=messages,
        received=number[later[received]],
        earlier=_by_segment(state, number[later], len(cut)),
        later=_by_segment(gradient, number[earlier], len(cut)),
    )


def _by_segment(
    values: IntArray, segment_of_pair: IntArray, segments: int
) -> tuple[tuple[int, ...], ...]:
    """Return the values of each segment's pairs.

    Args:
        values: [pairs].
        segment_of_pair: [pairs] segment to which each pair belongs; -1 for none.
    """
    return tuple(tuple(values[segment_of_pair == segment].tolist()) for segment in range(segments))


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
    document_begins = np.searchsorted(document, document)
    earlier_count = np.arange(len(order)) - document_begins
    earlier_place = expand(document_begins, earlier_count)
    later_place = np.repeat(np.arange(len(order)), earlier_count)
    return order, earlier_count, earlier_place, later_place


def _messages(
    source: IntArray, target: IntArray, item: IntArray, rank: int, ranks: int
) -> tuple[IntArray, IntArray, ExchangedRows]:
    """Return which transfers a rank sends and receives, and their messages.

    Transfers are in the order in which they travel.

    Args:
        source: [transfers] rank that has an item, which does not travel if `target` is the same.
        item: [transfers] number of the item at its source.
    """
    travels = source != target

    def by_peer(end: IntArray, peer: IntArray) -> tuple[IntArray, IntArray]:
        """Return this rank's transfers at one end, by peer, and [ranks] how many each has."""
        transfers = np.flatnonzero((end == rank) & travels)
        ordered = transfers[np.argsort(peer[transfers], kind="stable")]
        return ordered, np.bincount(peer[transfers], minlength=ranks)

    sent, send_counts = by_peer(source, target)
    received, recv_counts = by_peer(target, source)
    messages = ExchangedRows(item[sent], send_counts, recv_counts, crossing=bool(travels.any()))
    return sent, received, messages
