"""Packing documents so that ranks have equal tokens and equal pairs at once, with few and cheap cuts.

Only cut documents cost bytes: a piece that starts at row s needs K/V rows [0, s) of its document. So:

1. A document too large for one rank is cut from its end: each piece as large as its rank can take beside
   the shortest documents, which leaves every cut as early in the document as possible. Where those are used
   up, the head of the same document fills the rank. What is left in front is divided so that its rank need
   not send its K/V rows to all later pieces alone.
2. The rest stays whole, longest first, on the rank whose remaining pairs per remaining token are highest:
   every rank's need falls towards the shortest documents, which come last. Once what is left no longer
   matters in pairs, it goes to the rank with the most room.
3. The cuts of phase 1 move until the ranks that share a document have equal pairs, where that leaves nothing to
   balance there.
4. Ranks then differ by less than a short document. The ends of short documents make their tokens equal.

What pairs still differ is left to `balance`.
"""

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable
from functools import partial
from heapq import heapify, heappop, heappush, heapreplace
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from hf_distca.planner.cost import pairs, row_reaching

Piece = tuple[int, int, int, int]
"""(document, start, stop, rank)"""
Item = tuple[int, int, int]
"""(document, rows, pairs) of the rows of a document that are not cut off"""
Pieces = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]

STEPS = 4
"""Levels that are tried for the pairs of ranks with pieces of large documents."""
GUESSES = 8
"""Guesses at the size of a piece before bisection takes over."""
ROUNDING = 0.1
"""Share of the slack in pairs that rounding one cut may cost before it leaves the block's boundaries."""
NEGLIGIBLE = 0.3
"""Share of the slack in pairs that documents placed for their tokens alone may make up."""


def pack(lengths: NDArray[np.int64], ranks: int, window: int | None, slack: float, block: int) -> Pieces:
    """(document, start, stop, rank), each [segments] int64: total / ranks rows on every rank.

    Args:
        lengths: [documents] int64, all positive.
        ranks: number of ranks.
        window: width of the sliding window; None for full causal attention.
        slack: how far above the mean a rank's pairs may be.
        block: rows of a kernel block.
    """
    packing = _Packing(lengths, ranks, window, slack, block)
    packing.cut_large()
    packing.place_whole()
    packing.cut_again()
    packing.even_out()
    table = packing.pieces()
    return table[:, 0], table[:, 1], table[:, 2], table[:, 3]


class _Packing:
    """The state of one packing.

    Attributes:
        room: tokens that each rank still takes; the most at first is `most_room`.
        need: pairs that each rank is still short of the mean; negative above it.
        starts, stops: the rows of each document that are not in `cuts`; all of them while it is whole.
        home: the rank of these rows; -1 where none are left, or they are not placed yet.
        cuts: pieces (document, start, stop, rank) cut off.
    """

    def __init__(self, lengths: NDArray[np.int64], ranks: int, window: int | None, slack: float, block: int) -> None:
        self.window, self.slack, self.block, self.ranks = window, slack, block, ranks
        self.lengths: list[int] = lengths.tolist()
        total = int(lengths.sum())
        self.mean = int(pairs(0, lengths, window).sum()) / ranks
        self.room = [total // ranks + (rank < total % ranks) for rank in range(ranks)]
        self.most_room = max(self.room)
        self.need = [self.mean] * ranks
        self.documents = list(range(len(lengths)))
        self.starts, self.stops = [0] * len(lengths), list(self.lengths)
        self.order: list[int] = np.argsort(-lengths, kind="stable").tolist()
        self.home = [-1] * len(lengths)
        self.cuts: list[Piece] = []
        self._count_short(lengths[self.order[::-1]])
        large = sum(1 for _ in takewhile(self._large, self.order))
        self._count_short(lengths[self.order[large:][::-1]])

    def _count_short(self, ascending: NDArray[np.int64]) -> None:
        """Tokens and pairs of the shortest documents taken together, shortest first."""
        self.short_tokens: list[int] = np.concatenate([[0], np.cumsum(ascending)]).tolist()
        costs = pairs(0, ascending, self.window)
        self.short_pairs: list[int] = np.concatenate([[0], np.cumsum(costs)]).tolist()

    def pieces(self) -> NDArray[np.int64]:
        """[segments, 4] int64: all segments as (document, start, stop, rank)."""
        rest = np.array([self.documents, self.starts, self.stops, self.home], np.int64).T
        return np.concatenate([rest[rest[:, 3] >= 0], np.array(self.cuts, np.int64).reshape(-1, 4)])

    def _uncut_rows(self) -> NDArray[np.int64]:
        """[documents] int64: rows that are not in `cuts`."""
        return np.array(self.stops, np.int64) - np.array(self.starts, np.int64)

    def _filler(self, tokens: int) -> float:
        """Pairs of the `tokens` shortest tokens, documents taken whole except the last, in proportion."""
        at = bisect_left(self.short_tokens, tokens)
        if at == 0:
            return 0.0
        if at == len(self.short_tokens):
            return float(self.short_pairs[-1])
        low, high = self.short_tokens[at - 1], self.short_tokens[at]
        share = (tokens - low) / (high - low)
        return self.short_pairs[at - 1] + share * (self.short_pairs[at] - self.short_pairs[at - 1])

    def cut_large(self) -> None:
        """Phase 1: cut documents that are too large for a rank, from the end, one rank after another."""
        # Where even the densest rows give a rank fewer pairs than the mean, the others must take more: raise
        # the level until what is left always fits into the ranks that are left.
        for step in range(STEPS + 1):
            cuts, fits = self._cut_at(self.mean * (1 + self.slack * step / STEPS))
            if fits:
                break
        for doc, start, stop, rank in cuts:
            self.cuts.append((doc, start, stop, rank))
            if stop == self.stops[doc]:
                self.stops[doc] = start
            else:
                self.starts[doc] = stop
            self.room[rank] -= stop - start
            self.need[rank] -= pairs(start, stop, self.window)
        self._split_heads()
        rows = self._uncut_rows()
        longest: list[int] = np.argsort(-rows, kind="stable").tolist()
        self.order = longest[: np.count_nonzero(rows)]

    def _split_heads(self) -> None:
        """Divide what is left of cut documents until its rank sends no more K/V rows than others receive.

        Every later piece of a document needs the K/V rows of its head, so the rank of a head of h rows sends
        h rows to each of them; the last piece receives as many rows as lie before it.
        """
        if self.window is not None:  # later pieces then need no more than the window's rows
            return
        most = max((start for _, start, _, _ in self.cuts), default=0)
        for doc, count in Counter(doc for doc, *_ in self.cuts).items():
            start, stop = self.starts[doc], self.stops[doc]
            parts = min(-(-(stop - start) * count // max(most, 1)), (stop - start) // self.block)
            for part in range(parts, 1, -1):
                cut = start + (stop - start) * (part - 1) // part // self.block * self.block
                self.order.append(len(self.documents))
                self.documents.append(doc)
                self.home.append(-1)
                self.lengths.append(self.lengths[doc])
                self.starts.append(cut)
                self.stops.append(stop)
                stop = cut
            self.stops[doc] = stop

    def _cut_at(self, level: float) -> tuple[list[Piece], bool]:
        """(pieces, fits): cut so that every rank that gets a piece has `level` pairs.

        Beside its piece, a rank takes the shortest documents; once they are used up, the head of the same
        document, whose K/V rows its piece needs anyway.
        """
        cuts: list[Piece] = []
        rank, used, carry, fits = 0, 0, 0.0, True
        for doc in self.order:
            head, stop = 0, self.stops[doc]
            while rank < self.ranks and stop > head:
                room, aim, short = self.room[rank], level + carry, self.short_tokens[-1] - used
                filled = partial(self._filled, head, stop, room, used)
                if not head and stop <= room and filled(stop) <= aim + self.mean * self.slack / 2:
                    break
                rows = self._most_rows(filled, stop, min(stop - head, room), aim)
                start = max(self._on_grain(stop - rows, stop - room), head)
                if start >= stop:
                    break
                tail = stop - start
                carry = aim - filled(tail)
                own = min(max(room - tail - short, 0), start - head)
                used += min(room - tail, short)
                cuts.append((doc, start, stop, rank))
                if own:
                    cuts.append((doc, head, head + own, rank))
                head, stop, rank = head + own, start, rank + 1
            if rank == self.ranks:
                fits = stop <= head
                break
            if stop == self.stops[doc] and not self._large(doc):
                break
        return cuts, fits

    def _most_rows(self, filled: Callable[[int], float], stop: int, high: int, aim: float) -> int:
        """The most rows, up to `high`, at the end of rows [0, stop) with filled(rows) <= aim.

        The pairs beside the piece change little with its size, so each guess takes them from the guess before:
        that leaves a closed form. Where they do change much, bisection goes on.
        """
        low, guess, guesses = 0, high, 0
        below = pairs(0, stop, self.window) - aim
        while low < high:
            amount = filled(guess)
            beside = amount - pairs(stop - guess, stop, self.window)
            low, high = (guess, high) if amount <= aim else (low, guess - 1)
            guesses += 1
            if guesses <= GUESSES:
                guess = stop - math.ceil(row_reaching(below + beside, self.window))
                guess = min(max(guess, low + 1), high)
            else:
                guess = (low + high + 1) // 2
        return low

    def _filled(self, head: int, stop: int, room: int, used: int, tail: int) -> float:
        """Pairs of a rank with rows [stop - tail, stop) of a document and the cheapest rows beside them.

        Args:
            head: rows of the document below this are taken.
            stop: end of the document's rows that are not taken.
            room: rows of the rank.
            used: tokens of the shortest documents that are taken.
            tail: rows of the piece.
        """
        others = min(room - tail, self.short_tokens[-1] - used)
        own = min(room - tail - others, stop - tail - head)
        filler = self._filler(used + others) - self._filler(used)
        piece = pairs(stop - tail, stop, self.window)
        return piece + filler + pairs(head, head + own, self.window)

    def _large(self, doc: int) -> bool:
        """Whether a document is more than one rank takes, even beside the shortest documents."""
        rows, room = self.stops[doc], self.most_room
        filler = self._filler(max(room - rows, 0))
        return rows > room or bool(pairs(0, rows, self.window) + filler > self.mean * (1 + self.slack / 2))

    def _on_grain(self, start: int, least: int) -> int:
        """A cut near row `start`, at least `least`, that leaves no head below a block.

        It falls on a block's boundary if that moves few pairs, else on a finer one.
        """
        grain = self.block
        while grain > 1 and grain * min(start, self.window or start) > ROUNDING * self.slack * self.mean:
            grain //= 2
        row = round(start / grain) * grain
        if row < self.block:
            row = self.block if start >= self.block // 2 else 0
        return max(row, least)

    def place_whole(self) -> None:
        """Phase 2: the uncut documents and heads, longest first."""
        starts, stops = np.array(self.starts, np.int64)[self.order], np.array(self.stops, np.int64)[self.order]
        costs = pairs(starts, stops, self.window)
        items = list(zip(self.order, (stops - starts).tolist(), costs.tolist(), strict=True))
        before = np.cumsum(costs) - costs
        matter = costs.sum() - before > self.mean * self.ranks * self.slack * NEGLIGIBLE
        count = int(matter.sum())
        self.spare = [*self._by_need(items[:count]), *self._by_room(items[count:])]

    def _by_need(self, items: list[Item]) -> list[Item]:
        """Each item to the rank that needs most pairs per token and has room; returns those without one."""
        room, need, home = self.room, self.need, self.home
        ready = [(-need[rank] / max(room[rank], 1), rank) for rank in range(self.ranks)]
        heapify(ready)
        small: list[tuple[int, int]] = []  # (-room, rank) of ranks with too little room for now
        spare = []
        for item in items:
            doc, rows, cost = item
            while small and -small[0][0] >= rows:
                rank = heappop(small)[1]
                heappush(ready, (-need[rank] / max(room[rank], 1), rank))
            while ready and room[ready[0][1]] < rows:
                rank = heappop(ready)[1]
                heappush(small, (-room[rank], rank))
            if not ready:
                spare.append(item)
                continue
            rank = ready[0][1]
            home[doc] = rank
            room[rank] = left = room[rank] - rows
            need[rank] = short = need[rank] - cost
            heapreplace(ready, (-short / (left or 1), rank))
        return spare

    def _by_room(self, items: list[Item]) -> list[Item]:
        """Each item to the rank with the most room; returns those that fit nowhere."""
        roomy = [(-room, rank) for rank, room in enumerate(self.room)]
        heapify(roomy)
        spare = []
        for item in items:
            room, rank = roomy[0]
            if -room < item[1]:
                spare.append(item)
            else:
                self._hold(item, rank)
                heapreplace(roomy, (room + item[1], rank))
        return spare

    def _hold(self, item: Item, rank: int) -> None:
        doc, rows, cost = item
        self.home[doc] = rank
        self.room[rank] -= rows
        self.need[rank] -= cost

    def cut_again(self) -> None:
        """Phase 3: move the cuts of large documents until the ranks that share one have equal pairs."""
        home, rows = np.array(self.home, np.int64), self._uncut_rows()
        whole_rows = np.bincount(home[home >= 0], rows[home >= 0], self.ranks).tolist()
        chains: dict[int, list[int]] = {}
        for index, (doc, start, stop, rank) in enumerate(self.cuts):
            # Pieces from the end on, each beginning where the one before it stops; heads are none of them.
            chain = chains.setdefault(doc, [])
            _, before, _, other = self.cuts[chain[-1]] if chain else (doc, self.lengths[doc], 0, -1)
            if start and stop == before and rank != other:
                chain.append(index)
        for chain in chains.values():
            if len(chain) > 1:
                self._level(chain, whole_rows)

    def _level(self, chain: list[int], whole_rows: list[float]) -> None:
        """Give the ranks of some pieces, that follow each other in one document, equal pairs.

        Args:
            chain: indices into `cuts`.
            whole_rows: [ranks] rows that each rank has of whole documents.
        """
        share = sum(self.need[self.cuts[index][3]] for index in chain) / len(chain)
        if abs(share) > self.mean * self.slack:  # one rank's large surplus or room costs fewer bytes than many small
            return
        doc, first, stop, _ = self.cuts[chain[-1]]
        stop = self.cuts[chain[0]][2]
        moved: list[Piece] = []
        for index in chain:
            _, old_start, old_stop, rank = self.cuts[index]
            amount = pairs(old_start, old_stop, self.window) + self.need[rank] - share
            below = pairs(0, stop, self.window) - amount
            start = self._on_grain(int(row_reaching(below, self.window)), first + self.block)
            start = first if index == chain[-1] else start
            # What a rank gains must be in the room that its whole documents leave.
            gained = (stop - start) - (old_stop - old_start)
            if start >= stop or gained > self.room[rank] + whole_rows[rank]:
                return
            moved.append((doc, start, stop, rank))
            stop = start
        for index, piece in zip(chain, moved, strict=True):
            for (_, start, stop, rank), sign in ((self.cuts[index], 1), (piece, -1)):
                self.room[rank] += sign * (stop - start)
                self.need[rank] += sign * pairs(start, stop, self.window)
            self.cuts[index] = piece

    def even_out(self) -> None:
        """Phase 4: place what fits nowhere, then move ends of documents until every rank is full."""
        for item in self.spare:
            self._hold(item, max(range(self.ranks), key=lambda rank: (self.room[rank], -rank)))
        under = [rank for rank in range(self.ranks) if self.room[rank] > 0]
        under.sort(key=lambda rank: (-self.room[rank], rank))
        home, rows = np.array(self.home, np.int64), self._uncut_rows()
        by_rank = np.argsort(home, kind="stable")
        first = np.searchsorted(home[by_rank], np.arange(self.ranks + 1)).tolist()
        for rank in range(self.ranks):
            if self.room[rank] < 0:
                mine = by_rank[first[rank] : first[rank + 1]]
                self._shed(rank, list(zip(rows[mine].tolist(), mine.tolist(), strict=True)), under)

    def _shed(self, rank: int, items: list[tuple[int, int]], under: list[int]) -> None:
        """Move what a rank has too much to the last of `under`, then to the one before it.

        Args:
            rank: the rank.
            items: (rows, document) of the rows it holds that are not in `cuts`.
            under: ranks with room, that with the most room first.
        """
        # A document is cut once, and where it ends: so no piece is below a block unless it ends a document.
        whole = sorted(item for item in items if item[0] == self.lengths[item[1]])
        rest = sorted(item for item in items if item[0] != self.lengths[item[1]])
        while self.room[rank] < 0:
            if not whole:  # what is left are pieces of documents that are cut already
                whole, rest = rest, []
            target = under[-1]
            least = min(-self.room[rank], self.room[target])
            # One that fits as a whole, or the shortest whose head keeps a block; else the longest.
            at = bisect_left(whole, (least, -1))
            if at == len(whole) or whole[at][0] != least:
                at = min(bisect_left(whole, (least + self.block, -1)), len(whole) - 1)
            rows, doc = whole.pop(at)
            moved = min(least, rows)
            stop = self.stops[doc]
            start = stop - moved
            if moved < rows:
                insort(rest, (rows - moved, doc))
                self.stops[doc] = start
                self.cuts.append((self.documents[doc], start, stop, target))
            else:
                self.home[doc] = target
            cost = pairs(start, stop, self.window)
            self.need[rank] += cost
            self.need[target] -= cost
            self.room[rank] += moved
            self.room[target] -= moved
            if not self.room[target]:
                under.pop()
