from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from hf_distca.plan import TASK, ExchangeFigures, Plan
from hf_distca.planner.cost import RowBytes
from hf_distca.planner.layout import fixed_layout
from hf_distca.planner.metrics import (
    BETWEEN,
    WITHIN,
    bytes_by_link,
    bytes_moved,
    exchange_figures,
    link_seconds,
    loads_of,
    query_rows_of,
)
from tests.planner.carried_out import drawn_plans
from tests.planner.plan_checks import bytes_by_row, loads_by_row

BYTES = RowBytes(q=100, kv=10, o=1000)


def plan_of(rows, tasks, workers, window=None, ranks=None):
    return Plan(fixed_layout(rows, ranks), np.array(tasks, TASK), workers, window)


def test_one_moved_task():
    # Rows 2 and 3 of a document of 4 go to rank 1, which needs K/V rows 0 to 3 for them.
    plan = plan_of([[4], [1]], [(0, 0, 2, 0), (0, 2, 4, 1), (1, 0, 1, 1)], 2)
    assert bytes_moved(plan, BYTES).tolist() == [[2 * 100 + 4 * 10, 2 * 1000], [2 * 1000, 2 * 100 + 4 * 10]]


@settings(max_examples=100)
@given(drawn_plans())
def test_bytes_and_loads_are_those_counted_row_by_row(plan):
    assert loads_of(plan).tolist() == loads_by_row(plan)
    assert query_rows_of(plan).sum() == plan.layout.lengths.sum()
    assert tuple(bytes_moved(plan, BYTES).tolist()) == bytes_by_row(plan, BYTES)


def test_bytes_within_and_between_nodes():
    # Ranks 0 and 1 are one node, 2 and 3 the other. Rank 0 holds 4 rows; ranks 2 and 3 compute the last two.
    plan = plan_of([[4], [], [], []], [(0, 0, 2, 0), (0, 2, 3, 2), (0, 3, 4, 3)], 4)
    nodes = (0, 0, 1, 1)
    moved = bytes_by_link(plan, BYTES, nodes)
    assert moved[WITHIN].tolist() == [[0] * 4, [0] * 4]
    assert moved[BETWEEN].tolist() == [[200 + 30 + 40, 0, 1000, 1000], [2000, 0, 100 + 30, 100 + 40]]
    # Rows 0 to 2 are read by both: they go to rank 2 once, which forwards them.
    forwarded = bytes_by_link(replace(plan, nodes=nodes), BYTES, nodes)
    assert forwarded[WITHIN].tolist() == [[0, 0, 30, 0], [0, 0, 0, 30]]
    assert forwarded[BETWEEN].tolist() == [[200 + 40, 0, 1000, 1000], [2000, 0, 100 + 30, 100 + 10]]
    # 30 bytes at 1e-9 GB/s, 2000 at 100 times as much.
    assert link_seconds(forwarded, 1e-9, 1e-7) == pytest.approx(30)
    assert link_seconds(forwarded, 1e-9, 1e-9) == pytest.approx(2000)


def test_figures_of_exchanges_add_up_nano_batches_before_they_look_for_the_busiest():
    nodes = (0, 0, 1, 1)
    rows, others = [[4], [], [], []], [[], [4], [], []]
    forwarded = replace(plan_of(rows, [(0, 0, 2, 0), (0, 2, 3, 2), (0, 3, 4, 3)], 4), nodes=nodes)  # as above
    within = plan_of(rows, [(0, 0, 2, 0), (0, 2, 4, 1)], 4)
    between = plan_of(others, [(0, 0, 2, 1), (0, 2, 4, 3)], 4)
    # Within nodes workers send 240, 2000, 30, 0 and receive 2000, 240, 0, 30;
    # between them they send 240, 240, 1000, 3000 and receive 2000, 2000, 130, 350.
    figures = exchange_figures([forwarded, within, between], BYTES, nodes)
    assert figures == ExchangeFigures(
        bytes_total=6750,
        bytes_bottleneck=4000,
        bytes_within_nodes=2270,
        bytes_within_nodes_bottleneck=2000,
        bytes_within_nodes_busiest_node=2240,
        bytes_between_nodes=4480,
        bytes_between_nodes_bottleneck=3000,
        bytes_between_nodes_busiest_node=4000,
        link_seconds=pytest.approx(3000 / 50e9),
    )
    assert exchange_figures([within], BYTES, nodes, node_bandwidth=0.5).link_seconds == pytest.approx(2000 / 0.5e9)
