"""One layer walked with costs so simple that each second can be counted by hand."""

from dataclasses import replace

import numpy as np
import pytest

from hf_distca.plan import AttentionKind, Plan
from hf_distca.planner.cost import RowBytes
from hf_distca.planner.intervals import local_tasks
from hf_distca.planner.layout import fixed_layout
from hf_distca.planner.metrics import CountedPlan, RowsMoved, bytes_by_link, count_plan
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.routes import make_routes
from hf_distca.planner.seconds import KernelCost, LinkCost, Links, Tasks
from hf_distca.planner.settings import PlanSettings
from hf_distca.planner.walk import LayerClocks

NOWHERE = np.zeros((2, 2, 2), np.int64)


def tasks(*pairs: float) -> Tasks:
    amount = np.array(pairs)
    return Tasks(amount, amount, amount, (amount > 0).astype(float), 0 * amount)


def counted(local: tuple[float, float], remote_query: tuple[float, float] = (0, 0), rows: int = 0) -> CountedPlan:
    """Rank 0 sends so many rows of Q to rank 1."""
    queries = NOWHERE.copy()
    queries[0, 0, 0] = queries[0, 1, 1] = rows
    moved = RowsMoved(queries, NOWHERE)
    return CountedPlan(
        tasks(*local),
        tasks(0, 0),
        tasks(*remote_query),
        moved,
        RowsMoved(NOWHERE, NOWHERE),
        RowBytes(1, 1, 1),
        1,
        0,
        2,
        False,
        False,
        np.zeros(2, np.int64),
    )


def walk(nano_batches, direction="forward", before: float = 0.0, after: float = 0.0, bandwidth: float = np.inf):
    """A pair takes a second, in the backward two; a row that travels 1 / bandwidth."""
    kernel = KernelCost(0, 0, 0, 1.0 if direction == "forward" else 2.0)
    links = Links(LinkCost(0.0, bandwidth), LinkCost(0.0, bandwidth))
    parts = ([np.full(2, seconds)] * len(nano_batches) for seconds in (before, after))
    return LayerClocks(nano_batches, kernel, *parts, links, direction).walked()


def test_without_an_exchange_the_slowest_rank_is_the_step():
    walked = walk([counted(local=(5, 7))], before=1, after=2)
    assert walked.seconds == 10
    assert walked.attention.tolist() == [5, 7]
    assert walked.other.tolist() == [3, 3]
    backward = walk([counted(local=(5, 7))], "backward", before=6, after=3)
    assert backward.seconds == 14 + 9


@pytest.mark.parametrize(
    ("bandwidth", "seconds"),
    [
        (np.inf, 6),  # 4 local and 2 remote-query
        (1.0, 4 + 2 + 2),  # rows are there before local tasks are done; results take two seconds more
        (0.25, 8 + 2 + 8),  # local tasks take half of the way there
    ],
)
def test_local_tasks_hide_the_way_there(bandwidth, seconds):
    """Rank 1 computes two rows of rank 0, who waits for the results."""
    walked = walk([counted(local=(4, 4), remote_query=(0, 2), rows=2)], bandwidth=bandwidth)
    # In the middle of a model rank 1 begins the next layer while rank 0 still waits.
    assert walked.seconds == seconds
    assert walked.attention.tolist() == [4, 6]


def test_transfers_of_a_link_follow_each_other():
    """Rank 1 computes two rows of rank 0, whose keys come behind the queries."""
    keys = NOWHERE.copy()
    keys[0, 0, 0] = keys[0, 1, 1] = 2
    plan = counted(local=(0, 0), remote_query=(0, 2), rows=2)
    plan = replace(plan, among_ranks=RowsMoved(plan.among_ranks.queries, keys))
    assert walk([plan], bandwidth=1.0).seconds == 2 + 2 + 2 + 2


@pytest.mark.parametrize(
    ("connected", "busy", "seconds"),
    [((0, 0, 2, 2), 0.0, 2 + 9), ((0, 0, 0, 0), 0.0, 7 + 9), ((0, 0, 2, 2), 1e-9, 7 + 9)],
)
def test_ranks_that_share_no_documents_do_not_wait_for_each_other(connected, busy, seconds):
    """Ranks 0 and 1 reach the exchange after 2 seconds and compute for 9; ranks 2 and 3 after 7, for 1."""
    queries = np.zeros((2, 2, 4), np.int64)
    queries[0, 0, [0, 2]] = queries[0, 1, [1, 3]] = 1
    moved, nothing = RowsMoved(queries, queries * 0), RowsMoved(queries * 0, queries * 0)
    plan = CountedPlan(
        *(tasks(0, 0, 0, 0), tasks(0, 0, 0, 0), tasks(0, 9, 0, 1)),
        *(moved, nothing, RowBytes(1, 1, 1), 1, 0, 4, False, False, np.array(connected)),
    )
    before, after = np.array([2.0, 2, 7, 7]), np.zeros(4)
    links = Links(LinkCost(0.0, np.inf), LinkCost(0.0, np.inf), busy=busy)
    walked = LayerClocks([plan], KernelCost(0, 0, 0, 1.0), [before], [after], links, "forward").walked()
    assert walked.seconds == pytest.approx(seconds)


def test_ranks_are_connected_by_exchanges_over_other_ranks():
    layout = fixed_layout([[30, 5], [5], [40], []], 8)  # over ranks 0 and 1, 2 and 3, 4 and 5
    plan = Plan(layout, local_tasks(layout.segments), 8)
    assert count_plan(plan, AttentionKind(), 2).connected.tolist() == [0, 0, 2, 2, 4, 4, 6, 7]
    plan.tasks["worker"][plan.tasks["worker"] == 2] = 1
    assert count_plan(plan, AttentionKind(), 2).connected.tolist() == [0, 0, 0, 0, 4, 4, 6, 7]


def test_two_nano_batches_hide_each_others_exchange():
    alone = walk([counted((8, 8), (0, 4), 4)], "forward", 1, 1, bandwidth=1.0)
    halves = [counted((4, 4), (0, 2), 2), counted((4, 4), (0, 2), 2)]
    in_turns = walk(halves, "forward", 0.5, 0.5, bandwidth=1.0)
    assert in_turns.seconds < alone.seconds
    assert in_turns.attention.tolist() == alone.attention.tolist()
    assert in_turns.waited.max() < alone.waited.max()


def test_rows_of_short_tasks_are_counted():
    layout = fixed_layout([[2000, 10]], 2)  # rank 0 holds 1005 rows, rank 1 the other 995 and the short document
    plan = Plan(layout, local_tasks(layout.segments), 2)
    found = count_plan(plan, AttentionKind(), 2)
    assert found.local.diagonal.tolist() == [1005 * 512, 995 * 512 + 10 * 10]
    assert found.remote_kv.diagonal.tolist() == [0, 0]
    plan.tasks["worker"][plan.tasks["worker"] == 1] = 0
    assert count_plan(plan, AttentionKind(), 2).remote_query.diagonal.tolist() == [995 * 512 + 10 * 10, 0]


@pytest.mark.parametrize("layout", ["joint", "fixed"])
@pytest.mark.parametrize("window", [None, 96])
def test_what_is_counted_of_a_plan_is_what_its_routes_carry(layout, window):
    kind = AttentionKind(window, 4, 2, 8, 8)
    settings = PlanSettings(3, 600, kinds=(kind,), document_layout=layout, balance_block_size=16)
    (nano,) = plan_micro_batch([700, 40, 300, 90, 510], settings).nano_batches
    plan = nano.plans[kind]
    found = count_plan(plan, kind, 2)
    for rank in range(3):
        routes = make_routes(plan, rank)
        remote_query = [group for stage in routes.stages for group in (stage.remote_query, stage.remote_query_prefix)]
        here = [routes.local, *(stage.remote_kv for stage in routes.stages)]
        if window is None:
            assert found.local.pairs[rank] == routes.local.pairs
        assert found.local.pairs[rank] + found.remote_kv.pairs[rank] == sum(group.pairs for group in here)
        assert found.remote_query.pairs[rank] == sum(group.pairs for group in remote_query)
        keys = sum(stage.keys.send_counts[np.arange(3) != rank].sum() for stage in routes.stages)
        assert found.among_ranks.keys[0, 0, rank] == keys
        assert found.among_ranks.queries[0, 1, rank] == routes.queries.recv_counts.sum()
    row, moved = found.row_bytes, found.among_ranks
    total = moved.queries * row.q + moved.queries[:, ::-1] * row.o + moved.keys * row.kv
    assert np.array_equal(total, bytes_by_link(plan, row, (0, 0, 0)))
    assert count_plan(replace(plan, stage_rows=moved.most_keys // 2), kind, 2).stages == 2 + moved.most_keys % 2
