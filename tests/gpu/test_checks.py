"""What the parts of `make gpu` look for is found where it is wrong."""

import math
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.compared import compare
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.kernel_accuracy import calls_of, cases, check_kernel, deviation, side_by_side, why_missing
from benchmarks.gpu.models import StepResult
from benchmarks.gpu.shards import Bench, Timed, check_shards, row_overhead, shards_of
from benchmarks.gpu.tracing import busy_and_span
from benchmarks.gpu.training import Watch, _check_logged, _check_memory, collate
from hf_distca.kernels.cpu import CpuKernel
from hf_distca.kernels.versions import Version
from tests.gpu.test_parts import SMALL


def test_numbers_above_their_bound_and_no_numbers_are_wrong():
    findings = Findings()
    findings.at_most(1.0, 1.0, "as much")
    assert findings.wrong == []
    findings.at_most(1.5, 1.0, "more")
    findings.at_most(math.nan, 1.0, "none")
    assert findings.wrong == ["more: 1.5, at most 1 is expected", "none: nan, at most 1 is expected"]


def test_what_fails_does_not_end_the_part(capsys):
    findings = Findings()
    with findings.trying("first"):
        raise KeyError("lost")
    assert findings.wrong == ["first: KeyError: 'lost'"]
    assert "Traceback" in capsys.readouterr().err


def test_a_kernel_that_takes_windows_for_one_wider_is_found(monkeypatch):
    forward = CpuKernel.forward

    def wider(self, q, k, v, shapes, params):
        window = None if params.window is None else params.window + 1
        return forward(self, q, k, v, shapes, replace(params, window=window))

    monkeypatch.setattr(CpuKernel, "forward", wider)
    wrong = check_kernel(SMALL, "cpu").wrong
    assert wrong
    assert all("window" in sentence for sentence in wrong)


@pytest.mark.parametrize("check", [check_kernel, check_shards])
def test_a_kernel_that_is_not_installed_is_skipped(check, monkeypatch):
    findings = check(SMALL, "flash_attn")
    assert "flash-attn package" in findings.skipped
    assert findings.wrong == []
    assert why_missing("flash_attn") == findings.skipped
    assert why_missing("torch_varlen") == ""
    monkeypatch.setattr(Version, "installed", True)  # but it cannot be imported
    findings = check(SMALL, "flash_attn")
    (wrong,) = findings.wrong
    assert "is installed, but cannot be imported: ModuleNotFoundError" in wrong
    assert (findings.skipped, why_missing("flash_attn")) == ("", "")


def test_of_a_kernel_that_is_compiled_there_are_few_variants():
    few, every = calls_of(SMALL, "flash_attn_4"), calls_of(SMALL, "flash_attn_3")
    assert len({(dtype, case.variant) for (dtype, _), case in few.items()}) == 4
    assert {dtype for dtype, _ in few} == {torch.bfloat16}
    assert {"no tasks", "one row, many keys", "window 1", "not causal, one row"} <= {name for _, name in few}
    assert {name for dtype, name in every if dtype == torch.float16} == set(cases(SMALL))


def test_only_long_shards_must_be_about_as_fast_as_a_document(monkeypatch):
    setting = replace(SMALL, context=4096, shard_rows=(128, 512, 1024, 2048), least_share=0.6)

    def time(_bench, tasks, *, whole=False):
        rows = tasks[0][1] - tasks[0][0]
        slower = {128: 100.0, 512: 3.0, 1024: 1.8, 2048: 1.5}.get(rows, 1.0)
        return Timed(rows, 10**6, 1e-3, slower * 1e-3), torch.zeros(1)

    monkeypatch.setattr(Bench, "time", time)
    monkeypatch.setattr(Bench, "rows", lambda *_: torch.zeros(1))
    findings = check_shards(setting, "cpu")
    (wrong,) = findings.wrong
    assert wrong.startswith("backward of shards of 1024 rows runs at ")
    shares = findings.figures["shards_share_of_one_document"]
    assert {rows: share[1] for rows, share in shares.items()} == pytest.approx(
        {128: 0.01, 512: 1 / 3, 1024: 1 / 1.8, 2048: 1 / 1.5}
    )


def test_deviations():
    want = torch.tensor([2.0, -4.0, -torch.inf], dtype=torch.float64)
    assert deviation(torch.tensor([2.0, -3.0, -torch.inf]), want) == 0.25
    assert deviation(torch.tensor([2.0, -torch.inf, -torch.inf]), want) == math.inf
    assert deviation(torch.tensor([2.0, -4.0, 0.0]), want) == math.inf
    assert deviation(torch.tensor([0.01]), torch.zeros(1, dtype=torch.float64)) == pytest.approx(0.1)


def test_received_rows_lie_in_wider_rows_at_multiples_of_16_bytes():
    views = side_by_side([(3, 7, 5), (3, 1, 8)], torch.bfloat16, torch.device("cpu"))
    assert [tuple(view.shape) for view in views] == [(3, 7, 5), (3, 1, 8)]
    assert [view.storage_offset() * 2 % 16 for view in views] == [0, 0]
    assert [view.stride() for view in views] == [(56, 5, 1), (56, 8, 1)]


def test_a_result_that_is_further_off_than_stock_attention_is_found():
    exact = StepResult(2.0, {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([3.0])})
    stock = StepResult(2.0, {"a": torch.tensor([1.1, 0.0]), "b": torch.tensor([3.0])})
    as_good = StepResult(2.0, {"a": torch.tensor([1.0, 0.1]), "b": torch.tensor([3.0])})
    findings = Findings()
    assert compare(findings, "as good", as_good, stock, exact, torch.float32) == pytest.approx(0.1)
    assert findings.wrong == []
    worse = StepResult(2.1, {"a": torch.tensor([1.3, 0.0])})
    compare(findings, "worse", worse, stock, exact, torch.float32)
    assert [sentence.rsplit(": ", 1)[0] for sentence in findings.wrong] == [
        "worse: deviation of the loss",
        "worse: deviation of the gradient of a",
        "worse: deviation of the gradient of b",
    ]


def test_memory_that_grows_is_found():
    watch = Watch(SMALL)
    watch.memory = [100] * 9 + [105]
    findings = Findings()
    _check_memory(findings, watch)
    assert findings.wrong == []
    watch.memory = list(range(100, 110))
    _check_memory(findings, watch)
    assert findings.wrong == ["memory at the end over that after a fifth of the steps: 1.08, at most 1.05 is expected"]


def test_losses_that_differ_are_found():
    ours, stock = Watch(SMALL), Watch(SMALL)
    ours.logged = {"loss": [4.0, 3.99, 3.9], "grad_norm": [1.0, 1.05, 1.0]}
    stock.logged = {"loss": [4.0, 3.9], "grad_norm": [1.01, 1.0]}
    findings = Findings()
    _check_logged(findings, "sdpa", ours, stock)
    assert [sentence.rsplit(":", 1)[0] for sentence in findings.wrong] == [
        "sdpa: difference of the loss of step 1",
        "sdpa: difference of the grad_norm of step 1",
    ]
    stock.logged = {"loss": [], "grad_norm": []}
    _check_logged(findings, "none", ours, stock)
    assert findings.wrong[2:] == ["none: no loss was logged", "none: no grad_norm was logged"]


def test_stock_batches_have_no_target_across_documents():
    batch = {name: column.tolist() for name, column in collate([[[5, 6, 7], [8, 9]]]).items()}
    assert batch == {
        "input_ids": [[5, 6, 7, 8, 9]],
        "position_ids": [[0, 1, 2, 0, 1]],
        "labels": [[-100, 6, 7, -100, 9]],
    }


def test_row_overhead_is_that_of_the_times():
    timed = [
        Timed(rows, pairs, 1e-12 * (pairs + 90 * rows), 0.0)
        for rows, pairs in [(1000, 10**6), (500, 10**7), (4000, 10**7), (8000, 3 * 10**6)]
    ]
    assert row_overhead(timed, lambda t: t.forward_s) == pytest.approx(90)


def test_operations_a_second():
    assert Timed(1, 10**9, 0.001, 0.005).tflops(512) == pytest.approx((512.0, 256.0))


def test_shards_are_spread_over_the_document():
    setting = replace(SMALL, context=1024, keys_at_once=2000)
    assert shards_of(setting, 128) == [(0, 128), (384, 512), (896, 1024)]
    assert shards_of(replace(setting, keys_at_once=1), 512) == [(0, 512)]


def test_time_in_which_something_runs():
    assert busy_and_span([(5.0, 7.0), (0.0, 2.0), (1.0, 3.0), (6.0, 6.5)]) == (5.0, 7.0)
