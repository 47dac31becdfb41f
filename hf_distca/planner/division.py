"""Division of documents over ranks: equal tokens on each, long documents on several ranks.

A document on k ranks is cut into 2 k equal parts. The first of these ranks has the first part and
the last one, and so on inwards, so that all k compute alike. A long document lies on all ranks, or
on as few as its work needs: all ranks compute more evenly, few ranks receive fewer rows. Other
documents stay whole, but for the few that are cut to give every rank equally many tokens.

Where links differ, documents are divided over nodes first: a document that is long for a node lies
on all ranks of several nodes. Then each node's other documents are divided over its ranks.
"""

from collections.abc import Sequence

import numpy as np

from hf_distca.plan import SEGMENT
from hf_distca.plan.arrays import FloatArray, IntArray, Table
from hf_distca.plan.intervals import expand, joined, numbered, row_counts, table_of
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


class Division:
    """Documents of a nano-batch that are divided over ranks.

    Args:
        lengths: [documents] rows of all documents, also of those that are not placed.
        work: [documents] such as seconds of computing each document.
        over_all: divide long documents over all ranks of their group; otherwise over few.
    """

    def __init__(self, lengths: IntArray, work: FloatArray, *, over_all: bool) -> None:
        self._lengths = lengths
        self._work = work
        self._over_all = over_all
        self._whole: list[tuple[IntArray, IntArray]] = []  # documents, and the rank of each
        # Documents on several ranks, these ranks, and the rows of each.
        self._shared: list[tuple[int, IntArray, IntArray]] = []
        self._cut: list[tuple[int, int, int, int, int]] = []  # as in SEGMENT

    def place(
        self,
        documents: IntArray,
        node_sizes: Sequence[int],
        *,
        first_rank: int = 0,
        is_second: bool = False,
    ) -> None:
        """Place documents on the ranks of a group, with equal tokens on each.

        Tokens that do not divide evenly go to the first ranks in the first nano-batch, and to the
        last ranks in the second. So no rank holds more than with one nano-batch.

        Args:
            node_sizes: [nodes] ranks of each node; one node, or nodes of one rank, if all links are
                alike.
        """
        ranks = sum(node_sizes)
        if ranks == 1:
            self._whole.append((documents, np.full(len(documents), first_rank)))
            return
        rows, more_rows = divmod(int(self._lengths[documents].sum()), ranks)
        room = np.full(ranks, rows)
        room[:more_rows] += 1
        self._place(documents, room[::-1] if is_second else room, node_sizes, first_rank)

    def _place(
        self, documents: IntArray, room: IntArray, node_sizes: Sequence[int], first_rank: int
    ) -> list[int]:
        """Place documents on ranks, and return [ranks] the rows that each still takes.

        Args:
            room: [ranks] rows that each rank takes, together enough for all documents.
        """
        left: list[int] = room.tolist()
        if not len(documents):
            return left
        lengths, work = self._lengths[documents], self._work[documents]
        has_nodes = len(node_sizes) > 1 and max(node_sizes) > 1
        units = _Units(room, node_sizes if has_nodes else (1,) * len(room))
        # 1. Divide long documents over several units. Every part needs a row.
        order = largest_first(work)
        counts = units.counts(lengths, work, over_all=self._over_all)
        is_long = (counts > 1) & (lengths >= 2 * len(room))
        for index in order[is_long[order]].tolist():
            shares = units.share(int(lengths[index]), float(work[index]), int(counts[index]))
            is_long[index] = shares is not None
            if shares is not None:
                ranks, rows = shares
                self._shared.append((int(documents[index]), first_rank + ranks, rows))
        # 2. Give each of the other documents to one unit.
        unit_of_document, left = units.pack(lengths, work, order[~is_long[order]])
        if has_nodes:
            left = []
            for unit, members in enumerate(units.members):
                left += self._place(
                    documents[unit_of_document == unit],
                    units.room[members],
                    (node_sizes[unit],),
                    first_rank + members.start,
                )
        else:
            placed = unit_of_document != NOWHERE
            self._whole.append((documents[placed], first_rank + unit_of_document[placed]))
        # 3. Cut documents that fit nowhere.
        unplaced = documents[~is_long & (unit_of_document == NOWHERE)]
        self._cut_where_room(unplaced, left, first_rank)
        return left

    def cut_over_all(
        self, documents: IntArray, room: IntArray, others: Sequence["Division"]
    ) -> None:
        """Cut documents that fit into no group over the ranks with the most room.

        Args:
            room: [ranks] rows that each rank holds at most.
            others: of other nano-batches, which hold rows of the same ranks.
        """
        placed = joined(*(division.segments for division in (self, *others)))
        used = np.bincount(placed["rank"], row_counts(placed), len(room))
        self._cut_where_room(documents, (room - used.astype(np.int64)).tolist(), 0)

    def _cut_where_room(self, documents: IntArray, left: list[int], first_rank: int) -> None:
        """Cut documents that fit nowhere whole over the ranks with the most room.

        The rank with the most room has the end of a document: only the few rows before travel.

        Args:
            left: [ranks] rows that each rank still takes, together enough for the documents. Placed
                rows are taken off.
        """
        for document in documents.tolist():
            stop = int(self._lengths[document])
            while stop > 0:
                rank = left.index(max(left))
                start = max(stop - left[rank], 0)
                self._cut.append((document, start, stop, first_rank + rank, 0))
                left[rank] -= stop - start
                stop = start

    @property
    def segments(self) -> Table:
        """[segments] of dtype SEGMENT of the documents that were placed, offsets not set."""
        tables = [_parts(self._shared), np.array(self._cut, SEGMENT)]
        if self._whole:
            documents, ranks = map(np.concatenate, zip(*self._whole, strict=True))
            stops = self._lengths[documents]
            tables.append(table_of(SEGMENT, document=documents, stop=stops, rank=ranks))
        return joined(*tables)


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
        self._largest = max(sizes)
        self._first_ranks = ends - self._sizes
        self.members = list(map(slice, self._first_ranks.tolist(), ends.tolist()))
        self._work = np.zeros(len(sizes))  # [units] of each rank of a unit

    def counts(self, lengths: IntArray, work: FloatArray, *, over_all: bool) -> IntArray:
        """Return [documents] over how many units each document should be divided."""
        units = len(self._sizes)
        of_unit = self._largest / len(self.room)
        units_by_work = work / (work.sum() * of_unit)
        if over_all:
            return np.where(units_by_work > LONG_SHARE, units, 1)
        units_by_rows = lengths / (lengths.sum() * of_unit)
        fills_rows = FULL_SHARE * units_by_rows >= units_by_work
        most = np.where(fills_rows, FULL_SHARE, WHOLE_SHARE)
        counts: IntArray = np.ceil(units_by_work / most).astype(np.int64)
        return np.minimum(counts, units)

    def share(self, length: int, work: float, count: int) -> tuple[IntArray, IntArray] | None:
        """Divide a document over all ranks of the units with the least work.

        Args:
            count: number of units. There may be more if so few ranks have too little room.

        Returns:
            Ranks, and the rows of each; None if ranks have too little room.
        """
        if count < len(self._sizes):
            by_work = np.argsort(self._work, kind="stable")
            room_by_work = np.minimum.reduceat(self.room, self._first_ranks)[by_work]
            units = by_work[room_by_work >= length // (count * self._largest)][:count]
            if len(units) < count:
                return self.share(length, work, min(2 * count, len(self._sizes)))
            units = np.sort(units)
            ranks = units
            if self._largest > 1:  # else a unit is a rank
                ranks = expand(self._first_ranks[units], self._sizes[units])
        else:
            units = np.arange(len(self._sizes))
            ranks = np.arange(len(self.room))
        room = self.room[ranks]
        rows = _equal_rows(length, room)
        if (rows <= room).all():
            self.room[ranks] -= rows
            self._work[units] += work / len(ranks)
            return ranks, rows
        if len(units) == len(self._sizes):
            return None
        return self.share(length, work, min(2 * count, len(self._sizes)))

    def pack(
        self, lengths: IntArray, work: FloatArray, order: IntArray
    ) -> tuple[IntArray, list[int]]:
        """Return [documents] the unit of each, and [units] the rows that are left of each.

        Of the units with room a document goes to the one with the least work. NOWHERE stands for
        documents that no unit has room for, or that are not in `order`.
        """
        bins = Bins(
            np.add.reduceat(self.room, self._first_ranks).tolist(),
            work=self._work.tolist(),
            speeds=self._sizes.tolist(),
        )
        return bins.pack(lengths, work, order, bins.least_work), bins.room


def _equal_rows(length: int, room: IntArray) -> IntArray:
    """Return [ranks] rows of a document on each rank, one more where there is the most room."""
    rows, more_rows = divmod(length, len(room))
    rows_of_ranks = np.full(len(room), rows)
    rows_of_ranks[largest_first(room)[:more_rows]] += 1
    return rows_of_ranks


def _parts(shared: Sequence[tuple[int, IntArray, IntArray]]) -> Table:
    """Return [segments] of dtype SEGMENT of documents that ranks share.

    Each rank has one part of the first half of a document and one of the second, mirrored.

    Args:
        shared: documents, ranks of each, and the rows of these ranks.
    """
    if not shared:
        return np.zeros(0, SEGMENT)
    documents, ranks_of_documents, rows_of_documents = zip(*shared, strict=True)
    counts = np.array(list(map(len, ranks_of_documents)))
    ranks, rows = np.concatenate(ranks_of_documents), np.concatenate(rows_of_documents)
    # 1. Parts of the first halves, document after document, and then those of the second halves,
    #    each document's ranks in reverse.
    ends = np.cumsum(counts)
    owner, nth = numbered(counts)
    mirror = ends[owner] - 1 - nth
    parts = np.stack([rows // 2, (rows - rows // 2)[mirror]])
    # 2. Rows of a document before each part.
    stops = np.cumsum(parts, axis=1)
    before = np.pad(stops, ((0, 0), (1, 0)))
    stops -= before[:, ends - counts][:, owner]
    stops[1] += (before[0, ends] - before[0, ends - counts])[owner]
    return table_of(
        SEGMENT,
        document=np.tile(np.array(documents)[owner], 2),
        start=(stops - parts).ravel(),
        stop=stops.ravel(),
        rank=np.append(ranks, ranks[mirror]),
    )
