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


def check_layout(layout: Layout) -> None:
    """Every row of every document once; each rank's rows [0, n) without a gap, in the order of segments."""
    seen: set[tuple[int, int]] = set()
    filled = [0] * layout.ranks
    previous = (-1, -1)
    for document, start, stop, rank, offset in layout.segments.tolist():
        assert 0 <= start < stop <= layout.lengths[document]
        assert (rank, offset) > previous
        assert offset == filled[rank]
        previous = (rank, offset)
        filled[rank] += stop - start
        rows = {(document, row) for row in range(start, stop)}
        assert not rows & seen
        seen |= rows
    assert len(seen) == layout.lengths.sum()
    assert layout.tokens.tolist() == filled


def check_plan(plan: Plan) -> None:
    """Every row computed once; tasks sorted, and none that touch on one worker."""
    check_layout(plan.layout)
    seen: set[tuple[int, int]] = set()
    tasks = plan.tasks.tolist()
    assert [(w, d, s) for d, s, _, w in tasks] == sorted((w, d, s) for d, s, _, w in tasks)
    for document, start, stop, worker in tasks:
        assert 0 <= start < stop
        assert 0 <= worker < plan.workers
        rows = {(document, row) for row in range(start, stop)}
        assert not rows & seen
        seen |= rows
    assert seen == {(d, row) for d, length in enumerate(plan.layout.lengths) for row in range(length)}
    ends = {(d, stop, w) for d, _, stop, w in tasks}
    assert not ends & {(d, start, w) for d, start, _, w in tasks}


def loads_by_row(plan: Plan) -> list[int]:
    """Pairs of each worker, counted row by row."""
    loads = [0] * plan.workers
    for _, start, stop, worker in plan.tasks.tolist():
        loads[worker] += sum(min(row + 1, plan.window or row + 1) for row in range(start, stop))
    return loads


def bytes_by_row(plan: Plan, row_bytes: RowBytes) -> tuple[list[int], list[int]]:
    """(sent, received) by each worker, counted row by row: the readable form of metrics.bytes_moved."""
    home = {
        (document, row): rank
        for document, start, stop, rank, _ in plan.layout.segments.tolist()
        for row in range(start, stop)
    }
    sent, received = [0] * plan.workers, [0] * plan.workers
    keys: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for document, start, stop, worker in plan.tasks.tolist():
        first = 0 if plan.window is None else max(0, start - plan.window + 1)
        keys[worker] |= {(document, row) for row in range(first, stop)}
        for row in range(start, stop):
            owner = home[document, row]
            if owner != worker:
                sent[owner] += row_bytes.q
                received[worker] += row_bytes.q
                sent[worker] += row_bytes.o
                received[owner] += row_bytes.o
    for worker, rows in keys.items():
        for row in rows:
            if home[row] != worker:
                sent[home[row]] += row_bytes.kv
                received[worker] += row_bytes.kv
    return sent, received
