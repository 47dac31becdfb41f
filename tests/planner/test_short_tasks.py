import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_distca.plan import TASK, Plan
from hf_distca.planner.balance import balance
from hf_distca.planner.cost import BALANCE_TOLERANCE
from hf_distca.planner.layout import fixed_layout, joint_layout
from hf_distca.planner.metrics import loads_of
from hf_distca.planner.shifted import merged
from hf_distca.planner.short_tasks import without_short
from tests.planner.plan_checks import check_plan

ROOMY = [10**9] * 3


def short_free(rows, tasks, room, ranks=None):
    layout = fixed_layout(rows, ranks)
    found = without_short(np.array(tasks, TASK), layout.segments, layout.lengths, room, None, 16)
    return sorted(found.tolist())


def test_a_short_task_goes_back_to_the_rank_that_holds_its_rows():
    tasks = [(0, 0, 40, 0), (0, 40, 44, 1), (0, 44, 100, 0)]
    assert short_free([[100], []], tasks, ROOMY) == [(0, 0, 100, 0)]


def test_a_short_task_widens_where_its_neighbours_may_not_take_on_more():
    tasks = [(0, 0, 40, 0), (0, 40, 44, 1), (0, 44, 100, 0)]
    assert short_free([[100], []], tasks, [0, 10**9]) == [(0, 0, 28, 0), (0, 28, 44, 1), (0, 44, 100, 0)]


@pytest.mark.parametrize(
    ("rows", "ranks", "tasks"),
    [
        ([[100], []], 2, [(0, 0, 96, 0), (0, 96, 100, 1)]),  # its document ends there
        ([[96, 200]], 2, [(0, 0, 96, 0), (1, 0, 52, 0), (1, 52, 200, 1)]),  # nothing is short
        ([[140, 156]], 2, [(0, 0, 140, 0), (1, 0, 8, 0), (1, 8, 156, 1)]),  # a segment at home
    ],
)
def test_short_tasks_with_a_reason_stay(rows, ranks, tasks):
    assert short_free(rows, tasks, ROOMY, ranks) == tasks


def test_short_tasks_that_the_balance_needs_stay():
    tasks = [(0, 0, 40, 0), (0, 40, 44, 1), (0, 44, 100, 2)]
    assert short_free([[100], [], []], tasks, [0] * 3) == tasks


LENGTHS = st.lists(st.integers(1, 900), min_size=1, max_size=6)


@settings(max_examples=150)
@given(st.lists(LENGTHS, min_size=2, max_size=5), st.sampled_from([None, 60]), st.booleans(), st.integers(2, 48))
def test_no_single_change_removes_a_short_task_and_keeps_the_balance(rows, window, joint, block):
    lengths = [length for row in rows for length in row]
    layout = fixed_layout(rows)
    if joint:
        layout = joint_layout(
            lengths, len(rows), -(-sum(lengths) // len(rows)), window=window, balance_block_size=block
        )
    plan = balance(layout, window=window, balance_block_size=block)
    check_plan(plan)
    loads = loads_of(plan)
    limit = max(loads.mean() * (1 + BALANCE_TOLERANCE), loads.max())
    at_home = {segment[:4] for segment in layout.segments.tolist()}
    tasks = plan.tasks.tolist()

    def is_short(task):
        return task[2] - task[1] < block and task[2] != layout.lengths[task[0]] and task not in at_home

    for short in filter(is_short, tasks):
        doc, start, stop, worker = short
        for other in tasks:
            if other[0] != doc or (other[2] != start and other[1] != stop):
                continue
            _, first, last, neighbour = other
            if last == start:
                cut = stop - block
                wider = [(doc, first, cut, neighbour), (doc, cut, stop, worker)] if cut - first >= block else None
            else:
                cut = start + block
                wider = [(doc, start, cut, worker), (doc, cut, last, neighbour)] if last - cut >= block else None
            given_away = [other, (doc, start, stop, neighbour)]
            for pair in filter(None, (given_away, wider)):
                rest = [task for task in tasks if task not in (short, other)]
                changed = Plan(layout, merged(np.array(rest + pair, TASK)), plan.workers, window)
                fewer = sum(map(is_short, changed.tasks.tolist())) < sum(map(is_short, tasks))
                assert not fewer or loads_of(changed).max() > limit
