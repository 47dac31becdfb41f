"""Balancing core attention on a given layout: which rows to compute elsewhere, and where.

Rows move in few and cheap tasks:

1. Flows: who gives how many pairs to whom (`plan_flows`). Few and large ones, since bytes grow like the
   square root of the pairs moved.
2. Sources: a flow is taken from the documents where it costs least (`Source.take`).
3. Places: the flows out of one stretch of a document lie side by side in it, at the place where all of
   them together cost least (`BalancingPass`).

Rounding to whole rows leaves small differences; the three steps are repeated on the result until every
worker is within the tolerance. Swaps of work then relieve the busiest worker (`swapped`). What tasks
below a block are not needed for the balance are taken out (`without_short`).
"""

import numpy as np

from hf_distca.plan import Layout, Plan
from hf_distca.planner.balancing_pass import BalancingPass, Prices
from hf_distca.planner.cost import BALANCE_TOLERANCE, RowBytes, Workers
from hf_distca.planner.layout import check_settings
from hf_distca.planner.shifted import ShiftedRows, merged
from hf_distca.planner.short_tasks import without_short
from hf_distca.planner.swaps import swapped

AIM = (0.96, 0.8, 0.6, 0.4, 0.2, 0.0)
"""Flows aim at this share of the tolerance, pass after pass; rounding to rows has the rest."""
NEARLY = 0.15
"""A layout whose last worker finishes within this share of the limit hardly needs balancing."""


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
    rows = ShiftedRows.of(layout, window, row_overhead, balance_block_size)
    row_bytes = row_bytes or RowBytes()
    prices = Prices.of(row_bytes, rows, gather_cost)
    tasks = rows.tasks_as_laid_out()
    loads = rows.loads(tasks, len(workers))
    limit = workers.ideal(int(loads.sum())) * (1 + balance_tolerance)
    as_laid_out = float(workers.finishing(loads).max())
    best, best_time = tasks, as_laid_out
    for aim in AIM:
        if best_time <= limit or not len(tasks):
            break
        tasks = BalancingPass(tasks, rows, workers, prices, balance_tolerance, aim, balance_block_size).run()
        finish = float(workers.finishing(rows.loads(tasks, len(workers))).max())
        if finish < best_time:
            best, best_time = tasks, finish
    most = (max(limit, best_time) - np.asarray(workers.base_load)) * np.asarray(workers.speed)
    if as_laid_out > limit * (1 + NEARLY):  # else nearly all tasks are at home, and few bytes can be saved
        room = (most - rows.loads(best, len(workers))).tolist()
        best = merged(swapped(best, rows, room, row_bytes, balance_block_size))
    room = (most - rows.loads(best, len(workers))).tolist()
    best = merged(without_short(best, rows.segments, rows.stops, room, rows.pair_window, balance_block_size))
    return rows.plan(best, len(workers))
