"""What README shows is so: its commands run and print it, its figures are those of results, its names exist."""

import ast
import importlib.util
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hf_distca
from hf_distca.cli.main import main
from tests.launch import ROOT, cpu_environment
from tests.ranks import free_port

README = (ROOT / "README.md").read_text()
TEXT_BYTES = 12_000
"""How much of the quickstart's text is trained on here."""


def section(title: str) -> str:
    return re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", README, re.S | re.M)[1]


def blocks(title: str, language: str = "") -> list[str]:
    """Blocks of code of a section: those of commands are in no language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", section(title), re.S | re.M)
    return [code for its_language, code in found if its_language == language]


def result(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["result"]


def test_it_is_short():
    assert len(README.splitlines()) <= 160
    assert len(README.split()) <= 1500


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """The files that README's commands use, in a folder of their own."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "examples", folder / "examples")
    return folder


def in_shell(command: str, folder: Path) -> str:
    """What a command prints that a reader enters in a shell with the environment activated."""
    environment = cpu_environment()
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def trained(clone) -> tuple[Path, str]:
    """The clone after the quickstart, and what its training printed."""
    make_checkpoint, make_text, launch = blocks("Quickstart")[0].splitlines()
    in_shell(make_checkpoint, clone)
    in_shell(make_text, clone)
    text = clone / "my.txt"
    text.write_bytes(text.read_bytes()[:TEXT_BYTES])
    # On a port of its own: another launch may have the launcher's.
    launch = launch.replace("accelerate launch", f"accelerate launch --main_process_port {free_port()}")
    return clone, in_shell(f"{launch} --logging_steps 1 --num_train_epochs 2", clone)


def test_the_quickstart_trains(trained):
    folder, printed = trained
    losses = [float(found) for found in re.findall(r"'loss': '?([\d.]+)", printed)]
    assert losses[-1] < losses[0]
    assert losses[0] == pytest.approx(7.6, abs=0.2)  # ln 2048
    assert (folder / "runs" / "train" / "model.safetensors").exists()


def test_the_shown_script_trains(trained):
    folder, _ = trained
    (shown,) = blocks("Quickstart", "python")
    shutil.rmtree(folder / "runs" / "train")
    (folder / "shown.py").write_text(shown)
    in_shell("python shown.py", folder)
    assert (folder / "runs" / "train" / "model.safetensors").exists()


def test_python_compiles_and_its_names_exist():
    shown = re.findall(r"^```python\n(.*?)^```", README, re.S | re.M)
    assert len(shown) >= 2
    for code in shown:
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("hf_distca."):
                given = {keyword.arg: None for keyword in node.keywords}
                called = getattr(hf_distca, node.func.attr)
                if called is not hf_distca.DistCATrainer:  # hands keywords on
                    inspect.signature(called).bind(*node.args, **given)


def simulations() -> list[tuple[str, list[str]]]:
    """Commands of the simulation, each with the lines shown below it."""
    shown = [part.splitlines() for part in blocks("Will it pay?")[0].split("$ ")[1:]]
    return [(command, lines) for command, *lines in shown]


@pytest.mark.parametrize(("command", "lines"), simulations())
def test_the_shown_simulations_are_printed(command, lines, capsys):
    assert main(shlex.split(command)[1:]) == 0
    assert lines
    assert set(lines) <= set(capsys.readouterr().out.splitlines())


def test_one_shown_simulation_says_no():
    assert [any("No gain expected" in line for line in lines) for _, lines in simulations()].count(True) == 1


def test_expected_gains_are_those_of_the_result():
    shown = re.findall(r"^\| ([\w ]+) \| \d+% \| ([\d.]+)[^|]* \| ([\d.]+)[^|]* \|$", section("Will it pay?"), re.M)
    gains: dict[str, dict[int, float]] = {}
    rows = result("typical_data")["settings"]
    for row in rows:
        gains.setdefault(row["documents"], {})[row["ranks"]] = row["over_best_other_of_batches"]["median"]
    assert {name: {8: f"{of[8]:.2f}", 64: f"{of[64]:.2f}"} for name, of in gains.items()} == {
        name: {8: on_8, 64: on_64} for name, on_8, on_64 in shown
    }
    most = {ranks: max(of[ranks] for of in gains.values()) for ranks in (8, 64)}
    sentence = f"at most {most[8] - 1:.0%} on one node of 8 GPUs, and up to {most[64] - 1:.0%} on 64"
    text = section("Will it pay?").replace(" %", "%").replace("\n", " ")
    assert sentence in text
    single = {ranks: [row["over_best_fixed"] for row in rows if row["ranks"] == ranks] for ranks in (8, 64)}
    least_to_most = [f"{min(of):.2f} to {max(of):.2f} on {ranks}" for ranks, of in single.items()]
    assert "it is {} GPUs and {}.".format(*least_to_most) in text


def test_evidence_is_that_of_results():
    evidence = section("Evidence")
    document = result("long_document")
    assert f"{document['tokens']:,} tokens over {len(document['peak_mib'])} ranks" in evidence
    assert f"within {max(document['relative_errors'].values()):.1e} of float64" in evidence
    faults = [result("faults"), result("faults_nixl")]
    assert [each["lost"] for each in faults] == [0, 0]
    assert f"{sum(each['kills'] for each in faults)} attention servers killed" in evidence
    assert f"of {sum(each['steps'] for each in faults)} steps none was lost" in evidence
    loss = result("memory_loss")["derived"]
    assert f"{loss['8192 chunked / own, MiB']['median']:.3f} of the memory" in evidence
    assert loss["8192 chunked / own, s"]["median"] == pytest.approx(0.5, abs=0.05)


def test_models_are_those_of_the_survey():
    (page,) = (ROOT / "docs").rglob("compatibility.md")
    equal, refused, unmade = map(
        int, re.search(r"(\d+) give .*?(\d+) are refused .*?(\d+) ", page.read_text(), re.S).groups()
    )
    assert f"{equal} of {equal + refused + unmade} architectures" in section("What works")


def test_the_long_description_has_absolute_links():
    spec = importlib.util.spec_from_file_location("absolute_links", ROOT / ".ci" / "absolute_links.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.with_absolute_links(README, "https://example.org/a/b", "v1")
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert "https://example.org/a/b/raw/v1/docs/step.svg" in links
    assert "https://example.org/a/b/blob/v1/examples/train.py" in links
    assert all(link.startswith(("https://", "#")) for link in links)
    assert "absolute_links.py" in (ROOT / ".github" / "workflows" / "release.yml").read_text()


def test_named_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make (\w+)`", README):
        assert re.search(rf"^{target}:", makefile, re.M), target
