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

pytestmark = pytest.mark.launches

ROOT = Path(__file__).parents[2]
WRITE = "import json, sys; open(sys.argv[1], 'w').write(json.dumps(told))"
LEAVE = "told = dict(figures={}, wrong=[], skipped='') | {told}; " + WRITE
CODE = {
    "good": LEAVE.replace("{told}", "{}"),
    "wrong": "print('slow');"
    + LEAVE.replace("{told}", "dict(figures={'b': 2}, wrong=['too slow'])"),
    "skipped": LEAVE.replace("{told}", "dict(skipped='not installed')"),
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
    file = tmp_path / "results" / "gpu.json"
    parts = [Part(name, never, hanging_s if name == "hanging" else 20.0) for name in names]
    parts.append(Part("kernel", never, 20.0, skipped="needs a package"))
    right = run_parts(
        parts,
        lambda name, folder: [sys.executable, "-c", CODE[name], str(folder)],
        results,
        file,
        tmp_path,
        seconds,
    )
    assert json.loads(file.read_text()) == results
    kernel = results["parts"].pop("kernel")  # for which no process was started
    assert kernel["status"] == "skipped"
    assert kernel["skipped"] == "needs a package"
    return right, results["parts"]


def test_every_part_is_reported(tmp_path):
    begin = time.monotonic()
    right, parts = run(tmp_path, ["hanging", "broken", "wrong", "skipped", "good"])
    assert not right
    assert time.monotonic() - begin < 20
    reports = {
        name: (part["status"], part["wrong"], part["printed"]) for name, part in parts.items()
    }
    assert "in wait_for_ever" in reports["hanging"][2]
    assert reports == {
        "hanging": ("TIMED OUT", ["not done in 2 s"], reports["hanging"][2]),
        "broken": ("FAILED", ["ended with status 139, without findings"], "segfault"),
        "wrong": ("FAILED", ["too slow"], "slow"),
        "skipped": ("skipped", [], ""),
        "good": ("passed", [], ""),
    }
    assert parts["wrong"]["figures"] == {"b": 2}
    assert parts["skipped"]["skipped"] == "not installed"
    assert run(tmp_path, ["good", "skipped"])[0]


def test_a_part_sees_the_first_gpu_or_all(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    code = (
        "import os; told = dict(figures=os.environ['CUDA_VISIBLE_DEVICES'], wrong=[], "
        f"skipped=''); {WRITE}"
    )
    parts = [Part("part", never, 20.0, all_gpus=all_gpus) for all_gpus in (False, True)]
    seen = [
        run_part(part, lambda _, file: [sys.executable, "-c", code, str(file)], tmp_path)
        for part in parts
    ]
    assert [part["figures"] for part in seen] == ["3", "3,5"]


def test_parts_that_do_not_fit_are_not_run(tmp_path, capsys):
    right, parts = run(
        tmp_path, ["wrong", "hanging", "broken", "good"], seconds=21.9, hanging_s=22.0
    )
    assert not right
    assert [part["status"] for part in parts.values()] == ["FAILED", "NOT RUN", "FAILED", "passed"]
    (why,) = parts["hanging"]["wrong"]
    assert why.startswith("it is given 22 s, of 22 s 2")
    print_table({"parts": {**parts, "two ranks": parts["hanging"]}})
    assert capsys.readouterr().out.endswith("""not run: make gpu GPU="hanging 'two ranks'"\n""")


def test_a_run_that_is_killed_leaves_its_results_and_no_part(tmp_path):
    arguments = (tmp_path, ["good", "hanging", "broken"], 90.0, 60.0)
    process = multiprocessing.get_context("fork").Process(target=run, args=arguments)
    process.start()
    results = tmp_path / "results" / "gpu.json"
    children = []
    states = {}
    while states.get("hanging") != "NOT DONE" or not children:
        time.sleep(0.05)
        parts = json.loads(results.read_text())["parts"] if results.exists() else {}
        states = {name: part["status"] for name, part in parts.items() if name != "kernel"}
        children = psutil.Process(process.pid).children()
    process.kill()
    process.join()
    assert psutil.wait_procs(children, timeout=10)[1] == []
    assert states == {"good": "passed", "hanging": "NOT DONE", "broken": "NOT RUN"}
    assert json.loads(results.read_text())["parts"] == parts


def test_parts_by_name_or_how_they_begin():
    parts = [Part(name, never, 1.0) for name in ("kernel a", "kernel a2", "two ranks", "trace")]
    assert chosen(parts, []) == parts
    assert chosen(parts, ["t", "kernel a"]) == [parts[0], *parts[2:]]
    with pytest.raises(
        ValueError,
        match=r"no part is called 'nccl'; there are: kernel a, kernel a2, two ranks, trace",
    ):
        chosen(parts, ["kernel", "nccl"])


def test_without_a_gpu():
    begin = time.monotonic()
    environment = {"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-m", "benchmarks.gpu"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert time.monotonic() - begin < 5  # no torch: it alone would take seconds
    assert done.returncode == 3
    assert done.stdout == devices.why_none() + "\n"
    assert done.stderr == ""
