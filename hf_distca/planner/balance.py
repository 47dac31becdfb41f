"""Balancing core attention on a given layout: which rows to compute elsewhere, and where.

Rows move in few and cheap tasks:

1. Flows: who gives how many pairs to whom (`plan_flows`). Few and large ones, since bytes grow like the
   square root of the pairs moved.
2. Sources: a flow is taken from the documents where it costs least (`Source.take`).
3. Places: the flows out of one stretch of a document lie side by side in it, at the place where all of
   them together cost least (`_Round._stack`).

Rounding to whole rows leaves small differences; the three steps are repeated on the result until every
worker is within the tolerance. Swaps of work then relieve the busiest worker (`swapped`). What tasks
below a block are not needed for the balance are taken out (`without_short`).
"""

import itertools

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import TASK, Layout, Plan
from hf_distca.planner.cost import BALANCE_TOLERANCE, RowBytes, Workers, pairs, pairs_at, row_reaching
from hf_distca.planner.flows import plan_flows
from hf_distca.planner.intervals import grain, merge_touching
from hf_distca.planner.layout import check_settings
from hf_distca.planner.short_tasks import without_short
from hf_distca.planner.sources import Price, Source
from hf_distca.planner.swaps import Rules, swapped

BUSY = 0.8
"""Workers whose surplus reaches this share of the largest hold up everybody."""
FORBIDDEN = 1e18
"""Bytes that a task below a block counts for while places are compared."""
AIM = (0.96, 0.8, 0.6, 0.4, 0.2, 0.0)
"""Flows aim at this share of the tolerance, pass after pass; rounding to rows has the rest."""
NEARLY = 0.15
"""A layout whose last worker finishes within this share of the limit hardly needs balancing."""
ROUNDING = 0.04
"""Share of the tolerance that rounding one cut may cost before it leaves the block's boundaries."""


def balance(
    layout: Layout,
    *,
    workers: Workers | None = None,
    window: int | None = None,
    balance_tolerance: float = BALANCE_TOLERANCE,
    balance_block_size: int = 128,
    row_bytes: RowBytes | None = None,
    row_overhead: int = 0,
    gather_cost: float = 0.0,
) -> Plan:
    """Choose tasks so that all workers finish together, for few bytes.

    Args:
        layout: where the rows are; they stay there.
        workers: speeds and base loads; worker r < layout.ranks is rank r, further ones hold no rows. None for
            the ranks alone, all equal.
        window: width of the sliding window; None for full causal attention.
        balance_tolerance: how far above the ideal finishing time the last worker may finish, measured on the plan
            returned, as a fraction of that time. Where whole rows cannot reach it, the best found: 0 is as fine as
            they allow, and takes several times as long.
        balance_block_size: rows of a kernel block. Cuts fall on its multiples, and no task is shorter, except where a
            document or segment ends or where the balance needs it (short_tasks.py says when it does).
        row_bytes: bytes of the rows; None for RowBytes().
        row_overhead: what a query row costs besides its pairs, in pairs; counted in whole blocks. What is balanced
            is then pairs + rows · row_overhead.
        gather_cost: what a byte of K and V costs that is gathered on the rank itself because a task is left on either
            side of one that moves, compared with a byte sent.

    Raises:
        ValueError: settings out of range, or fewer workers than ranks.
    """
    check_settings(balance_tolerance, balance_block_size, window)
    workers = workers or Workers.uniform(layout.ranks)
    if len(workers) < layout.ranks:
        raise ValueError(
            f"the layout has {layout.ranks} ranks, but only {len(workers)} workers are described; "
            "every rank is a worker, dedicated ones come after them"
        )
    slack = balance_tolerance
    # A row p costs min(p + 1, window) + c: what row p + c costs with a window of window + c. So rows are counted from
    # c on while tasks are chosen; whole blocks of them, so that cuts stay on the blocks' boundaries.
    origin = round(row_overhead / balance_block_size) * balance_block_size
    row_bytes = row_bytes or RowBytes()
    price_all, price_sent = _prices(row_bytes, window, origin)
    gathered = gather_cost * row_bytes.kv
    window, kept_window = price_all.pair_window, window
    kept_layout, layout = layout, _shifted(layout, origin)
    tasks = _initial_tasks(layout)
    loads = _loads(tasks, len(workers), window)
    limit = workers.ideal(int(loads.sum())) * (1 + slack)
    as_laid_out = float(workers.finishing(loads).max())
    best, best_time = tasks, as_laid_out
    for aim in AIM:
        if best_time <= limit or not len(tasks):
            break
        tasks = _Round(
            tasks, layout.lengths, workers, price_all, price_sent, gathered, slack, aim, balance_block_size
        ).run()
        finish = float(workers.finishing(_loads(tasks, len(workers), window)).max())
        if finish < best_time:
            best, best_time = tasks, finish
    most = (max(limit, best_time) - np.asarray(workers.base_load)) * np.asarray(workers.speed)
    if as_laid_out > limit * (1 + NEARLY):  # else nearly all tasks are at home, and few bytes can be saved
        rules = Rules(row_bytes, kept_window, window, origin, balance_block_size)
        best = merged(swapped(best, layout, (most - _loads(best, len(workers), window)).tolist(), rules))
    room = (most - _loads(best, len(workers), window)).tolist()
    best = merged(without_short(best, layout, room, window, balance_block_size))
    best["start"] -= origin
    best["stop"] -= origin
    return Plan(kept_layout, best, len(workers), kept_window)


def _prices(row_bytes: RowBytes, window: int | None, origin: int) -> tuple[Price, Price]:
    """What giving costs: all bytes; those that the giver sends, which all wait for if it is the busiest."""
    return (
        Price(row_bytes.q + row_bytes.o, row_bytes.kv, window, origin),
        Price(row_bytes.q + row_bytes.o // 4, row_bytes.kv, window, origin),
    )


def _shifted(layout: Layout, origin: int) -> Layout:
    """The layout with the rows of every document counted from `origin` on."""
    if not origin:
        return layout
    segments = layout.segments.copy()
    segments["start"] += origin
    segments["stop"] += origin
    return Layout(layout.lengths + origin, segments, layout.ranks)


def _initial_tasks(layout: Layout) -> NDArray[np.void]:
    tasks = np.zeros(len(layout.segments), TASK)
    for field in ("document", "start", "stop"):
        tasks[field] = layout.segments[field]
    tasks["worker"] = layout.segments["rank"]
    return merged(tasks)


def _loads(tasks: NDArray[np.void], workers: int, window: int | None) -> NDArray[np.int64]:
    loads = np.zeros(workers, np.int64)
    np.add.at(loads, tasks["worker"], pairs(tasks["start"], tasks["stop"], window))
    return loads


def merged(tasks: NDArray[np.void]) -> NDArray[np.void]:
    """Tasks sorted by (worker, document, start), those that touch made one."""
    tasks = tasks[np.lexsort((tasks["start"], tasks["document"], tasks["worker"]))]
    return merge_touching(tasks, "worker")


class _Round:
    """One pass of flows, sources and places over the tasks as they stand.

    Attributes:
        surplus: pairs of each worker above what it should have.
        busy: surplus from which a worker counts as the bottleneck.
        known: document -> worker -> row: K/V rows up to it are, or will be, on that worker. Only of
            documents on more than one worker.
        parts: task -> (pairs, taker) of each part that is to leave it.
    """

    def __init__(
        self,
        tasks: NDArray[np.void],
        lengths: NDArray[np.int64],
        workers: Workers,
        price: Price,
        sending: Price,
        gathered: float,
        slack: float,
        share: float,
        block: int,
    ) -> None:
        self.tasks, self.lengths, self.block = tasks, lengths, block
        self.window = price.pair_window
        self.price, self.sending, self.gathered = price, sending, gathered
        loads = _loads(tasks, len(workers), self.window)
        ideal = workers.ideal(int(loads.sum()))
        speed, base = np.asarray(workers.speed), np.asarray(workers.base_load)
        aim = np.maximum((ideal * (1 + share * slack) - base) * speed, 0.0)
        surplus = loads - aim
        surplus[(surplus > 0) & (workers.finishing(loads) <= ideal * (1 + slack))] = 0.0
        self.surplus: list[float] = surplus.tolist()
        self.busy = BUSY * max(self.surplus)
        self.rounding = ROUNDING * slack * float(aim[aim > 0].min(initial=np.inf))
        self.documents: list[int] = tasks["document"].tolist()
        self.first: list[int] = np.searchsorted(tasks["worker"], np.arange(len(workers) + 1)).tolist()
        self.known: dict[int, dict[int, int]] = {}
        homes = np.bincount(tasks["document"], minlength=len(lengths))
        for task in np.flatnonzero(homes[tasks["document"]] > 1).tolist():
            self._learn(self.documents[task], int(tasks["worker"][task]), int(tasks["stop"][task]))
        self.parts: dict[int, list[tuple[float, int]]] = {}

    def run(self) -> NDArray[np.void]:
        """The tasks after this pass."""
        for giver, flows in plan_flows(self.surplus, self._partners()).items():
            self._give(giver, flows)
        kept = np.ones(len(self.tasks), bool)
        cut: list[tuple[int, int, int, int]] = []
        for task, parts in sorted(self.parts.items()):
            kept[task] = False
            cut += self._stack(task, parts)
        return merged(np.concatenate([self.tasks[kept], np.array(cut, dtype=TASK)]))

    def _price(self, giver: int) -> Price:
        """What giving costs: all bytes, but for the busiest givers those they send, which all wait for."""
        return self.sending if self.surplus[giver] >= self.busy else self.price

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
        parts = sorted(parts, key=lambda part: (held.get(part[1], self.price.origin), part))
        known = np.array([float(held.get(taker, self.price.origin)) for _, taker in parts])
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
        if stop != self.lengths[doc]:
            short += (cuts[:, -1] < stop - 1) & (cuts[:, -1] > stop - self.block)
        return short

    def _gathered(self, cuts: NDArray[np.float64], start: int, stop: int) -> NDArray[np.float64]:
        """[choices] float64: what a rest on either side of all parts costs: the second reads K/V rows once more."""
        first = float(self.price.origin)
        after = cuts[:, -1]
        keys = stop - (np.maximum(after - self.price.window + 1, first) if self.price.window else first)
        cost: NDArray[np.float64] = ((cuts[:, 0] > start) & (after < stop)) * keys * self.gathered
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
