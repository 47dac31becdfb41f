"""What every layout and every plan must be, checked row by row."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from hf_distca.plan import AttentionKind, Layout, Plan
from hf_distca.planner.balance import balance
from hf_distca.planner.cost import RowBytes, Workers
from hf_distca.planner.settings import PlanSettings

FULL = AttentionKind()


def balanced(
    layout: Layout,
    workers: Workers | None = None,
    nodes: Sequence[int] | None = None,
    kind: AttentionKind = FULL,
    **settings: Any,
) -> Plan:
    """Balanced tasks on a layout."""
    return balance(layout, kind, PlanSettings(layout.ranks, 1 << 30, **settings), workers, nodes)


def rows_of(table: Any) -> list[tuple[int, int]]:
    """(document, row) of all rows of a table, entry after entry; no entry is empty."""
    assert (table["start"] < table["stop"]).all()
    return [(document, row) for document, start, stop, *_ in table.tolist() for row in range(start, stop)]


def check_layout(layout: Layout) -> None:
    """Every row of every document once; each rank's rows [0, n) without a gap, in the order of segments."""
    every = [(document, row) for document, length in enumerate(layout.lengths) for row in range(length)]
    assert sorted(rows_of(layout.segments)) == every
    filled = [0] * layout.ranks
    assert sorted(layout.segments["rank"]) == layout.segments["rank"].tolist()
    for _, start, stop, rank, offset in layout.segments.tolist():
        assert offset == filled[rank]
        filled[rank] += stop - start
    assert layout.tokens.tolist() == filled


def check_plan(plan: Plan) -> None:
    """Every row computed once; tasks sorted, and none that touch on one worker."""
    check_layout(plan.layout)
    assert sorted(rows_of(plan.tasks)) == sorted(rows_of(plan.layout.segments))
    tasks = [(worker, document, start, stop) for document, start, stop, worker in plan.tasks.tolist()]
    assert tasks == sorted(tasks)
    assert {worker for worker, *_ in tasks} <= set(range(plan.workers))
    assert not {(*task[:2], task[3]) for task in tasks} & {task[:3] for task in tasks}


def loads_by_row(plan: Plan) -> list[int]:
    """Pairs of each worker, counted row by row."""
    loads = [0] * plan.workers
    for _, start, stop, worker in plan.tasks.tolist():
        loads[worker] += sum(min(row + 1, plan.window or row + 1) for row in range(start, stop))
    return loads


def bytes_by_row(plan: Plan, row_bytes: RowBytes) -> tuple[list[int], list[int]]:
    """(sent, received) by each worker, counted row by row: the readable form of metrics.bytes_moved."""
    ranks = plan.layout.segments["rank"].repeat(plan.layout.segments["stop"] - plan.layout.segments["start"])
    home = dict(zip(rows_of(plan.layout.segments), ranks.tolist(), strict=True))
    sent, received = [0] * plan.workers, [0] * plan.workers

    def move(source: int, target: int, size: int) -> None:
        if source != target:
            sent[source] += size
            received[target] += size

    keys: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for document, start, stop, worker in plan.tasks.tolist():
        first = 0 if plan.window is None else max(0, start - plan.window + 1)
        keys[worker] |= {(document, row) for row in range(first, stop)}
        for row in range(start, stop):
            move(home[document, row], worker, row_bytes.q)
            move(worker, home[document, row], row_bytes.o)
    for worker, rows in keys.items():
        for row in rows:
            move(home[row], worker, row_bytes.kv)
    return sent, received
