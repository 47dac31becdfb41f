"""Flows: how many query-key pairs each worker gives to which other, and from which documents.

Moving F pairs costs about √F bytes. So flows should be few and large: the sum of their roots is minimised, over all
givers and for the busiest one.
"""

import math
from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

from hf_distca.planner.cost import pairs, pairs_at, row_reaching

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


Array = NDArray[np.float64]


class Price:
    """Bytes of having rows [start, stop) of a document computed elsewhere.

    Attributes:
        rows: bytes of Q and O of one row, as far as they count.
        kv: bytes of K and V of one row.
        origin: first row of every document in the view.
        pair_window: window by which a row counts pairs.
        reach: where the cheapest rows of F pairs end, in units of √(2F).
    """

    def __init__(self, rows: float, kv: float, window: int | None, origin: int = 0) -> None:
        self.rows = rows
        self.kv = kv
        self.window = window
        self.origin = origin
        self.pair_window = None if window is None else window + origin
        # F pairs in [s, e) mean e² − s² = 2F, and the bytes (e − s)·rows + e·kv are least where
        # s = e / r with r = 1 + kv / rows, so e = √(2F)·r / √(r² − 1).
        ratio = 1 + self.kv / self.rows
        self.reach = ratio / math.sqrt(ratio * ratio - 1)

    def of(self, start: Array, stop: Array, known: Array) -> Array:
        """Return the bytes of rows [start, stop) for a worker that has K/V rows [origin, known) of the document."""
        first = known if self.window is None else np.maximum(start - self.window + 1, known)
        result: Array = (stop - start) * self.rows + np.maximum(stop - first, 0.0) * self.kv
        return result


class Source:
    """Pairs that one worker can still give.

    Attributes:
        ids: [tasks] int64: the worker's tasks.
        low, high: [tasks] float64: a task still has the pairs from `low` to `high`, counted from row 0 of its
            document. Taking lowers `high`; the place of the pairs in the task is chosen later.
    """

    def __init__(
        self, ids: NDArray[np.int64], start: NDArray[np.int64], stop: NDArray[np.int64], price: Price
    ) -> None:
        self.price, self.window = price, price.pair_window
        self.ids = ids
        self.low = pairs(0, start, self.window).astype(np.float64)
        self.high = pairs(0, stop, self.window).astype(np.float64)

    def take(self, amount: float, known: dict[int, int]) -> dict[int, float]:
        """Choose the pairs to give from each task, for `amount` pairs in all at the least cost found.

        Args:
            amount: pairs.
            known: task -> rows: the taker already has K/V rows [0, rows) of the task's document.
        """
        given: dict[int, float] = {}
        while amount > 0.5:
            single, cost, part = self._single(amount, known)
            if not part.any():
                break
            one = int(single.argmin())
            if single[one] == math.inf:  # no task has enough: take all of the one that is cheapest per pair
                one = int(np.where(part > 0, cost / np.maximum(part, 1.0), np.inf).argmin())
            amount -= float(part[one])
            self._give(given, one, float(part[one]))
        return given

    def _single(self, amount: float, known: dict[int, int]) -> tuple[Array, Array, Array]:
        """Return the bytes of giving pairs from each single task.

        The rows lie where the bytes are least, or at the task's end.

        Returns:
            Each [tasks]: bytes of the whole `amount` from this task, inf if it has less; bytes of as many of the pairs
            as the task has; these pairs.
        """
        start, stop = row_reaching(self.low, self.window), row_reaching(self.high, self.window)
        available = np.maximum(self.high - self.low, 0.0)
        part = np.minimum(amount, available)
        reach = self.price.reach * np.sqrt(2 * part)
        end = np.minimum(stop, np.maximum(row_reaching(self.low + part, self.window), reach))
        begin = np.maximum(row_reaching(pairs_at(end, self.window) - part, self.window), start)
        has = np.full(len(self.ids), float(self.price.origin))
        if known:
            has[:] = [known.get(task, self.price.origin) for task in self.ids.tolist()]
        cost = self.price.of(begin, end, has)
        return np.where(available >= amount, cost, np.inf), cost, part

    def _give(self, given: dict[int, float], index: int, amount: float) -> None:
        task = int(self.ids[index])
        given[task] = given.get(task, 0.0) + amount
        self.high[index] -= amount
