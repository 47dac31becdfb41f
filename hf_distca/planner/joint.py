"""Joint layout: documents placed so that ranks have equal tokens and equal pairs, with few and cheap cuts.

Only cut documents cost bytes: rows from row s on need K/V rows [0, s) of their document. So there
are three phases:

1. A document too large for one rank is cut from its end (`cut_large`). Besides its segment a rank
   takes the shortest documents, so that every cut lies as early as possible, or else the head of
   the same document, whose K/V rows the segment needs anyway. The rows before all cuts are divided,
   so that no single rank sends them to all later segments.
2. Other documents stay whole (`place_whole`). Longest first, each goes to the rank with the most
   missing pairs per missing token, so that every rank's need falls towards the shortest documents.
   Once the remaining documents hardly matter in pairs, each goes to the rank with the most room.
3. Ranks then differ by less than a short document. The ends of short documents make their tokens
   equal (`even_out`).

The remaining differences in pairs are left to `balance`. With several nodes, documents are placed
on nodes first, and then each node's rows on its ranks: only rows of documents that are cut between
nodes cross between them.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import accumulate, takewhile

import numpy as np

from hf_distca.plan import Layout, nodes
from hf_distca.plan.cost import BALANCE_TOLERANCE, as_lengths, pairs
from hf_distca.plan.intervals import (
    ROWS,
    IntArray,
    Table,
    by_document,
    grain,
    merge_touching,
    table_of,
)
from hf_distca.planner.layout import assemble, check_capacity, check_settings

OF_NODES = 0.25
"""Share of the slack in pairs that nodes may use."""
NEGLIGIBLE = 0.3
"""Share of the slack in pairs that documents placed for their tokens alone may use."""
ROUNDING = 0.1
"""Share of the slack in pairs that rounding one cut may cost; beyond it, the cut leaves the block's
boundary."""

Segment = tuple[int, int, int, int]
"""(index, start, stop, rank) of rows that were cut off"""


def joint_layout(
    lengths: Sequence[int] | IntArray,
    ranks: int,
    tokens_per_rank: int,
    *,
    window: int | None = None,
    balance_tolerance: float = BALANCE_TOLERANCE,
    balance_block_size: int = 128,
    node_sizes: Sequence[int] | None = None,
) -> Layout:
    """Place documents so that every rank has equal tokens and, as far as possible, equal attention.

    Query rows then stay where they are, and only K/V rows of cut documents travel. Every rank holds
    total / ranks rows, rounded down or up. Cuts fall on multiples of a block where tokens and
    balance allow.

    Args:
        balance_tolerance: how far above the mean a rank's pairs may be, as a fraction of the mean.
        node_sizes: [nodes] consecutive ranks of each node; documents are cut between nodes only if
            necessary. None if all links are alike.

    Raises:
        ValueError: a length below 1, settings out of range, or more tokens than the ranks take.
    """
    array = as_lengths(lengths)
    check_settings(balance_tolerance, balance_block_size)
    check_capacity(array, ranks, tokens_per_rank)
    sizes = (1,) * ranks if node_sizes is None else nodes.node_sizes(ranks, node_sizes)
    segments = joint_segments(array, sizes, window, balance_tolerance, balance_block_size)
    return assemble(array, tuple(segments.T), ranks, by_document=True)


def joint_segments(
    lengths: IntArray, sizes: Sequence[int], window: int | None, slack: float, block: int
) -> IntArray:
    """Return [segments, 4] document, start, stop and rank for nodes of these sizes.

    All 1 if all links are alike.
    """
    ranks = sum(sizes)
    share, more = divmod(int(lengths.sum()), ranks)
    room = [share + (rank < more) for rank in range(ranks)]
    mean = int(pairs(0, lengths, window).sum()) / ranks
    documents, tokens = (
        table_of(ROWS, document=np.arange(len(lengths)), stop=lengths),
        lengths.tolist(),
    )
    if len(sizes) in (1, ranks):
        return _Placement(tokens, documents, room, [mean] * ranks, window, slack, block).segments()
    # The largest nodes come first: a document that is too large for one node is too large for all
    # later ones.
    order = np.argsort(-np.array(sizes), kind="stable")
    first = np.cumsum(sizes) - sizes
    rooms = [sum(room[first[node] : first[node] + sizes[node]]) for node in order]
    needs = [mean * sizes[node] for node in order]
    on_nodes = _Placement(
        tokens, documents, rooms, needs, window, slack * OF_NODES, block
    ).segments()
    every = table_of(ROWS, document=on_nodes[:, 0], start=on_nodes[:, 1], stop=on_nodes[:, 2])
    pieces = [
        merge_touching(by_document(every[on_nodes[:, 3] == nth])) for nth in range(len(sizes))
    ]
    inter_node = [[0.0] * len(each) for each in pieces] if window else _inter_node_costs(pieces)
    placed = []
    for nth, node in enumerate(order):
        here = room[first[node] : first[node] + sizes[node]]
        own = int(pairs(pieces[nth]["start"], pieces[nth]["stop"], window).sum()) / sizes[node]
        most = max(mean * (1 + slack) / own - 1 if own else slack, slack * OF_NODES)
        needs = [own] * sizes[node]
        segments = _Placement(
            tokens, pieces[nth], here, needs, window, most, block, inter_node[nth]
        ).segments()
        segments[:, 3] += first[node]
        placed.append(segments)
    return np.concatenate(placed)


def _inter_node_costs(pieces: list[Table]) -> list[list[float]]:
    """Return the inter-node cost of a row of each piece, in intra-node rows."""
    document, start, stop = (
        np.concatenate([each[name] for each in pieces]) for name in ROWS.names or ()
    )
    node = np.repeat(np.arange(len(pieces)), [len(each) for each in pieces])
    cost = np.zeros(len(document))
    shared = np.flatnonzero(np.bincount(document)[document] > 1)
    for index in shared.tolist():
        later = shared[(document[shared] == document[index]) & (start[shared] >= stop[index])]
        readers = set(node[later].tolist()) - {int(node[index])}
        cost[index] = len(readers) * nodes.NODE_BANDWIDTH / nodes.NETWORK_BANDWIDTH
    return [cost[node == nth].tolist() for nth in range(len(pieces))]


class _Placement:
    """Rows of documents placed on ranks so far.

    When nodes are given rows, a node stands for a rank.

    Every piece to be placed, a document or a node's rows of it, has an index. So has each stretch
    that the head of a cut piece is divided into.

    Args:
        room: [ranks] rows that each rank takes; lowered by what it gets.
        need: [ranks] pairs that each rank should get, likewise.
        slack: how far above its share a rank's pairs may be, as a fraction of the mean.
        inter_node: [pieces] inter-node cost of a row, in intra-node rows; None if all links of the
            ranks are alike.
    """

    def __init__(
        self,
        lengths: list[int],
        pieces: Table,
        room: list[int],
        need: list[float],
        window: int | None,
        slack: float,
        block: int,
        inter_node: list[float] | None = None,
    ) -> None:
        self.room, self.need, self.ranks, self.mean = room, need, len(room), sum(need) / len(need)
        self.window, self.slack, self.block, self.inside = (
            window,
            slack,
            block,
            inter_node is not None,
        )
        self.lengths = lengths
        self.documents: list[int] = pieces["document"].tolist()
        # [indices] rows that are not cut off, and their rank; -1 if no rows are left or they are
        # not placed yet.
        self.starts: list[int] = pieces["start"].tolist()
        self.stops: list[int] = pieces["stop"].tolist()
        self.rank_of = [-1] * len(pieces)
        self.inter_node = inter_node or [0.0] * len(pieces)
        self.cuts: list[Segment] = []

    def segments(self) -> IntArray:
        """Place all rows so that every rank is full, and return [segments, 4] document, start, stop and rank."""
        self.cut_large()
        self.even_out(self.place_whole())
        documents = np.array(self.documents, np.int64)
        uncut = np.array([documents, self.starts, self.stops, self.rank_of], np.int64).T
        cut = np.array(self.cuts, np.int64).reshape(-1, 4)
        cut[:, 0] = documents[cut[:, 0]]
        return np.concatenate([uncut[uncut[:, 3] >= 0], cut])

    def uncut(self) -> tuple[IntArray, IntArray]:
        """Return [indices] rows that are not cut off, and their pairs."""
        starts, stops = np.array(self.starts, np.int64), np.array(self.stops, np.int64)
        return stops - starts, pairs(starts, stops, self.window)

    def cut_large(self) -> None:
        """Cut the large documents, and divide the rows before the cuts."""
        self.most_room, self.most_need = max(self.room), max(self.need)
        rows, costs = self.uncut()
        order = np.lexsort((-costs, rows <= self.most_room))
        self.order: list[int] = order.tolist()
        self._count_shortest(rows[order[::-1]], costs[order[::-1]])
        rest = order[sum(1 for _ in takewhile(self._large, self.order)) :][::-1]
        self._count_shortest(rows[rest], costs[rest])
        # If even the densest rows give a rank fewer pairs than its share, other ranks must take
        # more. So the level rises if the other documents do not fit into the remaining ranks.
        level = 1.0
        cuts, fits = self._cut_at(level)
        if not fits:
            level = 1 + self.slack
            cuts, fits = self._cut_at(level)
        if cuts and self.inside and self.window is None:
            shared, still_fits = self._cut_at(level, self._head_rows(cuts))
            if still_fits or not fits:
                cuts = shared
        for index, start, stop, rank in cuts:
            self.cuts.append((index, start, stop, rank))
            if stop == self.stops[index]:
                self.stops[index] = start
            else:
                self.starts[index] = stop
            self.room[rank] -= stop - start
            self.need[rank] -= pairs(start, stop, self.window)
        if self.window is not None:  # later segments need only the window's rows
            return
        # Divide the heads of cut documents until no head's rank sends more K/V rows than other
        # ranks receive. Every later segment of a document needs the K/V rows of its head. So the
        # rank of a head of h rows sends h rows to each later segment, while the last segment
        # receives all rows before it. To other nodes a rank sends at most for as long as sending
        # all of its rows inside its node takes.
        most = max((start for _, start, _, _ in self.cuts), default=0)
        readers = Counter(index for index, *_ in self.cuts)
        crossing = [
            index for index, cost in enumerate(self.inter_node) if cost and index not in readers
        ]
        for index in [*readers, *crossing]:
            start, stop = self.starts[index], self.stops[index]
            stretches = -(-(stop - start) * readers[index] // max(most, 1))
            if self.inter_node[index]:
                sent = (stop - start) * self.inter_node[index] / max(self.most_room, 1)
                stretches = max(stretches, min(math.ceil(sent), self.ranks))
            stretches = min(stretches, (stop - start) // self.block)
            for before in range(stretches - 1, 0, -1):
                cut = start + (stop - start) * before // (before + 1) // self.block * self.block
                stretch = ((self.starts, cut), (self.stops, stop), (self.rank_of, -1))
                for of_index, value in (*stretch, (self.documents, self.documents[index])):
                    of_index.append(value)
                stop = cut
            self.stops[index] = stop

    def _count_shortest(self, rows: IntArray, costs: IntArray) -> None:
        """Add up the tokens and pairs of documents, shortest first."""
        self._tokens: list[int] = np.append(0, np.cumsum(rows)).tolist()
        self._pairs: list[int] = np.append(0, np.cumsum(costs)).tolist()

    def _shortest_pairs(self, tokens: int) -> float:
        """Return the pairs of the first `tokens` tokens of the shortest documents, the last one in proportion."""
        at = bisect_left(self._tokens, tokens)
        if at in (0, len(self._tokens)):
            return float(self._pairs[at - 1]) if at else 0.0
        low, high = self._tokens[at - 1], self._tokens[at]
        return self._pairs[at - 1] + (tokens - low) / (high - low) * (
            self._pairs[at] - self._pairs[at - 1]
        )

    def _large(self, index: int) -> bool:
        """Return whether a document exceeds one rank, even beside the shortest documents."""
        start, stop = self.starts[index], self.stops[index]
        filler = self._shortest_pairs(max(self.most_room - (stop - start), 0))
        most = self.most_need * (1 + self.slack / 2)
        return stop - start > self.most_room or bool(
            pairs(start, stop, self.window) + filler > most
        )

    def _head_rows(self, cuts: list[Segment]) -> dict[int, int]:
        """Return, by rank, the rows of the head to take beside its segment, so that all ranks send alike.

        A row of the head goes to the ranks of all segments, a row of a segment to the ranks of
        later ones. Ranks without segments send less than other ranks receive.
        """
        rows: dict[int, int] = {}
        left, most = (
            self.ranks - len({rank for *_, rank in cuts}),
            max(start for _, start, _, _ in cuts),
        )
        for index in dict.fromkeys(index for index, *_ in cuts):
            chain = [cut[1:] for cut in cuts if cut[0] == index]
            head = min(start for start, _, _ in chain) - self.starts[index]
            crossing = self.inter_node[index]
            cost = len(chain) + crossing
            sent = [
                (stop - start) * (later + crossing) for later, (start, stop, _) in enumerate(chain)
            ]
            # The head's rows fill what the ranks send up to one level.
            amounts = enumerate(accumulate(sorted([*sent, *[0.0] * left])), start=1)
            level = max(min((below + head * cost) / count for count, below in amounts), most)
            given = head * cost - left * level
            for (*_, rank), amount in sorted(
                zip(chain, sent, strict=True), key=lambda each: each[1]
            ):
                part = int(max(min(level - amount, given), 0) / cost) // self.block * self.block
                rows[rank] = part
                given -= part * cost
        return rows

    def _cut_at(
        self, level: float, head_rows: dict[int, int] | None = None
    ) -> tuple[list[Segment], bool]:
        """Cut so that every rank with a segment gets `level` times its share of pairs.

        A rank takes `head_rows` of the head beside its segment in any case.

        Returns:
            The segments, and whether the other documents fit into the remaining ranks.
        """

        def filled(tail: int) -> float:
            """Return the pairs of the rank with the last `tail` rows before `stop` and the cheapest rows beside."""
            start, free = stop - tail, room - tail
            ahead = start - head
            others = min(free - min(asked, free, ahead), short)
            filler = (
                self._shortest_pairs(used + others) - pairs_used + pairs(start, stop, self.window)
            )
            own = min(free - others, ahead)
            return filler + pairs(head, head + own, self.window) if own > 0 else filler

        asked_of, cuts = head_rows or {}, list[Segment]()
        rank, used, carry = 0, 0, 0.0
        for index in self.order:
            first = head = self.starts[index]  # rows below `head` and from `stop` on are taken
            stop = self.stops[index]
            while rank < self.ranks and stop > head:
                room, aim = self.room[rank], self.need[rank] * level + carry
                short = (
                    self._tokens[-1] - used
                )  # tokens of the shortest documents that are not taken
                pairs_used, asked = self._shortest_pairs(used), asked_of.get(rank, 0)
                enough = aim + self.mean * self.slack / 2
                if (
                    (head == first or head_rows)
                    and stop - head <= room
                    and filled(stop - head) <= enough
                ):
                    break
                row = stop - bisect_right(range(min(stop - head, room) + 1), aim, 1, key=filled) + 1
                # The cut falls on a block's boundary if that moves few pairs, otherwise on a finer
                # one. No head from row `first` on stays below a block.
                multiple = grain(
                    self.block, min(row, self.window or row), ROUNDING * self.slack * self.mean
                )
                start = round(row / multiple) * multiple
                if start - first < self.block:
                    start = first + self.block if row - first >= self.block // 2 else first
                start = max(start, stop - room, head)
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
            if rank == self.ranks:
                return cuts, stop <= head
            if stop == self.stops[index] and not self._large(index):
                break
        return cuts, True

    def place_whole(self) -> list[int]:
        """Place each piece on the rank with room that wishes it most, and return the indices that fit nowhere."""
        room, need, spare = self.room, self.need, []
        rows, costs = self.uncut()
        order = np.argsort(-(costs if self.inside else rows), kind="stable")[
            : np.count_nonzero(rows)
        ]
        items = np.stack([order, rows[order], costs[order]], axis=1).tolist()
        left = np.cumsum(costs[order][::-1])[::-1]
        count = int((left > self.mean * self.ranks * self.slack * NEGLIGIBLE).sum())
        wishes: tuple[Callable[[int], float], ...] = (
            lambda rank: need[rank] / (room[rank] or 1),
            room.__getitem__,
        )
        for wish, chosen in zip(wishes, (items[:count], items[count:]), strict=True):
            ready = [(-wish(rank), rank) for rank in range(self.ranks)]
            heapify(ready)
            small: list[
                tuple[int, int]
            ] = []  # (-room, rank) of ranks with too little room for the present piece
            for index, size, cost in chosen:
                while small and -small[0][0] >= size:
                    rank = heappop(small)[1]
                    heappush(ready, (-wish(rank), rank))
                while ready and room[ready[0][1]] < size:
                    rank = heappop(ready)[1]
                    heappush(small, (-room[rank], rank))
                if not ready:
                    spare.append(index)
                    continue
                rank = ready[0][1]
                self.rank_of[index] = rank
                room[rank] -= size
                need[rank] -= cost
                heapreplace(ready, (-wish(rank), rank))
        return spare

    def even_out(self, spare: list[int]) -> None:
        """Place what fits nowhere, then move rows from overfull ranks to ranks with room."""
        room, (uncut, _) = self.room, self.uncut()
        for index in spare:
            rank = room.index(max(room))
            self.rank_of[index] = rank
            room[rank] -= int(uncut[index])
        # The rank with the most room first; it is the last to get rows.
        under = sorted(
            (rank for rank in range(self.ranks) if room[rank] > 0),
            key=lambda rank: (-room[rank], rank),
        )
        rank_of = np.array(self.rank_of)
        for rank in range(self.ranks):
            if room[rank] >= 0:
                continue
            mine = sorted(
                (int(uncut[index]), index) for index in np.flatnonzero(rank_of == rank).tolist()
            )
            # A document is cut once, near its end. So a segment below a block always ends a
            # document.
            whole = [each for each in mine if each[0] == self.lengths[self.documents[each[1]]]]
            rest = [each for each in mine if each[0] != self.lengths[self.documents[each[1]]]]
            while room[rank] < 0:
                if not whole:  # the remaining rows are of documents that are cut already
                    whole, rest = rest, []
                target = under[-1]
                least = min(-room[rank], room[target])
                # Choose a document that fits exactly, else the shortest whose head keeps a block,
                # else the longest.
                at = bisect_left(whole, (least, -1))
                if at == len(whole) or whole[at][0] != least:
                    at = min(bisect_left(whole, (least + self.block, -1)), len(whole) - 1)
                rows, index = whole.pop(at)
                moved = min(least, rows)
                if moved < rows:
                    insort(rest, (rows - moved, index))
                    stop = self.stops[index]
                    self.stops[index] = stop - moved
                    self.cuts.append((index, stop - moved, stop, target))
                else:
                    self.rank_of[index] = target
                room[rank] += moved
                room[target] -= moved
                if not room[target]:
                    under.pop()
