"""Costs of core attention, and tasks balanced by them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planner_inputs import measure
from hf_distca.plan import TASK, AttentionKind
from hf_distca.plan.cost import RowBytes, Workers, as_lengths, pairs, pairs_at, row_reaching
from hf_distca.plan.figures import BETWEEN, bytes_by_link, loads_of
from hf_distca.plan.intervals import grain
from hf_distca.planner.balance import ideals_inside, tasks_of_workers
from hf_distca.planner.balancing_pass import (
    FORBIDDEN,
    CutCosts,
    CutTask,
    Price,
    Problem,
    Stock,
    plan_flows,
)
from hf_distca.planner.layout import fixed_layout
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings
from tests.planner.plan_checks import balanced, check_plan, loads_by_row

WINDOWS = (None, 1, 3, 100)

# Pairs of rows


def pairs_by_row(start, stop, window):
    """Pairs of rows [start, stop) of a document, counted row by row."""
    return sum(min(row + 1, window or row + 1) for row in range(start, stop))


@pytest.mark.parametrize("window", WINDOWS)
def test_pairs(window):
    starts = np.array([0, 1, 5, 7])
    stops = np.array([0, 9, 8, 200])
    ranges = list(zip(starts.tolist(), stops.tolist(), strict=True))
    expected = [pairs_by_row(start, stop, window) for start, stop in ranges]
    assert pairs(starts, stops, window).tolist() == expected
    assert [pairs(start, stop, window) for start, stop in ranges] == expected


@pytest.mark.parametrize("window", WINDOWS)
def test_the_row_that_reaches_a_number_of_pairs(window):
    rows = np.array([0, 1, 3, 6, 1000])
    amounts = pairs(0, rows, window)
    np.testing.assert_allclose(row_reaching(amounts, window), rows, atol=1e-9)
    np.testing.assert_allclose(pairs_at(rows.astype(float), window), amounts)
    rows_one_by_one = [row_reaching(float(amount), window) for amount in amounts]
    np.testing.assert_allclose(rows_one_by_one, rows, atol=1e-9)


# Bytes, workers and blocks


def test_bytes_of_a_row():
    assert RowBytes.of_kind(AttentionKind(), 2) == RowBytes()
    kind = AttentionKind(None, q_heads=16, kv_heads=8, dim_qk=192, dim_v=128)
    assert RowBytes.of_kind(kind, 4) == RowBytes(q=12288, kv=10240, o=8192)


@pytest.mark.parametrize(
    ("speeds", "base_loads", "work", "ideal"),
    [
        ((1.0,) * 4, (0.0,) * 4, 100, 25),
        ((1.0, 1.0), (10.0, 0.0), 30, 20),
        ((1.0, 3.0), (0.0, 0.0), 100, 25),
        ((1.0, 1.0), (50.0, 0.0), 30, 50),  # a base load above the level
    ],
)
def test_the_ideal_time_fills_workers_up_to_one_level(speeds, base_loads, work, ideal):
    assert Workers(speeds, base_loads).ideal(work) == ideal


def test_workers_of_a_node_finish_together():
    loads = np.array([20, 0, 6])
    workers = Workers((1.0, 3.0, 2.0), (4.0, 0.0, 5.0))
    ideals = ideals_inside(loads, workers, np.array([0, 0, 1]))
    assert ideals.tolist() == [6.0, 6.0, 8.0]  # (20 + 1 · 4) / 4, and 5 + 6 / 2


@pytest.mark.parametrize(
    ("block", "most_error", "expected"),
    [(128, 128, 128), (128, 127, 64), (128, 40, 32), (128, 0, 1), (12, 2, 2)],
)
def test_a_cut_leaves_the_block_as_far_as_it_must(block, most_error, expected):
    assert grain(block, 1, most_error) == expected


# Balanced tasks


def test_ranks_keep_the_rows_that_they_can_compute():
    plan = balanced(fixed_layout([[300, 200], [200, 300]]))
    assert plan.tasks.tolist() == [(0, 0, 300, 0), (1, 0, 200, 0), (2, 0, 200, 1), (3, 0, 300, 1)]


def test_a_long_document_gives_one_task_in_whole_blocks():
    layout = fixed_layout([[4096], [1024] * 4])
    plan = balanced(layout, balance_tolerance=0.2, balance_block_size=16)
    tasks_of_longest = [task for task in plan.tasks.tolist() if task[0] == 0]
    assert tasks_of_longest == [(0, 0, 2112, 0), (0, 2960, 4096, 0), (0, 2112, 2960, 1)]
    assert measure(plan).max_over_mean <= 1.2


def test_one_long_document_among_512_ranks():
    plan = balanced(fixed_layout([[32768]] + [[2048] * 16] * 511))
    assert measure(plan).max_over_mean <= 1.01


def test_a_moved_task_lies_where_it_costs_the_fewest_bytes():
    # F pairs cost least in [s, e) with s = e / r. Here r = 1 + kv / q = 2.125, since the bytes sent
    # count on the busiest rank and O does not add to them.
    plan = balanced(
        fixed_layout([[100000], [3000] * 10]),
        kind=AttentionKind(None, 1, 1, 8, 1),
        bytes_per_value=1,
    )
    moved_tasks = [task for task in plan.tasks.tolist() if task[0] == 0 and task[3] == 1]
    ((_, start, stop, _),) = moved_tasks
    assert stop / start == pytest.approx(2.125, abs=0.01)


@pytest.mark.parametrize(("gather_cost", "kept_tasks"), [(0.0, 2), (0.2, 1)])
def test_keys_gathered_for_two_tasks_cost(gather_cost, kept_tasks):
    # Rows of the middle need the fewest bytes where keys are as wide as queries. The owner then
    # keeps two tasks, on both sides, and gathers their keys.
    kind = AttentionKind(None, 1, 1, 8, 8)
    plan = balanced(fixed_layout([[8192], [512] * 16]), kind=kind, gather_cost=gather_cost)
    assert sum(task[0] == 0 and task[3] == 0 for task in plan.tasks.tolist()) == kept_tasks


def test_a_surplus_stays_on_its_node():
    # Both nodes have the same to do, and on each one rank has all of it.
    layout = fixed_layout([[4096], [16] * 8, [16] * 8, [4096]])
    plan = balanced(layout, nodes=(0, 0, 1, 1))
    loads = loads_of(plan)
    assert loads.max() <= 1.01 * loads.mean()
    assert bytes_by_link(plan, RowBytes(), plan.nodes)[BETWEEN].sum() == 0


def test_shares_of_a_row_are_not_given():
    # Found by a search: rounding gave them back.
    layout = fixed_layout([[], [], [1, 1, 1]])
    plan = balanced(layout, workers=Workers.uniform(4), kind=AttentionKind(1), balance_block_size=1)
    check_plan(plan)
    assert loads_of(plan).max() == 1


@pytest.mark.parametrize("tolerance", [0.05, 0.01, 0.001, 0.0001, 0.0])
def test_the_tolerance_is_reached_and_used(tolerance):
    rank_lengths = [
        [30000],
        [1000] * 30,
        [2000] * 15,
        [10000] * 3,
        [24000, 6000],
        [15000] * 2,
    ]
    lengths = [length for document_lengths in rank_lengths for length in document_lengths]
    fixed = fixed_layout(rank_lengths)
    fixed_imbalance = measure(balanced(fixed, balance_tolerance=tolerance)).max_over_mean
    divided = plan_micro_batch(lengths, PlanSettings(6, 30000, balance_tolerance=tolerance))
    limit = 1 + (tolerance or 0.0001)  # 0 is as fine as whole rows allow
    assert fixed_imbalance <= limit
    assert divided.summary.max_over_mean <= limit
    assert fixed_imbalance > 1 + 0.9 * tolerance  # the tolerance is used


@pytest.mark.parametrize("window", [None, 1024])
@pytest.mark.parametrize(
    ("row_overhead", "counted_overhead"), [(128, 128), (512, 512), (100, 128), (200, 256)]
)
def test_rows_count_too_in_whole_blocks(row_overhead, counted_overhead, window):
    plan = balanced(
        fixed_layout([[8192], [512] * 16]),
        kind=AttentionKind(window),
        row_overhead=row_overhead,
    )
    costs = loads_of(plan, counted_overhead)
    assert costs.max() / costs.mean() <= 1.01
    loads = loads_of(plan)
    assert loads[0] > 1.01 * loads.mean()  # rank 0 has fewer rows, so it takes more pairs


# Refusals


def balance(**options):
    return lambda: balanced(fixed_layout([[1], [2], [3]]), **options)


def with_nodes(nodes, workers):
    return balance(nodes=nodes, workers=Workers.uniform(workers))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: AttentionKind(q_heads=32, kv_heads=5),
            "kv_heads must divide q_heads, got q_heads=32 and kv_heads=5",
        ),
        (lambda: AttentionKind(dim_v=0), "dim_v must be positive, got 0"),
        (lambda: as_lengths([1.5]), "must be 64-bit integers"),
        (lambda: as_lengths([True]), "must be 64-bit integers"),
        (lambda: as_lengths([2**31]), "more than"),
        (balance(workers=Workers.uniform(1)), "3 ranks, but only 1 workers"),
        (with_nodes((0, 0), 3), "one number per worker, 3 in all"),
        (with_nodes((1, 1, 0), 3), "one number per worker, 3 in all"),
        (with_nodes((0, 2, 2), 3), "one number per worker, 3 in all"),
        (with_nodes((0, 1, 0), 3), "one number per worker, 3 in all"),
        (with_nodes((0, 0, 1, 3), 4), "one number per worker, 4 in all"),
        (balance(ranks_per_node=(3, 0)), "ranks_per_node=3,0 adds up to 3 ranks"),
        (balance(ranks_per_node=0), "ranks_per_node=0 is set, but it does not divide the 3 ranks"),
        (balance(ranks_per_node=()), "ranks_per_node= adds up to 0 ranks"),
    ],
)
def test_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(("speed", "base_load"), [(0.0, 0.0), (float("nan"), 0.0), (1.0, -1.0)])
def test_workers_that_cannot_be(speed, base_load):
    with pytest.raises(AssertionError, match="Workers"):
        Workers((speed,), (base_load,))


# Properties of every plan

RANK_LENGTHS = st.lists(st.one_of(st.integers(1, 9), st.integers(1, 900)), max_size=8)


@st.composite
def problems(draw):
    """A layout, its workers, and the node of each worker; None where all links are alike."""
    rank_lengths = draw(st.lists(RANK_LENGTHS, min_size=1, max_size=5))
    lengths = [length for document_lengths in rank_lengths for length in document_lengths]
    if not lengths or draw(st.booleans()):
        layout = fixed_layout(rank_lengths, len(rank_lengths) * draw(st.integers(1, 3)))
    else:
        tokens_per_rank = -(-sum(lengths) // len(rank_lengths)) + 1
        plan = plan_micro_batch(lengths, PlanSettings(len(rank_lengths), tokens_per_rank))
        layout = plan.nano_batches[0].layout
    count = layout.ranks + draw(st.integers(0, 3))
    speeds = draw(st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=count, max_size=count))
    base_loads = draw(
        st.lists(st.sampled_from([0.0, 0.0, 1e3, 1e5]), min_size=count, max_size=count)
    )
    # Where links differ, ranks are on consecutive nodes of any sizes, and servers among them or on
    # nodes of their own.
    further_ranks = layout.ranks - 1
    steps = draw(st.lists(st.integers(0, 1), min_size=further_ranks, max_size=further_ranks))
    nodes = [0, *np.cumsum(steps).tolist()]
    for _ in range(layout.ranks, count):
        nodes.append(draw(st.integers(0, max(nodes) + 1)))
    workers = Workers(tuple(speeds), tuple(base_loads))
    return layout, workers, draw(st.sampled_from([None, tuple(nodes)]))


@settings(max_examples=300)
@given(
    problems(),
    st.sampled_from([None, 1, 60, 500]),
    st.sampled_from([0.0, 0.001, 0.01, 0.3]),
    st.sampled_from([1, 16, 128]),
)
def test_plans_compute_every_row_once_within_tolerance(problem, window, tolerance, block):
    layout, workers, nodes = problem
    options = {
        "workers": workers,
        "nodes": nodes,
        "kind": AttentionKind(window),
        "balance_tolerance": tolerance,
        "balance_block_size": block,
    }
    plan = balanced(layout, **options)
    check_plan(plan)
    assert plan.nodes == nodes
    assert balanced(layout, **options).tasks.tolist() == plan.tasks.tolist()
    loads = loads_by_row(plan)
    assert loads == loads_of(plan).tolist()
    # A row is not divisible: beyond the tolerance, the slowest worker is off by no more than a few
    # of the largest rows, and the others may be as late as it is: found by a search, where that
    # saved a task below a block.
    ideal = workers.ideal(sum(loads))
    largest_row = min(int(layout.lengths.max(initial=0)), window or 10**9)
    latest = ideal * (1 + tolerance) + 2 * largest_row / min(workers.speed)
    assert workers.finishing(np.array(loads)).max() <= latest + 1e-6 * ideal


# Flows, their sources, and places


@pytest.mark.parametrize(
    ("surplus", "partners", "flows"),
    [
        pytest.param([5.0, -9.0, -6.0, -2.0], {}, {0: [(2, 5.0)]}, id="tightest-sufficient-room"),
        pytest.param(
            [12.0, -9.0, -6.0, -2.0],
            {},
            {0: [(1, 9.0), (2, 3.0)]},
            id="largest-room-first-if-none-suffices",
        ),
        pytest.param(
            [5.0, -9.0, -6.0, -2.0], {0: {0, 1, 3}}, {0: [(1, 5.0)]}, id="partner-with-room"
        ),
        pytest.param(
            [5.0, 4.0, -5.0, -9.0, -4.0],
            {0: {0, 1}, 1: {0, 1}},
            {0: [(3, 5.0)], 1: [(3, 4.0)]},
            id="partners-share",
        ),
    ],
)
def test_flows(surplus, partners, flows):
    assert plan_flows(dict(enumerate(surplus)), partners) == flows


@pytest.mark.parametrize(
    ("stops", "window", "amount", "held_rows", "expected"),
    [
        pytest.param([1000, 30000, 900], None, 1e6, [0, 0, 0], {1: 1e6}, id="little-from-one-task"),
        pytest.param(
            [1000] * 3,
            None,
            750750.0,  # a task has 500,500 pairs
            [0, 0, 0],
            {0: 500500.0, 1: 250250.0},
            id="much-from-several-tasks",
        ),
        pytest.param(
            [5000, 5000], None, 1e5, [0, 5000], {1: 1e5}, id="from-the-task-whose-keys-are-held"
        ),
        pytest.param(
            [1, 1, 1], 1, 0.7572, [0, 0, 0], {0: 0.7572}, id="part-of-a-row-from-one-task"
        ),
    ],
)
def test_sources_of_a_flow(stops, window, amount, held_rows, expected):
    price = Price(16384, 4096, window)
    low = np.zeros(len(stops))
    high = pairs(0, np.array(stops), window).astype(float)
    assert Stock(price, low, high).take(amount, np.array(held_rows)) == expected


def test_what_was_taken_is_not_taken_again():
    """The first task has 200,500 of its 500,500 pairs left, up to row 633. The second task has 640
    rows, and sends fewer bytes for as many pairs.
    """
    high = pairs(0, np.array([1000, 640])).astype(float)
    stock, nothing = Stock(Price(16384, 4096, None), np.zeros(2), high), np.zeros(2, np.int64)
    assert stock.take(3e5, nothing) == {0: 3e5}
    assert stock.take(1e5, nothing) == {1: 1e5}


@pytest.mark.parametrize(
    ("length", "cuts", "forbidden"),
    [
        pytest.param(64, [40, 62], False, id="a-short-rest-ends-the-document"),
        pytest.param(80, [40, 62], True, id="a-short-rest"),
        pytest.param(80, [40, 44], True, id="a-short-part"),
        pytest.param(80, [3, 40], True, id="a-short-beginning"),
        pytest.param(80, [0, 64], False, id="everything-leaves"),
        pytest.param(80, [40, 56], False, id="whole-blocks"),
    ],
)
def test_tasks_smaller_than_a_block_are_forbidden_but_at_the_end_of_a_document(
    length, cuts, forbidden
):
    settings = PlanSettings(2, 128, (AttentionKind(),), balance_block_size=8)
    layout = fixed_layout([[length], [64]])
    problem = Problem(layout, AttentionKind(), settings, Workers.uniform(2), tolerance=np.zeros(2))
    task = CutTask(0, 0, 64, 0, Price(4, 1, None), [(100.0, 1)], [0.0])
    places = np.array(cuts, float)[:, None, None]
    assert (CutCosts(problem, [task]).of(places) >= FORBIDDEN).item() is forbidden


@pytest.mark.parametrize(
    ("rank_lengths", "window", "limit", "node_tasks", "expected"),
    [
        # Node 1 has rows 48 to 64 of document 0, whose 16 rows have 904 pairs. Each of its ranks
        # has room for 500 - 36 = 464 pairs, and rows 48 to 56 have 420.
        (
            [[64], [16], [8], [8]],
            None,
            500.0,
            [(0, 0, 48, 0), (0, 48, 64, 1), (2, 0, 8, 1), (3, 0, 8, 1)],
            [(0, 0, 48, 0), (0, 48, 56, 2), (2, 0, 8, 2), (0, 56, 64, 3), (3, 0, 8, 3)],
        ),
        # Rank 2 has room for 964 pairs, then 836: still more than the 516 of rank 3. Without a
        # window it had 60 left.
        (
            [[64], [16], [8], [64]],
            8,
            1000.0,
            [(0, 0, 48, 0), (0, 48, 64, 1), (1, 0, 16, 1), (2, 0, 8, 1), (3, 0, 64, 1)],
            [(0, 0, 48, 0), (0, 48, 64, 2), (1, 0, 16, 2), (2, 0, 8, 2), (3, 0, 64, 3)],
        ),
    ],
    ids=["all-keys", "window"],
)
def test_rows_of_other_nodes_go_to_ranks_with_room(
    rank_lengths, window, limit, node_tasks, expected
):
    problem = Problem(
        fixed_layout(rank_lengths),
        AttentionKind(window),
        PlanSettings(4, 64, balance_block_size=8),
        Workers.uniform(4),
        np.full(4, 0.01),
    )
    nodes = np.array([0, 0, 1, 1])
    tasks = tasks_of_workers(np.array(node_tasks, TASK), problem, nodes, np.full(4, limit))
    assert tasks.tolist() == expected
