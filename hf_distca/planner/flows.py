"""Flows: how many query-key pairs each worker gives to which other.

Moving F pairs costs about √F bytes. So flows should be few and large: the sum of their roots is minimised, over all
givers and for the busiest one.
"""

from bisect import bisect_left, insort

Flows = dict[int, list[tuple[int, float]]]
"""giver -> (taker, pairs) of each of its flows"""


def plan_flows(surplus: list[float], partners: dict[int, set[int]]) -> Flows:
    """Plan flows that take every worker down to a surplus of 0, as far as there is room.

    The giver with the largest surplus goes first, so that it finds the largest rooms.

    Args:
        surplus: [workers] pairs above each worker's target; negative where a worker has room.
        partners: worker -> workers that hold K/V rows of the same documents; giving to them costs less.
    """
    rooms = sorted((-extra, worker) for worker, extra in enumerate(surplus) if extra < 0)
    givers = [worker for worker, extra in enumerate(surplus) if extra > 0]
    givers.sort(key=lambda worker: (-surplus[worker], worker))
    partners = {giver: partners[giver] - {giver} for giver in givers if giver in partners}
    if any(surplus[partner] > 0 for near in partners.values() for partner in near):
        # Partners follow each other, so that they find each other's takers; the largest sum of surpluses goes first.

        together = {giver: sum(max(surplus[worker], 0.0) for worker in partners.get(giver, ())) for giver in givers}
        givers.sort(key=lambda giver: -surplus[giver] - together[giver])
    return _in_turn(surplus, givers, rooms, partners)


def _in_turn(
    surplus: list[float], givers: list[int], rooms: list[tuple[float, int]], partners: dict[int, set[int]]
) -> Flows:
    """Let each giver in turn fill the tightest room that takes its whole surplus, or else the largest room.

    A partner whose room takes the whole surplus goes before a tighter room. Next come takers that already take from a
    partner, since they mostly receive K/V rows of the same document. The room looked for includes the partners'
    surplus.
    """
    rooms = rooms.copy()
    room_of = {worker: room for room, worker in rooms}
    waiting = {giver: surplus[giver] for giver in givers}
    flows: Flows = {}
    for giver in givers:
        left = waiting.pop(giver)
        flows[giver] = given = []
        near = partners.get(giver, ())
        for_partners = sum(waiting.get(partner, 0.0) for partner in near)
        used = {taker for partner in near for taker, _ in flows.get(partner, ())}
        while left > 0 and rooms:
            wanted = (left + for_partners, -1)
            if near:
                enough = [(room_of[worker], worker) for worker in near if room_of.get(worker, 0.0) >= left]
                begun = [(room_of[worker], worker) for worker in used if room_of[worker] > 0]
                wanted = min(enough, default=max(begun, default=wanted))
            room, taker = rooms.pop(min(bisect_left(rooms, wanted), len(rooms) - 1))
            amount = min(left, room)
            given.append((taker, amount))
            left -= amount
            room_of[taker] = room - amount
            if amount < room:
                insort(rooms, (room - amount, taker))
    return flows
