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
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from hf_distca.plan import SEGMENT
from hf_distca.planner.cost import pairs
from hf_distca.planner.intervals import ROWS, IntArray, Table, by_document, merge_touching, table_of
from hf_distca.planner.joint.cut_large import cut_large
from hf_distca.planner.joint.placement import Item, Placement
from hf_distca.planner.nodes import NETWORK_BANDWIDTH, NODE_BANDWIDTH

OF_NODES = 0.25
"""Share of the slack in pairs that nodes may use."""


NEGLIGIBLE = 0.3
"""Share of the slack in pairs that documents placed for their tokens alone may use."""


def place_whole(placement: Placement) -> list[Item]:
    """Place everything that is not cut, and return the items that fit nowhere."""
    room, need = placement.room, placement.need
    rows = placement.uncut_rows()
    costs = pairs(np.array(placement.starts), np.array(placement.stops), placement.window)
    order = np.argsort(-(costs if placement.inside else rows), kind="stable")[: np.count_nonzero(rows)]
    costs = costs[order]
    items = list(zip(order.tolist(), rows[order].tolist(), costs.tolist(), strict=True))
    left = costs.sum() - np.cumsum(costs) + costs
    count = int((left > placement.mean * placement.ranks * placement.slack * NEGLIGIBLE).sum())
    spare = _place(placement, items[:count], lambda rank: need[rank] / (room[rank] or 1))
    return spare + _place(placement, items[count:], lambda rank: room[rank])


def _place(placement: Placement, items: list[Item], wish: Callable[[int], float]) -> list[Item]:
    """Place each item on the rank with room that wishes it most, and return items that fit nowhere."""
    room, need, rank_of = placement.room, placement.need, placement.rank_of
    ready = [(-wish(rank), rank) for rank in range(len(room))]
    heapify(ready)
    small: list[tuple[int, int]] = []  # (-room, rank) of ranks with too little room for the present item
    spare = []
    for item in items:
        index, rows, cost = item
        while small and -small[0][0] >= rows:
            rank = heappop(small)[1]
            heappush(ready, (-wish(rank), rank))
        while ready and room[ready[0][1]] < rows:
            rank = heappop(ready)[1]
            heappush(small, (-room[rank], rank))
        if not ready:
            spare.append(item)
            continue
        rank = ready[0][1]
        rank_of[index] = rank
        room[rank] -= rows
        need[rank] -= cost
        heapreplace(ready, (-wish(rank), rank))
    return spare


def even_out(placement: Placement, spare: list[Item]) -> None:
    """Place the items that fit nowhere, then move rows from overfull ranks to ranks with room."""
    room = placement.room
    for index, more, _ in spare:
        rank = room.index(max(room))
        placement.rank_of[index] = rank
        room[rank] -= more
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
    room = placement.room
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
            at = min(bisect_left(whole, (least + placement.block, -1)), len(whole) - 1)
        rows, index = whole.pop(at)
        moved = min(least, rows)
        if moved < rows:
            insort(rest, (rows - moved, index))
            stop = placement.stops[index]
            placement.stops[index] = stop - moved
            placement.cuts.append((index, stop - moved, stop, target))
        else:
            placement.rank_of[index] = target
        room[rank] += moved
        room[target] -= moved
        if not room[target]:
            under.pop()


def place_on_ranks(lengths: IntArray, sizes: Sequence[int], window: int | None, slack: float, block: int) -> IntArray:
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
    documents = table_of(ROWS, document=np.arange(len(lengths)), stop=lengths)
    if len(sizes) in (1, ranks):
        return _placed(Placement(lengths, documents, room, [mean] * ranks, window, slack, block))

    # The largest nodes come first: a document that is too large for one node is too large for all later ones.
    order = np.argsort(-np.array(sizes), kind="stable")
    first = np.cumsum(sizes) - sizes
    rooms = [sum(room[first[node] : first[node] + sizes[node]]) for node in order]
    needs = [mean * sizes[node] for node in order]
    on_nodes = _placed(Placement(lengths, documents, rooms, needs, window, slack * OF_NODES, block))
    pieces = [_joined(on_nodes[on_nodes[:, 3] == nth]) for nth in range(len(sizes))]
    inter_node = [[0.0] * len(each) for each in pieces] if window else _inter_node_costs(pieces)
    placed = []
    for nth, node in enumerate(order):
        here = slice(first[node], first[node] + sizes[node])
        own = int(pairs(pieces[nth]["start"], pieces[nth]["stop"], window).sum()) / sizes[node]
        most = max(mean * (1 + slack) / own - 1 if own else slack, slack * OF_NODES)
        needs = [own] * sizes[node]
        placement = Placement(lengths, pieces[nth], room[here], needs, window, most, block, True, inter_node[nth])
        segments = _placed(placement)
        segments[:, 3] += first[node]
        placed.append(segments)
    return np.concatenate(placed)


def _placed(placement: Placement) -> IntArray:
    """Place all rows so that every rank is full, and return the segments, see `Placement.segments`."""
    cut_large(placement)
    even_out(placement, place_whole(placement))
    return placement.segments()


def _joined(segments: IntArray) -> Table:
    """Return the rows of one node's segments by (document, start), with touching segments joined."""
    document, start, stop, rank = segments.T
    table = by_document(table_of(SEGMENT, document=document, start=start, stop=stop, rank=rank))
    return merge_touching(table, "rank")


def _inter_node_costs(pieces: list[Table]) -> list[list[float]]:
    """Return the inter-node cost of a row of each piece, in intra-node rows."""
    every = np.concatenate(pieces)
    document, start, stop = every["document"], every["start"], every["stop"]
    node = np.repeat(np.arange(len(pieces)), [len(each) for each in pieces])
    cost = np.zeros(len(document))
    shared = np.flatnonzero(np.bincount(document)[document] > 1)
    for index in shared.tolist():
        later = shared[(document[shared] == document[index]) & (start[shared] >= stop[index])]
        readers = set(node[later].tolist()) - {int(node[index])}
        cost[index] = len(readers) * NODE_BANDWIDTH / NETWORK_BANDWIDTH
    return [cost[node == nth].tolist() for nth in range(len(pieces))]
