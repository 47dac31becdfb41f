"""The parts of `make gpu`: on the CPU with small numbers, with `pytest -m gpu` on a GPU; and what
they find wrong.
"""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu import exchange, padded, prefixes, replay, steps
from benchmarks.gpu.__main__ import SECONDS, START_S, command_of, parts_of
from benchmarks.gpu.devices import cuda_devices, why_none
from benchmarks.gpu.findings import Findings, StepResult, compare
from benchmarks.gpu.kernels import (
    calls_of,
    cases,
    check_kernel,
    deviation,
    side_by_side,
    why_missing,
)
from benchmarks.gpu.runner import Part, run_part
from benchmarks.gpu.setting import Replay, Setting
from benchmarks.gpu.training import Watch, _check_logged, _check_memory
from hf_distca.kernel_names import KernelPackage
from hf_distca.kernels.cpu import CpuKernel
from hf_distca.planner.micro_batch import plan_placed
from hf_distca.planner.settings import PlanSettings
from hf_distca.profiling import device as measured

WIDE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "vocab_size": 64,
}
SMALL = Setting(
    device=torch.device("cpu"),
    dtype=torch.float32,
    exact=torch.float64,
    task_rows=24,
    head_dims=(16,),
    head_dim=8,
    lengths=(60, 13, 1, 40, 2, 7, 30),
    steps=3,
    attention_rows=128,
    repeats=2,
    wide={**WIDE, "num_attention_heads": 4, "num_key_value_heads": 2},
    large_vocabulary=80,
    tokens=192,
    plans=5,
    stock_steps=3,
    replays=(
        Replay("long, 4 ranks", "wlbllm-up-cp4-T32K-s0", 4),
        Replay("short, 2 ranks", "prolong-plain-T32K-s0", 2),
    ),
    replay_scale=64,
    replay_repeats=1,
    rollout_model={**WIDE, "num_attention_heads": 4, "num_key_value_heads": 2},
    rollouts=16,
    rollout_scale=64,
    rollout_repeats=1,
    prompt_tokens=256,
    completion_tokens=(4, 16),
)
OPTIONAL = ("flash_attn", "flash_attn_3", "flash_attn_4")
"""Kernels whose packages are not there unless they are brought along."""


def by_name(part: Part) -> str:
    return part.name


@pytest.mark.parametrize(
    "part",
    [part for part in parts_of(SMALL) if part.name not in ("two ranks", "exchange")],
    ids=by_name,
)
def test_on_the_cpu(part, monkeypatch):
    monkeypatch.setattr(measured, "QUERIES", {"cpu": (16, 64, 256)})
    monkeypatch.setattr(measured, "REPEATS", 1)
    findings = part.check(SMALL)
    assert findings.wrong == []
    assert findings.skipped == ""
    assert findings.figures


def alone(_ranks, function, *args):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return [function(*args)]
    finally:
        dist.destroy_process_group()


def test_steps_on_the_cpu(rank_pools):
    def run(ranks, *call):
        return rank_pools[ranks].run(*call)

    findings = steps.check_two_ranks(SMALL, run)
    assert findings.wrong == []
    assert findings.figures["bytes_moved"].keys() == steps.ON_TWO_RANKS.keys()


@pytest.mark.parametrize(
    ("ranks", "link"),
    [(1, "none: a rank with itself"), (2, "between GPUs"), (3, "between GPUs")],
)
def test_exchange_on_the_cpu(rank_pools, ranks, link):
    def run(ranks, *call):
        return rank_pools[ranks].run(*call)

    findings = exchange.check_exchange(SMALL, ranks, alone if ranks == 1 else run)
    assert findings.wrong == []
    assert findings.figures["link"] == link
    for blocks in exchange.BLOCKS:
        assert findings.figures[f"{blocks} blocks"]["exchange_ms"] > 0, blocks


def test_documents_divide_into_two_nano_batches_where_they_are_placed():
    settings = PlanSettings(ranks=2, rows_per_rank=2 * sum(Setting().lengths), ping_pong=True)
    lengths = sorted(Setting().lengths, reverse=True)
    assert len(plan_placed([lengths[:2], lengths[2:]], settings).nano_batches) == 2


def test_all_parts_fit_into_two_runs():
    limits = [part.limit_s for part in parts_of(Setting()) if not part.name.endswith(OPTIONAL)]
    assert sum(limits) + max(limits) <= 2 * (SECONDS - START_S)


@pytest.mark.gpu
@pytest.mark.skipif(not cuda_devices(), reason=why_none())
@pytest.mark.parametrize("part", parts_of(Setting(), cuda_devices()), ids=by_name)
def test_on_the_gpu(part, tmp_path):
    result = run_part(part, command_of, tmp_path)
    if result["skipped"]:
        pytest.skip(result["skipped"])
    assert result["wrong"] == [], result["printed"]


def test_a_failure_or_a_number_out_of_bounds_is_wrong_and_does_not_end_the_part(capsys):
    findings = Findings()
    for value, what in ((1.0, "as much"), (1.5, "more"), (math.nan, "none")):
        findings.at_most(value, 1.0, what)
    with findings.trying("first"):
        raise KeyError("lost")
    bounds = ["more: 1.5, at most 1 is expected", "none: nan, at most 1 is expected"]
    assert findings.wrong == [*bounds, "first: KeyError: 'lost'"]
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
    assert "flash-attn package" in findings.skipped == why_missing("flash_attn")
    assert findings.wrong == []
    assert why_missing("torch_varlen") == ""
    monkeypatch.setattr(KernelPackage, "missing", lambda _: "")  # but it cannot be imported
    findings = check_kernel(SMALL, "flash_attn")
    (wrong,) = findings.wrong
    assert "is installed, but cannot be imported: ModuleNotFoundError" in wrong
    assert findings.skipped == ""
    assert why_missing("flash_attn") == ""


def test_of_a_kernel_that_is_compiled_there_are_few_variants():
    few = calls_of(SMALL, "flash_attn_4")
    kernel_calls = calls_of(SMALL, "flash_attn_3")
    assert len({(dtype, case.variant) for (dtype, _), case in few.items()}) == 4
    assert {dtype for dtype, _ in few} == {torch.bfloat16}
    assert {"no tasks", "one row, many keys", "window 1", "not causal, one row"} <= {
        name for _, name in few
    }
    assert {name for dtype, name in kernel_calls if dtype == torch.float16} == set(cases(SMALL))


@pytest.mark.parametrize(
    ("computed", "expected"),
    [
        ([2.0, -3.0, -torch.inf], 0.25),
        ([2.0, -torch.inf, -torch.inf], math.inf),
        ([2.0, -4.0, 0.0], math.inf),
    ],
    ids=["finite", "infinite", "finite instead of infinite"],
)
def test_deviations(computed, expected):
    exact = torch.tensor([2.0, -4.0, -torch.inf], dtype=torch.float64)
    assert deviation(torch.tensor(computed), exact) == expected


def test_deviation_from_zero():
    exact = torch.zeros(1, dtype=torch.float64)
    assert deviation(torch.tensor([0.01]), exact) == pytest.approx(0.1)


def test_received_rows_lie_in_wider_rows_at_multiples_of_16_bytes():
    views = side_by_side([(3, 7, 5), (3, 1, 8)], torch.bfloat16, torch.device("cpu"))
    assert [(tuple(view.shape), view.stride()) for view in views] == [
        ((3, 7, 5), (56, 5, 1)),
        ((3, 1, 8), (56, 8, 1)),
    ]
    assert [view.storage_offset() * 2 % 16 for view in views] == [0, 0]


def test_a_result_that_is_further_off_than_stock_attention_is_found():
    exact = StepResult(2.0, {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([3.0])})
    stock = StepResult(2.0, {"a": torch.tensor([1.1, 0.0]), "b": torch.tensor([3.0])})
    as_good = StepResult(2.0, {"a": torch.tensor([1.0, 0.1]), "b": torch.tensor([3.0])})
    findings = Findings()
    assert compare(findings, "as good", as_good, stock, exact, torch.float32) == pytest.approx(0.1)
    assert findings.wrong == []
    compare(
        findings,
        "worse",
        StepResult(2.1, {"a": torch.tensor([1.3, 0.0])}),
        stock,
        exact,
        torch.float32,
    )
    wrong = [sentence.rsplit(": ", 1)[0] for sentence in findings.wrong]
    assert wrong == [
        f"worse: deviation of the {what}" for what in ("loss", "gradient of a", "gradient of b")
    ]


def test_a_replay_without_a_call_is_found(monkeypatch):
    all_calls = replay.calls_of_plan
    monkeypatch.setattr(replay, "calls_of_plan", lambda *of_rank: all_calls(*of_rank)[:-1])
    monkeypatch.setattr(measured, "QUERIES", {"cpu": (16, 64, 256)})
    monkeypatch.setattr(measured, "REPEATS", 1)
    wrong = replay.check_replays(replace(SMALL, replays=SMALL.replays[:1])).wrong
    assert len(wrong) == 1
    assert "long, 4 ranks" in wrong[0]
    assert "pairs are computed, not" in wrong[0]


def test_whole_documents_of_a_replay_go_to_the_rank_with_the_fewest_pairs():
    assert replay.longest_first([3, 9, 4, 4, 1], 2) == [[9], [4, 4, 3, 1]]
    lengths = replay.lengths_of(Setting().replays[1], Setting())
    assert max(lengths) == 115248
    assert sum(lengths) == 8 * 32768
    lengths = replay.lengths_of(SMALL.replays[0], SMALL)  # half as many ranks, divided by 64
    assert max(lengths) == 602
    assert sum(lengths) == 2041


def test_a_replay_that_gains_nothing_or_is_predicted_badly_is_found():
    findings = Findings()
    figures = {"speed_up_of_busiest": 1.01}
    replay.check_times(
        findings,
        "a",
        {**figures, "predicted_over_measured_least": 0.9, "predicted_over_measured_most": 1.1},
    )
    assert findings.wrong == []
    figures = {
        "speed_up_of_busiest": 0.5,
        "predicted_over_measured_least": 0.8,
        "predicted_over_measured_most": 1.2,
    }
    replay.check_times(findings, "b", figures)
    off = [
        f"b: predicted seconds of a rank are {ratio} of the measured" for ratio in ("0.80", "1.20")
    ]
    assert findings.wrong == [
        "b: the busiest rank takes 2.00 of its time with whole documents",
        *off,
    ]


def test_memory_that_grows_and_losses_that_differ_are_found():
    watch = Watch(SMALL)
    stock = Watch(SMALL)
    findings = Findings()
    watch.memory = [100] * 9 + [105]
    _check_memory(findings, watch)
    assert findings.wrong == []
    watch.memory = list(range(100, 110))
    _check_memory(findings, watch)
    watch.logged = {"loss": [4.0, 3.99, 3.9], "grad_norm": [1.0, 1.05, 1.0]}
    stock.logged = {"loss": [4.0, 3.9], "grad_norm": [1.01, 1.0]}
    _check_logged(findings, "sdpa", watch, stock)
    stock.logged = {"loss": [], "grad_norm": []}
    _check_logged(findings, "none", watch, stock)
    memory, *of_logs = (sentence.rsplit(":", 1)[0] for sentence in findings.wrong)
    assert memory == "memory at the end over that after a fifth of the steps"
    steps = [f"sdpa: difference of the {name} of step 1" for name in ("loss", "grad_norm")]
    assert of_logs == [*steps, "none", "none"]


def test_padded_batches_that_differ_gain_little_or_are_packed_slowly_are_found():
    same = {"loss": 6.0, "norm of gradients": 2.0, "share_before_model": 0.03}
    figures = {padded.STOCK: {**same, "step_s": 5.0}, padded.PACKED: {**same, "step_s": 2.0}}
    findings = Findings()
    padded.compare_strategies(findings, figures, on_cuda=True)
    assert findings.wrong == []
    assert figures[padded.STOCK]["over_packed"] == 2.5
    worse = {"loss": 6.04, "norm of gradients": 1.95, "share_before_model": 0.04, "step_s": 2.1}
    padded.compare_strategies(findings, {**figures, padded.PACKED: worse}, on_cuda=False)
    differences = [f"{padded.PACKED}: difference of the {what}" for what in padded.BOUNDS]
    assert [sentence.rsplit(": ", 1)[0] for sentence in findings.wrong] == differences
    slow = {**same, "share_before_model": 0.04, "step_s": 2.1}
    padded.compare_strategies(
        findings := Findings(), {**figures, padded.PACKED: slow}, on_cuda=True
    )
    of_times = ["time of packed over padded to all", "share of a step before the model"]
    assert [sentence.rsplit(": ", 1)[0] for sentence in findings.wrong] == of_times


def test_prefixes_that_save_too_little_are_found():
    unshared = {"rows": 300.0, "loss": 2.0, "norm of gradients": 1.0, "step_s": 3.0}
    shared = {**unshared, "rows": 100.0, "step_s": 1.0}
    prefixes.compare_strategies(
        findings := Findings(), {"unshared": unshared, "shared": shared}, on_cuda=True
    )
    assert findings.wrong == []
    worse = {"rows": 110.0, "loss": 2.1, "norm of gradients": 1.1, "step_s": 1.3}
    prefixes.compare_strategies(findings, {"unshared": unshared, "shared": worse}, on_cuda=True)
    assert [sentence.rsplit(": ", 1)[0] for sentence in findings.wrong] == [
        "difference of the loss",
        "difference of the norm of gradients",
        "rows, shared over unshared",
        "time, shared over unshared",
    ]
    prefixes.compare_strategies(
        findings := Findings(),
        {"unshared": unshared, "shared": {**shared, "step_s": 9.0}},
        on_cuda=False,
    )
    assert findings.wrong == []


def test_a_packed_model_without_its_attention_is_found(monkeypatch):
    findings = padded.check_padded(SMALL)
    packed = [
        figures
        for name, figures in findings.figures["strategies"].items()
        if name.startswith("packed")
    ]
    assert len(packed) == 2
    assert all(figures["before_model_s"] > 0 for figures in packed)
    monkeypatch.setattr(CpuKernel, "forward", lambda self, q, *_: (q * 0, q[..., 0] * 0))
    wrong = padded.check_padded(SMALL).wrong
    assert wrong
    assert all(
        sentence.startswith("packed") and "difference of the" in sentence for sentence in wrong
    )
