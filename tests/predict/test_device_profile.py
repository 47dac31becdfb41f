"""Costs that are fitted, and profiles that are read."""

import json
from dataclasses import replace

import numpy as np
import pytest

from hf_distca.plan import AttentionKind
from hf_distca.predict.device_profile import PROFILES, Accuracy, DeviceProfile, held_out
from hf_distca.predict.seconds import KernelCost, LinkCost, Tasks


def tasks(
    *calls: tuple[float, float, float], diagonal: float = 0.0, count: tuple[float, ...] = ()
) -> Tasks:
    """Calls of rows, keys and pairs, and `count` tasks of each call; none to leave tasks out."""
    rows, keys, pairs = np.array(calls).T
    return Tasks(
        rows,
        keys,
        pairs,
        np.ones(len(calls)),
        diagonal * rows,
        np.array(count or (0.0,) * len(calls)),
    )


def costs(cost: KernelCost) -> list[float]:
    return list(vars(cost).values())


def test_seconds_of_a_call_are_found_again():
    cost = KernelCost(call=1.0, row=0.5, key=0.25, pair=0.125, diagonal=2.0)
    assert cost.seconds(tasks((2, 4, 8), (0, 0, 0), diagonal=3)).tolist() == [16.0, 1.0]
    calls = tasks(
        (128, 128, 8e3), (128, 4096, 5e5), (4096, 4096, 8e6), (2048, 8192, 1.5e7), (64, 64, 2e3)
    )
    cost = KernelCost(2e-5, 1e-8, 3e-9, 1e-11)
    assert costs(KernelCost.fitted(calls, cost.seconds(calls))) == pytest.approx(
        costs(cost), rel=1e-6
    )
    calls = replace(calls, diagonal=calls.rows * np.minimum(calls.rows, 512))
    cost = KernelCost(2e-5, 1e-8, 3e-9, 1e-11, 4e-12)
    assert costs(KernelCost.fitted(calls, cost.seconds(calls))) == pytest.approx(
        costs(cost), rel=1e-6
    )
    # A task's cost is found apart from a call's by calls of several tasks.
    calls = replace(calls, tasks=np.array([1.0, 1.0, 1.0, 8.0, 4.0]))
    cost = KernelCost(2e-5, 1e-8, 0.0, 1e-11, 0.0, task=5e-6)
    assert cost.seconds(calls)[3] - replace(cost, task=0.0).seconds(calls)[3] == pytest.approx(
        8 * 5e-6
    )
    assert costs(KernelCost.fitted(calls, cost.seconds(calls))) == pytest.approx(
        costs(cost), rel=1e-6
    )
    # No cost is negative.
    assert (
        min(
            costs(
                KernelCost.fitted(tasks((1, 1, 1), (2, 2, 4), (3, 3, 9)), np.array([1.0, 1.0, 0.5]))
            )
        )
        >= 0
    )
    # (r - 1)² + 4 (2r / 4 - 1)² is least at 1.5: 0.5. The best cost of a call, 1.6, misses by 1.8.
    weighted = KernelCost.fitted(
        tasks((1, 0, 0), (2, 0, 0)), np.array([1.0, 4.0]), np.array([1.0, 4.0])
    )
    assert costs(weighted) == pytest.approx([0, 1.5, 0, 0, 0, 0])


def test_other_heads():
    cost, measured = KernelCost(1.0, 2.0, 4.0, 8.0, 0.5, 3.0), AttentionKind(None, 8, 4, 64, 64)
    assert cost.for_kind(measured, AttentionKind(None, 16, 2, 64, 64)) == KernelCost(
        1.0, 4.0, 2.0, 16.0, 1.0, 6.0
    )
    # Head dims of 320 in all are 2.5 times 128.
    assert cost.for_kind(measured, AttentionKind(None, 8, 4, 192, 128)) == KernelCost(
        1.0, 5.0, 10.0, 20.0, 1.25, 7.5
    )


def test_a_link():
    assert LinkCost(latency=1.0, bandwidth=10.0).seconds(np.array([0.0, 10.0, 40.0])).tolist() == [
        0.0,
        2.0,
        5.0,
    ]
    cost = LinkCost.fitted(np.array([10.0, 40.0, 100.0]), np.array([2.0, 5.0, 11.0]))
    assert (cost.latency, cost.bandwidth) == pytest.approx((1.0, 10.0))
    assert LinkCost.fitted(np.array([10.0, 20.0]), np.array([1.0, 0.5])).bandwidth == np.inf


def test_accuracy_on_what_lies_between_what_is_fitted_to():
    assert held_out(8) == ([0, 2, 3, 5, 6, 7], [1, 4])
    accuracy = Accuracy.of(np.array([1.0, 2.0, 6.0]), np.array([2.0, 2.0, 5.0]))
    assert (accuracy.r2, accuracy.worst_ratio, accuracy.count) == (pytest.approx(1 - 2 / 6), 2.0, 3)
    assert Accuracy.of(np.array([6.0, 2.0]), np.array([2.0, 4.0])).worst_ratio == 3.0
    assert Accuracy.of(np.array([2.0, 2.0]), np.array([2.0, 2.0])) == Accuracy(1.0, 1.0, 2)


@pytest.mark.parametrize(("name", "worst_ratio"), [("h100", 1.35), ("cpu", 2.0)])
def test_a_profile_is_accurate_and_survives_its_file(tmp_path, name, worst_ratio):
    path = tmp_path / "mine.json"
    profile = DeviceProfile.load(name)
    assert profile.accuracy.r2 > 0.98
    assert profile.accuracy.worst_ratio < worst_ratio
    assert len(profile.source) > 40
    profile.save(path)
    assert DeviceProfile.load(str(path)) == profile
    # A file that was written before tasks had a cost.
    content = json.loads(path.read_text())
    del content["forward"]["task"], content["backward"]["task"]
    path.write_text(json.dumps(content))
    loaded = DeviceProfile.load(str(path))
    assert loaded.forward.task == 0.0
    assert loaded.backward.task == 0.0


def test_profiles_of_the_package():
    assert {path.stem for path in PROFILES.glob("*.json")} == {"h100", "h200", "cpu"}
    h100 = DeviceProfile.load("h100")
    h200 = DeviceProfile.load("h200")
    assert h100.forward.task == h100.backward.task == 0.0  # was not published
    assert min(h200.forward.task, h200.backward.task) > 0
    assert "a prior until it is measured" in h200.source
    assert h100.exchange.within.bandwidth == 100e9 < h100.links.within.bandwidth
    assert h100.exchange.between == h100.links.between


@pytest.mark.parametrize(
    "content", ["{", json.dumps({"name": "half"}), None], ids=["broken", "half", "missing"]
)
def test_files_that_are_no_profile(tmp_path, content):
    path = tmp_path / "mine.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(
        ValueError, match=r"no device profile at '.*mine\.json' \(.*\), but .*; give one of .*h100"
    ):
        DeviceProfile.load(str(path))
