"""The runner of `make gpu`: what hangs, breaks or finds something hides no other part."""

import json
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.gpu import devices
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.runner import Part, chosen, print_table, run_part, run_parts

ROOT = Path(__file__).parents[2]
WRITE = "import json, sys; open(sys.argv[1], 'w').write(json.dumps(told))"
LEAVE = "told = {told}; " + WRITE
CODE = {
    "good": LEAVE.format(told={"figures": {"a": 1}, "wrong": [], "skipped": ""}),
    "wrong": "print('slow');" + LEAVE.format(told={"figures": {"b": 2}, "wrong": ["too slow"], "skipped": ""}),
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


def run(tmp_path, names, seconds=60.0, hanging_s=2.0):
    results = {"command": "this"}
    parts = [Part(name, never, hanging_s if name == "hanging" else 20.0) for name in names]
    parts.append(Part("kernel", never, 20.0, skipped="needs a package"))
    right = run_parts(
        parts,
        lambda name, findings: [sys.executable, "-c", CODE[name], str(findings)],
        results,
        tmp_path / "results" / "gpu.json",
        tmp_path / "logs",
        seconds,
    )
    assert json.loads((tmp_path / "results" / "gpu.json").read_text()) == results
    kernel = results["parts"].pop("kernel")  # for which no process was started
    assert (kernel["status"], kernel["skipped"]) == ("skipped", "needs a package")
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
    assert parts["hanging"]["wrong"] == ["not done in 2 s"]
    assert "in wait_for_ever" in parts["hanging"]["printed"]
    found = {name: (part["wrong"], part["printed"]) for name, part in parts.items()}
    assert found["broken"] == (["ended with status 139, without findings"], "segfault")
    assert (found["wrong"], found["good"]) == ((["too slow"], "slow"), ([], ""))
    assert (parts["wrong"]["figures"], parts["skipped"]["skipped"]) == ({"b": 2}, "not installed")
    assert run(tmp_path, ["good", "skipped"])[0]


def test_a_part_sees_the_first_gpu_or_all(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    code = f"import os; told = dict(figures=os.environ['CUDA_VISIBLE_DEVICES'], wrong=[], skipped=''); {WRITE}"
    parts = [Part("part", never, 20.0, all_gpus=all_gpus) for all_gpus in (False, True)]
    seen = [run_part(part, lambda _, file: [sys.executable, "-c", code, str(file)], tmp_path) for part in parts]
    assert [part["figures"] for part in seen] == ["3", "3,5"]


def test_parts_that_do_not_fit_are_not_run(tmp_path, capsys):
    right, parts = run(tmp_path, ["wrong", "hanging", "broken", "good"], seconds=21.9, hanging_s=22.0)
    assert not right
    assert [part["status"] for part in parts.values()] == ["FAILED", "NOT RUN", "FAILED", "passed"]
    (why,) = parts["hanging"]["wrong"]
    assert why.startswith("it is given 22 s, of 22 s 2")
    print_table({"parts": {**parts, "two ranks": parts["hanging"]}})
    assert capsys.readouterr().out.endswith("""not run: make gpu GPU="hanging 'two ranks'"\n""")


def test_a_run_that_is_killed_leaves_its_results_and_no_part(tmp_path):
    process = multiprocessing.get_context("fork").Process(
        target=run, args=(tmp_path, ["good", "hanging", "broken"], 90.0, 60.0)
    )
    process.start()
    results = tmp_path / "results" / "gpu.json"
    parts = {}
    children: list[psutil.Process] = []
    while parts.get("hanging", {}).get("status") != "NOT DONE" or not children:
        time.sleep(0.05)
        parts = json.loads(results.read_text())["parts"] if results.exists() else {}
        children = psutil.Process(process.pid).children()
    process.kill()
    process.join()
    assert psutil.wait_procs(children, timeout=10)[1] == []
    parts = json.loads(results.read_text())["parts"]
    statuses = [parts[name]["status"] for name in ("good", "hanging", "broken")]
    assert statuses == ["passed", "NOT DONE", "NOT RUN"]


def test_parts_by_name_or_how_they_begin():
    parts = [Part(name, never, 1.0) for name in ("kernel a", "kernel a2", "two ranks", "trace")]
    assert chosen(parts, []) == parts
    assert chosen(parts, ["t", "kernel a"]) == [parts[0], *parts[2:]]
    with pytest.raises(
        ValueError, match=r"no part is called 'nccl'; there are: kernel a, kernel a2, two ranks, trace"
    ):
        chosen(parts, ["kernel", "nccl"])


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
