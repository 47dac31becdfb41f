"""Phase 3 of the joint layout: ends of short documents move until every rank is full."""

from bisect import bisect_left, insort

import numpy as np

from hf_distca.planner.joint.placement import Item, Placement


def even_out(placement: Placement, spare: list[Item]) -> None:
    """Place the items that fit nowhere, then move rows from overfull ranks to ranks with room."""
    room = placement.room
    for item in spare:
        placement.hold(item, max(range(len(room)), key=lambda rank: (room[rank], -rank)))
    under = [rank for rank in range(len(room)) if room[rank] > 0]
    under.sort(key=lambda rank: (-room[rank], rank))
    home, rows = np.array(placement.home, np.int64), placement.uncut_rows()
    by_rank = np.argsort(home, kind="stable")
    first = np.searchsorted(home[by_rank], np.arange(len(room) + 1)).tolist()
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
            placement.home[index] = target
        cost = limits.pairs(start, stop)
        placement.need[rank] += cost
        placement.need[target] -= cost
        room[rank] += moved
        room[target] -= moved
        if not room[target]:
            under.pop()
