"""Who gives how many query-key pairs to whom.

Moving F pairs costs about √F bytes, so the flows to look for are few and large: the sum of their roots, and
for the busiest giver its own sum, are what is made small.
"""

from bisect import bisect_left, insort

Flows = dict[int, list[tuple[int, float]]]
"""giver -> (taker, pairs) of each of its flows"""


def plan_flows(surplus: list[float], partners: dict[int, set[int]]) -> Flows:
    """Flows that take every worker down to a surplus of 0, as far as there is room.

    The giver with the most goes first, so that it finds the largest rooms.

    Args:
        surplus: [workers] pairs above what each should have; the room it has for more where negative.
        partners: worker -> workers that hold K/V rows of the same documents, to which giving costs less.
    """
    rooms = sorted((-extra, worker) for worker, extra in enumerate(surplus) if extra < 0)
    givers = [worker for worker, extra in enumerate(surplus) if extra > 0]
    givers.sort(key=lambda worker: (-surplus[worker], worker))
    partners = {giver: partners[giver] - {giver} for giver in givers if giver in partners}
    if any(surplus[partner] > 0 for near in partners.values() for partner in near):
        # Partners one after the other, so that they find the takers of each other; those with the most in all first.
        together = {giver: sum(max(surplus[worker], 0.0) for worker in partners.get(giver, ())) for giver in givers}
        givers.sort(key=lambda giver: -surplus[giver] - together[giver])
    return _in_turn(surplus, givers, rooms, partners)


def _in_turn(
    surplus: list[float], givers: list[int], rooms: list[tuple[float, int]], partners: dict[int, set[int]]
) -> Flows:
    """Each giver in turn gives to the tightest room that takes all of what it has left, else to the largest.

    A partner whose room takes all goes before a tighter one. Then come takers that already take from a partner,
    since it mostly is the same document whose K/V rows they get; and the room looked for is that for the partners too.
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
