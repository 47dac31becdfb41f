"""How large stages are, and what ranks send and receive in each."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_distca.plan import TASK, Plan
from hf_distca.planner.layout import fixed_layout
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.moves import rows_to_move
from hf_distca.planner.routes import make_routes
from hf_distca.planner.settings import PlanSettings
from hf_distca.planner.stages import SMALLEST_STAGE, STAGES_ALONE, rows_by_stage, with_stages
from tests.planner.carried_out import plans_of_all_kinds


def quarters(length, ranks=4):
    """One document, an equal part on each rank, which computes its own rows."""
    part = length // ranks
    tasks = np.array([(0, part * rank, part * (rank + 1), rank) for rank in range(ranks)], TASK)
    return Plan(fixed_layout([[length]], ranks), tasks, ranks)


def test_rows_by_stage():
    # Rank 0 sends its 8 rows to three ranks, rank 3 receives those of three.
    assert rows_by_stage(quarters(32)).tolist() == [[[24, 16, 8, 0], [0, 8, 16, 24]]]
    parts = [[12, 8, 4, 0], [0, 4, 8, 12]]
    assert rows_by_stage(replace(quarters(32), stage_rows=12)).tolist() == [parts, parts]
    # Ranks 2 and 3 read all 16 rows of node 0, and each forwards half of them.
    assert rows_by_stage(replace(quarters(32), nodes=(0, 0, 1, 1))).tolist() == [[[16, 8, 16, 8], [0, 8, 16, 24]]]


@pytest.mark.parametrize(
    ("buffer_rows", "nodes", "together", "stage_rows"),
    [
        *((rows, None, False, expected) for rows, expected in ((24, None), (23, 23), (8, 8), (1, 1))),
        # 24 rows in three buffers, or in five.
        *((rows, None, True, expected) for rows, expected in ((8, None), (7, 7))),
        *((rows, (0, 0, 1, 1), True, expected) for rows, expected in ((5, None), (4, 4))),
    ],
)
def test_what_fits_travels_at_once(buffer_rows, nodes, together, stage_rows):
    plan = replace(quarters(32), nodes=nodes)
    assert with_stages(plan, buffer_rows, stages=1, together=together).stage_rows == stage_rows


def test_a_nano_batch_alone_has_stages_that_hide_its_exchange():
    plan = with_stages(quarters(32768), 2**20, stages=4)
    assert plan.stage_rows == 24576 // STAGES_ALONE
    assert len(rows_by_stage(plan)) == STAGES_ALONE
    assert with_stages(quarters(32768), 1000, stages=4).stage_rows == 1000
    in_nodes = with_stages(replace(quarters(32768), nodes=(0, 0, 1, 1)), 2**20, stages=4)
    assert len(rows_by_stage(in_nodes)) == STAGES_ALONE
    # Small ones have none that are not worth it.
    assert with_stages(quarters(4096), 2**20, stages=4).stage_rows == SMALLEST_STAGE
    assert with_stages(quarters(1024), 2**20, stages=4).stage_rows is None


def test_settings_say_how_many_bytes_travel_at_a_time():
    # One document on both ranks; rows of K and V of 4096 bytes.
    def planned(**settings):
        (nano,) = plan_micro_batch([8192], PlanSettings(2, 4096, **settings)).nano_batches
        (plan,) = nano.plans.values()
        return plan

    most = int(rows_by_stage(replace(planned(), stage_rows=None)).max())
    assert planned().stage_rows == max(-(-most // STAGES_ALONE), SMALLEST_STAGE)
    assert planned(exchange_buffer_bytes=512 * 4096).stage_rows == 512
    assert planned(exchange_buffer_bytes=1).stage_rows == 1


@given(plans_of_all_kinds(), st.integers(1, 12))
def test_stages_hold_so_many_rows_and_servers_have_one(plan, buffer_rows):
    staged, ranks = with_stages(plan, buffer_rows, stages=1), plan.layout.ranks
    rows, whole = rows_by_stage(staged), rows_by_stage(plan)
    assert (staged.stage_rows is None) == (whole.max(initial=0) <= buffer_rows)
    if plan.window is None:
        assert rows.sum(axis=0).tolist() == whole.sum(axis=0).tolist()
        # On each path rows are rounded up.
        _, *hops = rows_to_move(plan)
        moves = np.concatenate(hops)
        paths = [np.bincount(moves[end], minlength=plan.workers)[:ranks] for end in ("source", "target")]
        assert (rows <= buffer_rows + np.array(paths)).all()
    else:
        assert rows[:, 1].max(initial=0) <= max(buffer_rows, 2 * plan.window - 1)
    for server in range(ranks, plan.workers):
        came = [int(stage.keys.recv_counts.sum()) for stage in make_routes(staged, server).stages]
        assert not any(came[1:])
