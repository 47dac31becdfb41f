from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_distca.plan import TASK, AttentionKind
from hf_distca.planner.balance import balance, ideals_inside, layout_of_nodes, tasks_of_workers, workers_of_nodes
from hf_distca.planner.cost import RowBytes, Workers
from hf_distca.planner.layout import fixed_layout
from hf_distca.planner.metrics import BETWEEN, bytes_by_link, loads_of
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.nodes import node_sizes, nodes_of
from hf_distca.planner.servers import plan_with_servers
from hf_distca.planner.settings import PlanSettings
from hf_distca.planner.shifted import ShiftedRows
from tests.planner.plan_checks import check_plan
from tests.planner.test_routes_carried_out import check


def test_node_sizes():
    assert node_sizes(8, 4) == (4, 4)
    assert node_sizes(20, (8, 8, 4)) == (8, 8, 4)
    assert nodes_of((2, 1, 3)) == (0, 0, 1, 2, 2, 2)


@pytest.mark.parametrize(
    ("ranks", "per_node", "message"),
    [
        (20, 8, "ranks_per_node=8 does not divide the 20 ranks that train together; give"),
        (4, 0, "ranks_per_node=0 does not divide the 4 ranks"),
        (20, (8, 8), "ranks_per_node=8,8 adds up to 16 ranks, but 20 ranks train"),
        (4, (4, 0), "ranks_per_node=4,0 adds up to 4 ranks"),
        (4, (4, 2), "ranks_per_node=4,2 adds up to 6 ranks"),
        (4, (), "ranks_per_node= adds up to 0 ranks"),
    ],
)
def test_node_sizes_that_do_not_fit(ranks, per_node, message):
    with pytest.raises(ValueError, match=message):
        node_sizes(ranks, per_node)


def test_nodes_hold_what_their_ranks_hold():
    layout = fixed_layout([[4], [6, 2], [3]], 3)
    layout = layout_of_nodes(layout, (0, 0, 1))
    assert layout.segments.tolist() == [(0, 0, 4, 0, 0), (1, 0, 6, 0, 4), (2, 0, 2, 0, 10), (3, 0, 3, 1, 0)]
    layout = layout_of_nodes(fixed_layout([[9, 3]], 4), (0, 0, 1, 1))  # 3 rows on each rank
    assert layout.segments.tolist() == [(0, 0, 6, 0, 0), (0, 6, 9, 1, 0), (1, 0, 3, 1, 3)]


def test_nodes_are_as_fast_as_their_workers_and_begin_as_late():
    workers = Workers((1.0, 3.0, 2.0), (4.0, 0.0, 5.0))
    assert workers_of_nodes(workers, (0, 0, 1)) == Workers((4.0, 2.0), (1.0, 5.0))
    ideal = ideals_inside(np.array([20, 0, 6]), workers, (0, 0, 1))
    assert ideal.tolist() == [6.0, 6.0, 8.0]  # (20 + 1 · 4) / 4, and 5 + 6 / 2


def test_rows_of_other_nodes_go_to_those_with_room():
    layout = fixed_layout([[64], [16], [8], [8]])
    rows = ShiftedRows.of(layout, None, 0, 8)
    # Node 1 has rows 48 to 64 of document 0, whose 16 rows have 904 pairs.
    of_nodes = np.array([(0, 0, 48, 0), (1, 0, 16, 0), (0, 48, 64, 1), (2, 0, 8, 1), (3, 0, 8, 1)], TASK)
    tasks = tasks_of_workers(of_nodes, rows, Workers.uniform(4), (0, 0, 1, 1), limit=500.0, block=8)
    # Each has room for 500 - 36 = 464 pairs, and rows 48 to 56 have 420.
    assert tasks.tolist() == [(0, 0, 48, 0), (1, 0, 16, 1), (0, 48, 56, 2), (2, 0, 8, 2), (0, 56, 64, 3), (3, 0, 8, 3)]


def test_rows_that_see_a_window_take_as_much_room_as_they_have_pairs():
    rows = ShiftedRows.of(fixed_layout([[64], [16], [8], [64]]), 8, 0, 8)
    of_nodes = np.array([(0, 0, 48, 0), (0, 48, 64, 1), (1, 0, 16, 1), (2, 0, 8, 1), (3, 0, 64, 1)], TASK)
    tasks = tasks_of_workers(of_nodes, rows, Workers.uniform(4), (0, 0, 1, 1), limit=1000.0, block=8)
    # Rank 2 has room for 964 pairs, then 836: still more than the 516 of rank 3. Without a window it had 60 left.
    assert tasks.tolist() == [(0, 0, 48, 0), (0, 48, 64, 2), (1, 0, 16, 2), (2, 0, 8, 2), (3, 0, 64, 3)]


def test_a_surplus_stays_on_its_node():
    # Both nodes have the same to do, and on each one rank has all of it.
    layout = fixed_layout([[4096], [16] * 8, [16] * 8, [4096]])
    plan = balance(layout, nodes=(0, 0, 1, 1))
    loads = loads_of(plan)
    assert plan.nodes == (0, 0, 1, 1)
    assert loads.max() <= 1.01 * loads.mean()
    assert bytes_by_link(plan, RowBytes(), plan.nodes)[BETWEEN].sum() == 0


def test_keys_cross_to_a_node_once():
    layout = fixed_layout([[8192], [16], [16], [16]])
    nodes = (0, 0, 1, 1)
    plan = balance(layout, nodes=nodes)
    there = plan.tasks[plan.tasks["worker"] >= 2]
    there = there[there["document"] == 0]
    moved = bytes_by_link(plan, RowBytes(q=1, kv=1000000, o=1), nodes)
    assert len(there) >= 2
    assert moved[BETWEEN, 0].sum() // 1000000 == there["stop"].max()


@pytest.mark.parametrize(
    ("nodes", "workers"),
    [((0, 0, 1), 4), ((1, 1, 0, 0), 4), ((0, 0, 2, 2), 4), ((0, 1, 0, 1), 4), ((0, 0, 1, 1, 3), 5)],
)
def test_nodes_that_are_not_numbered_in_order_are_refused(nodes, workers):
    with pytest.raises(ValueError, match=f"nodes must have one number per worker, {workers} in all"):
        balance(fixed_layout([[8]] * 4), workers=Workers.uniform(workers), nodes=nodes)


NODES = (8, 8, 4)
BLOCK, TOLERANCE = 4, 0.1
DOCUMENTS = st.lists(st.integers(1, 24) | st.sampled_from([60, 110]), min_size=1, max_size=12)


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("layout", ["joint", "fixed"])
@settings(max_examples=12)
@given(
    lengths=DOCUMENTS,
    server_nodes=st.lists(st.sampled_from([None, 0, 2]), max_size=2),
    ping_pong=st.booleans(),
    stage_rows=st.sampled_from([None, 12]),
)
def test_plans_of_uneven_nodes(layout, window, lengths, server_nodes, ping_pong, stage_rows):
    ranks, kind = sum(NODES), AttentionKind(window)
    tokens_per_rank = -(-sum(lengths) // ranks)
    planned = PlanSettings(
        ranks,
        tokens_per_rank,
        (kind,),
        document_layout=layout,
        balance_tolerance=TOLERANCE,
        balance_block_size=BLOCK,
        ping_pong=ping_pong,
        ranks_per_node=NODES,
    )
    micro_batch = plan_micro_batch(lengths, planned)
    assert micro_batch.tokens.max() == tokens_per_rank
    assert micro_batch.tokens.min() == sum(lengths) // ranks
    workers = Workers.uniform(ranks + len(server_nodes))
    if server_nodes:
        micro_batch = plan_with_servers(micro_batch, workers, planned, ranks_serve=True, server_nodes=server_nodes)
    for nano in micro_batch.nano_batches:
        plan = nano.plans[kind]
        assert plan.nodes[:ranks] == (0,) * 8 + (1,) * 8 + (2,) * 4
        of_servers = [3 if node is None else node for node in server_nodes]
        if of_servers == [3, 3]:  # each on one of its own
            of_servers = [3, 4]
        assert list(plan.nodes[ranks:]) == of_servers
        check_plan(plan)
        loads = loads_of(plan)
        most_of_a_row = min(int(nano.layout.lengths.max()), window or 10**9)
        assert loads.max() <= loads.mean() * (1 + TOLERANCE) + 2 * most_of_a_row
        # Every row sees its keys once, and a key crosses to a node once: with a window, once in a stage.
        check(replace(plan, stage_rows=stage_rows))
