"""What a plan achieves: balance, bytes and shards, counted from its segments and tasks alone."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import Plan
from hf_distca.planner.cost import RowBytes, Workers, pairs


@dataclass(frozen=True)
class PlanMetrics:
    """The figures of one plan.

    Attributes:
        max_over_mean: the last worker's finishing time over the ideal one; with equal workers and no base
            loads, largest pairs over mean pairs. 1.0 for a plan without tasks.
        tokens_max_over_mean: largest tokens of a rank over the mean; 1.0 without tokens.
        bytes_total: bytes that cross between workers in one layer's forward: Q rows and K/V rows to the
            worker, O rows back. A K/V row counts once per (document, worker); rows already there are free.
        bytes_bottleneck: over workers, the largest of the bytes sent and of the bytes received.
        tasks: number of tasks.
        min_rows: rows of the smallest task; 0 without tasks.
        tasks_below_block: tasks of fewer rows than a kernel block.
        tasks_cut_below_block: those of them that do not end where their document ends.
    """

    max_over_mean: float
    tokens_max_over_mean: float
    bytes_total: int
    bytes_bottleneck: int
    tasks: int
    min_rows: int
    tasks_below_block: int
    tasks_cut_below_block: int


def loads_of(plan: Plan) -> NDArray[np.int64]:
    """[workers] int64: query-key pairs that each worker computes."""
    cost = pairs(plan.tasks["start"], plan.tasks["stop"], plan.window)
    loads = np.zeros(plan.workers, np.int64)
    np.add.at(loads, plan.tasks["worker"], cost)
    return loads


def rows_of(plan: Plan) -> NDArray[np.int64]:
    """[workers] int64: query rows that each worker computes."""
    rows = np.zeros(plan.workers, np.int64)
    np.add.at(rows, plan.tasks["worker"], plan.tasks["stop"] - plan.tasks["start"])
    return rows


def measure(
    plan: Plan, row_bytes: RowBytes | None = None, *, workers: Workers | None = None, balance_block_size: int = 128
) -> PlanMetrics:
    """Count what a plan achieves and what it costs.

    Args:
        plan: any plan.
        row_bytes: bytes of the rows; None for RowBytes().
        workers: speeds and base loads by which max_over_mean is counted; None for equal workers.
        balance_block_size: rows of a kernel block.

    Raises:
        ValueError: `workers` describes another number of workers than the plan has.
    """
    workers = workers or Workers.uniform(plan.workers)
    if len(workers) != plan.workers:
        raise ValueError(f"the plan has {plan.workers} workers, but {len(workers)} are described")
    loads = loads_of(plan)
    ideal = workers.ideal(int(loads.sum()))
    tokens = plan.layout.tokens
    rows = plan.tasks["stop"] - plan.tasks["start"]
    below = rows < balance_block_size
    at_end = plan.tasks["stop"] == plan.layout.lengths[plan.tasks["document"]]
    moved = bytes_between(plan, row_bytes or RowBytes())
    return PlanMetrics(
        max_over_mean=float(workers.finishing(loads).max() / ideal) if ideal else 1.0,
        tokens_max_over_mean=float(tokens.max() / tokens.mean()) if tokens.any() else 1.0,
        bytes_total=int(moved[0].sum()),
        bytes_bottleneck=int(moved.max()),
        tasks=len(plan.tasks),
        min_rows=int(rows.min()) if len(rows) else 0,
        tasks_below_block=int(below.sum()),
        tasks_cut_below_block=int((below & ~at_end).sum()),
    )


def bytes_between(plan: Plan, row_bytes: RowBytes) -> NDArray[np.int64]:
    """[2, workers] int64: bytes that each worker sends and receives in one layer's forward."""
    layout, tasks = plan.layout, plan.tasks
    sent_received = np.zeros((2, plan.workers), np.int64)
    if not len(tasks):
        return sent_received
    # Every row of every document has one position in a single line of rows, document after document.
    first_row = np.concatenate([[0], np.cumsum(layout.lengths)])
    segments = np.sort(layout.segments, order=["document", "start"])
    bounds = first_row[segments["document"]] + segments["start"]
    home = segments["rank"]

    # Q and O: cut the line wherever a segment or a task begins; each interval has one home, one worker.
    by_row = np.sort(tasks, order=["document", "start"])
    task_bounds = first_row[by_row["document"]] + by_row["start"]
    cuts = np.unique(np.concatenate([bounds, task_bounds]))
    rows = np.diff(np.append(cuts, first_row[-1]))
    source = home[np.searchsorted(bounds, cuts, "right") - 1]
    target = by_row["worker"][np.searchsorted(task_bounds, cuts, "right") - 1]
    away = source != target
    _add(sent_received, source[away], target[away], rows[away] * row_bytes.q)
    _add(sent_received, target[away], source[away], rows[away] * row_bytes.o)

    # K/V: the union of what a worker's tasks of a document need, then which segments hold it.
    worker, first, stop = _needed_keys(plan, first_row)
    low = np.searchsorted(bounds, first, "right") - 1
    count = np.searchsorted(bounds, stop, "left") - low
    which = np.repeat(np.arange(len(first)), count)
    segment = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(low, count)
    ends = np.append(bounds[1:], first_row[-1])
    rows = np.minimum(ends[segment], stop[which]) - np.maximum(bounds[segment], first[which])
    source, target = home[segment], worker[which]
    away = source != target
    _add(sent_received, source[away], target[away], rows[away] * row_bytes.kv)
    return sent_received


def _add(
    sent_received: NDArray[np.int64],
    source: NDArray[np.int64],
    target: NDArray[np.int64],
    amount: NDArray[np.int64],
) -> None:
    np.add.at(sent_received[0], source, amount)
    np.add.at(sent_received[1], target, amount)


def _needed_keys(
    plan: Plan, first_row: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(worker, first, stop), each [intervals] int64: disjoint K/V rows that workers need, as positions."""
    tasks = plan.tasks
    first = first_row[tasks["document"]] + plan.first_key()
    stop = first_row[tasks["document"]] + tasks["stop"]
    order = np.lexsort((first, tasks["worker"]))
    worker, first, stop = tasks["worker"][order], first[order], stop[order]
    # Shift each worker to its own stretch of the line, so that one running maximum serves all of them.
    shift = worker * (first_row[-1] + 1)
    reach = np.maximum.accumulate(stop + shift)
    opens = np.ones(len(first), bool)
    opens[1:] = (first + shift)[1:] > reach[:-1]
    # Intervals of two documents may touch but not overlap; a touch may be merged or not alike.
    begins = np.flatnonzero(opens)
    closes = np.append(begins[1:], len(first)) - 1
    return worker[begins], first[begins], reach[closes] - shift[closes]
