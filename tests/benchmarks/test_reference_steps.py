"""Steps of the reference system, predicted."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def reference_steps(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # as for a script in it
    import reference_steps

    return reference_steps


def run(mode: str, rows: list[list[int]], ms: list[float], **changes) -> dict:
    samples = [{"rows": rows, "ms": each} for each in ms]
    return {
        "mode": mode, "tp": 1, "dp": 2, "cp": None, "layers": 1, "tokens_per_row": 8, "pairing": "2i,2i+1",
        "samples": samples, **changes,
    }  # fmt: skip


def test_rows_of_a_rank(reference_steps):
    rows = ((1,), (2,), (3,), (4,))
    consecutive, strided = (
        reference_steps.Run.of(run("baseline", [], [], pairing=pairing)) for pairing in ("2i,2i+1", "i,i+dp")
    )
    assert consecutive.rows_of_ranks(rows) == [[(1,), (2,)], [(3,), (4,)]]
    assert strided.rows_of_ranks(rows) == [[(1,), (3,)], [(2,), (4,)]]


def test_what_is_known_of_a_step(reference_steps):
    rows = [[8], [4, 4], [2] * 4, [8]]
    found = {
        mode: reference_steps.described(reference_steps.Run.of(run(mode, rows, [1.0])))[0]
        for mode in ("baseline", "d2", "wlbllm")
    }
    assert (found["baseline"].rows, found["baseline"].pairs) == (2, 36 + 20)  # the first rank's
    assert found["d2"].pairs < 36 + 20
    assert found["d2"].moving > 0
    assert found["baseline"].moving == found["wlbllm"].moving == 0


def test_ranks_that_share_documents_share_pairs_and_gather_keys(reference_steps):
    alone, shared = (
        reference_steps.described(reference_steps.Run.of(run("baseline", [[8], [8]], [1.0], cp=cp)))[0]
        for cp in (1, 2)
    )
    assert (shared.rows, shared.pairs) == (alone.rows / 2, alone.pairs / 2)
    assert shared.moving > alone.moving == 0


def test_whole_documents_go_to_the_group_with_the_least_work(reference_steps, monkeypatch):
    monkeypatch.setattr(reference_steps, "EVEN_TOKENS", 4)
    found = reference_steps.Run.of(run("wlbllm", [[8, 4], [2, 2]], [1.0], dp=2))
    (step,) = reference_steps.described(found)
    assert (step.rows, step.pairs, step.moving) == (1, 36, 0)  # 8 alone; 4, 2 and 2 together
    (shared,) = reference_steps.described(replace(found, context=2))
    assert (shared.rows, shared.pairs) == (1, (36 + 10 + 3 + 3) / 2)
    assert shared.moving > 0


def test_what_was_measured_is_predicted(reference_steps):
    content = json.loads(gzip.decompress((ROOT / "benchmarks/data/measured_steps.json.gz").read_bytes()))
    for name, runs in content.items():
        few = [{**each, "samples": each["samples"][:20]} for each in runs]
        found = reference_steps.figures_of([reference_steps.Run.of(each) for each in few])
        assert found["baseline_r2"] > 0.99, name
        assert found["balanced_error_mean"] < 0.05, name
        assert found["balanced_error_p90"] < 0.10, name
        if "whole_error_mean" in found:
            assert found["whole_ranks_a_document"] == 4
            assert found["whole_error_mean"] < 0.05, name


def test_nothing_is_fitted_to_balanced_steps(reference_steps):
    baseline = [run("baseline", [[length], [1], [1], [1]], [float(length)]) for length in (2, 4, 8)]
    one, other = (
        reference_steps.figures_of(
            [reference_steps.Run.of(each) for each in (*baseline, run("d2", [[8], [1], [1], [1]], [ms]))]
        )
        for ms in (1.0, 5.0)
    )
    assert one["ms_per_billion_pairs"] == other["ms_per_billion_pairs"]
    assert np.isclose((1 + one["balanced_bias"]) * 1.0, (1 + other["balanced_bias"]) * 5.0)
