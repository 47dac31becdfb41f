from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_distca.plan import SEGMENT, TASK, Layout, Plan
from hf_distca.planner.layout import fixed_layout
from tests.planner.carried_out import carried_out, exchange, local_rows, routes_of
from tests.planner.drawn_plans import plans_of_all_kinds


def check(plan):
    """Every query sees exactly the keys that it must, each once, and every key gets back exactly its queries."""
    seen, seen_by = carried_out(plan)
    for rank in range(plan.workers):
        local = local_rows(plan, rank)
        wanted_keys, wanted_queries = {}, {}
        for number, (document, row) in local.items():
            reach = plan.window or row + 1
            wanted_keys[number] = [(document, key) for key in range(max(row - reach + 1, 0), row + 1)]
            last = plan.layout.lengths[document] if plan.window is None else row + plan.window
            queries = range(row, min(last, plan.layout.lengths[document]))
            wanted_queries[number] = [(document, query) for query in queries]
        assert {number: sorted(keys) for number, keys in seen[rank].items()} == wanted_keys
        assert {number: sorted(queries) for number, queries in seen_by[rank].items()} == wanted_queries


@settings(max_examples=500)
@given(plans_of_all_kinds(), st.none() | st.integers(1, 12))
def test_every_query_sees_its_keys_once_and_results_go_home(plan, stage_rows):
    check(replace(plan, stage_rows=stage_rows))


def test_a_document_on_two_ranks_and_a_server():
    # Rank 0 holds rows 0 and 1, then 4; rank 1 holds 2 and 3. Rank 0 computes 0, 1 and 2, the server 3 and 4.
    segments = np.array([(0, 0, 2, 0, 0), (0, 4, 5, 0, 2), (0, 2, 4, 1, 0)], SEGMENT)
    layout = Layout(np.array([5]), segments, 2)
    plan = Plan(layout, np.array([(0, 0, 3, 0), (0, 3, 5, 2)], TASK), 3)
    check(plan)
    routes = routes_of(plan)
    local = [local_rows(plan, worker) for worker in range(3)]
    queries, keys = (exchange(routes, kind, local) for kind in ("queries", 0))
    assert queries == [{0: (1, 0, (0, 2))}, {}, {0: (0, 2, (0, 4)), 1: (1, 1, (0, 3))}]
    # The keys of row 2 are rows 0 to 2; its worker gathers its own two.
    assert keys[0] == {0: (0, 0, (0, 0)), 1: (0, 1, (0, 1)), 2: (1, 0, (0, 2))}
    assert keys[2] == {
        0: (0, 0, (0, 0)), 1: (0, 1, (0, 1)), 2: (0, 2, (0, 4)), 3: (1, 0, (0, 2)), 4: (1, 1, (0, 3))
    }  # fmt: skip
    assert [
        row.tolist() for row in (routes[2].stages[0].remote_query.q_lens, routes[2].stages[0].remote_query.k_lens)
    ] == [
        [1, 1],
        [5, 4],
    ]
    assert [mine.stages[0].remote_query.pairs for mine in routes] == [3, 0, 9]
    assert [mine.local.pairs for mine in routes] == [3, 0, 0]


def test_a_window_across_segments():
    # Row 3 reads rows 2 and 3: of two segments of one rank, so both are gathered.
    segments = np.array([(0, 0, 3, 0, 0), (0, 3, 6, 1, 0)], SEGMENT)
    plan = Plan(Layout(np.array([6]), segments, 2), np.array([(0, 0, 3, 0), (0, 3, 4, 1), (0, 4, 6, 0)], TASK), 2, 2)
    check(plan)
    first, second = routes_of(plan)
    assert (first.local.pairs, first.stages[0].remote_kv.pairs, first.stages[0].remote_query.pairs) == (5, 0, 4)
    assert (second.local.pairs, second.stages[0].remote_kv.pairs, second.stages[0].remote_query.pairs) == (0, 2, 0)
    assert second.stages[0].remote_kv.k_rows.tolist() == [0, 1]
    assert second.stages[0].keys.recv_counts.tolist() == [1, 1]


def test_rows_that_are_passed_on():
    # Each rank of two nodes of two computes its own two rows of a document of eight.
    tasks = np.array([(0, 2 * rank, 2 * rank + 2, rank) for rank in range(4)], TASK)
    plan = Plan(fixed_layout([[8]], 4), tasks, 4, nodes=(0, 0, 1, 1))
    check(plan)
    routes = routes_of(plan)
    (first,), (second,), (third,), (fourth,) = (mine.stages for mine in routes)
    # Ranks 2 and 3 read rows 0 to 3, two from each of ranks 0 and 1: they cross to one of them, and are passed on to
    # the other. Rows 4 and 5 go from rank 2 to rank 3 directly.
    assert [mine.stages[0].keys.send_counts.tolist() for mine in routes] == [
        [0, 2, 2, 0],
        [0, 0, 0, 2],
        [0, 0, 0, 2],
        [0, 0, 0, 0],
    ]
    assert [mine.stages[0].forwarded.send_counts.tolist() for mine in routes] == [
        [0, 0, 0, 0],
        [0, 0, 0, 0],
        [0, 0, 0, 2],
        [0, 0, 2, 0],
    ]
    assert (third.forwarded.send_rows.tolist(), fourth.forwarded.send_rows.tolist()) == ([0, 1], [0, 1])
    # Rank 2 has rows 0 and 1, then 2 and 3 that rank 3 has passed on; rank 3 rows 2 to 5, then 0 and 1.
    local = [local_rows(plan, worker) for worker in range(4)]
    came = exchange(routes, 0, local)
    assert [[row for *_, (_, row) in came[rank].values()] for rank in (2, 3)] == [[0, 1, 2, 3], [2, 3, 4, 5, 0, 1]]
    assert first.keys.crossing
    assert first.forwarded.crossing
    assert second.remote_kv.k_rows.tolist() == [0, 1]
    assert sorted(fourth.remote_kv.k_rows.tolist()) == [0, 1, 2, 3, 4, 5]


def test_rows_of_a_server_come_in_the_first_stage_beside_others_that_are_passed_on():
    # As above, but a server of the second node computes the last row.
    tasks = np.array([(0, 0, 2, 0), (0, 2, 4, 1), (0, 4, 6, 2), (0, 6, 7, 3), (0, 7, 8, 4)], TASK)
    plan = Plan(fixed_layout([[8]], 4), tasks, 5, stage_rows=2, nodes=(0, 0, 1, 1, 1))
    check(plan)
    *ranks, server = routes_of(plan)
    stages = len(server.stages)
    assert stages > 2
    assert [stage.keys.recv_counts.tolist() for stage in server.stages] == [[2, 2, 2, 2, 0], *[[0] * 5] * (stages - 1)]
    assert [sum(int(stage.forwarded.recv_counts.sum()) for stage in rank.stages) for rank in ranks] == [0, 0, 2, 2]
