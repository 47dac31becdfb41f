"""Phase 1 of the joint layout: cut documents that are too large for a rank, from the end.

Besides its segment a rank takes the shortest documents. When these are used up, the head of the same document fills
the rank, since the segment needs the head's K/V rows anyway. The rows before all cuts are divided, so that no single
rank sends their K/V rows to all later segments.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import takewhile

import numpy as np

from hf_distca.planner.cost import pairs, row_reaching
from hf_distca.planner.intervals import IntArray
from hf_distca.planner.joint.placement import Placement, Segment

GUESSES = 12
"""Number of guesses at the size of a segment before bisection takes over."""


def cut_large(placement: Placement) -> None:
    """Cut the large documents, and divide the rows before the cuts."""
    cutting = _Cutting(placement)
    # If even the densest rows give a rank fewer pairs than its share, other ranks must take more. So the level rises
    # if the other documents do not fit into the remaining ranks.
    level = 1.0
    cuts, fits = cutting.cut_at(level)
    if not fits:
        level = 1 + placement.slack
        cuts, fits = cutting.cut_at(level)
    if cuts and placement.inside and placement.window is None:
        shared, still_fits = cutting.cut_at(level, cutting.head_rows(cuts))
        if still_fits or not fits:
            cuts = shared
    for index, start, stop, rank in cuts:
        placement.cuts.append((index, start, stop, rank))
        if stop == placement.stops[index]:
            placement.stops[index] = start
        else:
            placement.starts[index] = stop
        placement.room[rank] -= stop - start
        placement.need[rank] -= placement.pairs(start, stop)
    if placement.window is None:  # with a window, later segments need only the window's rows
        _divide_heads(placement, cutting.most_room)


def _divide_heads(placement: Placement, most_room: int) -> None:
    """Divide the heads of cut documents until no head's rank sends more K/V rows than other ranks receive.

    Every later segment of a document needs the K/V rows of its head. So the rank of a head of h rows sends h rows to
    each later segment, while the last segment receives all rows before it. To other nodes a rank sends at most for as
    long as sending all of its rows inside its node takes.
    """
    block, inter_node = placement.block, placement.inter_node
    most = max((start for _, start, _, _ in placement.cuts), default=0)
    readers = Counter(index for index, *_ in placement.cuts)
    crossing = [index for index, cost in enumerate(inter_node) if cost and index not in readers]
    for index in [*readers, *crossing]:
        start, stop = placement.starts[index], placement.stops[index]
        stretches = -(-(stop - start) * readers[index] // max(most, 1))
        if inter_node[index]:
            sent = (stop - start) * inter_node[index] / max(most_room, 1)
            stretches = max(stretches, min(math.ceil(sent), placement.ranks))
        stretches = min(stretches, (stop - start) // block)
        for before in range(stretches - 1, 0, -1):
            cut = start + (stop - start) * before // (before + 1) // block * block
            placement.add(index, cut, stop)
            stop = cut
        placement.stops[index] = stop


class _Cutting:
    """Trial cuts of the large documents at given levels of pairs; the placement stays as it is."""

    def __init__(self, placement: Placement) -> None:
        self.placement, self.room, self.need = placement, placement.room, placement.need
        self.starts, self.stops, self.inter_node = placement.starts, placement.stops, placement.inter_node
        self.most_room, self.most_need = max(self.room), max(self.need)
        rows = placement.uncut_rows()
        costs = pairs(np.array(self.starts, np.int64), np.array(self.stops, np.int64), self.placement.window)
        order = np.lexsort((-costs, rows <= self.most_room))
        self.order: list[int] = order.tolist()
        self._count_shortest(rows[order[::-1]], costs[order[::-1]])
        rest = order[sum(1 for _ in takewhile(self._large, self.order)) :][::-1]
        self._count_shortest(rows[rest], costs[rest])

    def _count_shortest(self, rows: IntArray, costs: IntArray) -> None:
        """Add up the tokens and pairs of documents, shortest first."""
        self._tokens: list[int] = np.append(0, np.cumsum(rows)).tolist()
        self._pairs: list[int] = np.append(0, np.cumsum(costs)).tolist()

    def _shortest_pairs(self, tokens: int) -> float:
        """Return the pairs of the first `tokens` tokens of the shortest documents, the last one in proportion."""
        at = bisect_left(self._tokens, tokens)
        if at == 0:
            return 0.0
        if at == len(self._tokens):
            return float(self._pairs[-1])
        low, high = self._tokens[at - 1], self._tokens[at]
        return self._pairs[at - 1] + (tokens - low) / (high - low) * (self._pairs[at] - self._pairs[at - 1])

    def _large(self, index: int) -> bool:
        """Return whether a document exceeds one rank, even beside the shortest documents."""
        start, stop, room = self.starts[index], self.stops[index], self.most_room
        filler = self._shortest_pairs(max(room - (stop - start), 0))
        most = self.most_need * (1 + self.placement.slack / 2)
        return stop - start > room or bool(self.placement.pairs(start, stop) + filler > most)

    def head_rows(self, cuts: list[Segment]) -> dict[int, int]:
        """Return, by rank, the rows of the head to take beside its segment, so that all ranks send alike.

        A row of the head goes to the ranks of all segments, a row of a segment to the ranks of later ones. Ranks
        without segments send less than other ranks receive. `cuts` are the result of `cut_at` without head rows.
        """
        rows: dict[int, int] = {}
        left = self.placement.ranks - len({rank for *_, rank in cuts})
        most = max(start for _, start, _, _ in cuts)
        for index in dict.fromkeys(index for index, *_ in cuts):
            chain = [cut[1:] for cut in cuts if cut[0] == index]
            head = min(start for start, _, _ in chain) - self.starts[index]
            crossing = self.inter_node[index]
            cost = len(chain) + crossing
            sent = [(stop - start) * (later + crossing) for later, (start, stop, _) in enumerate(chain)]
            level = max(_level(sorted([*sent, *[0.0] * left]), head * cost), most)
            given = head * cost - left * level
            for (*_, rank), amount in sorted(zip(chain, sent, strict=True), key=lambda each: each[1]):
                part = int(max(min(level - amount, given), 0) / cost) // self.placement.block * self.placement.block
                rows[rank] = part
                given -= part * cost
        return rows

    def cut_at(self, level: float, head_rows: dict[int, int] | None = None) -> tuple[list[Segment], bool]:
        """Cut so that every rank with a segment gets `level` times its share of pairs.

        Args:
            head_rows: rank -> rows of the head that the rank takes beside its segment, in any case.

        Returns:
            The segments, and whether the other documents fit into the remaining ranks.
        """
        placement, asked_of, cuts = self.placement, head_rows or {}, list[Segment]()
        rank, used, carry = 0, 0, 0.0
        for index in self.order:
            first = head = self.starts[index]
            stop = self.stops[index]
            while rank < placement.ranks and stop > head:
                room, aim = self.room[rank], self.need[rank] * level + carry
                short = self._tokens[-1] - used
                asked = asked_of.get(rank, 0)
                filled = partial(self._filled, head, stop, room, short, self._shortest_pairs(used), asked)
                enough = aim + placement.mean * placement.slack / 2
                if (head == first or head_rows) and stop - head <= room and filled(stop - head) <= enough:
                    break
                rows = self._most_rows(filled, stop, min(stop - head, room), aim)
                start = max(placement.cut_near(stop - rows, stop - room, first), head)
                if start >= stop:
                    break
                tail = stop - start
                carry = aim - filled(tail)
                own = min(max(room - tail - short, asked), room - tail, start - head)
                used += min(room - tail - own, short)
                cuts.append((index, start, stop, rank))
                if own:
                    cuts.append((index, head, head + own, rank))
                head, stop, rank = head + own, start, rank + 1
            if rank == placement.ranks:
                return cuts, stop <= head
            if stop == self.stops[index] and not self._large(index):
                break
        return cuts, True

    def _filled(self, head: int, stop: int, room: int, short: int, pairs_used: float, asked: int, tail: int) -> float:
        """Return the pairs of a rank with the last `tail` rows before `stop` and the cheapest rows beside them.

        Args:
            head: rows of the document below this row are taken.
            stop: end of the document's rows that are not taken.
            short: tokens of the shortest documents that are not taken.
            pairs_used: pairs of the shortest documents that are taken.
            asked: rows of the head that the rank takes in any case.
        """
        start, window = stop - tail, self.placement.window
        others = min(room - tail - min(asked, room - tail, start - head), short)
        own = head + min(room - tail - others, start - head)
        filler = self._shortest_pairs(self._tokens[-1] - short + others) - pairs_used
        return pairs(start, stop, window) + filler + (pairs(head, own, window) if own > head else 0)

    def _most_rows(self, filled: Callable[[int], float], stop: int, high: int, aim: float) -> int:
        """Return the most rows, up to `high`, at the end of rows [0, stop) with filled(rows) <= aim.

        The pairs beside the segment change little with its size. So the second guess takes them from the first, in a
        closed form. Further guesses lie on the line through the last two, where it rises. Bisection follows if the
        guesses do not settle.
        """
        low, guess, guesses = 0, high, 0
        below = self.placement.pairs(0, stop) - aim
        before, amount_before = guess, 0.0
        while low < high:
            amount = filled(guess)
            low, high = (guess, high) if amount <= aim else (low, guess - 1)
            guesses += 1
            tried, rise = guess, (amount - amount_before) * (guess - before)
            if guesses > GUESSES:
                guess = (low + high + 1) // 2
            elif rise > 0:
                guess += math.floor((aim - amount) * (guess - before) / (amount - amount_before))
            else:
                beside = amount - self.placement.pairs(stop - guess, stop)
                guess = stop - math.ceil(row_reaching(below + beside, self.placement.window))
            guess = min(max(guess, low + 1), high)
            before, amount_before = tried, amount
        return low


def _level(amounts: list[float], more: float) -> float:
    """Return the level up to which `more` fills some amounts, sorted smallest first."""
    below = 0.0
    for count, amount in enumerate(amounts):
        if amount * count - below > more:
            return (below + more) / count
        below += amount
    return (below + more) / len(amounts)
