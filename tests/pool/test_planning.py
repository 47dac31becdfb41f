from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_distca.plan import TASK, AttentionKind, Plan
from hf_distca.plan.cost import RowBytes, Workers
from hf_distca.plan.figures import bytes_by_link, bytes_moved, exchange_figures, loads_of
from hf_distca.plan.stages import rows_by_stage
from hf_distca.planner.layout import fixed_layout
from hf_distca.planner.micro_batch import plan_micro_batch, plan_placed
from hf_distca.planner.settings import PlanSettings
from hf_distca.pool import planning
from hf_distca.pool.planning import (
    plan_lost,
    plan_with_servers,
    tasks_of_ranks,
    without_ranks,
)
from hf_distca.predict.counts import count_plan
from tests.planner.carried_out import carried_out, keys_of, plans_of_all_kinds
from tests.planner.plan_checks import check_plan, rows_of

ROWS = [[3000, 500], [700] * 5]
SETTINGS = PlanSettings(ranks=2, rows_per_rank=4096, balance_block_size=16)


def with_servers(rows, workers, ranks_serve=True):
    plan = plan_with_servers(
        plan_placed(rows, SETTINGS), workers, SETTINGS, ranks_serve=ranks_serve
    )
    (nano,) = plan.nano_batches
    check_plan(nano.plans[AttentionKind()])
    return nano.plans[AttentionKind()]


def test_ranks_and_servers_finish_together():
    workers = Workers((1.0, 1.0, 2.0), (1e6, 1e6, 0.0))
    loads = loads_of(with_servers(ROWS, workers))
    assert workers.finishing(loads).max() <= 1.01 * workers.ideal(int(loads.sum()))
    assert (loads > 0).all()
    with pytest.raises(ValueError, match="2 workers for 2 ranks leave no server"):
        with_servers(ROWS, Workers.uniform(2))


@given(
    st.sampled_from([(1.0,), (1.0, 3.0)]),
    st.just(ROWS)
    | st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=2, max_size=2),
)
def test_ranks_that_do_not_serve_compute_nothing_however_small(speeds, rows):
    workers = Workers((1.0, 1.0, *speeds), (0.0,) * (2 + len(speeds)))
    loads = loads_of(with_servers(rows, workers, ranks_serve=False))
    assert loads[:2].tolist() == [0, 0]
    if rows is ROWS:
        assert (loads[2:] / speeds).max() <= 1.02 * sum(loads) / sum(speeds)
    # What is left at ranks goes to the server that finishes first. Alone, server 2 would need 10
    # units for either; server 3 has 36 / 8 and needs 10 / 8 for each.
    plan = Plan(
        fixed_layout([[8, 4], [4]]), np.array([(1, 0, 4, 0), (2, 0, 4, 1), (0, 0, 8, 3)], TASK), 4
    )
    assert without_ranks(plan, (1, 1, 1, 8)).tasks.tolist() == [
        (0, 0, 8, 3),
        (1, 0, 4, 3),
        (2, 0, 4, 3),
    ]
    assert without_ranks(plan, (1, 1, 1, 2)).tasks.tolist() == [
        (1, 0, 4, 2),
        (2, 0, 4, 2),
        (0, 0, 8, 3),
    ]


@pytest.mark.parametrize("ranks_serve", [True, False])
def test_the_summary_counts_both_nano_batches(ranks_serve):
    settings = replace(SETTINGS, row_overhead=32, ping_pong=True)
    before = plan_micro_batch([1500, 1200, 900, 700, 400, 300], settings)
    workers = Workers((1.0, 1.0, 2.0, 1.0), (2e5, 2e5, 0.0, 0.0))
    plan = plan_with_servers(before, workers, settings, ranks_serve=ranks_serve)
    assert [nano.layout for nano in plan.nano_batches] == [
        nano.layout for nano in before.nano_batches
    ]
    plans = [only for nano in plan.nano_batches for only in nano.plans.values()]
    assert len(plans) == 2
    moved = np.sum([bytes_moved(kind_plan, RowBytes()) for kind_plan in plans], axis=0)
    assert plan.summary.exchange.bytes_bottleneck == moved.max()
    assert plan.summary.packed_max_over_mean == before.summary.packed_max_over_mean
    # Every rank has its base load once for each nano-batch.
    cost = np.sum([loads_of(kind_plan, 32) for kind_plan in plans], axis=0)
    finishing = (np.array([4e5, 4e5, 0, 0]) + cost / [1, 1, 2, 1])[0 if ranks_serve else 2 :]
    assert plan.summary.max_over_mean == pytest.approx(finishing.max() / finishing.mean())
    assert 1 < plan.summary.max_over_mean < 1.02


@pytest.mark.parametrize(
    ("documents", "ping_pong", "stages"),
    [
        # Rank 1 reads 8192 rows of the document from rank 0.
        pytest.param([16384], False, [4], id="one-nano-batch"),
        pytest.param([8192, 8192], True, [1, 1], id="two-nano-batches"),
    ],
)
def test_rows_of_a_nano_batch_alone_travel_in_stages_beside_servers_too(
    documents, ping_pong, stages
):
    """The ranks compute all but a thousandth."""
    settings = PlanSettings(2, 8192, document_layout="fixed", ping_pong=ping_pong)
    workers = Workers((1.0, 1.0, 1e-3), (0.0,) * 3)
    plan = plan_micro_batch(documents, settings)
    plan = plan_with_servers(plan, workers, settings, ranks_serve=True)
    plans = [nano.plans[settings.dominant_kind] for nano in plan.nano_batches]
    assert [len(rows_by_stage(nano_plan)) for nano_plan in plans] == stages


def test_a_repair_has_stages_of_its_own():
    # Rank 1 computes what the server owes it, with keys of rank 0.
    tasks = np.array([(0, 0, 8192, 0), (0, 8192, 16384, 2)], TASK)
    lost = Plan(fixed_layout([[16384]], 2), tasks, 3)
    repair = plan_lost(lost, [2], AttentionKind(), PlanSettings(2, 8192), 1e15)
    assert repair.tasks.tolist() == [(0, 8192, 16384, 1)]
    assert len(rows_by_stage(repair)) == 4


# Rows of 32 bytes of Q, of O, and of K and V together.
KIND = AttentionKind(q_heads=2, kv_heads=1, dim_qk=8, dim_v=8)
SLOW = 1e-3
"""Pairs per second of ranks beside which bytes cost nothing."""
FAST = 1e15
"""Pairs per second of ranks whose pairs cost nothing."""


def settings_of(ranks, block, **others):
    return PlanSettings(ranks, 64, (KIND,), balance_block_size=block, **others)


def seconds_of(plan, kind, settings, pairs_per_second):
    counted = count_plan(plan, kind, settings.bytes_per_value, settings.node_of_ranks)
    return planning.seconds_with_servers(plan, counted, settings, pairs_per_second)


def test_the_summary_is_of_the_costliest_kind_of_attention_and_of_links_inside_nodes_and_between():
    settings = replace(
        settings_of(4, 2, row_overhead=3, ranks_per_node=2), kinds=(KIND, replace(KIND, window=8))
    )
    before, workers, nodes = (
        plan_placed([[40], [8], [8], [8]], settings),
        Workers.uniform(5),
        (0, 0, 1, 1, 1),
    )
    plan = plan_with_servers(before, workers, settings, ranks_serve=True, server_nodes=[1])
    full, loads = plan.nano_batches[0].plans[KIND], np.array([226, 225, 233, 202, 234])
    assert (full.nodes, loads_of(full, 3).tolist()) == (nodes, loads.tolist())
    assert plan.summary.max_over_mean == pytest.approx(loads.max() / loads.mean())
    assert plan.summary.exchange == exchange_figures(
        bytes_by_link(full, settings.row_bytes(KIND), nodes), nodes
    )
    assert (
        plan.summary.exchange.bytes_within_nodes,
        plan.summary.exchange.bytes_between_nodes,
    ) == (2304, 3168)


@pytest.mark.parametrize("nodes", [None, (0, 0, 1, 1, 2)])
def test_a_document_s_end_is_spread_over_the_ranks_or_inside_nodes_or_stays(nodes):
    # Rank 0 holds a document of 16 rows, each of the others one row; the server computes rows 8 to
    # 15.
    tasks = np.array([(0, 0, 8, 0), (1, 0, 1, 1), (2, 0, 1, 2), (3, 0, 1, 3), (0, 8, 16, 4)], TASK)
    plan = Plan(fixed_layout([[16], [1], [1], [1]]), tasks, 5, nodes=nodes)
    settings = settings_of(4, 2, ranks_per_node=2 if nodes else 1)
    over_all, inside, local = (
        plan_lost(plan, [4], KIND, settings, rate) for rate in (SLOW, 1e10, FAST)
    )
    assert over_all.tasks.tolist() == [
        (0, 14, 16, 0),
        (0, 8, 10, 1),
        (0, 10, 12, 2),
        (0, 12, 14, 3),
    ]
    assert local.tasks.tolist() == [(0, 8, 16, 0)]
    assert over_all.nodes == inside.nodes == local.nodes == (nodes and nodes[:4])
    if nodes:
        assert inside.tasks.tolist() == [(0, 12, 16, 0), (0, 8, 12, 1)]


@pytest.mark.parametrize(("ranks_per_node", "bandwidth"), [(1, 50e9), (2, 450e9)])
def test_seconds_are_those_of_the_busiest_rank_and_of_its_bytes(ranks_per_node, bandwidth):
    # Rank 1 computes rows 2 and 3 of a document of rank 0: 7 pairs, and 3 pairs are computed
    # locally.
    tasks = np.array([(0, 0, 2, 0), (0, 2, 4, 1)], TASK)
    plan = Plan(fixed_layout([[4], []]), tasks, 2)
    settings = settings_of(2, 2, row_overhead=5, ranks_per_node=ranks_per_node)
    # Forward: 2 rows of Q and 4 of K and V are sent. Backward: Q, O and dO, K and V are sent.
    expected = (7 + 2 * 5) / 1e10 + (192 + 320) / bandwidth
    assert seconds_of(plan, KIND, settings, 1e10) == pytest.approx(expected)


@pytest.mark.parametrize(("buffer_bytes", "stage_rows"), [(4 * 32, 4), (1, 1), (1 << 25, None)])
def test_a_repair_exchanges_in_the_stages_that_it_needs(buffer_bytes, stage_rows):
    # Rank 1 holds rows 8 to 15 and reads rows 0 to 7 of rank 0 for them, which a buffer of 4 rows
    # takes in two stages. In the plan ranks exchanged nothing.
    plan = Plan(fixed_layout([[16]], 2), np.array([(0, 0, 8, 0), (0, 8, 16, 2)], TASK), 3)
    settings = settings_of(2, 8, exchange_buffer_bytes=buffer_bytes)
    repair = plan_lost(plan, [2], KIND, settings, FAST)
    assert repair.tasks.tolist() == [(0, 8, 16, 1)]
    assert repair.stage_rows == stage_rows


@given(
    plans_of_all_kinds(),
    st.integers(1, 4),
    st.sampled_from([0, 7]),
    st.integers(1, 12),
    st.sampled_from([SLOW, 1e10, FAST]),
)
def test_every_lost_row_is_computed_once_and_the_busiest_rank_is_never_later_than_local(
    plan, block, row_overhead, buffer_rows, pairs_per_second
):
    ranks, kind = plan.layout.ranks, replace(KIND, window=plan.window)
    options = {"row_overhead": row_overhead, "exchange_buffer_bytes": 32 * buffer_rows}
    if plan.nodes is not None:  # those of the ranks are 0, 1, 2, …
        nodes = np.unique(plan.nodes, return_inverse=True)[1]
        plan = replace(plan, nodes=tuple(nodes.tolist()))
        options["ranks_per_node"] = tuple(np.bincount(nodes[:ranks]).tolist())
    settings = replace(settings_of(ranks, block, **options), kinds=(kind,))
    lost = range(ranks, plan.workers)
    repair, local = (
        plan_lost(plan, lost, kind, settings, pairs_per_second),
        tasks_of_ranks(plan, lost),
    )
    rows_of_ranks = [rows_of(plan.layout.of_rank(rank)) for rank in range(ranks)]
    for rank in range(ranks):
        assert set(rows_of(local.tasks[local.tasks["worker"] == rank])) <= set(rows_of_ranks[rank])
    lost_rows = sorted(rows_of(plan.tasks[plan.tasks["worker"] >= ranks]))
    assert sorted(rows_of(repair.tasks)) == sorted(rows_of(local.tasks)) == lost_rows
    assert seconds_of(repair, kind, settings, pairs_per_second) <= seconds_of(
        local, kind, settings, pairs_per_second
    )
    tasks = repair.tasks.tolist()
    assert tasks == sorted(tasks, key=lambda task: (task[3], task[0], task[1]))
    borders = {(document, row) for document, *span, _ in local.tasks.tolist() for row in span}
    assert {
        row % block
        for document, *span, _ in tasks
        for row in span
        if (document, row) not in borders
    } <= {0}
    # Carried out, each of these rows sees its keys once, and other rows see nothing.
    seen, _ = carried_out(repair)
    by_row = {
        rows_of_ranks[rank][number]: Counter(keys)
        for rank in range(ranks)
        for number, keys in seen[rank].items()
    }
    assert by_row == {
        (document, row): Counter(keys_of(plan, document, row)) for document, row in lost_rows
    }
