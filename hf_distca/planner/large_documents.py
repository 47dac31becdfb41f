"""First phase of the joint layout: cut documents that are too large for one rank.

Large documents are cut from their ends, one rank after another. A rank gets a segment, and beside
it the shortest documents as a filler. They have few pairs a row, so the segment has many, and lies
as early in its document as it can. Where the shortest documents run out, rows of the same
document's head take their place.
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, takewhile
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from hf_distca.plan.cost import pairs
from hf_distca.plan.intervals import IntArray, Table, grain
from hf_distca.planner.bin_packing import Bins

ROUNDING = 0.1
"""Share of the slack in pairs that rounding one cut may cost; beyond it, the cut leaves the block's
boundary."""


class Segment(NamedTuple):
    """Rows [start, stop) that are cut off a piece, and the rank that they go to."""

    piece: int
    start: int
    stop: int
    rank: int


@dataclass(frozen=True)
class Targets:
    """Pairs that every rank should get, and how closely.

    A node stands for a rank while documents are given to nodes.
    """

    mean: float  # pairs of a rank
    slack: float  # how far above its share a rank's pairs may be, as a fraction of the mean
    window: int | None
    block: int  # cuts fall on multiples of this many rows, where balance allows

    @classmethod
    def of_bins(cls, bins: Bins, slack: float, window: int | None, block: int) -> "Targets":
        """Return the targets of ranks that miss the pairs that `bins` says."""
        return cls(-sum(bins.work) / len(bins.work), slack, window, block)


class Pieces:
    """Rows to be placed: documents, or the parts of documents that a node has.

    Attributes:
        documents: [pieces] document of each piece.
        starts, stops: [pieces] rows of the document that are not cut off.
        inter_node: [pieces] inter-node cost of a row, in intra-node rows.
    """

    def __init__(self, table: Table, inter_node: list[float] | None = None) -> None:
        self.documents: list[int] = table["document"].tolist()
        self.starts: list[int] = table["start"].tolist()
        self.stops: list[int] = table["stop"].tolist()
        self.inter_node = inter_node or [0.0] * len(table)

    def __len__(self) -> int:
        return len(self.documents)

    def rows(self) -> IntArray:
        """Return [pieces] rows that are not cut off."""
        return np.array(self.stops, np.int64) - np.array(self.starts, np.int64)

    def pairs(self, window: int | None) -> IntArray:
        """Return [pieces] query-key pairs of the rows that are not cut off."""
        return pairs(np.array(self.starts, np.int64), np.array(self.stops, np.int64), window)

    def cut_off(self, segment: Segment) -> None:
        """Remove a segment, which lies at the end or at the beginning of its piece."""
        if segment.stop == self.stops[segment.piece]:
            self.stops[segment.piece] = segment.start
        else:
            self.starts[segment.piece] = segment.stop

    def split_at(self, piece: int, row: int) -> None:
        """Make the rows from `row` on a piece of their own."""
        self.documents.append(self.documents[piece])
        self.starts.append(row)
        self.stops.append(self.stops[piece])
        self.stops[piece] = row


class _ShortestDocuments:
    """Documents that fill ranks beside segments, the shortest first.

    Args:
        rows, costs: [documents] rows and pairs of each document.
    """

    def __init__(self, rows: IntArray, costs: IntArray) -> None:
        self._rows: list[int] = np.append(0, np.cumsum(rows)).tolist()
        self._pairs: list[int] = np.append(0, np.cumsum(costs)).tolist()
        self.rows = self._rows[-1]  # of all documents

    def pairs_of(self, rows: int) -> float:
        """Return the pairs of the first rows; a document counts in proportion to its rows."""
        number = bisect_left(self._rows, rows)
        if number == 0:
            return 0.0
        if number == len(self._rows):
            return float(self._pairs[-1])
        low = self._rows[number - 1]
        high = self._rows[number]
        share = (rows - low) / (high - low)
        return self._pairs[number - 1] + share * (self._pairs[number] - self._pairs[number - 1])


@dataclass
class _UncutRows:
    """Rows of a piece that no rank has yet while it is cut."""

    first: int  # first row of the piece
    head: int  # rows before it went to ranks beside their segments
    stop: int  # rows from it on went to ranks as segments


@dataclass(frozen=True)
class _NextRank:
    """Rank that gets the next segment, with the rows that it could take beside the segment."""

    room: int
    aim: float  # pairs that it should get
    head_rows: int  # rows of the head that it takes in any case
    uncut: _UncutRows
    shortest: _ShortestDocuments
    filler_used: int  # rows of the shortest documents that earlier ranks have
    window: int | None

    def beside(self, tail: int) -> tuple[int, int]:
        """Return the rows of the head and of the shortest documents beside a segment.

        Args:
            tail: rows of the segment, which ends where the uncut rows do.
        """
        free = self.room - tail
        ahead = self.uncut.stop - tail - self.uncut.head
        filler_left = self.shortest.rows - self.filler_used
        head_rows = min(max(free - filler_left, self.head_rows), free, ahead)
        return head_rows, min(free - head_rows, filler_left)

    def pairs(self, tail: int) -> float:
        """Return all pairs of the rank if its segment has the last `tail` uncut rows."""
        head, stop = self.uncut.head, self.uncut.stop
        head_rows, filler_rows = self.beside(tail)
        filler_stop = self.shortest.pairs_of(self.filler_used + filler_rows)
        segment_pairs = pairs(stop - tail, stop, self.window)
        all_pairs = filler_stop - self.shortest.pairs_of(self.filler_used) + segment_pairs
        if head_rows > 0:
            all_pairs += pairs(head, head + head_rows, self.window)
        return all_pairs


class _Cutter:
    """Cuts of the large documents at one level.

    Args:
        order: pieces from the largest one on.
        bins: room and missing pairs of every rank.
        level: every rank with a segment gets this many times its share of pairs.
        head_rows: for a rank, rows of the head that it takes beside its segment in any case.
    """

    def __init__(
        self,
        pieces: Pieces,
        order: list[int],
        bins: Bins,
        targets: Targets,
        shortest: _ShortestDocuments,
        level: float,
        head_rows: dict[int, int],
    ) -> None:
        self.segments: list[Segment] = []
        self._pieces = pieces
        self._order = order
        self._bins = bins
        self._targets = targets
        self._shortest = shortest
        self._level = level
        self._head_rows = head_rows
        self._rank = 0  # that gets the next segment
        self._filler_used = 0  # rows of the shortest documents that earlier ranks have
        self._carry = 0.0  # pairs that earlier ranks together got too few

    def cut(self, largest: "_Largest") -> bool:
        """Cut pieces until one fits, and return whether all rows fit into the ranks."""
        for piece in self._order:
            uncut = self._cut_piece(piece)
            if self._rank == len(self._bins.room):
                return uncut.stop <= uncut.head
            if uncut.stop == self._pieces.stops[piece] and not largest.exceeds_rank(piece):
                break
        return True

    def _cut_piece(self, piece: int) -> _UncutRows:
        """Cut a piece until what is left of it fits a rank, and return the uncut rows."""
        first = self._pieces.starts[piece]
        uncut = _UncutRows(first, head=first, stop=self._pieces.stops[piece])
        while self._rank < len(self._bins.room) and uncut.stop > uncut.head:
            rank = self._next_rank(uncut)
            if self._leaves_rest(rank):
                break
            start = self._segment_start(rank)
            if start >= uncut.stop:
                break
            self._give(piece, rank, start)
        return uncut

    def _next_rank(self, uncut: _UncutRows) -> _NextRank:
        number = self._rank
        missing = -self._bins.work[number]
        return _NextRank(
            room=self._bins.room[number],
            aim=missing * self._level + self._carry,
            head_rows=self._head_rows.get(number, 0),
            uncut=uncut,
            shortest=self._shortest,
            filler_used=self._filler_used,
            window=self._targets.window,
        )

    def _leaves_rest(self, rank: _NextRank) -> bool:
        """Return whether the uncut rows stay together, since they fit the rank.

        The rows do not stay together if ranks took rows of the head for lack of other documents.
        """
        uncut = rank.uncut
        if uncut.head != uncut.first and not self._head_rows:
            return False
        rows = uncut.stop - uncut.head
        enough = rank.aim + self._targets.mean * self._targets.slack / 2
        return rows <= rank.room and rank.pairs(rows) <= enough

    def _segment_start(self, rank: _NextRank) -> int:
        """Return the first row of the rank's segment."""
        head, stop, first = rank.uncut.head, rank.uncut.stop, rank.uncut.first
        block, window = self._targets.block, self._targets.window
        # 1. Find the shortest segment with which the rank has enough pairs.
        tails = range(min(stop - head, rank.room) + 1)
        row = stop - bisect_right(tails, rank.aim, 1, key=rank.pairs) + 1
        # 2. Round to a block's boundary if that moves few pairs, otherwise to a finer one.
        most_moved = ROUNDING * self._targets.slack * self._targets.mean
        multiple = grain(block, min(row, window or row), most_moved)
        start = round(row / multiple) * multiple
        # 3. Leave no head below a block before the segment, and no more rows than there is room.
        if start - first < block:
            start = first + block if row - first >= block // 2 else first
        return max(start, stop - rank.room, head)

    def _give(self, piece: int, rank: _NextRank, start: int) -> None:
        """Give the rank the uncut rows from `start` on, and the rows that it takes beside them."""
        uncut = rank.uncut
        tail = uncut.stop - start
        head_rows, filler_rows = rank.beside(tail)
        # The next rank makes up for the pairs that this one misses, or has too many of.
        self._carry = rank.aim - rank.pairs(tail)
        self._filler_used += filler_rows
        self.segments.append(Segment(piece, start, uncut.stop, self._rank))
        if head_rows:
            head_stop = uncut.head + head_rows
            self.segments.append(Segment(piece, uncut.head, head_stop, self._rank))
        uncut.head += head_rows
        uncut.stop = start
        self._rank += 1


class _Largest:
    """Order of the pieces by size, and which of them exceed a rank."""

    def __init__(self, pieces: Pieces, bins: Bins, targets: Targets) -> None:
        self._pieces = pieces
        self._targets = targets
        self._most_room = max(bins.room)
        self._most_pairs = -min(bins.work) * (1 + targets.slack / 2)
        rows = pieces.rows()
        costs = pieces.pairs(targets.window)
        order = np.lexsort((-costs, rows <= self._most_room))
        self.order: list[int] = order.tolist()
        self.shortest = _ShortestDocuments(rows[order[::-1]], costs[order[::-1]])
        large = sum(1 for _ in takewhile(self.exceeds_rank, self.order))
        fillers = order[large:][::-1]
        self.shortest = _ShortestDocuments(rows[fillers], costs[fillers])

    def exceeds_rank(self, piece: int) -> bool:
        """Return whether a piece exceeds one rank, even beside the shortest documents."""
        start, stop = self._pieces.starts[piece], self._pieces.stops[piece]
        if stop - start > self._most_room:
            return True
        filler = self.shortest.pairs_of(self._most_room - (stop - start))
        return pairs(start, stop, self._targets.window) + filler > self._most_pairs


def cut_large(pieces: Pieces, bins: Bins, targets: Targets, *, inside: bool) -> list[Segment]:
    """Cut the large documents, divide the rows before the cuts, and return the segments.

    Args:
        pieces: loses the segments; gets a further piece for each stretch of a divided head.
        bins: room and missing pairs of every rank; lowered by the segments.
        inside: whether the ranks are those of one node of several.
    """
    largest = _Largest(pieces, bins, targets)
    most_room = max(bins.room)
    segments = _cut_at_lowest_level(pieces, bins, targets, largest, inside=inside)
    for segment in segments:
        pieces.cut_off(segment)
        cost = pairs(segment.start, segment.stop, targets.window)
        bins.put(segment.rank, segment.stop - segment.start, cost)
    if targets.window is None:  # with a window, later segments need only the window's rows
        _divide_heads(pieces, segments, len(bins.room), most_room, targets.block)
    return segments


def _cut_at_lowest_level(
    pieces: Pieces, bins: Bins, targets: Targets, largest: _Largest, *, inside: bool
) -> list[Segment]:
    """Cut at the lowest level at which the other documents fit into the remaining ranks."""

    def cut(level: float, head_rows: dict[int, int]) -> tuple[list[Segment], bool]:
        cutter = _Cutter(pieces, largest.order, bins, targets, largest.shortest, level, head_rows)
        fits = cutter.cut(largest)
        return cutter.segments, fits

    # If even the densest rows give a rank fewer pairs than its share, other ranks must take more.
    level = 1.0
    segments, fits = cut(level, {})
    if not fits:
        level = 1 + targets.slack
        segments, fits = cut(level, {})
    if segments and inside and targets.window is None:
        head_rows = _head_rows(pieces, segments, len(bins.room), targets.block)
        sharing_head, still_fits = cut(level, head_rows)
        if still_fits or not fits:
            segments = sharing_head
    return segments


def _head_rows(pieces: Pieces, segments: list[Segment], ranks: int, block: int) -> dict[int, int]:
    """Return for ranks the rows of the head beside their segments with which all ranks send alike.

    A row of the head goes to the ranks of all segments, a row of a segment to the ranks of later
    ones. Ranks without segments send less than other ranks receive.
    """
    rows_of_rank: dict[int, int] = {}
    without_segment = ranks - len({segment.rank for segment in segments})
    most_received = max(segment.start for segment in segments)
    for piece in dict.fromkeys(segment.piece for segment in segments):
        # 1. Count the rows that ranks send of their segments; the last segment comes first.
        chain = [segment for segment in segments if segment.piece == piece]
        crossing = pieces.inter_node[piece]
        sent_rows = [
            (segment.stop - segment.start) * (later_segments + crossing)
            for later_segments, segment in enumerate(chain)
        ]
        # 2. Fill what ranks send up to one level with rows of the head.
        head = min(segment.start for segment in chain) - pieces.starts[piece]
        sent_a_row = len(chain) + crossing
        level = _filled_level([*sent_rows, *[0.0] * without_segment], head * sent_a_row)
        level = max(level, most_received)
        # 3. Give ranks with segments what ranks without segments do not send, in whole blocks.
        rows_left = head * sent_a_row - without_segment * level
        for segment, sent in sorted(zip(chain, sent_rows, strict=True), key=itemgetter(1)):
            further_rows = max(min(level - sent, rows_left), 0)
            head_rows = int(further_rows / sent_a_row) // block * block
            rows_of_rank[segment.rank] = head_rows
            rows_left -= head_rows * sent_a_row
    return rows_of_rank


def _filled_level(amounts: Iterable[float], added_amount: float) -> float:
    """Return the level of the lowest amounts after an amount is added that makes them equal."""
    sums = accumulate(sorted(amounts))
    return min((below + added_amount) / count for count, below in enumerate(sums, start=1))


def _divide_heads(
    pieces: Pieces, segments: list[Segment], ranks: int, most_room: int, block: int
) -> None:
    """Divide the heads of cut documents until no rank sends more K/V rows than others receive.

    Every later segment of a document needs the K/V rows of its head. So the rank of a head of h
    rows sends h rows to each later segment, while the last segment receives all rows before it. To
    other nodes a rank sends at most for as long as sending all of its rows inside its node takes.
    """
    most_received = max((segment.start for segment in segments), default=0)
    readers = Counter(segment.piece for segment in segments)
    crossing_uncut = [
        piece for piece, cost in enumerate(pieces.inter_node) if cost and piece not in readers
    ]
    for piece in [*readers, *crossing_uncut]:
        start = pieces.starts[piece]
        rows = pieces.stops[piece] - pieces.starts[piece]
        stretches = -(-rows * readers[piece] // max(most_received, 1))
        if pieces.inter_node[piece]:
            sent = rows * pieces.inter_node[piece] / max(most_room, 1)
            stretches = max(stretches, min(math.ceil(sent), ranks))
        stretches = min(stretches, rows // block)
        # Cut the last stretch off first; each begins at a block's boundary.
        for earlier in range(stretches - 1, 0, -1):
            uncut_rows = pieces.stops[piece] - start
            pieces.split_at(piece, start + uncut_rows * earlier // (earlier + 1) // block * block)
