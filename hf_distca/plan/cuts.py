"""Exchanges between the segments of a path, for modules that mix its rows in order.

A document may be cut into several segments, and several branches may continue a document. The
segment with the row before a segment is its predecessor; a predecessor may have several successors.
A short convolution needs the rows before a segment, its halo. A recurrence needs the state after
the predecessor. All tables follow from the layout alone, so that every rank makes matching ones.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hf_distca.plan import Layout
from hf_distca.plan.arrays import BoolArray, IntArray
from hf_distca.plan.intervals import ROWS, by_document, expand, overlaps, row_counts, table_of
from hf_distca.plan.paths import along_paths
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


class Later(NamedTuple):
    """Gradient that reaches the state after a segment from one of the later segments."""

    gradient: int  # number of the gradient
    # Place of the predecessor's gradient among all that reach the segment; -1 if the predecessor is
    # the segment itself.
    place: int


@dataclass(frozen=True, eq=False)
class Chains:
    """States from which the segments of one rank start.

    A segment is complete if its rank holds all rows of its path before it. The rank computes the
    states of complete segments one after another. The state before any other segment follows from
    states of earlier segments: from the last complete one on its path, and from all after that.

    States are numbered: first the states of this rank's linked segments, in row order, then states
    that arrive. Gradients are numbered alike: first this rank's own, then those that arrive.
    Forward, a state goes once to each rank with later segments. Backward, a gradient goes once to
    each rank with earlier segments.
    """

    # [segments of the rank] the rank's segment after which a complete segment starts; -1 if it
    # begins its document, or is not complete.
    before: tuple[int, ...]
    has_later: tuple[bool, ...]  # [segments of the rank] whether any segment starts after it
    linked: IntArray  # this rank's segments that send or need states, among all its segments
    states: ExchangedRows  # states that travel
    gradients: ExchangedRows  # gradients that travel
    # For each linked segment, states of earlier segments, along the path; empty if it is complete.
    earlier: tuple[tuple[int, ...], ...]
    # For each linked segment, the rank's own gradient to which that of its state before is added;
    # -1 if it is complete. Segments with the same predecessor and no later segments share one.
    gradient_of: tuple[int, ...]
    # For each linked segment, gradients of later segments that are not complete, each before that
    # of its predecessor.
    later: tuple[tuple[Later, ...], ...]


def halos(layout: Layout, rank: int, width: int) -> Halos:
    """Return the places of a rank's rows and halos.

    The halos are those of a convolution whose kernel has width + 1 rows.
    """
    segments = layout.segments
    # 1. Rows of halos: parts [start, stop) of a document, each held by one segment.
    reader = np.flatnonzero(segments["start"] > 0)
    first_rows = segments["start"][reader]
    halo_rows = table_of(
        ROWS,
        document=segments["document"][reader],
        start=np.maximum(first_rows - width, 0),
        stop=first_rows,
    )
    if layout.branches is not None:
        halo_rows, entry = along_paths(halo_rows, layout.branches)
        reader = reader[entry]
    ordered = by_document(segments)
    entry, holder_index, start, stop = overlaps(halo_rows, ordered)
    reader = reader[entry]
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
    received, messages = _messages(source, target, row, rank, layout.ranks)
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


def predecessors(layout: Layout) -> IntArray:
    """Return [segments] the segment with the row before each segment; -1 without one.

    Raises:
        ValueError: A branch begins inside a segment. The state there is not computed.
    """
    segments = layout.segments
    follows = np.flatnonzero(segments["start"] > 0)
    stops = segments["start"][follows]
    rows = table_of(ROWS, document=segments["document"][follows], start=stops - 1, stop=stops)
    if layout.branches is not None:
        rows, _ = along_paths(rows, layout.branches)
    order = np.lexsort((segments["start"], segments["document"]))
    _, place, _, stops = overlaps(rows, segments.take(order))
    holder = order[place]
    if (segments["stop"][holder] != stops).any():
        raise ValueError("a branch begins inside a segment, but states are computed at their ends")
    before = np.full(len(segments), -1)
    before[follows] = holder
    return before


def exchanges_states(layout: Layout) -> bool:
    """Return whether any segment starts from a state of another rank."""
    before = predecessors(layout)
    rank = layout.segments["rank"]
    return bool(((before >= 0) & (rank[before] != rank)).any())


def complete_segments(layout: Layout, before: IntArray) -> BoolArray:
    """Return [segments] whether the rank of each segment holds all rows of its path before it.

    Args:
        before: of `predecessors`.
    """
    rank = layout.segments["rank"]
    begins = before < 0
    is_complete: BoolArray = begins | (rank[before] == rank)
    count = np.intp(-1)
    while np.count_nonzero(is_complete) != count:
        count = np.count_nonzero(is_complete)
        is_complete &= begins | is_complete[before]
    return is_complete


def linked_pairs(before: IntArray, is_complete: BoolArray) -> tuple[IntArray, IntArray]:
    """Return the segments whose states the segments that are not complete need.

    Args:
        before: of `predecessors`.
        is_complete: of `complete_segments`.

    Returns:
        [pairs] earlier segment; [pairs] later segment. Of each later segment, the nearest earlier
        one comes first.
    """
    later = np.flatnonzero(~is_complete)
    earlier = before[later]
    all_earlier, all_later = [earlier], [later]
    while len(later):
        goes_on = ~is_complete[earlier]
        later = later[goes_on]
        earlier = before[earlier[goes_on]]
        all_earlier.append(earlier)
        all_later.append(later)
    return np.concatenate(all_earlier), np.concatenate(all_later)


def gradient_holders(
    layout: Layout, before: IntArray, earlier: IntArray, later: IntArray
) -> IntArray:
    """Return [segments] the segment that stands for the gradient of each segment.

    Segments of a rank that have the same predecessor and no later segments share one gradient.

    Args:
        before: of `predecessors`.
        earlier, later: of `linked_pairs`.
    """
    holders = np.arange(len(before))
    last = np.setdiff1d(later, earlier)
    family = before[last] * layout.ranks + layout.segments["rank"][last]
    _, first, number = np.unique(family, return_index=True, return_inverse=True)
    holders[last] = last[first][number]
    return holders


def sent_once(holder: IntArray, target: IntArray, layout: Layout) -> tuple[IntArray, IntArray]:
    """Return what travels if a segment's state or gradient goes once to each rank that needs it.

    Args:
        holder: [pairs] segment.
        target: [pairs] rank that needs its state or gradient.

    Returns:
        [transfers] segment; [transfers] rank.
    """
    numbers = np.unique(holder * layout.ranks + target)
    segment, rank = np.divmod(numbers, layout.ranks)
    travels = layout.segments["rank"][segment] != rank
    return segment[travels], rank[travels]


def chains(layout: Layout, rank: int) -> Chains:
    """Return the states from which a rank's segments start."""
    ranks = layout.segments["rank"]
    before = predecessors(layout)
    is_complete = complete_segments(layout, before)
    earlier, later = linked_pairs(before, is_complete)
    holders = gradient_holders(layout, before, earlier, later)
    segments = np.flatnonzero(ranks == rank)
    linked = np.intersect1d(segments, np.concatenate([earlier, later]))
    # 1. Numbers of states and gradients on this rank: its own, then those that arrive.
    own_gradients = np.intersect1d(segments, holders[later])
    states, state_number = _numbered(
        linked, *sent_once(earlier, ranks[later], layout), rank, layout
    )
    gradients, gradient_number = _numbered(
        own_gradients, *sent_once(holders[later], ranks[earlier], layout), rank, layout
    )
    # 2. The rank's own segments, by their place on the rank.
    starts_here = is_complete[segments] & (before[segments] >= 0)
    places = np.searchsorted(segments, before[segments])
    # 3. Of each linked segment, the states before it and the gradients after it.
    states_before = _by_segment(state_number[earlier], later, linked)
    is_holder = holders[later] == later
    holders_after = _by_segment(later[is_holder], earlier[is_holder], linked)
    return Chains(
        before=tuple(np.where(starts_here, places, -1).tolist()),
        has_later=tuple(np.isin(segments, before).tolist()),
        linked=np.searchsorted(segments, linked),
        states=states,
        gradients=gradients,
        earlier=tuple(map(tuple, states_before)),
        gradient_of=tuple(
            np.where(is_complete[linked], -1, gradient_number[holders[linked]]).tolist()
        ),
        later=tuple(
            _with_places(holders_of_segment, before, gradient_number)
            for holders_of_segment in holders_after
        ),
    )


def _by_segment(values: IntArray, segment_of_pair: IntArray, segments: IntArray) -> list[list[int]]:
    """Return the values of each segment's pairs, in reverse order.

    Args:
        values: [pairs].
        segment_of_pair: [pairs] segment to which each pair belongs.
    """
    return [values[segment_of_pair == segment][::-1].tolist() for segment in segments]


def _with_places(
    holders: list[int], before: IntArray, gradient_number: IntArray
) -> tuple[Later, ...]:
    """Return the gradients of segments that follow a segment, with places of predecessors.

    Args:
        holders: segments that stand for the gradients, each before its predecessor.
    """
    place = {holder: index for index, holder in enumerate(holders)}
    return tuple(
        Later(int(gradient_number[holder]), place.get(int(before[holder]), -1))
        for holder in holders
    )


def _numbered(
    own: IntArray, segment: IntArray, target: IntArray, rank: int, layout: Layout
) -> tuple[ExchangedRows, IntArray]:
    """Return the messages of states or gradients, and their numbers on a rank.

    Args:
        own: segments of the rank that have one.
        segment, target: of `sent_once`.

    Returns:
        The messages; [segments] number of each segment's state or gradient, where the rank has one.
    """
    ranks = layout.segments["rank"]
    number = np.full(len(ranks), -1)
    number[own] = np.arange(len(own))
    received, messages = _messages(ranks[segment], target, number[segment], rank, layout.ranks)
    number[segment[received]] = len(own) + np.arange(len(received))
    return messages, number


def _messages(
    source: IntArray, target: IntArray, item: IntArray, rank: int, ranks: int
) -> tuple[IntArray, ExchangedRows]:
    """Return which transfers a rank receives, in the order in which they arrive; and its messages.

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
    return received, messages
