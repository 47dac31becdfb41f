"""One pass of balancing: who gives what to whom, from which documents, and where in them."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import TASK
from hf_distca.planner.cost import RowBytes, Workers, pairs, pairs_at, row_reaching
from hf_distca.planner.flows import Flows, plan_flows
from hf_distca.planner.intervals import grain
from hf_distca.planner.shifted import ShiftedRows, merged
from hf_distca.planner.sources import Price, Source

BUSY = 0.8
"""Workers whose surplus reaches this share of the largest hold up everybody."""
FORBIDDEN = 1e18
"""Bytes that a task below a block counts for while places are compared."""
ROUNDING = 0.04
"""Share of the tolerance that rounding one cut may cost before it leaves the block's boundaries."""


@dataclass(frozen=True)
class Prices:
    """What giving rows away costs.

    Attributes:
        all: bytes of all workers.
        sent: bytes that the giver sends, which all wait for if it is the busiest.
        gathered: what gathering a K/V row on the rank itself costs, in bytes sent.
    """

    all: Price
    sent: Price
    gathered: float

    @classmethod
    def of(cls, row_bytes: RowBytes, rows: ShiftedRows, gather_cost: float) -> "Prices":
        """Prices for rows of some bytes.

        Args:
            row_bytes: bytes of the rows.
            rows: the view that they are counted in.
            gather_cost: what gathering a byte on the rank itself costs, in bytes sent.
        """
        q, kv, o = row_bytes.q, row_bytes.kv, row_bytes.o
        return cls(
            Price(q + o, kv, rows.window, rows.origin),
            Price(q + o // 4, kv, rows.window, rows.origin),
            gather_cost * kv,
        )


@dataclass(frozen=True, eq=False)
class Goal:
    """When the workers should finish.

    Attributes:
        aim: [workers] what flows aim at.
        limit: [workers] until when a worker need not give anything.
        slack: how far above the ideal the limit lies, as a fraction; or [workers].
    """

    aim: NDArray[np.float64]
    limit: NDArray[np.float64]
    slack: float | NDArray[np.float64]


class BalancingPass:
    """One pass of flows, sources and places over the tasks as they stand.

    Args:
        tasks: [tasks] of dtype TASK, sorted by (worker, document, start).
        rows: the view that they are counted in.
        workers: speeds and base loads.
        prices: what giving costs.
        goal: when workers should finish, and may.
        block: rows of a kernel block.
        groups: [workers] the group of each worker, and nothing leaves a group.

    Attributes:
        surplus: pairs of each worker above what it should have.
        busy: surplus from which a worker counts as the bottleneck.
        known: document -> worker -> row: K/V rows up to it are, or will be, on that worker. Only of
            documents on more than one worker, one of which gives.
        parts: task -> (pairs, taker) of each part that is to leave it.
    """

    def __init__(
        self,
        tasks: NDArray[np.void],
        rows: ShiftedRows,
        workers: Workers,
        prices: Prices,
        goal: "Goal",
        block: int,
        groups: Sequence[int] | NDArray[np.int64],
    ) -> None:
        self.tasks, self.stops, self.block, self.groups = tasks, rows.stops, block, np.asarray(groups)
        self.window, self.prices = rows.pair_window, prices
        self.origin, self.key_window = rows.origin, rows.window
        loads = rows.loads(tasks, len(workers))
        speed, base = np.asarray(workers.speed), np.asarray(workers.base_load)
        aim = np.maximum((goal.aim - base) * speed, 0.0)
        surplus = loads - aim
        surplus[(surplus > 0) & (workers.finishing(loads) <= goal.limit)] = 0.0
        self.surplus: list[float] = surplus.tolist()
        self.busy = BUSY * max(self.surplus)
        slack = np.broadcast_to(goal.slack, aim.shape)
        self.rounding = ROUNDING * float((slack[aim > 0] * aim[aim > 0]).min(initial=np.inf))
        self.documents: list[int] = tasks["document"].tolist()
        self.first: list[int] = np.searchsorted(tasks["worker"], np.arange(len(workers) + 1)).tolist()
        self.known: dict[int, dict[int, int]] = {}
        homes = np.bincount(tasks["document"], minlength=len(self.stops))
        given = np.zeros(len(self.stops), bool)
        given[tasks["document"][surplus[tasks["worker"]] > 0]] = True
        shared = tasks[(given & (homes > 1))[tasks["document"]]]
        for document, _, stop, worker in shared.tolist():
            self._learn(document, worker, stop)
        self.parts: dict[int, list[tuple[float, int]]] = {}

    def run(self) -> NDArray[np.void]:
        """The tasks after this pass."""
        for giver, flows in self._flows().items():
            self._give(giver, flows)
        kept = np.ones(len(self.tasks), bool)
        cut: list[tuple[int, int, int, int]] = []
        for task, parts in sorted(self.parts.items()):
            kept[task] = False
            cut += self._stack(task, parts)
        return merged(np.concatenate([self.tasks[kept], np.array(cut, dtype=TASK)]))

    def _flows(self) -> Flows:
        """Who gives how much to whom, group by group."""
        partners = self._partners()
        flows: Flows = {}
        surplus = np.array(self.surplus)
        for group in np.unique(self.groups[surplus > 0]).tolist():
            here = np.flatnonzero(self.groups == group).tolist()
            place = {worker: at for at, worker in enumerate(here)}
            near = {place[w]: {place[p] for p in partners[w] if p in place} for w in here if w in partners}
            inside = plan_flows([self.surplus[worker] for worker in here], near)
            flows |= {
                here[giver]: [(here[taker], amount) for taker, amount in given] for giver, given in inside.items()
            }
        return flows

    def _price(self, giver: int) -> Price:
        """What giving costs: all bytes, but for the busiest givers those they send, which all wait for."""
        return self.prices.sent if self.surplus[giver] >= self.busy else self.prices.all

    def _partners(self) -> dict[int, set[int]]:
        """Workers that have tasks of the same documents."""
        partners: dict[int, set[int]] = {}
        for held in self.known.values():
            for worker in held:
                partners.setdefault(worker, set()).update(held)
        return partners

    def _learn(self, doc: int, worker: int, rows: int) -> None:
        held = self.known.setdefault(doc, {})
        held[worker] = max(held.get(worker, 0), rows)

    def _give(self, giver: int, flows: list[tuple[int, float]]) -> None:
        """Choose the tasks from which one worker gives to the others."""
        mine = range(self.first[giver], self.first[giver + 1])
        span = slice(mine.start, mine.stop)
        start, stop = self.tasks["start"][span], self.tasks["stop"][span]
        source = Source(np.arange(mine.start, mine.stop), start, stop, self._price(giver))
        shared = [task for task in mine if self.documents[task] in self.known]
        for taker, amount in flows:
            for task, part in source.take(amount, self._rows_known(shared, taker)).items():
                self.parts.setdefault(task, []).append((part, taker))

    def _rows_known(self, shared: list[int], worker: int) -> dict[int, int]:
        """task -> K/V rows that a worker has of its document, where it has any."""
        rows = {task: self.known[self.documents[task]].get(worker, 0) for task in shared}
        return {task: count for task, count in rows.items() if count}

    def _stack(self, task: int, parts: list[tuple[float, int]]) -> list[tuple[int, int, int, int]]:
        """Cut one task: its parts side by side where they cost least, the rest left with its worker."""
        doc, start, stop, owner = (int(field) for field in self.tasks[task])
        held = self.known.get(doc, {})
        # Small parts first: fewer K/V rows for the others. Who has K/V rows already, last.
        parts = sorted(parts, key=lambda part: (held.get(part[1], self.origin), part))
        known = np.array([float(held.get(taker, self.origin)) for _, taker in parts])
        amounts = np.cumsum([0.0] + [amount for amount, _ in parts])
        low, high = pairs(0, start, self.window), pairs(0, stop, self.window)
        amounts *= min(1.0, (high - low) / amounts[-1])
        price = self._price(owner)
        begin, end = float(start), row_reaching(float(high - amounts[-1]), self.window)
        for _ in range(2):  # where the first part starts: coarse, then fine
            first = np.linspace(begin, end, 33)
            cuts = row_reaching(pairs_at(first, self.window)[:, None] + amounts, self.window)
            np.clip(cuts, start, stop, out=cuts)
            costs = price.of(cuts[:, :-1], cuts[:, 1:], known).sum(axis=1)
            costs += self._short(cuts, start, stop, doc) * FORBIDDEN
            costs += self._gathered(cuts, start, stop)
            at = int(costs.argmin())
            begin, end = float(first[max(at - 1, 0)]), float(first[min(at + 1, len(first) - 1)])
        bounds = self._whole_rows(cuts[at], start, stop, doc)
        takers = [owner, *(taker for _, taker in parts), owner]
        cut = [(doc, *rows, taker) for rows, taker in zip(itertools.pairwise(bounds), takers, strict=True)]
        cut = [span for span in cut if span[1] < span[2]]
        for _, _, last, taker in cut:
            self._learn(doc, taker, last)
        return cut

    def _short(self, cuts: NDArray[np.float64], start: int, stop: int, doc: int) -> NDArray[np.int64]:
        """[choices] int64: tasks below a block that would come of [choices, parts + 1] cuts."""
        short: NDArray[np.int64] = (np.diff(cuts, axis=1) < self.block).sum(axis=1)
        short += (cuts[:, 0] > start + 1) & (cuts[:, 0] < start + self.block)
        if stop != self.stops[doc]:
            short += (cuts[:, -1] < stop - 1) & (cuts[:, -1] > stop - self.block)
        return short

    def _gathered(self, cuts: NDArray[np.float64], start: int, stop: int) -> NDArray[np.float64]:
        """[choices] float64: what a rest on either side of all parts costs: the second reads K/V rows once more."""
        first = float(self.origin)
        after = cuts[:, -1]
        keys = stop - (np.maximum(after - self.key_window + 1, first) if self.key_window else first)
        cost: NDArray[np.float64] = ((cuts[:, 0] > start) & (after < stop)) * keys * self.prices.gathered
        return cost

    def _whole_rows(self, cuts: NDArray[np.float64], start: int, stop: int, doc: int) -> list[int]:
        """[start, the cuts, stop]; a cut leaves the block's boundary only where that moves too many pairs."""
        rows = [start]
        for cut in cuts.tolist():
            rows.append(min(max(self._whole_row(cut), rows[-1]), stop))
        return [*rows, stop]

    def _whole_row(self, cut: float) -> int:
        pairs_a_row = min(cut, self.window or cut)
        multiple = grain(self.block, lambda size: size * pairs_a_row > self.rounding)
        return round(cut / multiple) * multiple
