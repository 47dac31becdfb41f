"""What every layout and every plan must be, checked row by row."""

from collections.abc import Sequence
from typing import Any

from hf_distca.plan import AttentionKind, Layout, Plan
from hf_distca.plan.cost import Workers
from hf_distca.planner.balance import balance
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
    return [
        (document, row)
        for document, start, stop, *_ in table.tolist()
        for row in range(start, stop)
    ]


def check_layout(layout: Layout) -> None:
    """Every row of every document once; each rank's rows [0, n) without a gap, in the order of
    segments.
    """
    all_rows = [
        (document, row)
        for document, (start, stop) in enumerate(
            zip(layout.own_starts, layout.lengths, strict=True)
        )
        for row in range(start, stop)
    ]
    assert sorted(rows_of(layout.segments)) == all_rows
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
    tasks = [
        (worker, document, start, stop) for document, start, stop, worker in plan.tasks.tolist()
    ]
    assert tasks == sorted(tasks)
    assert {worker for worker, *_ in tasks} <= set(range(plan.workers))
    assert not {(*task[:2], task[3]) for task in tasks} & {task[:3] for task in tasks}


def loads_by_row(plan: Plan) -> list[int]:
    """Pairs of each worker, counted row by row."""
    loads = [0] * plan.workers
    for _, start, stop, worker in plan.tasks.tolist():
        loads[worker] += sum(min(row + 1, plan.window or row + 1) for row in range(start, stop))
    return loads
