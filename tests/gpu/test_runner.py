"""The runner of `make gpu`: what hangs, breaks or finds something hides no other part."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import devices
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.runner import Part, run_part, run_parts

ROOT = Path(__file__).parents[2]
WRITE = "import json, sys; open(sys.argv[1], 'w').write(json.dumps(told))"
LEAVE = "told = {told}; " + WRITE
CODE = {
    "good": LEAVE.format(told={"figures": {"a": 1}, "wrong": [], "skipped": ""}),
    "wrong": LEAVE.format(told={"figures": {"b": 2}, "wrong": ["too slow"], "skipped": ""}),
    "skipped": LEAVE.format(told={"figures": {}, "wrong": [], "skipped": "not installed"}),
    "broken": "import sys; print('segfault'); sys.exit(139)",
    # Waits together with a process that it has started.
    "hanging": """
import faulthandler, signal, subprocess, sys
faulthandler.register(signal.SIGUSR1)
def wait_for_ever():
    subprocess.run([sys.executable, "-c", "import time; time.sleep(99)"])
wait_for_ever()
""",
}


def never(_setting: object) -> Findings:
    raise AssertionError("parts run in processes of their own")


def run(tmp_path, names, seconds=60.0, limit_s=20.0):
    results = {"command": "this"}
    right = run_parts(
        [Part(name, never, 2.0 if name == "hanging" else limit_s) for name in names],
        lambda name, findings: [sys.executable, "-c", CODE[name], str(findings)],
        results,
        tmp_path / "results" / "gpu.json",
        tmp_path / "logs",
        seconds,
    )
    assert json.loads((tmp_path / "results" / "gpu.json").read_text()) == results
    return right, results["parts"]


def test_every_part_is_reported(tmp_path):
    begin = time.monotonic()
    right, parts = run(tmp_path, ["hanging", "broken", "wrong", "skipped", "good"])
    assert not right
    assert time.monotonic() - begin < 20
    assert {name: part["status"] for name, part in parts.items()} == {
        "hanging": "TIMED OUT",
        "broken": "FAILED",
        "wrong": "FAILED",
        "skipped": "skipped",
        "good": "passed",
    }
    (where,) = parts["hanging"]["wrong"]
    assert where.startswith("not done in 2 s")
    assert "in wait_for_ever" in where
    assert parts["broken"]["wrong"] == ["ended with status 139 and without findings: segfault"]
    assert parts["wrong"]["wrong"] == ["too slow"]
    assert parts["wrong"]["figures"] == {"b": 2}
    assert parts["skipped"]["skipped"] == "not installed"


def test_nothing_wrong(tmp_path):
    right, _ = run(tmp_path, ["good", "skipped"])
    assert right


def test_for_a_part_that_has_nothing_to_do_no_process_is_started(tmp_path):
    results = {}
    right = run_parts(
        [Part("kernel", never, 20.0, skipped="needs a package")],
        lambda *_: pytest.fail("a process was started"),
        results,
        tmp_path / "gpu.json",
        tmp_path / "logs",
        60.0,
    )
    assert right
    assert results["parts"]["kernel"]["status"] == "skipped"
    assert json.loads((tmp_path / "gpu.json").read_text())["parts"]["kernel"]["skipped"] == "needs a package"


def test_a_part_sees_the_first_gpu_or_all(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    code = f"import os; told = dict(figures=os.environ['CUDA_VISIBLE_DEVICES'], wrong=[], skipped=''); {WRITE}"
    seen = [
        run_part("part", lambda _, findings: [sys.executable, "-c", code, str(findings)], tmp_path, 20.0, all_gpus=all)
        for all in (False, True)
    ]
    assert [part["figures"] for part in seen] == ["3", "3,5"]


def test_parts_that_time_is_up_for_are_not_reached(tmp_path):
    right, parts = run(tmp_path, ["good", "wrong"], seconds=0.0)
    assert not right
    assert [part["status"] for part in parts.values()] == ["NOT REACHED", "NOT REACHED"]


def test_without_a_gpu(monkeypatch):
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu"],
        cwd=ROOT,
        env={"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert time.monotonic() - begin < 5  # no torch: it alone would take seconds
    assert (done.returncode, done.stdout) == (3, devices.why_none() + "\n")
    assert done.stderr == ""
