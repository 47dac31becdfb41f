"""One pass of balancing: who gives rows to whom, from which documents, and where in them.

Moving F pairs costs about √F bytes. So flows should be few and large: the sum of their roots is
minimised, over all givers and for the busiest one.
"""

import itertools
import math
from bisect import bisect_left, insort

import numpy as np

from hf_distca.plan import TASK, AttentionKind, Layout
from hf_distca.plan.cost import Workers, pairs, pairs_at, row_reaching
from hf_distca.plan.intervals import (
    FloatArray,
    IntArray,
    Table,
    grain,
    joined,
    local_tasks,
    merged,
    moved_by,
)
from hf_distca.planner.settings import PlanSettings

BUSY = 0.8
"""A worker whose surplus is at least this share of the largest one counts as a bottleneck."""
FORBIDDEN = 1e18
"""Bytes charged for a task smaller than a block while places are compared."""
ROUNDING = 0.04
"""Share of the tolerance that rounding one cut may cost; beyond it, the cut leaves the block's
boundary."""
SEARCHED = np.linspace(0, 1, 33)
"""Places that are tried for the first part of a task, in shares of where it may begin."""

Flows = dict[int, list[tuple[int, float]]]
"""giver -> (taker, pairs) of each of its flows"""


class Problem:
    """Everything that stays the same from pass to pass.

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
        self.workers, self.tolerance = workers, tolerance
        self.block, self.window = settings.balance_block_size, kind.window
        self.origin = round(settings.row_overhead / self.block) * self.block
        self.pair_window = (
            None if kind.window is None else kind.window + self.origin
        )  # by which a row counts pairs
        self.layout = Layout(
            layout.lengths + self.origin, moved_by(layout.segments, self.origin), layout.ranks
        )
        self.row_bytes = settings.row_bytes(kind)
        self.gather_bytes = (
            settings.gather_cost * self.row_bytes.kv
        )  # cost of gathering a row of K/V, in bytes sent
        self.as_laid_out = local_tasks(self.layout.segments)

    def loads(self, tasks: Table) -> IntArray:
        """Return [workers] int64: pairs of each worker."""
        cost = pairs(tasks["start"], tasks["stop"], self.pair_window)
        return np.bincount(tasks["worker"], cost, len(self.workers)).astype(np.int64)


class Price:
    """Bytes of having rows [start, stop) of a document computed elsewhere, for bytes of Q and O, and of K/V, of a row.

    F pairs in [s, e) mean e² − s² = 2F, and the bytes (e − s)·rows + e·kv are least where s = e / r
    with r = 1 + kv / rows, so e = √(2F)·r / √(r² − 1): `reach` in units of √(2F).
    """

    def __init__(self, rows: float, kv: float, window: int | None, origin: int = 0) -> None:
        self.rows, self.kv, self.window = rows, kv, window
        self.pair_window = None if window is None else window + origin
        ratio = 1 + self.kv / self.rows
        self.reach = ratio / math.sqrt(ratio * ratio - 1)

    def of(self, start: FloatArray, stop: FloatArray, known: FloatArray | IntArray) -> FloatArray:
        """Return the bytes of rows [start, stop) for a worker that has K/V rows [origin, known) of the document."""
        first = known if self.window is None else np.maximum(start - self.window + 1, known)
        return np.asarray((stop - start) * self.rows + np.maximum(stop - first, 0.0) * self.kv)


def take(
    price: Price, low: FloatArray, high: FloatArray, amount: float, known: IntArray
) -> dict[int, float]:
    """Return by task the pairs to give of a worker's tasks, `amount` in all, at the least cost found.

    The rows lie where the bytes are least, or at the task's end. Where they lie in the end is
    chosen later.

    Args:
        low: [tasks] pairs of the document's rows before the task.
        high: [tasks] the same up to the end of what is left of the task; lowered by what is taken.
        known: [tasks] the taker already has the document's K/V rows up to this row.
    """
    window = price.pair_window
    start = row_reaching(low, window)
    given: dict[int, float] = {}
    while amount > 0.5:
        available = np.maximum(high - low, 0.0)
        part = np.minimum(amount, available)
        if not part.any():
            break
        reach = price.reach * np.sqrt(2 * part)
        end = np.minimum(
            row_reaching(high, window), np.maximum(row_reaching(low + part, window), reach)
        )
        begin = np.maximum(row_reaching(pairs_at(end, window) - part, window), start)
        cost = price.of(begin, end, known)
        enough = available >= amount
        if enough.any():
            task = int(np.where(enough, cost, np.inf).argmin())
        else:  # take all of the task that is cheapest per pair
            task = int(np.where(part > 0, cost / np.maximum(part, 1.0), np.inf).argmin())
        taken = float(part[task])
        amount -= taken
        given[task] = given.get(task, 0.0) + taken
        high[task] -= taken
    return given


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
    workers, loads = problem.workers, problem.loads(tasks)
    window, block, origin = problem.pair_window, problem.block, problem.origin
    aim = np.maximum((aim - np.asarray(workers.base_load)) * np.asarray(workers.speed), 0.0)
    surplus = loads - aim  # pairs above the aim; negative where a worker has room
    surplus[(surplus > 0) & (workers.finishing(loads) <= limit)] = 0.0
    rounding = ROUNDING * float((problem.tolerance[aim > 0] * aim[aim > 0]).min(initial=np.inf))
    # All workers wait for the bytes that the busiest one sends; O does not add to them.
    q, kv, o = problem.row_bytes.q, problem.row_bytes.kv, problem.row_bytes.o
    prices = [Price(q + of_o, kv, problem.window, origin) for of_o in (o, o // 4)]
    price_of = [prices[busy] for busy in (surplus >= BUSY * surplus.max()).tolist()]  # by giver
    # document -> worker -> row: the worker has, or will have, K/V rows up to this row. Only
    # documents on several workers, one of which gives, are listed.
    known: dict[int, dict[int, int]] = {}
    homes = np.bincount(tasks["document"], minlength=len(problem.layout.lengths))
    gives = np.zeros(len(homes), bool)
    gives[tasks["document"][surplus[tasks["worker"]] > 0]] = True
    for document, _, stop, worker in tasks.compress(
        (gives & (homes > 1))[tasks["document"]]
    ).tolist():
        known.setdefault(document, {})[worker] = stop

    # 1. Flows, inside each group.
    partners: dict[int, set[int]] = {}  # workers that have tasks of the same documents
    for held in known.values():
        for worker in held:
            partners.setdefault(worker, set()).update(held)
    flows: Flows = {}
    for group in np.unique(groups[surplus > 0]):
        flows |= plan_flows(np.where(groups == group, surplus, 0.0).tolist(), partners)

    # 2. Sources.
    first_of: list[int] = np.searchsorted(tasks["worker"], np.arange(len(workers) + 1)).tolist()
    documents: list[int] = tasks["document"].tolist()
    parts: dict[
        int, list[tuple[float, int]]
    ] = {}  # task -> (pairs, taker) of each part that leaves it
    for giver, given in flows.items():
        first, last = first_of[giver], first_of[giver + 1]
        low, high = (
            pairs(0, tasks[end][first:last], window).astype(np.float64) for end in ("start", "stop")
        )
        shared = [task for task in range(first, last) if documents[task] in known]
        for taker, amount in given:
            rows = np.full(last - first, origin)
            for task in shared:
                rows[task - first] = known[documents[task]].get(taker, origin)
            for index, part in take(price_of[giver], low, high, amount, rows).items():
                parts.setdefault(first + index, []).append((part, taker))

    # 3. Places.
    def placed(task: int, parts: list[tuple[float, int]]) -> list[tuple[int, int, int, int]]:
        """Return the pieces of a task, with its parts side by side where they cost least, and rests on both sides."""
        document, start, stop, owner = tasks[task].tolist()
        held = known.setdefault(document, {})
        # Small parts come first: the others then need fewer K/V rows. Takers that have K/V rows
        # already come last.
        parts = sorted(parts, key=lambda part: (held.get(part[1], origin), part))
        rows = np.array([float(held.get(taker, origin)) for _, taker in parts])
        amounts = np.cumsum([0.0] + [amount for amount, _ in parts])
        low, high = pairs(0, start, window), pairs(0, stop, window)
        amounts *= min(1.0, (high - low) / amounts[-1])
        begin, end = float(start), row_reaching(float(high - amounts[-1]), window)
        for _ in range(2):  # search the start of the first part: coarse, then fine
            first = begin + (end - begin) * SEARCHED
            cuts = row_reaching(pairs_at(first, window)[:, None] + amounts, window).clip(
                start, stop
            )
            starts, stops = cuts[:, :-1], cuts[:, 1:]
            costs = price_of[owner].of(starts, stops, rows).sum(axis=1)
            # Tasks smaller than a block are forbidden, except at a document's end.
            before, after = cuts[:, 0], cuts[:, -1]
            short = (stops - starts < block).sum(axis=1) + (
                (before > start + 1) & (before < start + block)
            )
            if stop < problem.layout.lengths[document]:
                short += (after < stop - 1) & (after > stop - block)
            # Of rests on both sides of the parts the second one gathers its K/V rows once more.
            keys = stop - (
                np.maximum(after - problem.window + 1, origin) if problem.window else origin
            )
            costs += short * FORBIDDEN + ((before > start) & (after < stop)) * (
                keys * problem.gather_bytes
            )
            at = int(costs.argmin())
            begin, end = float(first[max(at - 1, 0)]), float(first[min(at + 1, len(first) - 1)])
        bounds = [start]
        for row in cuts[at].tolist():
            multiple = grain(block, min(row, window or row), rounding)
            bounds.append(min(max(round(row / multiple) * multiple, bounds[-1]), stop))
        takers = [owner, *(taker for _, taker in parts), owner]
        spans = zip(itertools.pairwise([*bounds, stop]), takers, strict=True)
        pieces = [(document, begin, end, taker) for (begin, end), taker in spans if begin < end]
        for *_, end, taker in pieces:
            held[taker] = max(held.get(taker, 0), end)
        return pieces

    kept = np.ones(len(tasks), bool)
    kept[list(parts)] = False
    cut = [piece for task, leaving in sorted(parts.items()) for piece in placed(task, leaving)]
    return merged(joined(tasks.compress(kept), np.array(cut, TASK)))


def plan_flows(surplus: list[float], partners: dict[int, set[int]]) -> Flows:
    """Plan flows from workers with a surplus to workers with room, until no surplus is left or no room is.

    The giver with the largest surplus goes first, so that it finds the largest rooms. Each giver
    fills the tightest room that takes its whole surplus and its partners', or else the largest
    room. A partner, which holds K/V rows of the same documents, goes before a tighter room if it
    takes the whole surplus. Next come takers that already take from a partner, since they mostly
    receive K/V rows of the same document.
    """
    rooms = sorted((-extra, worker) for worker, extra in enumerate(surplus) if extra < 0)
    room_of = {worker: room for room, worker in rooms}
    givers = sorted((-extra, worker) for worker, extra in enumerate(surplus) if extra > 0)
    partners = {giver: partners[giver] - {giver} for _, giver in givers if giver in partners}
    if any(surplus[partner] > 0 for near in partners.values() for partner in near):
        # Partners follow each other, so that they find each other's takers; the largest sum of
        # surpluses goes first.
        givers.sort(
            key=lambda each: (
                each[0] - sum(max(surplus[other], 0.0) for other in partners.get(each[1], ()))
            )
        )
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
                enough = [
                    (room_of[worker], worker) for worker in near if room_of.get(worker, 0.0) >= left
                ]
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
