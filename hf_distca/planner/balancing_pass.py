"""One pass of balancing: who gives rows to whom, from which documents, and where in them.

Moving F pairs costs about √F bytes. So flows should be few and large: the sum of their roots is minimised, over all
givers and for the busiest one.
"""

import itertools
import math
from bisect import bisect_left, insort
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hf_distca.plan import TASK, AttentionKind, Layout
from hf_distca.planner.cost import RowBytes, Workers, pairs, pairs_at, row_reaching
from hf_distca.planner.intervals import FloatArray, IntArray, Table, grain, joined, local_tasks, merged, moved_by
from hf_distca.planner.settings import PlanSettings

BUSY = 0.8
"""A worker whose surplus is at least this share of the largest one counts as a bottleneck."""
FORBIDDEN = 1e18
"""Bytes charged for a task smaller than a block while places are compared."""
ROUNDING = 0.04
"""Share of the tolerance that rounding one cut may cost; beyond it, the cut leaves the block's boundary."""


Flows = dict[int, list[tuple[int, float]]]
"""giver -> (taker, pairs) of each of its flows"""


@dataclass(frozen=True, eq=False)
class Problem:
    """Everything that stays the same from pass to pass.

    Rows of every document are counted from `origin` on, so that pairs alone express the whole cost of a row. A row p
    with an overhead of c pairs costs min(p + 1, window) + c in all. Row p + c costs the same with a window of
    window + c.

    Attributes:
        layout: rows are counted from `origin` on; so are `lengths`.
        tolerance: [workers] how far above the ideal time a worker may finish, as a fraction of that time.
        block: rows of a kernel block.
        window: window of K/V rows; None for full causal attention.
        gather_cost: cost of gathering a byte of K and V on the rank itself, in bytes sent.
    """

    layout: Layout
    workers: Workers
    tolerance: FloatArray
    block: int
    window: int | None
    origin: int
    row_bytes: RowBytes
    gather_cost: float

    @classmethod
    def of(
        cls, layout: Layout, kind: AttentionKind, settings: PlanSettings, workers: Workers, tolerance: FloatArray
    ) -> "Problem":
        """Return the problem of a layout whose rows are counted from 0 on.

        The overhead of a row is rounded to whole blocks, so that cuts stay on the blocks' boundaries.
        """
        block = settings.balance_block_size
        origin = round(settings.row_overhead / block) * block
        layout = Layout(layout.lengths + origin, moved_by(layout.segments, origin), layout.ranks)
        row_bytes = settings.row_bytes(kind)
        return cls(layout, workers, tolerance, block, kind.window, origin, row_bytes, settings.gather_cost)

    @property
    def pair_window(self) -> int | None:
        """Window by which a row counts pairs; None for full causal attention."""
        return None if self.window is None else self.window + self.origin

    @cached_property
    def as_laid_out(self) -> Table:
        """[tasks] of dtype TASK: every rank computes the rows that it holds."""
        return local_tasks(self.layout.segments)

    def loads(self, tasks: Table) -> IntArray:
        """Return [workers] int64: pairs of each worker."""
        cost = pairs(tasks["start"], tasks["stop"], self.pair_window)
        return np.bincount(tasks["worker"], cost, len(self.workers)).astype(np.int64)


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


class BalancingPass:
    """One pass of flows, sources and places over the present tasks.

    Args:
        tasks: [tasks] of dtype TASK, sorted by (worker, document, start).
        aim: [workers] finishing time that flows aim at.
        limit: [workers] a worker that finishes by this time gives nothing.
        groups: [workers] group of each worker; nothing moves between groups.
    """

    def __init__(self, problem: Problem, tasks: Table, aim: FloatArray, limit: FloatArray, groups: IntArray) -> None:
        self._problem, self._tasks, self._groups = problem, tasks, groups
        self._window, self._origin = problem.pair_window, problem.origin
        q, kv, o = problem.row_bytes.q, problem.row_bytes.kv, problem.row_bytes.o
        self._price = Price(q + o, kv, problem.window, problem.origin)
        # All workers wait for the bytes that the busiest one sends; O does not add to them.
        self._price_of_busy = Price(q + o // 4, kv, problem.window, problem.origin)

        workers, loads = problem.workers, problem.loads(tasks)
        aim = np.maximum((aim - np.asarray(workers.base_load)) * np.asarray(workers.speed), 0.0)
        surplus = loads - aim  # pairs above the aim; negative where a worker has room
        surplus[(surplus > 0) & (workers.finishing(loads) <= limit)] = 0.0
        self._surplus = surplus
        self._busy = BUSY * surplus.max()
        self._rounding = ROUNDING * float((problem.tolerance[aim > 0] * aim[aim > 0]).min(initial=np.inf))
        self._first: list[int] = np.searchsorted(tasks["worker"], np.arange(len(workers) + 1)).tolist()
        self._documents: list[int] = tasks["document"].tolist()
        # document -> worker -> row: the worker has, or will have, K/V rows up to this row. Only documents on several
        # workers, one of which gives, are listed.
        self._known: dict[int, dict[int, int]] = {}
        homes = np.bincount(tasks["document"], minlength=len(problem.layout.lengths))
        given = np.zeros(len(homes), bool)
        given[tasks["document"][surplus[tasks["worker"]] > 0]] = True
        for document, _, stop, worker in tasks.compress((given & (homes > 1))[tasks["document"]]).tolist():
            self._learn(document, worker, stop)

    def run(self) -> Table:
        """Return the tasks after this pass."""
        parts: dict[int, list[tuple[float, int]]] = {}  # task -> (pairs, taker) of each part that leaves it
        for giver, flows in self._flows().items():
            first, last = self._first[giver], self._first[giver + 1]
            mine = self._tasks[first:last]
            source = Source(mine["start"], mine["stop"], self._price_for(giver))
            shared = [task for task in range(first, last) if self._documents[task] in self._known]
            for taker, amount in flows:
                known = np.full(len(mine), self._origin)
                for task in shared:
                    known[task - first] = self._known[self._documents[task]].get(taker, self._origin)
                for index, part in source.take(amount, known).items():
                    parts.setdefault(first + index, []).append((part, taker))
        kept = np.ones(len(self._tasks), bool)
        kept[list(parts)] = False
        cut = [piece for task, leaving in sorted(parts.items()) for piece in self._stack(task, leaving)]
        return merged(joined(self._tasks.compress(kept), np.array(cut, TASK)))

    def _flows(self) -> Flows:
        """Plan the flows of each group."""
        partners: dict[int, set[int]] = {}  # workers that have tasks of the same documents
        for held in self._known.values():
            for worker in held:
                partners.setdefault(worker, set()).update(held)
        flows: Flows = {}
        for group in np.unique(self._groups[self._surplus > 0]):
            flows |= plan_flows(np.where(self._groups == group, self._surplus, 0.0).tolist(), partners)
        return flows

    def _price_for(self, giver: int) -> Price:
        return self._price_of_busy if self._surplus[giver] >= self._busy else self._price

    def _learn(self, document: int, worker: int, rows: int) -> None:
        held = self._known.setdefault(document, {})
        held[worker] = max(held.get(worker, 0), rows)

    def _stack(self, task: int, parts: list[tuple[float, int]]) -> list[tuple[int, int, int, int]]:
        """Cut one task: place its parts side by side where they cost least, and leave the rest with its worker."""
        document, start, stop, owner = self._tasks[task].tolist()
        window = self._window
        held = self._known.get(document, {})
        # Small parts come first: the others then need fewer K/V rows. Takers that have K/V rows already come last.
        parts = sorted(parts, key=lambda part: (held.get(part[1], self._origin), part))
        known = np.array([float(held.get(taker, self._origin)) for _, taker in parts])
        amounts = np.cumsum([0.0] + [amount for amount, _ in parts])
        low, high = pairs(0, start, window), pairs(0, stop, window)
        amounts *= min(1.0, (high - low) / amounts[-1])
        price = self._price_for(owner)
        begin, end = float(start), row_reaching(float(high - amounts[-1]), window)
        for _ in range(2):  # search the start of the first part: coarse, then fine
            first = np.linspace(begin, end, 33)
            cuts = row_reaching(pairs_at(first, window)[:, None] + amounts, window)
            np.clip(cuts, start, stop, out=cuts)
            costs = price.of(cuts[:, :-1], cuts[:, 1:], known).sum(axis=1)
            costs += self._besides(cuts, start, stop, at_end=stop == self._problem.layout.lengths[document])
            at = int(costs.argmin())
            begin, end = float(first[max(at - 1, 0)]), float(first[min(at + 1, len(first) - 1)])
        bounds = [start]
        for row in cuts[at].tolist():
            bounds.append(min(max(self._whole_row(row), bounds[-1]), stop))
        bounds.append(stop)
        takers = [owner, *(taker for _, taker in parts), owner]
        pieces = [(document, *rows, taker) for rows, taker in zip(itertools.pairwise(bounds), takers, strict=True)]
        pieces = [piece for piece in pieces if piece[1] < piece[2]]
        for _, _, last, taker in pieces:
            self._learn(document, taker, last)
        return pieces

    def _besides(self, cuts: FloatArray, start: int, stop: int, *, at_end: bool) -> FloatArray:
        """Return [choices] bytes charged besides the parts' own, for [choices, parts + 1] cuts of rows [start, stop).

        Tasks smaller than a block are forbidden, except at a document's end. Of rests on both sides of the parts the
        second one gathers its K/V rows once more.
        """
        problem, block = self._problem, self._problem.block
        before, after = cuts[:, 0], cuts[:, -1]
        short = (np.diff(cuts, axis=1) < block).sum(axis=1) + ((before > start + 1) & (before < start + block))
        if not at_end:
            short += (after < stop - 1) & (after > stop - block)
        keys = stop - (np.maximum(after - problem.window + 1, self._origin) if problem.window else self._origin)
        gathered = keys * (problem.gather_cost * problem.row_bytes.kv)
        cost: FloatArray = short * FORBIDDEN + ((before > start) & (after < stop)) * gathered
        return cost

    def _whole_row(self, cut: float) -> int:
        """Round a cut to a block's boundary, or to a finer one if that would move too many pairs."""
        pairs_a_row = min(cut, self._window or cut)
        multiple = grain(self._problem.block, lambda size: size * pairs_a_row > self._rounding)
        return round(cut / multiple) * multiple


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
