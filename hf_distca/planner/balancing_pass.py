"""One pass of balancing: who gives rows to whom, from which documents, and where in them.

Moving F pairs costs about √F bytes. So flows should be few and large: the sum of their roots is
minimised, over all givers and for the busiest one.
"""

import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass

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
        first_sent = held_rows
        if self.window is not None:
            first_sent = np.maximum(start - self.window + 1, held_rows)
        sent_keys = np.maximum(stop - first_sent, 0.0)
        return np.asarray((stop - start) * self.row_bytes + sent_keys * self.kv_bytes)


def take(
    price: Price, low: FloatArray, high: FloatArray, amount: float, held_rows: IntArray
) -> dict[int, float]:
    """Choose tasks of a worker to give pairs of, and return the pairs of each.

    The rows lie where the bytes are least, or at the task's end. Where they lie in the end is
    chosen later.

    Args:
        low: [tasks] pairs of the document's rows before the task.
        high: [tasks] the same up to the end of what is left of the task; lowered by what is taken.
        amount: pairs to give, of all tasks together.
        held_rows: [tasks] the taker already has the document's K/V rows up to this row.
    """
    window = price.pair_window
    task_starts = row_reaching(low, window)
    pairs_of_task: dict[int, float] = {}
    while amount > SMALLEST_TAKEN:
        available = np.maximum(high - low, 0.0)
        part = np.minimum(amount, available)
        if not part.any():
            break
        # 1. Find for each task the rows of this part that cost least.
        reach = price.reach * np.sqrt(2 * part)
        earliest_stop = row_reaching(low + part, window)
        stop = np.minimum(row_reaching(high, window), np.maximum(earliest_stop, reach))
        start = np.maximum(row_reaching(pairs_at(stop, window) - part, window), task_starts)
        cost = price.bytes_of(start, stop, held_rows)
        # 2. Take the cheapest task that has enough, else all of the one that is cheapest per pair.
        suffices = available >= amount
        if suffices.any():
            task = int(np.where(suffices, cost, np.inf).argmin())
        else:
            cost_a_pair = cost / np.maximum(part, 1.0)
            task = int(np.where(part > 0, cost_a_pair, np.inf).argmin())
        taken_pairs = float(part[task])
        amount -= taken_pairs
        pairs_of_task[task] = pairs_of_task.get(task, 0.0) + taken_pairs
        high[task] -= taken_pairs
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
    cut_tasks: list[Task] = []
    for index, parts in sorted(parts_of_task.items()):
        document, start, stop, owner = tasks[index].tolist()
        task = _CutTask(problem, document, start, stop, owner, price_of_giver[owner], rounding)
        cut_tasks += task.divided(parts, held_rows.setdefault(document, {}))
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
    """Return up to which row each worker has, or will have, K/V rows: document -> worker -> row.

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
        listed = [task for task in range(first_own, stop) if documents[task] in held_rows]
        for taker, amount in flows_of_giver:
            # K/V rows that the taker has of each task's document: they need not travel.
            rows_of_taker = np.full(stop - first_own, problem.origin)
            for task in listed:
                rows = held_rows[documents[task]].get(taker, problem.origin)
                rows_of_taker[task - first_own] = rows
            taken_pairs = take(price_of_giver[giver], low, high, amount, rows_of_taker)
            for index, part in taken_pairs.items():
                parts_of_task.setdefault(first_own + index, []).append((part, taker))
    return parts_of_task


@dataclass(frozen=True)
class _CutTask:
    """Task that parts leave: rows [start, stop) of a document, computed by `owner` so far."""

    problem: Problem
    document: int
    start: int
    stop: int
    owner: int
    price: Price
    rounding: float  # pairs that rounding a cut may move

    def divided(self, parts: list[Part], row_of_worker: dict[int, int]) -> list[Task]:
        """Return tasks of the parts, side by side where they cost least, and of the rows left.

        Args:
            row_of_worker: up to which row workers have the document's K/V rows; raised by what they
                get.
        """
        origin = self.problem.origin
        # Small parts come first: the others then need fewer K/V rows. Takers that have K/V rows
        # already come last.
        parts = sorted(parts, key=lambda part: (row_of_worker.get(part[1], origin), part))
        takers = [taker for _, taker in parts]
        held_rows = np.array([float(row_of_worker.get(taker, origin)) for taker in takers])
        cuts = self._cheapest_cuts([amount for amount, _ in parts], held_rows)
        bounds = [self.start]
        for row in cuts:
            bounds.append(min(max(self._rounded(row), bounds[-1]), self.stop))
        bounds.append(self.stop)
        workers = [self.owner, *takers, self.owner]
        tasks = []
        for (start, stop), worker in zip(itertools.pairwise(bounds), workers, strict=True):
            if start < stop:
                tasks.append((self.document, start, stop, worker))
                row_of_worker[worker] = max(row_of_worker.get(worker, 0), stop)
        return tasks

    def _rounded(self, row: float) -> int:
        """Return a row at a block's boundary, or at a finer one where a block moves many pairs."""
        pairs_a_row = min(row, self.problem.pair_window or row)
        multiple = grain(self.problem.block, pairs_a_row, self.rounding)
        return round(row / multiple) * multiple

    def _cheapest_cuts(self, amounts: list[float], held_rows: FloatArray) -> list[float]:
        """Return [parts + 1] rows at which parts of [parts] pairs begin, and the last one ends.

        Args:
            held_rows: [parts] the taker of each part has the document's K/V rows up to this row.
        """
        window = self.problem.pair_window
        low, high = pairs(0, self.start, window), pairs(0, self.stop, window)
        pairs_before = np.cumsum([0.0, *amounts])
        pairs_before *= min(1.0, (high - low) / pairs_before[-1])
        # Search the start of the first part: coarse, then fine.
        earliest = float(self.start)
        latest = row_reaching(float(high - pairs_before[-1]), window)
        for _ in range(2):
            first = earliest + (latest - earliest) * SEARCHED
            pairs_of_cuts = pairs_at(first, window)[:, None] + pairs_before
            cuts = row_reaching(pairs_of_cuts, window).clip(self.start, self.stop)
            cheapest = int(self._costs(cuts, held_rows).argmin())
            earliest = float(first[max(cheapest - 1, 0)])
            latest = float(first[min(cheapest + 1, len(first) - 1)])
        cheapest_cuts: list[float] = cuts[cheapest].tolist()
        return cheapest_cuts

    def _costs(self, cuts: FloatArray, held_rows: FloatArray) -> FloatArray:
        """Return [places] the cost in bytes of cutting a task at [places, parts + 1] rows."""
        problem = self.problem
        block = self.problem.block
        # 1. Count the bytes of the parts.
        starts = cuts[:, :-1]
        stops = cuts[:, 1:]
        costs = self.price.bytes_of(starts, stops, held_rows).sum(axis=1)
        # 2. Forbid tasks smaller than a block, except at a document's end.
        first_cut = cuts[:, 0]
        last_cut = cuts[:, -1]
        short_tasks = (stops - starts < block).sum(axis=1)
        short_tasks += (first_cut > self.start + 1) & (first_cut < self.start + block)
        if self.stop < problem.layout.lengths[self.document]:
            short_tasks += (last_cut < self.stop - 1) & (last_cut > self.stop - block)
        forbidden = short_tasks * FORBIDDEN
        # 3. Of rests on both sides of the parts, the second one gathers its K/V rows once more.
        first_key: FloatArray | int = problem.origin
        if problem.window:
            first_key = np.maximum(last_cut - problem.window + 1, problem.origin)
        rests_on_both_sides = (first_cut > self.start) & (last_cut < self.stop)
        gathered = rests_on_both_sides * ((self.stop - first_key) * problem.gather_bytes)
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
