"""Parts of benchmark scripts on tiny inputs."""

import gzip
import json
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # as for a script in it
    return import_module


def test_documents_of_the_step_benchmark(script):
    step_time = script("step_time")
    assert step_time.whole_rows([4, 3, 2, 1], 2) == [[4], [3, 2, 1]]
    for lengths in step_time.MIXES.values():
        assert sum(lengths) == step_time.LENGTHS_FOR
        for ranks in (2, 4):
            for rows in (
                step_time.whole_rows(lengths, ranks),
                step_time.packed_rows(lengths, ranks),
            ):
                assert len(rows) == ranks
                assert all(rows)
                assert sorted(length for row in rows for length in row) == sorted(lengths)


def test_pairs_and_figures_of_peers(script):
    peers = script("peers")
    examples = [{"input_ids": [5] * length} for length in (4, 2, 1)]
    for padded, expected in ((False, 10 + 3 + 1), (True, 3 * 10)):
        collate = peers.Counted(len, padded=padded)
        assert (collate(examples), collate.pairs) == (3, expected)
    assert peers.document_lengths(torch.tensor([0, 1, 2, 0, 0, 1])) == (3, 1, 2)
    ranks = [{"mix": {"seconds": 2.0, "loss": 7.0, "pairs": pairs}} for pairs in (30.0, 10.0)]
    assert peers.together(ranks) == {"mix": {"seconds": 2.0, "loss": 7.0, "imbalance": 1.5}}
    assert peers.together([{"mix": {"MiB": 3.0}}, {"mix": {"MiB": 5.0}}]) == {"mix": {"MiB": 5.0}}
    assert peers.largest_difference([2.0, 3.0], [2.0, 4.0]) == 0.25
    for lengths in peers.MIXES.values():
        assert sum(lengths) == peers.TOKENS
        assert all(length % 32 == 0 for length in lengths)
        assert all(len(lengths) % ranks == 0 for ranks in peers.RANKS)


def test_padded_batches_of_rollouts(script):
    harness, benchmark = script("harness.padded"), script("padded")
    lengths = harness.rollout_lengths(2000)
    assert (min(lengths) >= 2, max(lengths), 280 < np.median(lengths) < 320) == (
        True,
        harness.LONGEST,
        True,
    )
    assert harness.rollout_lengths(2000, scale=4) == [max(length // 4, 2) for length in lengths]
    assert sum(harness.lengths_that_add_up(64, 16384, seed=3)) == 16384
    for to_all, columns in ((True, [5, 5]), (False, [5, 3])):
        batches = harness.padded_batches(
            [5, 2, 3], 10, torch.device("cpu"), to_all=to_all, at_once=2
        )
        assert [batch.input_ids.shape[1] for batch in batches] == columns
        assert [batch.attention_mask.sum(1).tolist() for batch in batches] == [[5, 2], [3]]
    rows = benchmark.rows_of(benchmark.Case(32, 4))
    tokens = sum(harness.rollout_lengths(32, 4))
    assert (
        rows["packed"]
        == rows["hf_distca"]
        == tokens
        < rows["padded to eight"]
        < rows["padded to all"]
    )


def test_plans_that_know_of_nodes_beside_flat_ones(script):
    planner = script("planner")
    # Half the ranks of each node have one document, half of them four.
    rows = [[512] if rank % 8 < 4 else [128] * 4 for rank in range(64)]
    batch = {"id": "alike-s0", "layout": "dp", "T": 512, "rows": rows}
    flat, aware = (
        planner.planned(batch, "joint", 0.01, ranks_per_node, 1) for ranks_per_node in (None, 8)
    )
    # Of each of the 32 long documents, K and V of rows 0 to 383 go to the rank that has the others:
    # with the nodes known to one of the same node, else from one half of the ranks to the other.
    moved = 384 * 4096
    assert flat == planner.Planned(flat.metrics, 0, 32 * moved, moved / 50 / 1e9, flat.plan_ms)
    assert aware == planner.Planned(aware.metrics, moved, 0, moved / 450 / 1e9, aware.plan_ms)
    for metrics in (flat.metrics, aware.metrics):
        balance = (metrics.max_over_mean, metrics.tokens_max_over_mean)
        assert (balance, metrics.bytes_total, metrics.bytes_bottleneck) == (
            (1.0, 1.0),
            32 * moved,
            moved,
        )
    figures = planner.node_aware_over_flat({"alike-s0": (aware, flat)})
    names = ("bytes_between_nodes", "busiest_within_node", "link_seconds", "bytes_total")
    assert [figures[f"{name}_ratio_worst"] for name in names] == [
        0.0,
        1.0,
        pytest.approx(1 / 9),
        1.0,
    ]
    assert figures["bytes_between_nodes_ratio_worst_input"] == "alike-s0"
    assert (
        figures["plans_with_bytes_between_nodes"],
        figures["flat_plans_with_bytes_between_nodes"],
    ) == (0, 1)


def run(mode: str, rows: list[list[int]], ms: list[float], **changes) -> dict:
    samples = [{"rows": rows, "ms": each} for each in ms]
    return {
        "mode": mode, "tp": 1, "dp": 2, "cp": None, "layers": 1, "tokens_per_row": 8, "pairing": "2i,2i+1",
        "samples": samples, **changes,
    }  # fmt: skip


def test_what_is_known_of_a_step_of_the_reference(script, monkeypatch):
    reference = script("reference_steps")

    def described(mode, rows, **changes):
        (step,) = reference.described(reference.Run.of(run(mode, rows, [1.0], **changes)))
        return step.rows, step.pairs, step.moving > 0

    rows = [[8], [4, 4], [2] * 4, [8]]
    assert described("baseline", rows) == (2, 36 + 20, False)  # the first rank's
    assert described("d2", rows)[1] < 36 + 20
    assert (described("d2", rows)[2], described("wlbllm", rows)[2]) == (True, False)
    # Strided: rank 0 has the first and the third row.
    assert described("baseline", rows, pairing="i,i+dp")[1] == 36 + 20
    assert described("baseline", [[8], [1], [8], [1]], pairing="i,i+dp")[1] == 2 * 36
    assert described("baseline", [[8], [8]], cp=2) == (1 / 2, 36 / 2, True)
    # Whole documents go to the group with the least work: 8 alone; 4, 2 and 2 together.
    monkeypatch.setattr(reference, "EVEN_TOKENS", 4)
    assert described("wlbllm", [[8, 4], [2, 2]], cp=1) == (1, 36, False)
    # `dp` counts groups: one group of two ranks has all documents.
    assert described("wlbllm", [[8, 4], [2, 2]], dp=1, cp=2) == (1, (36 + 10 + 3 + 3) / 2, True)
    assert described("wlbllm", [[8, 4], [2, 2]], dp=2, cp=2) == (1 / 2, 36 / 2, True)


def test_steps_of_the_reference_are_predicted_by_its_baseline_alone(script):
    reference = script("reference_steps")
    content = json.loads(
        gzip.decompress((ROOT / "benchmarks/data/measured_steps.json.gz").read_bytes())
    )
    for name, runs in content.items():
        few = [{**each, "samples": each["samples"][:20]} for each in runs]
        found = reference.figures_of([reference.Run.of(each) for each in few])
        assert found["baseline_r2"] > 0.99, name
        assert found["balanced_error_mean"] < 0.05, name
        assert found["balanced_error_p90"] < 0.10, name
        if "whole_error_mean" in found:
            named = name == "dp8-128k-L4"
            assert found["whole_ranks_a_document_named"] is named
            assert found["whole_ranks_a_document"] == ([1, 2, 4] if named else [4])
            assert found["whole_error_mean"] < (0.06 if named else 0.05), name
    baseline = [run("baseline", [[length], [1], [1], [1]], [float(length)]) for length in (2, 4, 8)]
    one, other = (
        reference.figures_of(
            [reference.Run.of(each) for each in (*baseline, run("d2", [[8], [1], [1], [1]], [ms]))]
        )
        for ms in (1.0, 5.0)
    )
    assert one["ms_per_billion_pairs"] == other["ms_per_billion_pairs"]
    assert np.isclose((1 + one["balanced_bias"]) * 1.0, (1 + other["balanced_bias"]) * 5.0)
