"""Balancing core attention on a given layout: which rows to compute elsewhere, and where.

Rows move in the fewest and cheapest pieces:

1. Flows. The worker with the most above its share gives to the worker whose room fits best, so that most
   flows end a surplus or fill a room, and their number stays near that of the workers. (Bytes grow like
   the square root of the pairs moved: few large flows beat many small ones.)
2. Sources. A flow is taken from the documents where it costs least (`_Source.take`).
3. Places. Flows out of one stretch of a document lie side by side in it, at the place where all of them
   together cost least (`_stack`).

Rounding to whole rows leaves small differences; the three steps are repeated on the result until every
worker is within the tolerance.
"""

import math
from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import TASK, Layout, Plan
from hf_distca.planner.cost import FINEST, RowBytes, Workers, pairs, row_reaching
from hf_distca.planner.layout import check_settings

ROUNDS = 6
AIM = 0.8
"""Flows aim at this share of the tolerance; rounding to rows has the rest."""
ROUNDING = 0.1
"""Share of the tolerance that rounding one cut may cost before it leaves the block's boundaries."""


def balance(
    layout: Layout,
    *,
    workers: Workers | None = None,
    window: int | None = None,
    tolerance: float = 0.0,
    block_size: int = 128,
    row_bytes: RowBytes | None = None,
) -> Plan:
    """Choose tasks so that all workers finish together, for few bytes.

    Args:
        layout: where the rows are; they stay there.
        workers: speeds and base loads; worker r < layout.ranks is rank r, further ones hold no rows. None for
            the ranks alone, all equal.
        window: width of the sliding window; None for full causal attention.
        tolerance: how far above the ideal finishing time the last worker may finish, measured on the plan
            returned. Below FINEST it counts as FINEST. Where whole rows cannot reach it, the best found.
        block_size: rows of a kernel block. Cuts fall on its multiples, and no task is shorter, except where a
            document or segment ends or where the balance needs it.
        row_bytes: bytes of the rows; None for RowBytes().

    Raises:
        ValueError: settings out of range, or fewer workers than ranks.
    """
    check_settings(tolerance, block_size, window)
    workers = workers or Workers.uniform(layout.ranks)
    if len(workers) < layout.ranks:
        raise ValueError(
            f"the layout has {layout.ranks} ranks, but only {len(workers)} workers are described; "
            "every rank is a worker, dedicated ones come after them"
        )
    slack = max(tolerance, FINEST)
    tasks = _initial_tasks(layout)
    best, best_time = tasks, math.inf
    ideal = workers.ideal(int(pairs(tasks["start"], tasks["stop"], window).sum()))
    for _ in range(ROUNDS):
        finish = float(workers.finishing(_loads(tasks, len(workers), window)).max())
        if finish < best_time:
            best, best_time = tasks, finish
        if finish <= ideal * (1 + slack):
            break
        tasks = _Round(tasks, workers, window, slack, block_size, row_bytes or RowBytes(), layout).run()
    return Plan(layout, best, len(workers), window)


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
    touches = (
        (tasks["worker"][1:] == tasks["worker"][:-1])
        & (tasks["document"][1:] == tasks["document"][:-1])
        & (tasks["start"][1:] == tasks["stop"][:-1])
    )
    if not touches.any():
        return tasks
    first = np.flatnonzero(np.append(True, ~touches))
    last = np.append(first[1:], len(tasks)) - 1
    result: NDArray[np.void] = tasks[first]
    result["stop"] = tasks["stop"][last]
    return result


class _Price:
    """Bytes of moving rows [start, stop) to a worker that holds nothing of the document.

    Attributes:
        rows: bytes of Q and O of one row.
        kv: bytes of K and V of one row.
        reach: where the cheapest piece of F pairs ends, in units of √(2F).
    """

    def __init__(self, row_bytes: RowBytes, window: int | None) -> None:
        self.rows = row_bytes.q + row_bytes.o
        self.kv = row_bytes.kv
        self.window = window
        # For F pairs in [s, e), e² − s² = 2F, the bytes (e − s)(q + o) + e·kv are least where
        # s = e / r with r = 1 + kv / (q + o): e = √(2F)·r / √(r² − 1).
        ratio = 1 + self.kv / self.rows
        self.reach = ratio / math.sqrt(ratio * ratio - 1)
        self.unit = self.reach * (self.kv + self.rows * (1 - 1 / ratio))

    def of(self, start: NDArray[np.float64], stop: NDArray[np.float64]) -> NDArray[np.float64]:
        first = 0.0 if self.window is None else np.maximum(start - self.window + 1, 0)
        return (stop - start) * self.rows + (stop - first) * self.kv

    def least(self, amount: NDArray[np.float64]) -> NDArray[np.float64]:
        """Bytes of the cheapest piece of `amount` pairs there could be."""
        inside = self.unit * np.sqrt(2 * np.maximum(amount, 0))
        if self.window is None:
            return inside
        return np.minimum(inside, amount / self.window * (self.rows + self.kv) + self.window * self.kv)


class _Source:
    """What one worker can still give: its tasks, and how many pairs of each are spoken for."""

    def __init__(
        self, start: NDArray[np.int64], stop: NDArray[np.int64], ids: NDArray[np.int64], price: _Price
    ):
        order = np.argsort(-stop, kind="stable")
        self.price, self.window = price, price.window
        self.ids = ids[order]
        self.low = pairs(0, start[order], self.window).astype(np.float64)
        self.high = pairs(0, stop[order], self.window).astype(np.float64)

    def take(self, amount: float) -> list[tuple[int, float]]:
        """(task id, pairs) of the cheapest way found to give `amount` pairs."""
        given = []
        while amount > 0.5 and (self.high > self.low).any():
            stop = row_reaching(self.high, self.window)
            start = row_reaching(self.low, self.window)
            # One piece of one document, and the least that the rest can then cost.
            part = np.minimum(amount, self.high - self.low)
            end = np.minimum(
                stop,
                np.maximum(row_reaching(self.low + part, self.window), self.price.reach * np.sqrt(2 * part)),
            )
            begin = np.maximum(row_reaching(pairs_at(end, self.window) - part, self.window), start)
            single = self.price.of(begin, end) + self.price.least(amount - part)
            single[part <= 0] = np.inf
            # Or the ends of the n longest documents, all cut at the same row s: one more row costs the same
            # bytes per pair in each. n·pairs(0, s) = Σ pairs(0, stop) − amount.
            count = np.arange(1, len(stop) + 1)
            level = (np.cumsum(self.high) - amount) / count
            row = row_reaching(level, self.window)
            usable = (level >= np.maximum.accumulate(self.low)) & (row < stop)
            first = 0.0 if self.window is None else np.maximum(row - self.window + 1, 0)
            many = np.cumsum(stop) * (self.price.rows + self.price.kv) - count * (
                row * self.price.rows + first * self.price.kv
            )
            many = np.where(usable & (count > 1), many, np.inf)
            one, several = int(single.argmin()), int(many.argmin())
            if many[several] < single[one]:
                for index in range(several + 1):
                    given.append((int(self.ids[index]), float(self.high[index] - level[several])))
                self.high[: several + 1] = level[several]
                amount = 0.0
            else:
                given.append((int(self.ids[one]), float(part[one])))
                self.high[one] -= part[one]
                amount -= float(part[one])
            order = np.argsort(-self.high, kind="stable")
            self.ids, self.low, self.high = self.ids[order], self.low[order], self.high[order]
        return given


def pairs_at(row: NDArray[np.float64], window: int | None) -> NDArray[np.float64]:
    """pairs(0, row) for fractional rows."""
    inside = row if window is None else np.minimum(row, window)
    amount = inside * (inside + 1) / 2
    return amount if window is None else amount + (row - inside) * window


class _Round:
    """One pass of flows, sources and places over the tasks as they stand."""

    def __init__(
        self,
        tasks: NDArray[np.void],
        workers: Workers,
        window: int | None,
        slack: float,
        block: int,
        row_bytes: RowBytes,
        layout: Layout,
    ) -> None:
        self.tasks, self.workers, self.window, self.block = tasks, workers, window, block
        self.price = _Price(row_bytes, window)
        self.lengths = layout.lengths
        loads = _loads(tasks, len(workers), window)
        ideal = workers.ideal(int(loads.sum()))
        speed, base = np.asarray(workers.speed), np.asarray(workers.base_load)
        aim = np.maximum((ideal * (1 + AIM * slack) - base) * speed, 0.0)
        self.surplus: list[float] = (loads - aim).tolist()
        self.rounding = ROUNDING * slack * float(aim[aim > 0].min()) if len(aim) else 0.0

    def run(self) -> NDArray[np.void]:
        """The tasks after one pass."""
        flows = self._flows()
        by_task: dict[int, list[tuple[float, int]]] = {}
        ids = np.arange(len(self.tasks))
        first = np.searchsorted(self.tasks["worker"], np.arange(len(self.workers) + 1))
        for giver, taken in flows.items():
            mine = slice(int(first[giver]), int(first[giver + 1]))
            source = _Source(self.tasks["start"][mine], self.tasks["stop"][mine], ids[mine], self.price)
            for taker, amount in taken:
                for task, part in source.take(amount):
                    by_task.setdefault(task, []).append((part, taker))
        kept = np.ones(len(self.tasks), bool)
        pieces: list[tuple[int, int, int, int]] = []
        for task, parts in sorted(by_task.items()):
            kept[task] = False
            pieces += self._stack(task, sorted(parts))
        new = np.array([piece for piece in pieces if piece[1] < piece[2]], dtype=TASK)
        return merged(np.concatenate([self.tasks[kept], new]))

    def _flows(self) -> dict[int, list[tuple[int, float]]]:
        """giver -> [(taker, pairs)]: surplus above the aim to workers with room below it."""
        givers = [(-extra, worker) for worker, extra in enumerate(self.surplus) if extra > 0]
        rooms = sorted((-extra, worker) for worker, extra in enumerate(self.surplus) if extra < 0)
        heapify(givers)
        flows: dict[int, list[tuple[int, float]]] = {}
        while givers and rooms:
            extra, giver = heappop(givers)
            at = min(bisect_left(rooms, (-extra, -1)), len(rooms) - 1)
            room, taker = rooms.pop(at)
            amount = min(-extra, room)
            flows.setdefault(giver, []).append((taker, amount))
            if amount < -extra:
                heappush(givers, (extra + amount, giver))
            if amount < room:
                insort(rooms, (room - amount, taker))
        return flows

    def _stack(self, task: int, parts: list[tuple[float, int]]) -> list[tuple[int, int, int, int]]:
        """Cut one task: its parts side by side where they cost least, the rest left with its worker."""
        doc, start, stop, owner = (int(x) for x in self.tasks[task])
        amounts = np.cumsum([0.0] + [amount for amount, _ in parts])
        low, high = (float(pairs(0, row, self.window)) for row in (start, stop))
        amounts *= min(1.0, (high - low) / amounts[-1])
        # Search the first cut: coarse, then fine.
        left, right = low, high - amounts[-1]
        for _ in range(2):
            first = pairs_at(
                np.linspace(*row_reaching(np.array([left, right]), self.window), 33), self.window
            )
            cuts = row_reaching(np.clip(first[:, None] + amounts[None, :], low, high), self.window)
            costs = self.price.of(cuts[:, :-1], cuts[:, 1:]).sum(axis=1)
            at = int(costs.argmin())
            left, right = float(first[max(at - 1, 0)]), float(first[min(at + 1, len(first) - 1)])
        rows = [self._rounded(float(cut), start, stop, doc) for cut in cuts[at]]
        bounds = [start, *rows, stop]
        takers = [owner, *(taker for _, taker in parts), owner]
        return [
            (doc, begin, end, taker) for begin, end, taker in zip(bounds, bounds[1:], takers, strict=False)
        ]

    def _rounded(self, cut: float, start: int, stop: int, doc: int) -> int:
        """A cut near `cut`: on a block's boundary if that moves few pairs, else on a finer one."""
        grain = self.block
        while grain > 1 and grain * min(cut, self.window or cut) > self.rounding:
            grain = -(-grain // 2)
        row = round(cut / grain) * grain
        if row - start < self.block and row != start and row - start <= grain:
            row = start
        return min(max(row, start), stop)
