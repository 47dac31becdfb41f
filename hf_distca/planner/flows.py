"""Flows: how many query-key pairs each worker gives to which other, and from which documents.

Moving F pairs costs about √F bytes. So flows should be few and large: the sum of their roots is minimised, over all
givers and for the busiest one.
"""

import math
from bisect import bisect_left, insort

import numpy as np

from hf_distca.planner.cost import pairs, pairs_at, row_reaching
from hf_distca.planner.intervals import FloatArray, IntArray

Flows = dict[int, list[tuple[int, float]]]
"""giver -> (taker, pairs) of each of its flows"""


def plan_flows(surplus: list[float], partners: dict[int, set[int]]) -> Flows:
    """Plan flows that take every worker down to a surplus of 0, as far as there is room.

    The giver with the largest surplus goes first, so that it finds the largest rooms. Each giver fills the tightest
    room that takes its whole surplus, or else the largest room. A partner whose room takes the whole surplus goes
    before a tighter room. Next come takers that already take from a partner, since they mostly receive K/V rows of the
    same document. The room looked for includes the partners' surplus.

    Args:
        surplus: [workers] pairs above each worker's target; negative where a worker has room.
        partners: worker -> workers that hold K/V rows of the same documents; giving to them costs less.
    """
    rooms = sorted((-extra, worker) for worker, extra in enumerate(surplus) if extra < 0)
    room_of = {worker: room for room, worker in rooms}
    givers = sorted((-extra, worker) for worker, extra in enumerate(surplus) if extra > 0)
    partners = {giver: partners[giver] - {giver} for _, giver in givers if giver in partners}
    if any(surplus[partner] > 0 for near in partners.values() for partner in near):
        # Partners follow each other, so that they find each other's takers; the largest sum of surpluses goes first.
        givers.sort(key=lambda each: each[0] - sum(max(surplus[other], 0.0) for other in partners.get(each[1], ())))
    waiting = {giver: -less for less, giver in givers}
    flows: Flows = {}
    for _, giver in givers:
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


class Price:
    """Bytes of having rows [start, stop) of a document computed elsewhere.

    Attributes:
        rows: bytes of Q and O of one row, as far as they count.
        kv: bytes of K and V of one row.
        origin: first row of every document, see `Problem`.
        pair_window: window by which a row counts pairs.
        reach: where the cheapest rows of F pairs end, in units of √(2F).
    """

    def __init__(self, rows: float, kv: float, window: int | None, origin: int = 0) -> None:
        self.rows, self.kv, self.window, self.origin = rows, kv, window, origin
        self.pair_window = None if window is None else window + origin
        # F pairs in [s, e) mean e² − s² = 2F, and the bytes (e − s)·rows + e·kv are least where
        # s = e / r with r = 1 + kv / rows, so e = √(2F)·r / √(r² − 1).
        ratio = 1 + self.kv / self.rows
        self.reach = ratio / math.sqrt(ratio * ratio - 1)

    def of(self, start: FloatArray, stop: FloatArray, known: FloatArray | IntArray) -> FloatArray:
        """Return the bytes of rows [start, stop) for a worker that has K/V rows [origin, known) of the document."""
        first = known if self.window is None else np.maximum(start - self.window + 1, known)
        result: FloatArray = (stop - start) * self.rows + np.maximum(stop - first, 0.0) * self.kv
        return result


class Source:
    """Pairs that one worker can still give.

    A task still has the pairs from `low` to `high`, counted from row 0 of its document. Taking lowers `high`. Where
    the pairs lie in the task is chosen later.

    Args:
        start: [tasks] first row of each of the worker's tasks.
        stop: [tasks] one past the last row.
    """

    def __init__(self, start: IntArray, stop: IntArray, price: Price) -> None:
        self._price, self._window = price, price.pair_window
        self._low = pairs(0, start, self._window).astype(np.float64)
        self._high = pairs(0, stop, self._window).astype(np.float64)

    def take(self, amount: float, known: IntArray) -> dict[int, float]:
        """Choose the pairs to give from each task, for `amount` pairs in all at the least cost found.

        The rows lie where the bytes are least, or at the task's end.

        Args:
            known: [tasks] the taker already has the document's K/V rows up to this row.

        Returns:
            The pairs by index of the task.
        """
        low, window = self._low, self._window
        start = row_reaching(low, window)
        given: dict[int, float] = {}
        while amount > 0.5:
            available = np.maximum(self._high - low, 0.0)
            part = np.minimum(amount, available)
            if not part.any():
                break
            reach = self._price.reach * np.sqrt(2 * part)
            end = np.minimum(row_reaching(self._high, window), np.maximum(row_reaching(low + part, window), reach))
            begin = np.maximum(row_reaching(pairs_at(end, window) - part, window), start)
            cost = self._price.of(begin, end, known)
            enough = available >= amount
            if enough.any():
                task = int(np.where(enough, cost, np.inf).argmin())
            else:  # take all of the task that is cheapest per pair
                task = int(np.where(part > 0, cost / np.maximum(part, 1.0), np.inf).argmin())
            taken = float(part[task])
            amount -= taken
            given[task] = given.get(task, 0.0) + taken
            self._high[task] -= taken
        return given
