"""Placement of documents with equal tokens and equal pairs on all ranks, and with few and cheap cuts.

Only cut documents cost bytes: rows from row s on need K/V rows [0, s) of their document. So there are three phases:

1. A document too large for one rank is cut from its end (`cut_large`). Each segment is as large as its rank can take
   beside the shortest documents. So every cut lies as early in the document as possible.
2. Other documents stay whole (`place_whole`). Longest first, each goes to the rank with the most missing pairs per
   missing token, so that every rank's need falls towards the shortest documents. Once the remaining documents hardly
   matter in pairs, each goes to the rank with the most room.
3. Ranks then differ by less than a short document. The ends of short documents make their tokens equal (`even_out`).

The remaining differences in pairs are left to `balance`. With several nodes, documents are placed on nodes first, and
then each node's rows on its ranks: only rows of documents that are cut between nodes cross between them.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np
from numpy.typing import NDArray

from hf_distca.planner.cost import pairs
from hf_distca.planner.intervals import Intervals
from hf_distca.planner.joint.cut_large import cut_large
from hf_distca.planner.joint.placement import Item, Limits, Placement
from hf_distca.planner.nodes import NETWORK_BANDWIDTH, NODE_BANDWIDTH

NEGLIGIBLE = 0.3
"""Share of the slack in pairs that documents placed for their tokens alone may use."""


def place_whole(placement: Placement) -> list[Item]:
    """Place everything that is not cut, and return the items that fit nowhere."""
    limits = placement.limits
    rows = placement.uncut_rows()
    costs = pairs(np.array(placement.starts), np.array(placement.stops), limits.window)
    order = np.argsort(-(costs if limits.inside else rows), kind="stable")[: np.count_nonzero(rows)]
    costs = costs[order]
    items = list(zip(order.tolist(), rows[order].tolist(), costs.tolist(), strict=True))
    before = np.cumsum(costs) - costs
    matter = costs.sum() - before > limits.mean * limits.ranks * limits.slack * NEGLIGIBLE
    count = int(matter.sum())
    return [*_by_need(placement, items[:count]), *_by_room(placement, items[count:])]


def _by_need(placement: Placement, items: list[Item]) -> list[Item]:
    """Place each item on the rank with room that needs most pairs per token; return items that fit nowhere."""
    room, need, rank_of = placement.room, placement.need, placement.rank_of
    ready = [(-need[rank] / max(room[rank], 1), rank) for rank in range(len(room))]
    heapify(ready)
    small: list[tuple[int, int]] = []  # (-room, rank) of ranks with too little room for the present item
    spare = []
    for item in items:
        index, rows, cost = item
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
        rank_of[index] = rank
        room[rank] = left = room[rank] - rows
        need[rank] = short = need[rank] - cost
        heapreplace(ready, (-short / (left or 1), rank))
    return spare


def _by_room(placement: Placement, items: list[Item]) -> list[Item]:
    """Place each item on the rank with the most room; return items that fit nowhere."""
    roomy = [(-room, rank) for rank, room in enumerate(placement.room)]
    heapify(roomy)
    spare = []
    for item in items:
        room, rank = roomy[0]
        if -room < item[1]:
            spare.append(item)
        else:
            placement.hold(item, rank)
            heapreplace(roomy, (room + item[1], rank))
    return spare


def even_out(placement: Placement, spare: list[Item]) -> None:
    """Place the items that fit nowhere, then move rows from overfull ranks to ranks with room."""
    room = placement.room
    for item in spare:
        placement.hold(item, max(range(len(room)), key=lambda rank: (room[rank], -rank)))
    under = [rank for rank in range(len(room)) if room[rank] > 0]
    under.sort(key=lambda rank: (-room[rank], rank))
    rank_of, rows = np.array(placement.rank_of, np.int64), placement.uncut_rows()
    by_rank = np.argsort(rank_of, kind="stable")
    first = np.searchsorted(rank_of[by_rank], np.arange(len(room) + 1)).tolist()
    for rank in range(len(room)):
        if room[rank] < 0:
            mine = by_rank[first[rank] : first[rank + 1]]
            _shed(placement, rank, list(zip(rows[mine].tolist(), mine.tolist(), strict=True)), under)


def _shed(placement: Placement, rank: int, items: list[tuple[int, int]], under: list[int]) -> None:
    """Move a rank's excess rows to the last of `under`, then to the one before it.

    Args:
        items: (rows, index) of the uncut rows that the rank holds.
        under: ranks with room, the one with the most room first.
    """
    limits, room = placement.limits, placement.room
    # A document is cut once, near its end. So a segment below a block always ends a document.
    whole = sorted(item for item in items if item[0] == placement.lengths[item[1]])
    rest = sorted(item for item in items if item[0] != placement.lengths[item[1]])
    while room[rank] < 0:
        if not whole:  # the remaining rows are of documents that are cut already
            whole, rest = rest, []
        target = under[-1]
        least = min(-room[rank], room[target])
        # Choose a document that fits exactly, else the shortest whose head keeps a block, else the longest.
        at = bisect_left(whole, (least, -1))
        if at == len(whole) or whole[at][0] != least:
            at = min(bisect_left(whole, (least + limits.block, -1)), len(whole) - 1)
        rows, index = whole.pop(at)
        moved = min(least, rows)
        stop = placement.stops[index]
        start = stop - moved
        if moved < rows:
            insort(rest, (rows - moved, index))
            placement.stops[index] = start
            placement.cuts.append((index, start, stop, target))
        else:
            placement.rank_of[index] = target
        cost = limits.pairs(start, stop)
        placement.need[rank] += cost
        placement.need[target] -= cost
        room[rank] += moved
        room[target] -= moved
        if not room[target]:
            under.pop()


def place(placement: Placement) -> NDArray[np.int64]:
    """Place all rows so that every rank is full, and return the segments, see `Placement.segments`."""
    cut_large(placement)
    even_out(placement, place_whole(placement))
    return placement.segments()


OF_NODES = 0.25
"""Share of the slack in pairs that nodes may use."""


def place_on_ranks(
    lengths: NDArray[np.int64], sizes: Sequence[int], window: int | None, slack: float, block: int
) -> NDArray[np.int64]:
    """Place all rows of all documents; every rank gets total / ranks rows, rounded down or up.

    Args:
        lengths: [documents] int64, all positive.
        sizes: [nodes] ranks of each node.
        slack: how far above the mean a rank's pairs may be, as a fraction of the mean.
        block: rows of a kernel block.

    Returns:
        [segments, 4] int64: document, start, stop and rank of each segment, in no order.
    """
    ranks = sum(sizes)
    share, more = divmod(int(lengths.sum()), ranks)
    room = [share + (rank < more) for rank in range(ranks)]
    mean = int(pairs(0, lengths, window).sum()) / ranks
    documents = Intervals(np.arange(len(lengths)), np.zeros_like(lengths), lengths)
    if len(sizes) in (1, ranks):
        limits = Limits(ranks, window, slack, block, mean)
        return place(Placement.of_pieces(lengths, documents, limits, room, [mean] * ranks))

    # The largest nodes come first: a document that is too large for one node is too large for all later ones.
    order = np.argsort(-np.array(sizes), kind="stable")
    first = np.cumsum(sizes) - sizes
    limits = Limits(len(sizes), window, slack * OF_NODES, block, mean * ranks / len(sizes))
    rooms = [sum(room[first[node] : first[node] + sizes[node]]) for node in order]
    needs = [mean * sizes[node] for node in order]
    on_nodes = place(Placement.of_pieces(lengths, documents, limits, rooms, needs))
    pieces = [_joined(on_nodes[on_nodes[:, 3] == nth]) for nth in range(len(sizes))]
    inter_node = [[0.0] * len(each) for each in pieces] if window else _inter_node_costs(pieces)
    placed = []
    for nth, node in enumerate(order):
        own = int(pairs(pieces[nth].start, pieces[nth].stop, window).sum()) / sizes[node]
        most = mean * (1 + slack) / own - 1 if own else slack
        limits = Limits(sizes[node], window, max(most, slack * OF_NODES), block, own, inside=True)
        its_room = room[first[node] : first[node] + sizes[node]]
        placement = Placement.of_pieces(lengths, pieces[nth], limits, its_room, [own] * sizes[node], inter_node[nth])
        segments = place(placement)
        segments[:, 3] += first[node]
        placed.append(segments)
    return np.concatenate(placed)


def _joined(segments: NDArray[np.int64]) -> Intervals:
    """Return the rows of one node's segments by (document, start), with touching segments joined."""
    document, start, stop, _ = segments[np.lexsort((segments[:, 1], segments[:, 0]))].T
    begins = np.append(True, (document[1:] != document[:-1]) | (start[1:] != stop[:-1]))[: len(document)]
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(document))[: len(first)] - 1
    return Intervals(document[first], start[first], stop[last])


def _inter_node_costs(pieces: list[Intervals]) -> list[list[float]]:
    """Return the inter-node cost of a row of each piece, in intra-node rows."""
    document, start, stop = (
        np.concatenate([getattr(each, name) for each in pieces]) for name in ("document", "start", "stop")
    )
    node = np.repeat(np.arange(len(pieces)), [len(each) for each in pieces])
    cost = np.zeros(len(document))
    shared = np.flatnonzero(np.bincount(document)[document] > 1)
    for index in shared.tolist():
        later = shared[(document[shared] == document[index]) & (start[shared] >= stop[index])]
        readers = set(node[later].tolist()) - {int(node[index])}
        cost[index] = len(readers) * NODE_BANDWIDTH / NETWORK_BANDWIDTH
    return [cost[node == nth].tolist() for nth in range(len(pieces))]
