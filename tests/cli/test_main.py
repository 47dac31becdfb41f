"""The command itself: help and answers to wrong arguments, which must not wait for torch or
transformers.
"""

import json
import os
import subprocess
import sys

import pytest

import hf_distca
from hf_distca.cli.main import TOOLS
from hf_distca.kernel_names import KERNEL_PACKAGES
from hf_distca.pool.nixl import is_installed
from hf_distca.pool.token import make_token, write_token

CODE = """
import contextlib, io, json, sys
from hf_distca.cli.main import main
answers = []
for command, *libraries in json.load(sys.stdin):
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        try:
            status = main(command.split())
        except SystemExit as ended:
            status = ended.code
    imported = sorted(set(libraries) & set(sys.modules))
    answers.append([status, printed.getvalue(), errors.getvalue(), imported])
json.dump(answers, sys.stdout)
"""
HEAVY = ("torch", "transformers", "datasets")
LIGHT = ["", "--help", "--version"]
"""Commands that need no library at all."""
STEP = "--ranks 2 --tokens-per-rank 64"
SERVE = "serve --join a:1 --token-file {files}/token"
MISSING_KERNELS = [kernel for kernel, package in KERNEL_PACKAGES.items() if package.missing()]
"""Kernels whose packages this machine lacks."""
WRONG = [
    *(
        "simulate",
        f"simulate --lengths prolong {STEP} --batches 0",
        "plan --ranks x",
        "profile --hidden 0",
    ),
    *("doctor --timeout x", "timeline", "timeline nowhere.json", "serve --join a"),
    *("serve --join a:1 --token-file nowhere", "profile --output nowhere/costs.json"),
    *(f"{tool} --lengths nowhere.json {STEP}" for tool in ("plan", "simulate")),
    *(f"{tool} --lengths nowhere.jsonl {STEP}" for tool in ("plan", "simulate")),
    *(f"{tool} --lengths lognormal:x {STEP}" for tool in ("plan", "simulate")),
    *(f"{tool} --lengths prolong {STEP} --model nowhere.json" for tool in ("plan", "simulate")),
    *(f"{tool} --lengths prolong {STEP} --model nowhere" for tool in ("plan", "simulate")),
    *(f"{tool} --lengths nowhere {STEP}" for tool in ("plan", "simulate")),
    *(f"{tool} --lengths README.md {STEP} --tokenizer nowhere" for tool in ("plan", "simulate")),
    *(f"{tool} --lengths prolong {STEP} --ranks-per-node 3,3" for tool in ("plan", "simulate")),
    *(
        f"{tool} --lengths prolong {STEP} --report nowhere/report.html"
        for tool in ("plan", "simulate")
    ),
    *(
        f"{tool} --lengths prolong {STEP} --config {{files}}/buffers.yaml"
        for tool in ("plan", "simulate")
    ),
    *(
        f"{tool} --lengths prolong {STEP} --model {{files}}/{model_type}"
        for tool in ("plan", "simulate")
        for model_type in ("t5", "vit", "abacus")
    ),
    *(f"profile --output costs.json --attention-kernel {kernel}" for kernel in MISSING_KERNELS),
    *(f"{SERVE} --attention-kernel {kernel}" for kernel in MISSING_KERNELS),
    *([] if is_installed() else [f"{SERVE} --transport nixl"]),
    *(f"{tool} --lengths prolong --ranks 2" for tool in ("plan", "simulate")),
    *(f"{tool} --lengths prolong {STEP} --config nowhere.yaml" for tool in ("plan", "simulate")),
    *(f"{tool} --lengths prolong {STEP} --profile nowhere.json" for tool in ("plan", "simulate")),
    f"simulate --lengths prolong {STEP} --tensor-parallel 3",
    "simulate --lengths prolong --ranks 2 --tokens-per-rank 1",
]
"""Each has one argument that is wrong or missing. The configs and the token are files of the
test."""


@pytest.fixture
def files(tmp_path):
    """A folder with configs of models that no plan can train, and the token of a run."""
    for model_type in ("t5", "vit", "abacus"):
        (tmp_path / model_type).mkdir()
        (tmp_path / model_type / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "buffers.yaml").write_text("planning: {exchange_buffer_bytes: 64KiB}\n")
    write_token(tmp_path / "token", make_token())
    return tmp_path


def test_help_and_wrong_arguments_are_answered_without_torch(run, files, subtests):
    """Counted in imports, as time tells how busy the machine is: torch and transformers take
    seconds.
    """
    commands = [[command, *HEAVY, "numpy"] for command in LIGHT]
    commands += [[f"{tool} --help", *HEAVY] for tool in TOOLS]
    commands += [[command.format(files=files), *HEAVY] for command in WRONG]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}  # names on the Hub are not looked up
    options = {
        "input": json.dumps(commands),
        "env": offline,
        "capture_output": True,
        "text": True,
        "check": True,
    }
    answers = json.loads(subprocess.run([sys.executable, "-c", CODE], **options).stdout)
    imported = {
        command: libraries for (command, *_), (*_, libraries) in zip(commands, answers, strict=True)
    }
    assert {command: libraries for command, libraries in imported.items() if libraries} == {}
    assert answers[2][:2] == [0, f"hf-distca {hf_distca.__version__}\n"]
    helped = answers[: -len(WRONG)]
    wrong = answers[-len(WRONG) :]
    assert {status for status, *_ in helped} == {0}
    for command, (status, printed, errors, _) in zip(WRONG, wrong, strict=True):
        with subtests.test(command):
            assert status == 2, errors
            assert printed == ""
            assert errors.count("\n") == 1
            assert ": error: " in errors


def test_help_names_all_tools(run):
    status, shown, _ = run()
    assert status == 0
    assert shown.startswith("usage: hf-distca")
    undescribed = {
        tool
        for tool, what_for in TOOLS.items()
        if tool not in shown or what_for.split(",")[0] not in shown
    }
    assert undescribed == set()


def test_a_tool_that_does_not_exist(run):
    status, _, error = run("plam")
    assert status == 2
    assert error.count("\n") == 1
    assert "invalid choice: 'plam'" in error


@pytest.mark.parametrize(("rank", "said"), [("0", "\ninterrupted\n"), ("1", "")])
def test_ctrl_c_is_one_line_of_rank_0(run, monkeypatch, rank, said):
    def interrupt(_options):
        raise KeyboardInterrupt

    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("hf_distca.cli.doctor.run", interrupt)
    assert run("doctor") == (130, "", said)
