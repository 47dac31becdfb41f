import pytest

from hf_distca.measure import device
from hf_distca.plan import AttentionKind
from hf_distca.planner.seconds import KernelCost
from hf_distca.sim.costs import Accuracy, DeviceProfile

SMALL = ["--q-heads", "2", "--kv-heads", "1", "--head-dim", "16", "--hidden", "64"]


def test_a_device_is_measured_and_simulated(tmp_path, run, figures, monkeypatch):
    monkeypatch.setattr(device, "QUERIES", {"cpu": (16, 64, 256)})
    monkeypatch.setattr(device, "REPEATS", 1)
    path = str(tmp_path / "mine.json")
    assert "held-out calls" in run("profile", "--output", path, *SMALL)[1]
    found = DeviceProfile.load(path)
    assert (found.measured, found.dtype) == (AttentionKind(None, 2, 1, 16, 16), "float32")
    assert "links not measured" in found.source
    assert found.accuracy.count == 3
    assert (found.links.within.bandwidth, found.exchange.within.bandwidth) == (450e9, 100e9)
    assert min(found.flops_per_second, found.bytes_per_second) > 1e6
    setting = ["--lengths", "prolong", "--ranks", "2", "--tokens-per-rank", "2048", "--batches", "1"]
    assert figures("simulate", *setting, "--profile", path)["profile"] == "CPU, float32"


def test_the_printed_speed_is_that_of_a_long_document(tmp_path, run, monkeypatch):
    cost, seconds = KernelCost(0.0, 1e-3, 0.0, 2e-8), 16.384 + 16384 * 16385 * 1e-8
    monkeypatch.setattr(device, "measured_kernel", lambda *_, **__: (cost, cost, Accuracy(1.0, 1.0, 1)))
    flops = 2 * 2 * (16 + 16) * (16384 * 16385 / 2)
    printed = run("profile", "--output", str(tmp_path / "mine.json"), *SMALL)[1]
    assert f"16384 tokens' attention    {flops / seconds / 1e12:.3g} TFLOP/s" in printed


def test_errors_come_before_measuring(tmp_path, run, monkeypatch):
    monkeypatch.setattr(device, "seconds_of", lambda *_: pytest.fail("measured"))
    for options, message in (
        (["--output", "/nonexistent/x.json"], "cannot write /nonexistent/x.json: there is no such folder; make the"),
        (["--q-heads", "3", "--kv-heads", "2"], "kv_heads must divide q_heads"),
        (["--attention-kernel", "torch_varlen"], "torch_varlen"),
        (["--hidden", "1000000000"], "cpu has too little memory for rows of this size; make --q-heads"),
    ):
        status, _, error = run("profile", "--output", str(tmp_path / "mine.json"), *SMALL, *options)
        assert (status, message in error) == (2, True), error
