"""What is told of node-aware plans beside flat ones."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [[512] if rank % 8 < 4 else [128] * 4 for rank in range(64)]
"""Half the ranks of each node have one document, half of them four."""


def test_joint_plans_whose_documents_need_not_leave_a_node(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # as for a script in it
    from planner_nodes import Pair, Planned, planned, summary

    batch = {"id": "alike-s0", "layout": "dp", "T": 512, "rows": ROWS}
    flat, aware = (planned(batch, "joint", 0.01, ranks_per_node, 1) for ranks_per_node in (None, 8))
    # Of each of the 32 long documents, K and V of rows 0 to 383 go to the rank that has the others: with the nodes
    # known to one of the same node, else from one half of the ranks to the other.
    rows = 384 * 4096
    assert flat == Planned(1.0, 1.0, 32 * rows, rows, 0, 32 * rows, rows / 50 / 1e9, flat.plan_ms)
    assert aware == Planned(1.0, 1.0, 32 * rows, rows, rows, 0, rows / 450 / 1e9, aware.plan_ms)
    figures = summary([Pair("alike-s0", flat, aware)])
    ratios = ("bytes_between_nodes", "busiest_within_node", "link_seconds", "bytes_total")
    assert [figures[f"{name}_ratio_worst"] for name in ratios] == [0.0, 1.0, pytest.approx(1 / 9), 1.0]
    assert figures["bytes_between_nodes_ratio_worst_input"] == "alike-s0"
    assert (figures["plans_with_bytes_between_nodes"], figures["flat_plans_with_bytes_between_nodes"]) == (0, 1)
