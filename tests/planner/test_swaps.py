import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_distca.plan import TASK, Plan
from hf_distca.planner.balance import balance
from hf_distca.planner.cost import RowBytes
from hf_distca.planner.layout import fixed_layout
from hf_distca.planner.metrics import loads_of, measure
from hf_distca.planner.shifted import ShiftedRows, merged
from hf_distca.planner.swaps import _Search, swapped
from tests.planner.plan_checks import check_plan

ROW_BYTES = RowBytes()


def rows_of(layout, window=None):
    return ShiftedRows.of(layout, window, 0, 16)


def after(plan, room, block=16):
    tasks = merged(swapped(plan.tasks, rows_of(plan.layout, plan.window), [room] * plan.workers, ROW_BYTES, block))
    return Plan(plan.layout, tasks, plan.workers, plan.window)


def test_work_at_the_wrong_rank_goes_home():
    layout = fixed_layout([[512], [512]])
    plan = after(Plan(layout, np.array([(1, 0, 512, 0), (0, 0, 512, 1)], TASK), 2), 0)
    assert plan.tasks.tolist() == [(0, 0, 512, 0), (1, 0, 512, 1)]


def test_a_part_of_the_larger_task_is_swapped():
    layout = fixed_layout([[512], [512]])
    tasks = merged(np.array([(0, 256, 512, 1), (0, 0, 256, 0), (1, 0, 300, 0), (1, 300, 512, 1)], TASK))
    before = Plan(layout, tasks, 2)
    plan = after(before, 1000)
    check_plan(plan)
    assert measure(plan).bytes_bottleneck < measure(before).bytes_bottleneck
    assert (np.abs(loads_of(plan) - loads_of(before)) <= 1000).all()


def test_nothing_to_do_where_every_document_stays():
    plan = balance(fixed_layout([[512], [512]]))
    assert swapped(plan.tasks, rows_of(plan.layout), [0.0, 0.0], ROW_BYTES, 16) is plan.tasks


def test_many_workers_are_left_as_they_are():
    plan = balance(fixed_layout([[4096], [512] * 8]))
    assert swapped(plan.tasks, rows_of(plan.layout), [0.0] * 1000, ROW_BYTES, 16) is plan.tasks


@pytest.mark.parametrize("window", [None, 70])
@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(1, 900), min_size=1, max_size=6), min_size=2, max_size=3), st.integers(1, 3))
def test_fewer_bytes_within_the_room(window, rows, ranks_per_row):
    layout = fixed_layout(rows, len(rows) * ranks_per_row)
    before = balance(layout, window=window, balance_block_size=16)
    search = _Search(before.tasks, rows_of(layout, window), [0.0] * before.workers, ROW_BYTES, 16)
    assert max(search.total.values(), default=0) == measure(before).bytes_bottleneck
    plan = after(before, 100)
    check_plan(plan)
    assert measure(plan).bytes_bottleneck <= measure(before).bytes_bottleneck
    assert measure(plan).bytes_total <= 1.03 * measure(before).bytes_total
    assert (loads_of(plan) <= loads_of(before) + 100).all()
