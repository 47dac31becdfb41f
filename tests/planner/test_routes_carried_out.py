from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_distca.plan import TASK, Plan
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


def test_rows_that_are_forwarded():
    # Each rank of two nodes of two computes its own two rows of a document of eight.
    tasks = np.array([(0, 2 * rank, 2 * rank + 2, rank) for rank in range(4)], TASK)
    plan = Plan(fixed_layout([[8]], 4), tasks, 4, nodes=(0, 0, 1, 1))
    check(plan)
    routes = routes_of(plan)
    (first,), (second,), (third,), (fourth,) = (mine.stages for mine in routes)
    # Ranks 2 and 3 read rows 0 to 3, two from each of ranks 0 and 1: they cross to one of them, and are forwarded to
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
    # Rank 2 has rows 0 and 1, then 2 and 3 that rank 3 has forwarded; rank 3 rows 2 to 5, then 0 and 1.
    local = [local_rows(plan, worker) for worker in range(4)]
    came = exchange(routes, 0, local)
    assert [[row for *_, (_, row) in came[rank].values()] for rank in (2, 3)] == [[0, 1, 2, 3], [2, 3, 4, 5, 0, 1]]
    assert first.keys.crossing
    assert first.forwarded.crossing
    assert second.remote_kv.k_rows.tolist() == [0, 1]
    assert sorted(fourth.remote_kv.k_rows.tolist()) == [0, 1, 2, 3, 4, 5]
