"""Phase 2 of the joint layout: place uncut documents and heads whole, the longest first.

Each goes to the rank with the most missing pairs per missing token, so that every rank's need falls towards the
shortest documents, which come last. Once the remaining documents hardly matter in pairs, each goes to the rank with
the most room.
"""

from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from hf_distca.planner.cost import pairs
from hf_distca.planner.joint.placement import Item, Placement

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
    room, need, home = placement.room, placement.need, placement.home
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
        home[index] = rank
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
