import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_distca.plan import TASK, Plan
from hf_distca.planner.build import local_plan
from hf_distca.planner.cost import RowBytes
from hf_distca.planner.intervals import Intervals
from hf_distca.planner.layout import fixed_layout
from hf_distca.planner.metrics import bytes_moved
from hf_distca.planner.routes import TaskGroup, make_routes, nothing_moves
from hf_distca.planner.routes.forwarded import forward_inside_nodes, hops_by_stage
from hf_distca.planner.routes.moves import Moves, any_key_crosses, any_query_crosses
from tests.planner.carried_out import messages_of, routes_of
from tests.planner.drawn_plans import plans_of_all_kinds

BYTES = RowBytes(q=100, kv=10, o=1000)


def group(q_lens, k_lens):
    return TaskGroup(
        np.array(q_lens, np.int64),
        np.array(k_lens, np.int64),
        np.arange(sum(q_lens), dtype=np.int64),
        np.arange(sum(k_lens), dtype=np.int64),
        np.array([q * (2 * k - q + 1) // 2 for q, k in zip(q_lens, k_lens, strict=True)], np.int64),
    )


def halves(q_lens, k_lens):
    """[(query rows and keys of each task, rows of its queries)] of the first half, and of the second."""
    return [
        (
            list(zip(half.q_lens.tolist(), half.k_lens.tolist(), strict=True)),
            half.q_rows.tolist(),
            half.k_rows.tolist(),
            half.task_pairs.tolist(),
        )
        for half in group(q_lens, k_lens).halves(window=None)
    ]


def test_halves_of_the_pairs():
    assert halves([], []) == [([], [], [], [])] * 2
    assert halves([1], [1]) == [([(1, 1)], [0], [0], [1]), ([], [], [], [])]
    assert halves([2, 2], [2, 2]) == [([(2, 2)], [0, 1], [0, 1], [3]), ([(2, 2)], [2, 3], [2, 3], [3])]


def test_a_task_in_the_middle_is_cut_into_its_first_queries_with_their_keys_and_the_others():
    # 1 + 2 + 3 pairs and 4; the first three queries see three keys, the last one all.
    assert halves([4], [4]) == [([(3, 3)], [0, 1, 2], [0, 1, 2], [6]), ([(1, 4)], [3], [0, 1, 2, 3], [4])]
    # 3, then 6 + 7 + 8 of a task that has five keys before its own rows, then 1: cut where 9 of 25 are done.
    first, second = halves([2, 3, 1], [2, 8, 1])
    assert first == ([(2, 2), (1, 6)], [0, 1, 2], [*range(8)], [3, 6])
    assert second == ([(2, 8), (1, 1)], [3, 4, 5], [*range(2, 11)], [15, 1])
    # Each row sees one key.
    first, second = replace(group([4], [4]), task_pairs=np.array([4])).halves(window=1)
    assert (first.q_lens.tolist(), first.k_lens.tolist()) == ([2], [2])
    assert (second.q_lens.tolist(), second.k_lens.tolist()) == ([2], [4])


@pytest.mark.parametrize(
    ("lengths", "ranks", "tasks", "workers", "expected"),
    [
        ([[2, 3], [4]], None, [(0, 0, 2, 0), (1, 0, 3, 0), (2, 0, 4, 1)], 2, True),
        (
            [[2, 3], [4]],
            None,
            [(0, 0, 2, 0), (1, 0, 1, 0), (1, 1, 3, 0), (2, 0, 4, 1)],
            3,
            True,
        ),  # a task of two parts
        ([[2, 3], [4]], None, [(0, 0, 2, 0), (1, 0, 3, 1), (2, 0, 4, 1)], 2, False),  # a document elsewhere
        ([[2, 3], [4]], None, [(0, 0, 2, 0), (1, 0, 3, 0), (2, 0, 2, 1), (2, 2, 4, 2)], 3, False),  # rows at a server
        ([[2], []], None, [(0, 0, 2, 0)], 2, False),  # a rank without rows
        ([[2, 4]], 2, [(0, 0, 2, 0), (1, 0, 1, 0), (1, 1, 4, 1)], 2, False),  # a document on two ranks
    ],
)
def test_nothing_moves(lengths, ranks, tasks, workers, expected):
    plan = Plan(fixed_layout(lengths, ranks), np.array(sorted(tasks, key=lambda task: task[3]), TASK), workers)
    assert nothing_moves(plan) == expected


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=4),
    st.sampled_from([None, 1, 3]),
)
@settings(deadline=None)
def test_where_nothing_moves_each_rank_computes_its_rows_and_nothing_crosses(placed, window):
    plan = local_plan(fixed_layout(placed), window)
    assert nothing_moves(plan)
    assert not any_key_crosses(plan)
    assert not any_query_crosses(plan)
    for rank, lengths in enumerate(placed):
        routes = make_routes(plan, rank)
        assert routes.local.q_lens.tolist() == routes.local.k_lens.tolist() == lengths
        assert routes.local.q_rows.tolist() == list(range(sum(lengths)))
        assert [len(stage.remote_kv.q_lens) + len(stage.remote_query.q_lens) for stage in routes.stages] == [0]


@settings(max_examples=150)
@given(plans_of_all_kinds(), st.none() | st.integers(1, 12))
def test_routes_carry_the_bytes_that_are_counted(plan, stage_rows):
    if plan.window is None:  # else rows that windows of two stages reach travel twice
        plan = replace(plan, stage_rows=stage_rows)
    routes = routes_of(plan)
    ranks = range(plan.layout.ranks)
    counts = []
    stages = range(len(routes[0].stages))
    for stage, hop in (("queries", 1), *itertools.product(stages, (1, 2))):
        messages = messages_of(routes, stage, hop)
        sent = np.array([mine.send_counts for mine in messages])
        crosses = any(sent[one, other] for one, other in itertools.permutations(ranks, 2))
        assert [mine.crossing for mine in messages] == [crosses] * plan.workers
        np.fill_diagonal(sent, 0)  # a rank's keys that it gathers for itself
        counts.append(sent)
    queries, *keys = counts
    moved = queries * BYTES.q + queries.T * BYTES.o + sum(keys) * BYTES.kv
    assert [moved.sum(1).tolist(), moved.sum(0).tolist()] == bytes_moved(plan, BYTES).tolist()


@given(plans_of_all_kinds(), st.integers(1, 12))
def test_stages_hold_so_many_rows_and_servers_have_one(plan, stage_rows):
    whole, routes = routes_of(plan), routes_of(replace(plan, stage_rows=stage_rows))
    most_received = stage_rows if plan.window is None else max(stage_rows, 2 * plan.window - 1)
    readers = max(np.bincount(plan.nodes or [0])) - 1  # of a row that is forwarded
    for rank, mine in enumerate(routes):
        received = [hop_rows(stage, "recv_counts") for stage in mine.stages]
        total = hop_rows(whole[rank].stages[0], "recv_counts")
        if rank >= plan.layout.ranks:
            assert received == [total] + [0] * (len(received) - 1)
            continue
        assert max(received) <= most_received
        if plan.window is None:
            assert sum(received) == total
            sent = [hop_rows(stage, "send_counts", plan.layout.ranks) for stage in mine.stages]
            assert max(sent) <= max(stage_rows, readers * (plan.nodes is not None))


def hop_rows(stage, counts, workers=None):
    """K/V rows of a stage in both hops: sent to so many workers, or received."""
    return sum(int(getattr(messages, counts)[:workers].sum()) for messages in (stage.keys, stage.forwarded))


def test_rows_that_go_the_same_way_are_spread_over_the_stages():
    # A document of 8 · 16 rows; each of two nodes of four ranks reads all that comes before its rows.
    tasks = np.array([(0, 16 * rank, 16 * rank + 16, rank) for rank in range(8)], TASK)
    plan = Plan(fixed_layout([[128]], 8), tasks, 8, nodes=(0, 0, 0, 0, 1, 1, 1, 1))
    *_, last = routes_of(plan)
    # Rows 64 to 111 come directly from its own node; a quarter of the others cross to it, and the rest to its peers.
    assert last.stages[0].keys.recv_counts.tolist() == [0, 0, 0, 16, 16, 16, 16, 0]
    assert last.stages[0].forwarded.recv_counts.tolist() == [0, 0, 0, 0, 16, 16, 16, 0]
    *_, last = routes_of(replace(plan, stage_rows=30))
    assert [hop_rows(stage, "recv_counts") for stage in last.stages] == [28, 28, 28, 28]


def test_of_all_that_goes_from_rank_to_rank_as_much_goes_in_each_stage():
    # One document of 4 · 8 rows, a quarter on each rank, which computes its own rows.
    layout = fixed_layout([[32]], 4)
    tasks = np.array([(0, 8 * rank, 8 * rank + 8, rank) for rank in range(4)], TASK)
    first, *_, last = routes_of(Plan(layout, tasks, 4, stage_rows=12))
    assert [stage.keys.send_counts.tolist() for stage in first.stages] == [[0, 4, 4, 4], [0, 4, 4, 4]]
    assert [stage.keys.recv_counts.tolist() for stage in last.stages] == [[4, 4, 4, 0], [4, 4, 4, 0]]
    # Where there is no room for all, the next rank comes before others.
    first, *_ = routes_of(Plan(layout, tasks, 4, stage_rows=8))
    assert [stage.keys.send_counts.tolist() for stage in first.stages] == [[0, 3, 3, 2], [0, 3, 3, 2], [0, 2, 2, 4]]


def crossing(rows, readers):
    """Moves of the same rows of a document on rank 0 to so many ranks."""
    document = Intervals(np.zeros(readers, np.int64), np.zeros(readers, np.int64), np.full(readers, rows))
    return Moves(document, np.zeros(readers, np.int64), 1 + np.arange(readers), np.zeros(readers, np.int64))


def ways(moves):
    """[(source, target, first row, row behind the last)]."""
    columns = (moves.source, moves.target, moves.rows.start, moves.rows.stop)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@pytest.mark.parametrize(
    ("rows", "first", "second"),
    [
        # Half and half: both readers receive and send as much.
        (257, [(0, 1, 0, 129), (0, 2, 129, 257)], [(1, 2, 0, 129), (2, 1, 129, 257)]),
        (255, [(0, 1, 0, 255)], [(1, 2, 0, 255)]),  # less than two blocks stay together
    ],
)
def test_rows_that_two_ranks_read_cross_to_both_of_them(rows, first, second):
    hops = forward_inside_nodes(crossing(rows, 2), (0, 1, 1), 3)
    assert (ways(hops.first), ways(hops.second)) == (first, second)


def test_a_row_goes_on_to_all_its_readers_in_its_stage_even_if_they_are_more_than_the_rows_of_a_stage():
    hops = forward_inside_nodes(crossing(2, 4), (0, 1, 1, 1, 1), 5)
    stages = hops_by_stage(hops, 1, 5)
    assert [ways(stage.first) for stage in stages] == [[(0, 1, 0, 1)], [(0, 1, 1, 2)]]
    assert [ways(stage.second) for stage in stages] == [
        [(1, 2, 0, 1), (1, 3, 0, 1), (1, 4, 0, 1)],
        [(1, 2, 1, 2), (1, 3, 1, 2), (1, 4, 1, 2)],
    ]


def test_rows_are_forwarded_whatever_the_number_of_documents_and_nodes():
    nodes = [rank // 8 for rank in range(4096)]
    ends = {}
    for document in (0, 50_000):  # times nodes, and behind them rows: more than 63 bits
        rows = Intervals(np.full(4, document), np.zeros(4, np.int64), np.full(4, 100))
        moves = Moves(rows, np.zeros(4, np.int64), np.array([8, 9, 4088, 4089]), np.zeros(4, np.int64))
        hops = forward_inside_nodes(moves, nodes, 4096)
        ends[document] = [
            (each.source.tolist(), each.target.tolist(), each.rows.start.tolist(), each.rows.stop.tolist())
            for each in (hops.first, hops.second)
        ]
    assert ends[0] == ends[50_000]
    assert sum(ends[0][0][3]) - sum(ends[0][0][2]) == 2 * 100
