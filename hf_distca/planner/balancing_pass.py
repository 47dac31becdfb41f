"""One pass of balancing: who gives rows to whom, from which documents, and where in them.

Moving F pairs costs about √F bytes. So flows should be few and large: the sum of their roots is
minimised, over all givers and for the busiest one.
"""

import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hf_distca.plan import TASK, AttentionKind, Layout
from hf_distca.plan.arrays import FloatArray, IntArray, Table
from hf_distca.plan.cost import Workers, pairs, pairs_at, row_reaching
from hf_distca.plan.intervals import grain, joined, local_tasks, merged, moved_by
from hf_distca.planner.settings import PlanSettings

BUSY = 0.8
"""A worker whose surplus is at least this share of the largest one counts as a bottleneck. Its
flows are priced by what it sends, since all workers wait for it."""
O_OF_BUSY = 4
"""Divisor of the bytes of O in the price of a bottleneck: O comes back, and adds little to what the
busiest worker sends."""
FORBIDDEN = 1e18
"""Bytes charged for a task smaller than a block while places are compared: more than any task."""
ROUNDING = 0.04
"""Share of the tolerance that rounding one cut may cost; beyond it, the cut leaves the block's
boundary. A worker has several cuts, which together stay well within the tolerance."""
SEARCHED = np.linspace(0, 1, 33)
"""Places that are tried for the first part of a task, in shares of where it may begin. Two searches
of 33 places are as fine as a thousandth of the task."""
SMALLEST_TAKEN = 0.5
"""Pairs below which nothing is taken: half of the smallest row."""

Flows = dict[int, list[tuple[int, float]]]
"""giver -> (taker, pairs) of each of its flows"""
Part = tuple[float, int]
"""(pairs, taker) of a part that leaves a task"""
Task = tuple[int, int, int, int]
"""(document, start, stop, worker), as in TASK"""


class Problem:
    """Layout, workers and costs of a balancing, which are the same in all of its passes.

    Rows of every document are counted from `origin` on, so that pairs alone express the whole cost
    of a row. A row p with an overhead of c pairs costs min(p + 1, window) + c in all. Row p + c
    costs the same with a window of window + c. The overhead is rounded to whole blocks, so that
    cuts stay on the blocks' boundaries.

    Args:
        layout: rows are counted from 0 on.
        tolerance: [workers] how far above the ideal time a worker may finish, as a fraction of that
            time.
    """

    def __init__(
        self,
        layout: Layout,
        kind: AttentionKind,
        settings: PlanSettings,
        workers: Workers,
        tolerance: FloatArray,
    ) -> None:
        self.workers = workers
        self.tolerance = tolerance
        self.block = settings.balance_block_size
        self.window = kind.window
        self.origin = round(settings.row_overhead / self.block) * self.block
        # The window by which a row counts pairs.
        self.pair_window = None if kind.window is None else kind.window + self.origin
        self.layout = Layout(
            layout.lengths + self.origin, moved_by(layout.segments, self.origin), layout.ranks
        )
        self.row_bytes = settings.row_bytes(kind)
        # Cost of gathering a row of K/V, in bytes sent.
        self.gather_bytes = settings.gather_cost * self.row_bytes.kv
        self.as_laid_out = local_tasks(self.layout.segments)

    def loads(self, tasks: Table) -> IntArray:
        """Return [workers] int64: pairs of each worker."""
        cost = pairs(tasks["start"], tasks["stop"], self.pair_window)
        return np.bincount(tasks["worker"], cost, len(self.workers)).astype(np.int64)


class Price:
    """Bytes that are sent if another worker computes rows of a document.

    F pairs in [s, e) mean e² − s² = 2F, and the bytes (e − s)·rows + e·kv are least where s = e / r
    with r = 1 + kv / rows, so e = √(2F)·r / √(r² − 1): `reach` in units of √(2F).

    Args:
        row_bytes: bytes of Q and O of a row.
        kv_bytes: bytes of K and V of a row.
    """

    def __init__(
        self, row_bytes: float, kv_bytes: float, window: int | None, origin: int = 0
    ) -> None:
        self.row_bytes = row_bytes
        self.kv_bytes = kv_bytes
        self.window = window
        self.pair_window = None if window is None else window + origin
        ratio = 1 + kv_bytes / row_bytes
        self.reach = ratio / math.sqrt(ratio * ratio - 1)

    def bytes_of(
        self, start: FloatArray, stop: FloatArray, held_rows: FloatArray | IntArray
    ) -> FloatArray:
        """Return the bytes of rows [start, stop) of a document.

        Args:
            held_rows: the taker has the document's K/V rows before this row already.
        """
        return np.asarray((stop - start) * self.row_bytes + self.key_bytes(start, stop, held_rows))

    def key_bytes(
        self, start: FloatArray, stop: FloatArray, held_rows: FloatArray | IntArray
    ) -> FloatArray:
        """Return the part of `bytes_of` that K and V take."""
        first_sent = held_rows
        if self.window is not None:
            first_sent = np.maximum(start - self.window + 1, held_rows)
        return np.asarray(np.maximum(stop - first_sent, 0.0) * self.kv_bytes)


class Stock:
    """Rows of a worker's tasks that the worker has not given away.

    Args:
        low: [tasks] pairs of the document's rows before the task.
        high: [tasks] the same up to the end of the task.
    """

    def __init__(self, price: Price, low: FloatArray, high: FloatArray) -> None:
        self._price = price
        self._low = low
        self._high = high  # lowered by what is taken
        self._start = row_reaching(low, price.pair_window)
        self._stop = row_reaching(high, price.pair_window)

    def take(self, amount: float, held_rows: IntArray) -> dict[int, float]:
        """Choose tasks to give pairs of, and return the pairs of each.

        The rows lie where the bytes are least, or at the task's end. Where they lie in the end is
        chosen later.

        Args:
            amount: pairs to give, of all tasks together.
            held_rows: [tasks] the taker already has the document's K/V rows up to this row.
        """
        price, window = self._price, self._price.pair_window
        pairs_of_task: dict[int, float] = {}
        while amount > SMALLEST_TAKEN:
            available = np.maximum(self._high - self._low, 0.0)
            part = np.minimum(amount, available)
            if not part.any():
                break
            # 1. Find for each task the rows of this part that cost least.
            reach = price.reach * np.sqrt(2 * part)
            earliest_stop = row_reaching(self._low + part, window)
            stop = np.minimum(self._stop, np.maximum(earliest_stop, reach))
            start = np.maximum(row_reaching(pairs_at(stop, window) - part, window), self._start)
            cost = price.bytes_of(start, stop, held_rows)
            # 2. Take the cheapest task that has enough, else all of the one that is cheapest per
            #    pair.
            suffices = available >= amount
            if suffices.any():
                task = int(np.where(suffices, cost, np.inf).argmin())
            else:
                cost_a_pair = cost / np.maximum(part, 1.0)
                task = int(np.where(part > 0, cost_a_pair, np.inf).argmin())
            taken_pairs = float(part[task])
            amount -= taken_pairs
            pairs_of_task[task] = pairs_of_task.get(task, 0.0) + taken_pairs
            self._high[task] -= taken_pairs
            self._stop[task] = row_reaching(float(self._high[task]), window)
        return pairs_of_task


def balancing_pass(
    problem: Problem, tasks: Table, aim: FloatArray, limit: FloatArray, groups: IntArray
) -> Table:
    """Return the tasks after one pass of flows, sources and places.

    Args:
        tasks: [tasks] of dtype TASK, sorted by (worker, document, start).
        aim: [workers] finishing time that flows aim at.
        limit: [workers] a worker that finishes by this time gives nothing.
        groups: [workers] group of each worker; nothing moves between groups.
    """
    # 1. Flows, inside each group.
    surplus = _surplus(problem, problem.loads(tasks), aim, limit)
    held_rows = _held_rows(problem, tasks, surplus)
    partners = _partners(held_rows, groups.tolist())
    flows: Flows = {}
    for group in np.unique(groups[surplus > 0]):
        members = np.flatnonzero(groups == group)
        surplus_of_members = dict(zip(members.tolist(), surplus[members].tolist(), strict=True))
        flows |= plan_flows(surplus_of_members, partners)
    # 2. Sources.
    price_of_giver = _prices(problem, surplus)
    parts_of_task = _sources(problem, tasks, flows, price_of_giver, held_rows)
    # 3. Places.
    aim_pairs = _pairs_until(problem, aim)
    tolerated = problem.tolerance[aim_pairs > 0] * aim_pairs[aim_pairs > 0]
    rounding = ROUNDING * float(tolerated.min(initial=np.inf))
    stays = np.ones(len(tasks), bool)
    stays[list(parts_of_task)] = False
    cut_tasks = _divided(problem, tasks, parts_of_task, price_of_giver, held_rows, rounding)
    return merged(joined(tasks.compress(stays), np.array(cut_tasks, TASK)))


def _pairs_until(problem: Problem, finishing: FloatArray) -> FloatArray:
    """Return [workers] pairs with which workers finish at [workers] times; 0 for earlier times."""
    workers = problem.workers
    time_left = finishing - np.asarray(workers.base_load)
    return np.asarray(np.maximum(time_left * np.asarray(workers.speed), 0.0))


def _surplus(problem: Problem, loads: IntArray, aim: FloatArray, limit: FloatArray) -> FloatArray:
    """Return [workers] pairs above the aim; negative where a worker has room.

    Args:
        aim, limit: as in `balancing_pass`.
    """
    surplus = loads - _pairs_until(problem, aim)
    is_early = problem.workers.finishing(loads) <= limit
    surplus[(surplus > 0) & is_early] = 0.0
    return surplus


def _prices(problem: Problem, surplus: FloatArray) -> list[Price]:
    """Return [workers] the price of rows that each worker gives."""
    row_bytes = problem.row_bytes
    usual_price = Price(row_bytes.q + row_bytes.o, row_bytes.kv, problem.window, problem.origin)
    # All workers wait for the bytes that the busiest one sends.
    price_if_busy = Price(
        row_bytes.q + row_bytes.o // O_OF_BUSY, row_bytes.kv, problem.window, problem.origin
    )
    is_busy = surplus >= BUSY * surplus.max()
    return [price_if_busy if busy else usual_price for busy in is_busy.tolist()]


def _held_rows(problem: Problem, tasks: Table, surplus: FloatArray) -> dict[int, dict[int, int]]:
    """Return up to which row each worker has K/V rows: document -> worker -> row.

    Only documents on several workers, one of which gives, are listed.
    """
    counts = np.bincount(tasks["document"], minlength=len(problem.layout.lengths))
    gives = np.zeros(len(counts), bool)
    gives[tasks["document"][surplus[tasks["worker"]] > 0]] = True
    is_listed = gives & (counts > 1)
    held_rows: dict[int, dict[int, int]] = {}
    for document, _, stop, worker in tasks.compress(is_listed[tasks["document"]]).tolist():
        held_rows.setdefault(document, {})[worker] = stop
    return held_rows


def _partners(
    held_rows: dict[int, dict[int, int]], group_of_worker: list[int]
) -> dict[int, set[int]]:
    """Return for each worker the workers of its group that have tasks of the same documents.

    The worker itself is among them.
    """
    partners: dict[int, set[int]] = {}
    for row_of_worker in held_rows.values():
        workers_of_group: dict[int, list[int]] = {}
        for worker in row_of_worker:
            workers_of_group.setdefault(group_of_worker[worker], []).append(worker)
        for workers in workers_of_group.values():
            for worker in workers:
                partners.setdefault(worker, set()).update(workers)
    return partners


def _sources(
    problem: Problem,
    tasks: Table,
    flows: Flows,
    price_of_giver: list[Price],
    held_rows: dict[int, dict[int, int]],
) -> dict[int, list[Part]]:
    """Divide every giver's flows among its tasks.

    Args:
        flows: pairs that each giver gives to each taker.
        held_rows: as `_held_rows` returns.

    Returns:
        By task, the parts that leave the task: their pairs, and the taker of each.
    """
    # Tasks are sorted by worker: those of worker w are [first_task[w], first_task[w + 1]).
    workers = np.arange(len(problem.workers) + 1)
    first_task: list[int] = np.searchsorted(tasks["worker"], workers).tolist()
    documents: list[int] = tasks["document"].tolist()
    parts_of_task: dict[int, list[Part]] = {}
    for giver, flows_of_giver in flows.items():
        first_own = first_task[giver]
        stop = first_task[giver + 1]
        own_tasks = tasks[first_own:stop]
        # Pairs of the document up to where each task starts and stops.
        low = pairs(0, own_tasks["start"], problem.pair_window).astype(np.float64)
        high = pairs(0, own_tasks["stop"], problem.pair_window).astype(np.float64)
        stock = Stock(price_of_giver[giver], low, high)
        listed = [task for task in range(first_own, stop) if documents[task] in held_rows]
        for taker, amount in flows_of_giver:
            # K/V rows that the taker has of each task's document: they need not travel.
            rows_of_taker = np.full(stop - first_own, problem.origin)
            for task in listed:
                rows = held_rows[documents[task]].get(taker, problem.origin)
                rows_of_taker[task - first_own] = rows
            for index, part in stock.take(amount, rows_of_taker).items():
                parts_of_task.setdefault(first_own + index, []).append((part, taker))
    return parts_of_task


class CutTask(NamedTuple):
    """Task that parts leave: rows [start, stop) of a document, computed by `owner` so far."""

    document: int
    start: int
    stop: int
    owner: int
    price: Price
    parts: list[Part]  # in the order of their rows
    held_rows: list[float]  # of each part: the taker has the document's K/V rows up to this row


def _divided(
    problem: Problem,
    tasks: Table,
    parts_of_task: dict[int, list[Part]],
    price_of_giver: list[Price],
    held_rows: dict[int, dict[int, int]],
    rounding: float,
) -> list[Task]:
    """Return tasks of the parts, side by side where they cost least, and of the rows left.

    Args:
        parts_of_task: as `_sources` returns.
        held_rows: as `_held_rows` returns.
        rounding: pairs that rounding a cut may move.
    """
    # Tasks with equally many parts are divided together.
    tasks_by_parts: dict[int, list[CutTask]] = {}
    for index, parts in sorted(parts_of_task.items()):
        task: Task = tasks[index].tolist()
        document, _, _, owner = task
        row_of_worker = held_rows.get(document, {})
        cut_task = _cut_task(task, price_of_giver[owner], parts, row_of_worker, problem.origin)
        tasks_by_parts.setdefault(len(parts), []).append(cut_task)
    divided: list[Task] = []
    for cut_tasks in tasks_by_parts.values():
        cuts_of_tasks = _cheapest_cuts(problem, cut_tasks)
        for cut_task, cuts in zip(cut_tasks, cuts_of_tasks, strict=True):
            divided += _cut_at(cut_task, [_rounded(row, problem, rounding) for row in cuts])
    return divided


def _cut_task(
    task: Task, price: Price, parts: list[Part], row_of_worker: Mapping[int, int], origin: int
) -> CutTask:
    """Return a task with its parts in the order in which they lie side by side.

    Small parts come first: the others then need fewer K/V rows. Takers that have K/V rows already
    come last.

    Args:
        row_of_worker: up to which row workers have the document's K/V rows.
    """
    ordered = sorted((row_of_worker.get(part[1], origin), part) for part in parts)
    held_rows = [float(row) for row, _ in ordered]
    return CutTask(*task, price, [part for _, part in ordered], held_rows)


def _rounded(row: float, problem: Problem, rounding: float) -> int:
    """Return a row at a block's boundary, or at a finer one where a block moves many pairs."""
    pairs_a_row = min(row, problem.pair_window or row)
    multiple = grain(problem.block, pairs_a_row, rounding)
    return round(row / multiple) * multiple


def _cut_at(task: CutTask, cuts: Sequence[int]) -> list[Task]:
    """Return the parts of a task that is cut at these rows, and what its owner keeps."""
    bounds = [task.start]
    for row in (*cuts, task.stop):
        bounds.append(min(max(row, bounds[-1]), task.stop))
    workers = [task.owner, *(taker for _, taker in task.parts), task.owner]
    return [
        (task.document, start, stop, worker)
        for (start, stop), worker in zip(itertools.pairwise(bounds), workers, strict=True)
        if start < stop
    ]


def _cheapest_cuts(problem: Problem, tasks: Sequence[CutTask]) -> list[list[float]]:
    """Return for each task the [parts + 1] rows at which its parts begin, and the last one ends.

    Args:
        tasks: with equally many parts.
    """
    window = problem.pair_window
    start, stop = np.array([(task.start, task.stop) for task in tasks]).T
    pairs_of_parts = np.zeros((len(tasks), 1 + len(tasks[0].parts)))
    for number, task in enumerate(tasks):
        pairs_of_parts[number, 1:] = [amount for amount, _ in task.parts]
    pairs_before = pairs_of_parts.T.cumsum(axis=0)  # [parts + 1, tasks]
    low, high = pairs(0, start, window), pairs(0, stop, window)
    pairs_before *= np.minimum(1.0, (high - low) / pairs_before[-1])
    # Search the start of the first part of each task: coarse, then fine.
    earliest = start.astype(np.float64)
    latest = row_reaching(high - pairs_before[-1], window)
    costs = CutCosts(problem, tasks)
    task_numbers = np.arange(len(tasks))
    for _ in range(2):
        first = earliest[:, None] + (latest - earliest)[:, None] * SEARCHED
        cuts = row_reaching(pairs_at(first, window) + pairs_before[:, :, None], window)
        cuts = np.minimum(np.maximum(cuts, start[:, None]), stop[:, None])
        cheapest = costs.of(cuts).argmin(axis=1)
        earliest = first[task_numbers, np.maximum(cheapest - 1, 0)]
        latest = first[task_numbers, np.minimum(cheapest + 1, len(SEARCHED) - 1)]
    cheapest_cuts: list[list[float]] = cuts[:, task_numbers, cheapest].T.tolist()
    return cheapest_cuts


class CutCosts:
    """Costs in bytes of cutting tasks that have equally many parts."""

    def __init__(self, problem: Problem, tasks: Sequence[CutTask]) -> None:
        self._problem = problem
        self._held_rows = np.array([task.held_rows for task in tasks]).T[:, :, None]
        self._price = tasks[0].price  # prices differ by the bytes of Q and O alone
        numbers = [(task.start, task.stop, task.price.row_bytes) for task in tasks]
        self._start, self._stop, self._row_bytes = np.array(numbers).T[:, :, None]
        lengths = problem.layout.lengths
        ends = [task.stop == lengths[task.document] for task in tasks]
        self._is_document_end = np.array(ends)[:, None]

    def of(self, cuts: FloatArray) -> FloatArray:
        """Return [tasks, places] the cost of cutting at [parts + 1, tasks, places] rows."""
        problem, block = self._problem, self._problem.block
        # 1. Count the bytes of the parts.
        starts, stops = cuts[:-1], cuts[1:]
        sent = (stops - starts) * self._row_bytes
        costs = (sent + self._price.key_bytes(starts, stops, self._held_rows)).sum(axis=0)
        # 2. Forbid tasks smaller than a block, except at a document's end.
        first_cut, last_cut = cuts[0], cuts[-1]
        short_tasks = (stops - starts < block).sum(axis=0)
        short_tasks += (first_cut > self._start + 1) & (first_cut < self._start + block)
        is_short_rest = (last_cut < self._stop - 1) & (last_cut > self._stop - block)
        short_tasks += is_short_rest & ~self._is_document_end
        forbidden = short_tasks * FORBIDDEN
        # 3. Of rests on both sides of the parts, the second one gathers its K/V rows once more.
        first_key: FloatArray | int = problem.origin
        if problem.window:
            first_key = np.maximum(last_cut - problem.window + 1, problem.origin)
        rests_on_both_sides = (first_cut > self._start) & (last_cut < self._stop)
        gathered = rests_on_both_sides * ((self._stop - first_key) * problem.gather_bytes)
        return np.asarray(costs + (forbidden + gathered))


def plan_flows(surplus: Mapping[int, float], partners: Mapping[int, set[int]]) -> Flows:
    """Plan flows from workers with a surplus to workers with room.

    Flows end when no surplus is left or no room is. The giver with the largest surplus goes first,
    so that it finds the largest rooms. Each giver fills the tightest room that takes its whole
    surplus and its partners', or else the largest room. A partner, which holds K/V rows of the same
    documents, goes before a tighter room if it takes the whole surplus. Next come takers that
    already take from a partner, since they mostly receive K/V rows of the same document.

    Args:
        surplus: pairs of each worker above the aim; negative where a worker has room.
        partners: for workers, those of these workers that have tasks of the same documents.
    """
    # 1. Who has room, sorted by it; who gives; and what each partner still has to give.
    rooms = sorted(
        (-pairs_above, worker) for worker, pairs_above in surplus.items() if pairs_above < 0
    )
    room_of_worker = {worker: room for room, worker in rooms}
    givers = [worker for worker, pairs_above in surplus.items() if pairs_above > 0]
    partners = {giver: partners[giver] - {giver} for giver in givers if giver in partners}
    waiting_surplus = {giver: surplus[giver] for giver in givers}
    flows: Flows = {}
    # 2. Each giver fills rooms until its surplus is gone.
    for giver in _largest_givers_first(givers, surplus, partners):
        remaining = waiting_surplus.pop(giver)
        flows[giver] = flows_of_giver = []
        own_partners = partners.get(giver, set())
        partners_surplus = sum(waiting_surplus.get(partner, 0.0) for partner in own_partners)
        takers_of_partners = {
            taker for partner in own_partners for taker, _ in flows.get(partner, ())
        }
        while remaining > 0 and rooms:
            # The tightest room for the giver and its partners, unless a partner takes the surplus
            # or another taker of its partners has room.
            wanted_room = (remaining + partners_surplus, -1)
            partner_rooms = [
                (room_of_worker[partner], partner)
                for partner in own_partners
                if room_of_worker.get(partner, 0.0) >= remaining
            ]
            if partner_rooms:
                wanted_room = min(partner_rooms)
            else:
                taker_rooms = [
                    (room_of_worker[taker], taker)
                    for taker in takers_of_partners
                    if room_of_worker[taker] > 0
                ]
                wanted_room = max(taker_rooms, default=wanted_room)
            # The first room at least as large as wanted, or else the largest.
            room, taker = rooms.pop(min(bisect_left(rooms, wanted_room), len(rooms) - 1))
            amount = min(remaining, room)
            flows_of_giver.append((taker, amount))
            remaining -= amount
            room_of_worker[taker] = room - amount
            if amount < room:
                insort(rooms, (room - amount, taker))
    return flows


def _largest_givers_first(
    givers: list[int], surplus: Mapping[int, float], partners: Mapping[int, set[int]]
) -> list[int]:
    """Return givers in the order in which they choose takers, the largest surplus first.

    Partners follow each other, so that they find each other's takers: the largest sum of surpluses
    goes first then.
    """
    ordered = sorted(givers, key=lambda giver: -surplus[giver])
    partners_give = any(
        surplus[partner] > 0 for own_partners in partners.values() for partner in own_partners
    )
    if not partners_give:
        return ordered

    def negative_sum(giver: int) -> float:
        return -surplus[giver] - sum(
            max(surplus[partner], 0.0) for partner in partners.get(giver, ())
        )

    return sorted(ordered, key=negative_sum)
