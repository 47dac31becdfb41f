import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_distca.plan import TASK, AttentionKind, Plan
from hf_distca.planner.cost import RowBytes, Workers
from hf_distca.planner.layout import fixed_layout
from hf_distca.planner.metrics import loads_of, query_rows_of
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.servers import _without_ranks, balance_with_servers, plan_with_servers
from hf_distca.planner.settings import PlanSettings
from tests.planner.plan_checks import bytes_by_row, check_plan, loads_by_row

ROWS = [[3000, 500], [700] * 5]
SETTINGS = PlanSettings(ranks=2, tokens_per_rank=4096, balance_block_size=16)


def test_ranks_and_servers_finish_together():
    workers = Workers((1.0, 1.0, 2.0), (1e6, 1e6, 0.0))
    plan = balance_with_servers(fixed_layout(ROWS), AttentionKind(), workers, SETTINGS)
    check_plan(plan)
    finishing = workers.finishing(loads_of(plan))
    assert finishing.max() <= 1.01 * workers.ideal(int(loads_of(plan).sum()))
    assert (loads_of(plan) > 0).all()


@pytest.mark.parametrize("speeds", [(1.0,), (1.0, 1.0), (1.0, 3.0)])
def test_ranks_that_do_not_serve_compute_nothing(speeds):
    workers = Workers((1.0, 1.0, *speeds), (0.0,) * (2 + len(speeds)))
    plan = balance_with_servers(fixed_layout(ROWS), AttentionKind(), workers, SETTINGS, ranks_serve=False)
    check_plan(plan)
    loads = loads_by_row(plan)
    assert loads[:2] == [0, 0]
    times = np.array(loads[2:]) / speeds
    assert times.max() <= 1.02 * sum(loads) / sum(speeds)


@given(st.lists(st.lists(st.integers(1, 40), max_size=6), min_size=2, max_size=2), st.integers(1, 3))
def test_ranks_that_do_not_serve_keep_no_task_however_small(rows, servers):
    workers = Workers.uniform(2 + servers)
    plan = balance_with_servers(fixed_layout(rows), AttentionKind(), workers, SETTINGS, ranks_serve=False)
    check_plan(plan)
    assert loads_of(plan)[:2].tolist() == [0, 0]


def test_what_is_left_at_ranks_goes_to_the_server_that_finishes_first():
    layout = fixed_layout([[8, 4], [4]])
    tasks = np.array([(1, 0, 4, 0), (2, 0, 4, 1), (0, 0, 8, 3)], TASK)
    plan = _without_ranks(Plan(layout, tasks, 4), Workers((1e-9, 1e-9, 1.0, 8.0), (0.0,) * 4))
    # Alone, server 2 would need 10 units for either; server 3 has 36 / 8 and needs 10 / 8 for each.
    assert plan.tasks.tolist() == [(0, 0, 8, 3), (1, 0, 4, 3), (2, 0, 4, 3)]
    plan = _without_ranks(Plan(layout, tasks, 4), Workers((1e-9, 1e-9, 1.0, 2.0), (0.0,) * 4))
    assert plan.tasks.tolist() == [(1, 0, 4, 2), (2, 0, 4, 2), (0, 0, 8, 3)]


def test_a_pool_needs_a_server():
    with pytest.raises(ValueError, match="2 workers for 2 ranks leave no server"):
        balance_with_servers(fixed_layout([[4], [4]]), AttentionKind(), Workers.uniform(2), SETTINGS)


@pytest.mark.parametrize("ranks_serve", [True, False])
def test_the_summary_counts_both_nano_batches(ranks_serve):
    settings = PlanSettings(2, 4096, balance_block_size=16, row_overhead=32, ping_pong=True)
    before = plan_micro_batch([1500, 1200, 900, 700, 400, 300], settings)
    workers = Workers((1.0, 1.0, 2.0, 1.0), (2e5, 2e5, 0.0, 0.0))
    plan = plan_with_servers(before, workers, settings, ranks_serve=ranks_serve)
    assert [nano.layout for nano in plan.nano_batches] == [nano.layout for nano in before.nano_batches]
    plans = [only for nano in plan.nano_batches for only in nano.plans.values()]
    assert len(plans) == 2
    moved = np.sum([bytes_by_row(each, RowBytes()) for each in plans], axis=0)
    assert plan.summary.exchange.bytes_bottleneck == moved.max()
    assert plan.summary.packed_max_over_mean == before.summary.packed_max_over_mean
    # Every rank has its base load once for each nano-batch.
    cost = np.sum([np.array(loads_by_row(each)) + 32 * query_rows_of(each) for each in plans], axis=0)
    finishing = (np.array([4e5, 4e5, 0, 0]) + cost / [1, 1, 2, 1])[0 if ranks_serve else 2 :]
    assert plan.summary.max_over_mean == pytest.approx(finishing.max() / finishing.mean())
    assert 1 < plan.summary.max_over_mean < 1.02
