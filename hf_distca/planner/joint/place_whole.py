"""Phase 2 of the joint layout: uncut documents and heads stay whole, the longest first.

Each goes to the rank whose remaining pairs per remaining token are highest: every rank's need falls towards the
shortest documents, which come last. Once what is left no longer matters in pairs, it goes to the rank with the most
room.
"""

from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from hf_distca.planner.cost import pairs
from hf_distca.planner.joint.placement import Item, Placement

NEGLIGIBLE = 0.3
"""Share of the slack in pairs that documents placed for their tokens alone may make up."""


def place_whole(placement: Placement) -> list[Item]:
    """Place what is not cut, and return what fits nowhere."""
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
    """Each item to the rank that needs most pairs per token and has room; returns those without one."""
    room, need, home = placement.room, placement.need, placement.home
    ready = [(-need[rank] / max(room[rank], 1), rank) for rank in range(len(room))]
    heapify(ready)
    small: list[tuple[int, int]] = []  # (-room, rank) of ranks with too little room for now
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
        home[index] = rank
        room[rank] = left = room[rank] - rows
        need[rank] = short = need[rank] - cost
        heapreplace(ready, (-short / (left or 1), rank))
    return spare


def _by_room(placement: Placement, items: list[Item]) -> list[Item]:
    """Each item to the rank with the most room; returns those that fit nowhere."""
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
