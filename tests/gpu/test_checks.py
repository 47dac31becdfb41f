"""What the parts of `make gpu` look for is found where it is wrong."""

import math
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.findings import Findings, StepResult, compare
from benchmarks.gpu.kernels import calls_of, cases, check_kernel, deviation, side_by_side, why_missing
from benchmarks.gpu.training import Watch, _check_logged, _check_memory
from hf_distca.kernels.cpu import CpuKernel
from hf_distca.kernels.varlen import FlashVarlenKernel
from tests.gpu.test_parts import SMALL


def test_a_failure_or_a_number_out_of_bounds_is_wrong_and_does_not_end_the_part(capsys):
    findings = Findings()
    for value, what in ((1.0, "as much"), (1.5, "more"), (math.nan, "none")):
        findings.at_most(value, 1.0, what)
    with findings.trying("first"):
        raise KeyError("lost")
    assert findings.wrong == [
        "more: 1.5, at most 1 is expected",
        "none: nan, at most 1 is expected",
        "first: KeyError: 'lost'",
    ]
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


def test_a_kernel_that_is_not_installed_is_skipped(monkeypatch):
    findings = check_kernel(SMALL, "flash_attn")
    assert "flash-attn package" in findings.skipped
    assert findings.wrong == []
    assert why_missing("flash_attn") == findings.skipped
    assert why_missing("torch_varlen") == ""
    monkeypatch.setattr(FlashVarlenKernel, "missing", str)  # but it cannot be imported
    findings = check_kernel(SMALL, "flash_attn")
    (wrong,) = findings.wrong
    assert "is installed, but cannot be imported: ModuleNotFoundError" in wrong
    assert (findings.skipped, why_missing("flash_attn")) == ("", "")


def test_of_a_kernel_that_is_compiled_there_are_few_variants():
    few, every = calls_of(SMALL, "flash_attn_4"), calls_of(SMALL, "flash_attn_3")
    assert len({(dtype, case.variant) for (dtype, _), case in few.items()}) == 4
    assert {dtype for dtype, _ in few} == {torch.bfloat16}
    assert {"no tasks", "one row, many keys", "window 1", "not causal, one row"} <= {name for _, name in few}
    assert {name for dtype, name in every if dtype == torch.float16} == set(cases(SMALL))


def test_deviations_and_side_by_side_rows():
    want = torch.tensor([2.0, -4.0, -torch.inf], dtype=torch.float64)
    assert deviation(torch.tensor([2.0, -3.0, -torch.inf]), want) == 0.25
    assert deviation(torch.tensor([2.0, -torch.inf, -torch.inf]), want) == math.inf
    assert deviation(torch.tensor([2.0, -4.0, 0.0]), want) == math.inf
    assert deviation(torch.tensor([0.01]), torch.zeros(1, dtype=torch.float64)) == pytest.approx(0.1)
    # Received rows lie in wider rows, at multiples of 16 bytes.
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


def test_memory_that_grows_and_losses_that_differ_are_found():
    ours, stock, findings = Watch(SMALL), Watch(SMALL), Findings()
    ours.memory = [100] * 9 + [105]
    _check_memory(findings, ours)
    assert findings.wrong == []
    ours.memory = list(range(100, 110))
    _check_memory(findings, ours)
    ours.logged = {"loss": [4.0, 3.99, 3.9], "grad_norm": [1.0, 1.05, 1.0]}
    stock.logged = {"loss": [4.0, 3.9], "grad_norm": [1.01, 1.0]}
    _check_logged(findings, "sdpa", ours, stock)
    stock.logged = {"loss": [], "grad_norm": []}
    _check_logged(findings, "none", ours, stock)
    assert [sentence.rsplit(":", 1)[0] for sentence in findings.wrong] == [
        "memory at the end over that after a fifth of the steps",
        "sdpa: difference of the loss of step 1",
        "sdpa: difference of the grad_norm of step 1",
        "none",
        "none",
    ]
