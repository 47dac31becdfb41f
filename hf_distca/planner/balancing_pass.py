"""One pass of balancing: who gives rows to whom, from which documents, and where in them."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import TASK
from hf_distca.planner.cost import RowBytes, Workers, pairs, pairs_at, row_reaching
from hf_distca.planner.flows import Flows, Price, Source, plan_flows
from hf_distca.planner.intervals import grain
from hf_distca.planner.shifted import ShiftedRows, merged

BUSY = 0.8
"""A worker whose surplus is at least this share of the largest one counts as a bottleneck."""
FORBIDDEN = 1e18
"""Bytes charged for a task smaller than a block while places are compared."""
ROUNDING = 0.04
"""Share of the tolerance that rounding one cut may cost; beyond it, the cut leaves the block's boundary."""


@dataclass(frozen=True)
class Prices:
    """Cost of giving rows away.

    Attributes:
        sent: bytes that the giver sends; all workers wait for them if the giver is the busiest.
        gathered: cost of gathering a K/V row on the rank itself, in bytes sent.
    """

    all: Price
    sent: Price
    gathered: float

    @classmethod
    def of(cls, row_bytes: RowBytes, rows: ShiftedRows, gather_cost: float) -> "Prices":
        """Return the prices for rows of the given bytes."""
        q, kv, o = row_bytes.q, row_bytes.kv, row_bytes.o
        return cls(
            Price(q + o, kv, rows.window, rows.origin),
            Price(q + o // 4, kv, rows.window, rows.origin),
            gather_cost * kv,
        )


@dataclass(frozen=True, eq=False)
class Goal:
    """Times at which workers should finish.

    Attributes:
        aim: [workers] finishing time that flows aim at.
        limit: [workers] a worker that finishes by this time gives nothing.
        slack: how far the limit lies above the ideal, as a fraction; or [workers].
    """

    aim: NDArray[np.float64]
    limit: NDArray[np.float64]
    slack: float | NDArray[np.float64]


class BalancingPass:
    """One pass of flows, sources and places over the present tasks.

    Args:
        tasks: [tasks] of dtype TASK, sorted by (worker, document, start).
        block: rows of a kernel block.
        groups: [workers] group of each worker; nothing moves between groups.

    Attributes:
        surplus: [workers] pairs above the aim; negative where a worker has room.
        busy: surplus from which a worker counts as a bottleneck.
        known: document -> worker -> row: the worker has, or will have, K/V rows up to this row. Only documents on
            several workers, one of which gives, are listed.
        parts: task -> (pairs, taker) of each part that is to leave the task.
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
        """Return the tasks after this pass."""
        for giver, flows in self._flows().items():
            self._give(giver, flows)
        kept = np.ones(len(self.tasks), bool)
        cut: list[tuple[int, int, int, int]] = []
        for task, parts in sorted(self.parts.items()):
            kept[task] = False
            cut += self._stack(task, parts)
        return merged(np.concatenate([self.tasks[kept], np.array(cut, dtype=TASK)]))

    def _flows(self) -> Flows:
        """Plan the flows of each group."""
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
        """Return the price of giving: all bytes, or for a bottleneck the bytes that it sends."""
        return self.prices.sent if self.surplus[giver] >= self.busy else self.prices.all

    def _partners(self) -> dict[int, set[int]]:
        """Return, for each worker, the workers that have tasks of the same documents."""
        partners: dict[int, set[int]] = {}
        for held in self.known.values():
            for worker in held:
                partners.setdefault(worker, set()).update(held)
        return partners

    def _learn(self, doc: int, worker: int, rows: int) -> None:
        held = self.known.setdefault(doc, {})
        held[worker] = max(held.get(worker, 0), rows)

    def _give(self, giver: int, flows: list[tuple[int, float]]) -> None:
        """Choose the tasks from which one worker serves its flows."""
        mine = range(self.first[giver], self.first[giver + 1])
        span = slice(mine.start, mine.stop)
        start, stop = self.tasks["start"][span], self.tasks["stop"][span]
        source = Source(np.arange(mine.start, mine.stop), start, stop, self._price(giver))
        shared = [task for task in mine if self.documents[task] in self.known]
        for taker, amount in flows:
            for task, part in source.take(amount, self._rows_known(shared, taker)).items():
                self.parts.setdefault(task, []).append((part, taker))

    def _rows_known(self, shared: list[int], worker: int) -> dict[int, int]:
        """Return, by task, the K/V rows of its document that a worker has, where there are any."""
        rows = {task: self.known[self.documents[task]].get(worker, 0) for task in shared}
        return {task: count for task, count in rows.items() if count}

    def _stack(self, task: int, parts: list[tuple[float, int]]) -> list[tuple[int, int, int, int]]:
        """Cut one task: place its parts side by side where they cost least, and leave the rest with its worker."""
        doc, start, stop, owner = (int(field) for field in self.tasks[task])
        held = self.known.get(doc, {})
        # Small parts come first: the others then need fewer K/V rows. Takers that have K/V rows already come last.
        parts = sorted(parts, key=lambda part: (held.get(part[1], self.origin), part))
        known = np.array([float(held.get(taker, self.origin)) for _, taker in parts])
        amounts = np.cumsum([0.0] + [amount for amount, _ in parts])
        low, high = pairs(0, start, self.window), pairs(0, stop, self.window)
        amounts *= min(1.0, (high - low) / amounts[-1])
        price = self._price(owner)
        begin, end = float(start), row_reaching(float(high - amounts[-1]), self.window)
        for _ in range(2):  # search the start of the first part: coarse, then fine
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
        """Return [choices] int64: tasks smaller than a block that result from cuts [choices, parts + 1]."""
        short: NDArray[np.int64] = (np.diff(cuts, axis=1) < self.block).sum(axis=1)
        short += (cuts[:, 0] > start + 1) & (cuts[:, 0] < start + self.block)
        if stop != self.stops[doc]:
            short += (cuts[:, -1] < stop - 1) & (cuts[:, -1] > stop - self.block)
        return short

    def _gathered(self, cuts: NDArray[np.float64], start: int, stop: int) -> NDArray[np.float64]:
        """Return [choices] float64: the cost of rests on both sides of the parts.

        The second rest reads the K/V rows once more.
        """
        first = float(self.origin)
        after = cuts[:, -1]
        keys = stop - (np.maximum(after - self.key_window + 1, first) if self.key_window else first)
        cost: NDArray[np.float64] = ((cuts[:, 0] > start) & (after < stop)) * keys * self.prices.gathered
        return cost

    def _whole_rows(self, cuts: NDArray[np.float64], start: int, stop: int, doc: int) -> list[int]:
        """Return [start, rounded cuts, stop].

        A cut leaves the block's boundary only if rounding to the boundary would move too many pairs.
        """
        rows = [start]
        for cut in cuts.tolist():
            rows.append(min(max(self._whole_row(cut), rows[-1]), stop))
        return [*rows, stop]

    def _whole_row(self, cut: float) -> int:
        pairs_a_row = min(cut, self.window or cut)
        multiple = grain(self.block, lambda size: size * pairs_a_row > self.rounding)
        return round(cut / multiple) * multiple
