import json
import os

import numpy as np
import pytest
import torch

from hf_distca.cli.main import main
from hf_distca.dispatch.groups import Groups
from hf_distca.kernels.speed import PEAK_FLOPS
from hf_distca.measure import device
from hf_distca.measure import profile as measured_profile
from hf_distca.measure.links import measured_link
from hf_distca.measure.profile import ranks_per_core
from hf_distca.plan import AttentionKind
from hf_distca.planner.seconds import KernelCost, LinkCost
from hf_distca.sim.costs import Accuracy, DeviceProfile

SMALL = ["--q-heads", "2", "--kv-heads", "1", "--head-dim", "16", "--hidden", "64"]


@pytest.fixture
def few_calls(monkeypatch):
    monkeypatch.setattr(device, "QUERIES", {"cpu": (16, 64, 256)})
    monkeypatch.setattr(device, "REPEATS", 1)


def test_a_device_is_measured_and_simulated(tmp_path, capsys, few_calls):
    path = tmp_path / "mine.json"
    assert main(["profile", "--output", str(path), *SMALL]) == 0
    assert "held-out calls" in capsys.readouterr().out
    found = DeviceProfile.load(str(path))
    assert found.measured == AttentionKind(None, 2, 1, 16, 16)
    assert found.dtype == "float32"
    assert "links not measured" in found.source
    assert found.accuracy.count == 3
    assert (found.links.within.bandwidth, found.exchange.within.bandwidth) == (450e9, 100e9)
    assert min(found.flops_per_second, found.bytes_per_second) > 1e6
    setting = ["--lengths", "prolong", "--ranks", "2", "--tokens-per-rank", "2048", "--batches", "1"]
    assert main(["simulate", *setting, "--profile", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["profile"] == "CPU, float32"


@pytest.mark.parametrize(
    ("cost", "seconds"),
    [
        (KernelCost(0.0, 1e-3, 0.0, 0.0), 16.384),  # as a fit of a few short calls may find
        (KernelCost(0.0, 0.0, 0.0, 2e-8), 16384 * 16385 * 1e-8),
    ],
)
def test_a_long_document_tells_how_fast_the_kernel_is(tmp_path, capsys, monkeypatch, cost, seconds):
    monkeypatch.setattr(measured_profile, "measured_kernel", lambda *_, **__: (cost, cost, Accuracy(1.0, 1.0, 1)))
    assert main(["profile", "--output", str(tmp_path / "mine.json"), *SMALL]) == 0
    flops = 2 * 2 * (16 + 16) * (16384 * 16385 / 2)
    assert f"16384 tokens' attention    {flops / seconds / 1e12:.3g} TFLOP/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            ["--output", "/nonexistent/x.json"],
            "cannot write /nonexistent/x.json: there is no such folder; make the folder first",
        ),
        (["--output", "."], "cannot write .: it is a folder; name a file"),
        (["--q-heads", "3", "--kv-heads", "2"], "kv_heads must divide q_heads"),
        (["--attention-kernel", "torch_varlen"], "torch_varlen"),
        (["--hidden", "1000000000"], "cpu has too little memory for rows of this size; make --q-heads"),
    ],
)
def test_what_cannot_be_measured_is_told_first(tmp_path, capsys, monkeypatch, options, told):
    monkeypatch.setattr(device, "seconds_of", lambda *_: pytest.fail("measured"))
    assert main(["profile", "--output", str(tmp_path / "mine.json"), *SMALL, *options]) == 2
    assert told in capsys.readouterr().err


def test_costs_follow_what_calls_take(monkeypatch):
    """With a clock that counts query-key pairs."""
    now = [0.0]

    class Counts:
        def forward(self, q, k, v, shapes, params):
            now[0] += 2e-9 * (q.shape[0] * (k.shape[0] - q.shape[0]) + q.shape[0] * (q.shape[0] + 1) / 2) + 1e-5
            return q, q[..., 0]

        def backward(self, do, q, k, v, o, lse, shapes, params):
            now[0] += 1e-4
            return q, k, v

    monkeypatch.setattr(device.time, "perf_counter", lambda: now[0])
    kind = AttentionKind(None, 1, 1, 8, 8)
    forward, backward, accuracy = device.measured_kernel(Counts(), kind, torch.float32, torch.device("cpu"))
    assert (forward.pair, forward.call) == pytest.approx((2e-9, 1e-5), rel=1e-6)
    assert (backward.pair, backward.call) == pytest.approx((0.0, 1e-4), abs=1e-15)
    assert accuracy.worst_ratio == pytest.approx(1.0)


def test_values_of_another_width_are_measured_as_such():
    widths = set()

    class Notes:
        def forward(self, q, k, v, shapes, params):
            widths.add((q.shape[-1], k.shape[-1], v.shape[-1]))
            return q.new_empty(*q.shape[:2], v.shape[-1]), q[..., 0]

        def backward(self, do, q, k, v, o, lse, shapes, params):
            assert do.shape == o.shape
            return q, k, v

    kind = AttentionKind(None, 2, 1, 12, 8)
    device.measured_kernel(Notes(), kind, torch.float32, torch.device("cpu"), queries=(4, 8, 16))
    assert widths == {(12, 12, 8)}


def test_short_calls_do_not_bend_what_long_ones_cost():
    """A pair takes 3 s in short calls, and 1 s in long ones."""
    calls = [(rows, rows, rows * rows) for rows in (8, 16, 32, 512, 1024, 2048)]
    tasks = device._tasks(calls, range(len(calls)))
    seconds = tasks.pairs * np.array([3.0, 3.0, 3.0, 1.0, 1.0, 1.0])
    found = device._fitted(tasks, seconds)
    assert found.seconds(tasks)[3:] == pytest.approx(seconds[3:], rel=0.05)


def _links(_: None) -> list[LinkCost]:
    groups, cpu = Groups(torch.device("cpu"), 60.0), torch.device("cpu")
    return [measured_link(groups, cpu, [1, 0], alone=alone) for alone in (False, True)]


def test_ranks_measure_the_same_link(rank_pools):
    first, second = rank_pools[2].run(_links, None)
    assert first == second
    for link in first:
        assert link.latency >= 0
        assert np.isfinite(link.bandwidth)
        assert link.bandwidth > 1e6


def _per_core(cores: int) -> float:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
        torch.set_num_threads(2)
        found = ranks_per_core(Groups(torch.device("cpu"), 60.0))
        torch.set_num_threads(1)
    return found


@pytest.mark.parametrize(("cores", "expected"), [(1, 4.0), (3, 4 / 3), (8, 1.0)])
def test_threads_of_ranks_on_a_core_are_counted(rank_pools, cores, expected):
    assert rank_pools[2].run(_per_core, cores) == [expected] * 2


def test_peaks_are_of_devices_that_are_known():
    assert {"H100", "H200", "A100"} <= PEAK_FLOPS.keys()
