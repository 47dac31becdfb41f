"""Who gives how many query-key pairs to whom.

Moving F pairs costs about √F bytes, so the flows to look for are few and large: the sum of their roots, and
for the busiest giver its own sum, are what is made small.
"""

import math
from bisect import bisect_left, insort

import numpy as np

Flows = dict[int, list[tuple[int, float]]]
"""giver -> (taker, pairs) of each of its flows"""

TRIES = 24
"""Exchanges of two givers' turns that are tried; fewer with very many workers."""
MOST = 4096
"""Tries times workers."""


def plan_flows(surplus: list[float], partners: dict[int, set[int]]) -> Flows:
    """Flows that take every worker down to a surplus of 0, as far as there is room.

    The giver with the most goes first, so that it finds the largest rooms; then exchanging the turns of two
    givers is kept where it costs less. A function of `surplus` alone: the tries come from a fixed seed.

    Args:
        surplus: [workers] pairs above what each should have; the room it has for more where negative.
        partners: worker -> workers that hold K/V rows of the same documents, to which giving costs less.
    """
    rooms = sorted((-extra, worker) for worker, extra in enumerate(surplus) if extra < 0)
    givers = [worker for worker, extra in enumerate(surplus) if extra > 0]
    givers.sort(key=lambda worker: (-surplus[worker], worker))
    takers = {worker for _, worker in rooms}
    partners = {giver: partners[giver] & takers for giver in givers if giver in partners}
    flows = _in_turn(surplus, givers, rooms, partners)
    if len(givers) < 2 or not rooms:
        return flows
    first_total, first_busiest = _roots(flows)
    best = 2.0
    tries = min(TRIES, MOST // len(surplus))
    for one, other in np.random.default_rng(0).integers(len(givers), size=(tries, 2)).tolist():
        turns = givers.copy()
        turns[one], turns[other] = turns[other], turns[one]
        candidate = _in_turn(surplus, turns, rooms, partners)
        total, busiest = _roots(candidate)
        cost = total / first_total + busiest / first_busiest
        if cost < best:
            best, flows, givers = cost, candidate, turns
    return flows


def _in_turn(
    surplus: list[float], givers: list[int], rooms: list[tuple[float, int]], partners: dict[int, set[int]]
) -> Flows:
    """Each giver in turn gives to the tightest room that takes all of what it has left, else to the largest.

    A partner whose room takes all goes before a tighter one.
    """
    rooms = rooms.copy()
    room_of = {worker: room for room, worker in rooms}
    flows: Flows = {}
    for giver in givers:
        left = surplus[giver]
        flows[giver] = given = []
        near = partners.get(giver, ())
        while left > 0 and rooms:
            enough = [(room_of[worker], worker) for worker in near if room_of.get(worker, 0.0) >= left]
            at = bisect_left(rooms, min(enough, default=(left, -1)))
            room, taker = rooms.pop(min(at, len(rooms) - 1))
            amount = min(left, room)
            given.append((taker, amount))
            left -= amount
            room_of[taker] = room - amount
            if amount < room:
                insort(rooms, (room - amount, taker))
    return flows


def _roots(flows: Flows) -> tuple[float, float]:
    """√F summed over all flows, and over those of the giver with the most."""
    sums = [sum(math.sqrt(amount) for _, amount in given) for given in flows.values()]
    return sum(sums), max(sums)
