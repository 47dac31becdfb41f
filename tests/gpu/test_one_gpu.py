"""benchmarks/one_gpu.py on the CPU with small numbers: what each rank does, what is counted, and what is modelled."""

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_distca.kernels import get_kernel
from hf_distca.plan import (
    SEGMENT,
    TASK,
    AttentionKind,
    ExchangeFigures,
    Layout,
    MicroBatchPlan,
    NanoBatch,
    Plan,
    PlanSummary,
)
from hf_distca.planner.cost import RowBytes, pairs
from hf_distca.planner.metrics import BETWEEN, WITHIN

KIND = AttentionKind(None, q_heads=4, kv_heads=2, dim_qk=8, dim_v=8)
ROWS = [[300], [100, 100, 60, 40], [200, 50, 50], [150, 150]]


@pytest.fixture
def one_gpu(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("one_gpu")


@pytest.fixture
def shape(one_gpu):
    return one_gpu.Shape(hidden=32, mlp=48, heads=4, kv_heads=2, head_dim=8)


def test_documents_stay_whole_or_are_divided_head_and_tail(one_gpu):
    rows = [[8], [4, 4]]
    assert [(work.tokens, work.calls) for work in one_gpu.work_packed(rows)] == [
        (8, [[(0, 8)]]),
        (8, [[(0, 4), (0, 4)]]),
    ]
    assert [(work.tokens, work.calls) for work in one_gpu.work_whole([[4], [4, 8]])] == [
        (8, [[(0, 8)]]),
        (8, [[(0, 4), (0, 4)]]),
    ]
    first, second = one_gpu.work_context([[8], [4]], RowBytes(q=20, kv=10, o=20), 1)
    assert first.calls == [[(0, 2), (6, 8), (0, 1), (3, 4)]]
    assert second.calls == [[(2, 4), (4, 6), (1, 2), (2, 3)]]
    none = [0, 0]
    assert (first.tokens, first.moved.tolist()) == (6, [[none, [60, 60]], [none, [120, 120]]])


def test_rows_of_context_parallelism_come_to_a_node_once(one_gpu):
    works = one_gpu.work_context([[8]] * 4, RowBytes(q=20, kv=10, o=20), 2)
    # 8 rows each: 8 from the other node's rank of the same place; 8 and 8 from the other rank of the node.
    for work in works:
        assert work.moved.tolist() == [[[160, 160], [80, 80]], [[320, 320], [160, 160]]]


def test_bytes_of_a_plan_are_those_that_the_documents_count(one_gpu):
    # Of the document's 8 rows, all on rank 0, rank 1 computes the last 4.
    layout = Layout(np.array([8, 2]), np.array([(0, 0, 8, 0, 0), (1, 0, 2, 1, 0)], SEGMENT), 2)
    plan = Plan(layout, np.array([(0, 0, 4, 0), (0, 4, 8, 1), (1, 0, 2, 1)], TASK), 2)
    micro_batch = MicroBatchPlan(
        (NanoBatch(np.arange(2), layout, {KIND: plan}),), PlanSummary(1, 1, ExchangeFigures(*[0] * 9))
    )
    q, kv, lse = 64, 64, 16
    there_and_back = [
        [4 * q + 8 * kv, 4 * (q + lse)],
        [4 * (3 * q + lse) + 8 * kv, 4 * q + 8 * kv],
    ]
    for nodes, link in (((0, 1), BETWEEN), ((0, 0), WITHIN)):
        here, there = one_gpu.work_planned(micro_batch, KIND, RowBytes.of_kind(KIND, 2), nodes)
        assert (here.calls, there.calls) == ([[(0, 4)]], [[(4, 8), (0, 2)]])
        assert here.moved[:, link].tolist() == there.moved[:, link, ::-1].tolist() == there_and_back
        assert not here.moved[:, 1 - link].any()


def test_every_way_computes_the_same_pairs_of_the_same_tokens(one_gpu, shape):
    rows = [[32 * length for length in row] for row in ROWS]
    works = one_gpu.works_of(rows, 9600, shape, get_kernel("cpu", torch.device("cpu")), 2)
    assert tuple(works) == one_gpu.WAYS
    for way, ranks in works.items():
        seen = [sum(pairs(start, stop) for call in work.calls for start, stop in call) for work in ranks]
        assert sum(seen) == sum(pairs(0, length) for row in rows for length in row), way
        assert sum(work.tokens for work in ranks) == 38400
        sent, received = sum(work.moved for work in ranks).sum(axis=(0, 1))
        assert sent == received
        if way in ("context", "fixed", "joint"):
            assert [len(work.calls) for work in ranks] == [1 if way == "context" else len(ranks[0].calls)] * 4
            assert max(seen) < 1.1 * sum(seen) / 4


class Clock:
    """Tells times that are known."""

    def attention(self, tasks):
        return sum(stop - start for start, stop in tasks) / 10

    def others(self, tokens):
        return tokens / 100


def test_a_step_is_the_slowest_rank_and_the_exchanges(one_gpu):
    gb = 10**9
    none = [0, 0]
    works = [
        one_gpu.Work(100, [[(0, 10)], [(5, 15)]], gb * np.array([[none, [3, 1]], [[18, 0], [0, 1]]])),
        one_gpu.Work(200, [[(0, 10)]], gb * np.array([[none, [0, 2]], [[0, 18], [5, 0]]])),
    ]
    # The forward's 3 GB take longest between nodes; the backward's 18 GB inside take as long as 6 GB between.
    assert one_gpu.step_seconds(works, Clock(), one_gpu.Links([2.0, 4.0], 2, node_bandwidth=6.0)) == {
        "attention_s": 2.0,
        "others_s": 2.0,
        "slowest_s": 3.0,
        "max_over_mean": 1.0,
        "bytes": 3 * gb + 18 * gb,
        "bytes_between_nodes": 8 * gb,
        "exchange_s": {"2": 4.5, "4": 3.75},
        "step_s": {"2": 7.5, "4": 6.75},
        "step_with_overlap_s": {"2": 4.5, "4": 3.75},
    }


def test_shapes_are_timed_once_and_large_ones_in_pieces(one_gpu, shape, monkeypatch):
    timed = []
    monkeypatch.setattr(one_gpu, "median_seconds", lambda call, device, repeats: timed.append(call()) or 1.0)
    device = torch.device("cpu")
    watch = one_gpu.Stopwatch(shape, device, torch.float32, get_kernel("cpu", device), piece=512, keys=100, repeats=1)
    assert watch.attention([(0, 60), (20, 60), (10, 30)]) == 2.0  # 60 + 30 keys, then 60
    assert watch.attention([(10, 30), (0, 60), (20, 60)]) == 2.0
    assert watch.attention([]) == 0.0
    assert len(timed) == watch.calls == 2
    assert watch.others(1024 + 300) == 3.0  # two pieces of 512 and one of 512
    assert watch.others(100) == 1.0
    assert len(timed) == watch.calls == 4


def test_all_ways_on_the_cpu(one_gpu, shape):
    device = torch.device("cpu")
    kernel = get_kernel("cpu", device)
    batches = [
        {"id": "a-s0", "layout": "dp", "T": 300, "rows": ROWS},
        {"id": "a-s1", "layout": "dp", "T": 300, "rows": ROWS},
        {"id": "b-s0", "layout": "cp4", "T": 300, "rows": ROWS},
        {"id": "c-s0", "layout": "dp", "T": 600, "rows": ROWS},
    ]
    batches = one_gpu.chosen(batches, [300], 1)
    assert [batch["id"] for batch in batches] == ["a-s0"]

    def watch(tokens):
        return one_gpu.Stopwatch(shape, device, torch.float32, kernel, piece=tokens, keys=4096, repeats=1)

    left = []
    results = one_gpu.measure(
        batches, [2, 4], one_gpu.Links([50.0], 2), shape, watch, kernel, 4, lambda results: left.append(len(results))
    )
    assert left == [1, 2]
    assert [result["ranks"] for result in results] == [2, 4]
    assert all(figures["slowest_s"] > 0 for result in results for figures in result["ways"].values())
    summary = one_gpu.summary(results, [50.0])
    assert list(summary) == ["2", "4"]
    assert summary["4"]["packed"]["at 50 GB/s"] == summary["4"]["packed"]["computation"] == 1.0
    assert summary["4"]["joint"].keys() == {"max_over_mean", "computation", "at 50 GB/s", "at 50 GB/s, overlap"}
