"""Packing documents so that ranks have equal tokens and equal pairs at once, with few and cheap cuts.

Only cut documents cost bytes: a piece that starts at row s needs K/V rows [0, s) of its document. So:

1. A document too large for one rank is cut from its end: each piece as large as its rank can take beside
   the shortest documents, which leaves every cut as early in the document as possible.
2. The rest stays whole, longest first, on the rank whose remaining pairs per remaining token are highest:
   every rank's need falls towards the shortest documents, which come last. Once what is left no longer
   matters in pairs, it goes to the rank with the most room.
3. Ranks then differ by less than a short document. The ends of short documents make their tokens equal.
"""

from bisect import bisect_left, bisect_right
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np
from numpy.typing import NDArray

from hf_distca.planner.cost import pairs

Pieces = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]

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
    packing.even_out()
    table = np.array(packing.pieces(), np.int64).reshape(-1, 4)
    return table[:, 0], table[:, 1], table[:, 2], table[:, 3]


class _Packing:
    """The state of one packing.

    Attributes:
        room: tokens that each rank still takes.
        need: pairs that each rank is still short of the mean; negative above it.
        held: (stop, document) of the uncut documents, or heads of documents, on each rank.
        cuts: finished pieces (document, start, stop, rank) that do not start at row 0.
        stops: where the head of each document ends; its length where it is whole.
    """

    def __init__(
        self, lengths: NDArray[np.int64], ranks: int, window: int | None, slack: float, block: int
    ) -> None:
        self.window, self.slack, self.block, self.ranks = window, slack, block, ranks
        total = int(lengths.sum())
        self.mean = int(pairs(0, lengths, window).sum()) / ranks
        self.room = [total // ranks + (rank < total % ranks) for rank in range(ranks)]
        self.need = [self.mean] * ranks
        self.stops: list[int] = lengths.tolist()
        self.order: list[int] = np.argsort(-lengths, kind="stable").tolist()
        self.held: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        self.cuts: list[tuple[int, int, int, int]] = []
        # Pairs and tokens of the shortest documents taken together, shortest first.
        ascending = lengths[self.order[::-1]]
        self.short_tokens: list[int] = np.concatenate([[0], np.cumsum(ascending)]).tolist()
        self.short_pairs: list[int] = np.concatenate([[0], np.cumsum(pairs(0, ascending, window))]).tolist()

    def pieces(self) -> list[tuple[int, int, int, int]]:
        """All segments as (document, start, stop, rank)."""
        heads = [(doc, 0, stop, rank) for rank, held in enumerate(self.held) for stop, doc in held]
        return heads + self.cuts

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
        """Phase 1: cut documents that are too large for a rank, a piece per rank, from the end."""
        for step in range(9):
            # Ranks that can hold no more pairs than the longest documents give leave the others above the
            # mean: raise the level until the rest of every document fits into the ranks that are left.
            level = self.mean * (1 + self.slack * step / 8)
            cuts, heads, fits = self._cut_at(level)
            if fits:
                break
        for doc, start, stop, rank in cuts:
            self.cuts.append((doc, start, stop, rank))
            self.stops[doc] = min(self.stops[doc], start)
            self.room[rank] -= stop - start
            self.need[rank] -= int(pairs(start, stop, self.window))
        stops = self.stops
        self.order = sorted((doc for doc in self.order if stops[doc]), key=lambda doc: (-stops[doc], doc))

    def _cut_at(self, level: float) -> tuple[list[tuple[int, int, int, int]], list[int], bool]:
        rank = used = 0
        carry = 0.0
        cuts = []
        fits = True
        for doc in self.order:
            stop = self.stops[doc]
            while rank < self.ranks:
                room, aim = self.room[rank], level + carry
                filler = self._filler(used)

                def filled(rows: int, stop: int = stop, room: int = room, base: int = used, less: float = filler) -> float:
                    return int(pairs(stop - rows, stop, self.window)) + self._filler(base + room - rows) - less

                if stop <= room and filled(stop) <= aim + self.mean * self.slack / 2:
                    break
                low, high = 0, min(stop, room)
                while low < high:  # the most rows that keep the rank within its aim
                    middle = (low + high + 1) // 2
                    low, high = (middle, high) if filled(middle) <= aim else (low, middle - 1)
                must = stop - sum(self.room[rank + 1 :])
                if low < must:
                    fits = False
                    low = min(must, room)
                start = self._on_grain(stop - low, stop, room)
                if start >= stop:
                    break
                carry = aim - filled(stop - start)
                cuts.append((doc, start, stop, rank))
                used += room - (stop - start)
                stop = start
                rank += 1
                if not stop:
                    break
            if stop > max(self.room[rank:], default=0) and stop == self.stops[doc]:
                break
        return cuts, [], fits

    def _on_grain(self, start: int, stop: int, room: int) -> int:
        """A cut near row `start`: on a block's boundary if that moves few pairs, else on a finer one."""
        grain = self.block
        while grain > 1 and grain * min(start, self.window or start) > ROUNDING * self.slack * self.mean:
            grain //= 2
        row = round(start / grain) * grain
        if row < self.block:
            row = self.block if start >= self.block // 2 else 0
        return max(row, stop - room)

    def place_whole(self) -> None:
        """Phase 2: the uncut documents and heads, longest first."""
        order = self.order
        costs = pairs(0, np.array([self.stops[doc] for doc in order], np.int64), self.window).tolist()
        left = sum(costs)
        negligible = self.mean * self.ranks * self.slack * NEGLIGIBLE
        ready = [(-self.need[rank] / max(self.room[rank], 1), rank) for rank in range(self.ranks)]
        heapify(ready)
        small: list[tuple[int, int]] = []  # (-room, rank) of ranks with too little room for now
        self.spare: list[int] = []
        position = 0
        while position < len(order) and left > negligible:
            doc, cost = order[position], costs[position]
            stop = self.stops[doc]
            while small and -small[0][0] >= stop:
                rank = heappop(small)[1]
                heappush(ready, (-self.need[rank] / max(self.room[rank], 1), rank))
            while ready and self.room[ready[0][1]] < stop:
                rank = heappop(ready)[1]
                heappush(small, (-self.room[rank], rank))
            if ready:
                rank = ready[0][1]
                self._hold(doc, stop, cost, rank)
                heapreplace(ready, (-self.need[rank] / max(self.room[rank], 1), rank))
            else:
                self.spare.append(doc)
            left -= cost
            position += 1
        roomy = [(-room, rank) for rank, room in enumerate(self.room)]
        heapify(roomy)
        for doc, cost in zip(order[position:], costs[position:], strict=True):
            stop = self.stops[doc]
            room, rank = roomy[0]
            if -room < stop:
                self.spare.append(doc)
                continue
            self._hold(doc, stop, cost, rank)
            heapreplace(roomy, (room + stop, rank))

    def _hold(self, doc: int, stop: int, cost: int, rank: int) -> None:
        self.held[rank].append((stop, doc))
        self.room[rank] -= stop
        self.need[rank] -= cost

    def even_out(self) -> None:
        """Phase 3: place what fits nowhere, then move ends of documents until every rank is full."""
        for doc in self.spare:
            stop = self.stops[doc]
            rank = max(range(self.ranks), key=lambda r: (self.room[r], -r))
            self._hold(doc, stop, int(pairs(0, stop, self.window)), rank)
        over = [rank for rank in range(self.ranks) if self.room[rank] < 0]
        under = sorted(
            (rank for rank in range(self.ranks) if self.room[rank] > 0), key=lambda r: -self.room[r]
        )
        for rank in over:
            held = self.held[rank]
            held.sort()
            while self.room[rank] < 0:
                target = under[-1]
                rows = min(-self.room[rank], self.room[target])
                # The shortest document whose head keeps a block; else the longest there is.
                at = bisect_right(held, (rows + self.block, -1))
                stop, doc = held.pop(min(at, len(held) - 1))
                rows = min(rows, stop)
                start = stop - rows
                if start:
                    held.insert(bisect_left(held, (start, doc)), (start, doc))
                    self.cuts.append((doc, start, stop, target))
                else:
                    self.held[target].append((stop, doc))
                cost = int(pairs(start, stop, self.window))
                self.need[rank] += cost
                self.need[target] -= cost
                self.room[rank] += rows
                self.room[target] -= rows
                if not self.room[target]:
                    under.pop()
