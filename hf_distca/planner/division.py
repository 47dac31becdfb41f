"""Division of documents over ranks: equal tokens on each, long documents on several ranks.

A document on k ranks is cut into 2 k equal parts. The first of these ranks has the first part and
the last one, and so on inwards, so that all k compute alike. A long document lies on all ranks, or
on as few as its work needs: all ranks compute more evenly, few ranks receive fewer rows. Other
documents stay whole, but for the few that are cut to give every rank equally many tokens.

Where links differ, documents are divided over nodes first: a document that is long for a node lies
on all ranks of several nodes. Then each node's other documents are divided over its ranks.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from hf_distca.plan import SEGMENT
from hf_distca.plan.arrays import FloatArray, IntArray, Table
from hf_distca.plan.intervals import joined, row_counts, table_of
from hf_distca.planner.bin_packing import NOWHERE, Bins, largest_first

LONG_SHARE = 0.25
"""Share of a rank's work from which a document is divided over all ranks; shorter ones balance well
enough uncut."""
WHOLE_SHARE = 0.7
"""Share of a rank's work from which a document is divided over few ranks, and the most work that it
gives each of them. Documents that stay whole fill the rest."""
FULL_SHARE = 1.05
"""The same for a document that takes as many of a rank's rows as of its work, up to this factor. It
leaves no rows that others would have to fill with little work."""


def divide_nano_batches(
    lengths: IntArray,
    work: FloatArray,
    nano_batches: Sequence[IntArray],
    node_sizes: Sequence[int],
    *,
    over_all: bool,
) -> list[Table]:
    """Place the documents of each nano-batch on ranks, with equal tokens on each.

    Tokens that do not divide evenly go to the first ranks in the first nano-batch, and to the last
    ranks in the second. So no rank holds more than with one nano-batch.

    Args:
        work: [documents] such as seconds of computing each document.
        nano_batches: documents of each nano-batch.
        node_sizes: [nodes] ranks of each node; one node, or nodes of one rank, if all links are
            alike.
        over_all: divide long documents over all ranks; otherwise over few.

    Returns:
        [segments] of dtype SEGMENT of each nano-batch, offsets not set.
    """
    ranks = sum(node_sizes)
    if ranks == 1:
        return [on_ranks(documents, lengths, 0) for documents in nano_batches]
    tables = []
    for number, documents in enumerate(nano_batches):
        rows, more_rows = divmod(int(lengths[documents].sum()), ranks)
        room = np.full(ranks, rows)
        room[:more_rows] += 1
        segments = _divide(
            lengths[documents],
            work[documents],
            room[::-1] if number == 1 else room,
            node_sizes,
            over_all=over_all,
        )
        segments["document"] = documents[segments["document"]]
        tables.append(segments)
    return tables


def _divide(
    lengths: IntArray,
    work: FloatArray,
    room: IntArray,
    node_sizes: Sequence[int],
    *,
    over_all: bool,
) -> Table:
    """Return [segments] of dtype SEGMENT that place documents on ranks.

    Args:
        room: [ranks] rows that each rank takes, together enough for all documents.
    """
    has_nodes = len(node_sizes) > 1 and max(node_sizes) > 1
    units = _Units(room, node_sizes if has_nodes else (1,) * len(room))
    # 1. Divide long documents over several units. Every part needs a row.
    order = largest_first(work)
    counts = units.counts(lengths, work, over_all=over_all)
    is_long = (counts > 1) & (lengths >= 2 * len(room))
    tables = []
    for document in order[is_long[order]].tolist():
        parts = units.share(document, lengths[document], work[document], counts[document])
        is_long[document] = parts is not None
        if parts is not None:
            tables.append(parts)
    # 2. Give each of the other documents to one unit.
    unit_of_document = units.pack(lengths, work, order[~is_long[order]])
    if has_nodes:
        for unit, members in enumerate(units.members):
            documents = np.flatnonzero(unit_of_document == unit)
            inside = _divide(
                lengths[documents],
                work[documents],
                units.room[members],
                (node_sizes[unit],),
                over_all=over_all,
            )
            inside["document"] = documents[inside["document"]]
            inside["rank"] += members.start
            tables.append(inside)
    else:
        whole = np.flatnonzero(unit_of_document != NOWHERE)
        tables.append(on_ranks(whole, lengths, unit_of_document[whole]))
    # 3. Cut documents that fit nowhere.
    placed = joined(*tables)
    unplaced = np.flatnonzero(~is_long & (unit_of_document == NOWHERE))
    return joined(placed, cut_where_room(unplaced.tolist(), lengths, room_left(room, placed)))


class _Units:
    """Nodes, or single ranks, that documents are given to.

    Args:
        room: [ranks] rows that each rank takes.
        sizes: [units] ranks of each unit.

    Attributes:
        room: [ranks] rows that each rank takes besides parts of long documents.
        members: [units] ranks of each unit.
    """

    def __init__(self, room: IntArray, sizes: Sequence[int]) -> None:
        self.room = room.copy()
        ends = np.cumsum(sizes)
        self._sizes = np.array(sizes)
        self._first_ranks = ends - self._sizes
        self.members = list(map(slice, self._first_ranks.tolist(), ends.tolist()))
        self._unit_of_rank = np.repeat(np.arange(len(sizes)), sizes)
        self._work = np.zeros(len(sizes))  # [units] of each rank of a unit

    def counts(self, lengths: IntArray, work: FloatArray, *, over_all: bool) -> IntArray:
        """Return [documents] over how many units each document should be divided."""
        units = len(self._sizes)
        of_unit = self._sizes.max() / len(self.room)
        units_by_work = work / (work.sum() * of_unit)
        if over_all:
            return np.where(units_by_work > LONG_SHARE, units, 1)
        units_by_rows = lengths / (lengths.sum() * of_unit)
        fills_rows = FULL_SHARE * units_by_rows >= units_by_work
        most = np.where(fills_rows, FULL_SHARE, WHOLE_SHARE)
        counts: IntArray = np.ceil(units_by_work / most).astype(np.int64)
        return np.minimum(counts, units)

    def share(self, document: int, length: int, work: float, count: int) -> Table | None:
        """Divide a document over all ranks of the units with the least work.

        Args:
            count: number of units. There may be more if so few ranks have too little room.

        Returns:
            [segments] of dtype SEGMENT; None if ranks have too little room.
        """
        by_work = np.argsort(self._work, kind="stable")
        room_by_work = np.minimum.reduceat(self.room, self._first_ranks)[by_work]
        while True:
            units = by_work[room_by_work >= length // (count * int(self._sizes.max()))][:count]
            if len(units) == count:
                is_chosen = np.zeros(len(self._sizes), np.bool_)
                is_chosen[units] = True
                ranks = np.flatnonzero(is_chosen[self._unit_of_rank])
                rows = _equal_rows(length, self.room[ranks])
                if (rows <= self.room[ranks]).all():
                    self.room[ranks] -= rows
                    self._work[units] += work / len(ranks)
                    return _parts(document, ranks, rows)
            if count == len(self._sizes):
                return None
            count = min(2 * count, len(self._sizes))

    def pack(self, lengths: IntArray, work: FloatArray, order: IntArray) -> IntArray:
        """Return [documents] the unit of each: of those with room, the one with the least work.

        NOWHERE for documents that no unit has room for, or that are not in `order`.
        """
        bins = Bins(
            np.add.reduceat(self.room, self._first_ranks).tolist(),
            work=self._work.tolist(),
            speeds=self._sizes.tolist(),
        )
        return bins.pack(lengths, work, order, bins.least_work)


def _equal_rows(length: int, room: IntArray) -> IntArray:
    """Return [ranks] rows of a document on each rank, one more where there is the most room."""
    rows, more_rows = divmod(length, len(room))
    rows_of_ranks = np.full(len(room), rows)
    rows_of_ranks[largest_first(room)[:more_rows]] += 1
    return rows_of_ranks


def _parts(document: int, ranks: IntArray, rows: IntArray) -> Table:
    """Return [segments] of dtype SEGMENT of a document that ranks share.

    Each rank has one part of the first half of the document and one of the second, mirrored.

    Args:
        rows: [ranks] rows of the document on each rank.
    """
    first_parts = rows // 2
    parts = np.append(first_parts, (rows - first_parts)[::-1])
    stops = np.cumsum(parts)
    return table_of(
        SEGMENT,
        document=np.full(len(parts), document),
        start=stops - parts,
        stop=stops,
        rank=np.append(ranks, ranks[::-1]),
    )


def on_ranks(documents: IntArray, lengths: IntArray, rank: IntArray | int) -> Table:
    """Return [segments] of dtype SEGMENT of whole documents.

    Args:
        rank: rank of each of the documents, or of all.
    """
    return table_of(SEGMENT, document=documents, stop=lengths[documents], rank=rank)


def room_left(room: IntArray, segments: Table) -> IntArray:
    """Return [ranks] rows that each rank takes besides segments."""
    used = np.bincount(segments["rank"], row_counts(segments), len(room))
    return np.asarray(room - used.astype(np.int64))


def cut_where_room(documents: Iterable[int], lengths: IntArray, room: IntArray) -> Table:
    """Cut documents that fit nowhere whole over the ranks with the most room.

    The rank with the most room has the end of a document: only the few rows before travel.

    Args:
        room: [ranks] rows that each rank takes, together enough for the documents.

    Returns:
        [segments] of dtype SEGMENT.
    """
    left = room.tolist()
    segments = []
    for document in documents:
        stop = int(lengths[document])
        while stop > 0:
            rank = left.index(max(left))
            start = max(stop - left[rank], 0)
            segments.append((document, start, stop, rank, 0))
            left[rank] -= stop - start
            stop = start
    return np.array(segments, SEGMENT)
