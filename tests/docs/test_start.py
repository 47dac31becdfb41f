"""What the pages of docs/start show is so: scripts run, options and files exist, printed lines are printed."""

import ast
import re
import shlex
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from transformers import HfArgumentParser

import hf_distca
from tests.examples.running import EXAMPLES, run
from tests.launch import CONFIGS, ROOT

PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs" / "start").glob("*.md"))}
LAUNCHER = {
    *("--config_file", "--num_processes", "--num_machines", "--machine_rank", "--main_process_ip"),
    *("--main_process_port", "--module"),
}


def blocks(page: str, language: str = "") -> list[str]:
    """Blocks of code of a page: those of commands are in no language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGES[page], re.S | re.M)
    return [code for its_language, code in found if its_language == language]


def commands(page: str) -> list[str]:
    return [line for block in blocks(page) for line in block.replace("\\\n", " ").splitlines()]


def test_pages_are_there():
    assert {path.removesuffix(".md") for path in PAGES} == {"install", "quickstart", "chats", "launching", "notebooks"}


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page):
    for path in re.findall(r"\b((?:examples|docs|benchmarks)/[\w/.]+\w)", PAGES[page]):
        assert (ROOT / path).exists(), path


def test_extras_are_those_that_are_declared():
    table = re.findall(r"^\| ((?:`[\w-]+`(?:, )?)+) \|", PAGES["install.md"], re.M)
    shown = {name for cell in table for name in re.findall(r"`([\w-]+)`", cell)}
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert shown == set(declared["optional-dependencies"]) - {"report"}
    needs = dict(re.match(r"(\w+)>=([\d.]+)", need).groups() for need in declared["dependencies"] if ">=" in need)
    for name in ("torch", "transformers", "accelerate"):
        assert f"{name} {needs[name]}" in PAGES["install.md"]


def test_configs_are_those_of_the_examples():
    shown = re.findall(r"^\| ((?:`\w+\.yaml`(?:, )?)+) \|", PAGES["launching.md"], re.M)
    assert {name for cell in shown for name in re.findall(r"`(\w+)\.yaml`", cell)} == {
        path.stem for path in CONFIGS.glob("*.yaml")
    }


def launches() -> list[tuple[str, list[str]]]:
    """Script and options of every launch on the pages."""
    found = []
    for page in PAGES:
        for command in commands(page):
            if match := re.search(r"examples/(\w+)\.py (.*)", command):
                found.append((match[1], shlex.split(match[2])))
    return found


@pytest.mark.parametrize(("script", "options"), launches())
def test_options_of_scripts_exist(script, options, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    if script == "make_checkpoint":
        known = set(re.findall(r"\"(--\w+)\"", (EXAMPLES / "make_checkpoint.py").read_text()))
        assert {option for option in options if option.startswith("--")} <= known
        return
    if script == "train":
        parser = HfArgumentParser(hf_distca.DistCATrainingArguments)
        parser.add_argument("model")
        parser.add_argument("text", nargs="+")
    else:
        arguments = hf_distca.DistCASFTConfig if script == "sft_chat" else hf_distca.DistCATrainingArguments
        parser = HfArgumentParser((import_module(script).ScriptArguments, arguments))
    parser.parse_args(options)


@pytest.mark.parametrize("page", PAGES)
def test_options_of_the_launcher_are_known(page):
    for command in commands(page):
        if command.startswith("accelerate launch"):
            options = re.findall(r"--\w+", re.split(r"examples/\w+\.py", command)[0])
            assert set(options) <= LAUNCHER


def test_the_shown_script_trains(checkpoint, tmp_path):
    (shown,) = blocks("quickstart.md", "python")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "checkpoint").symlink_to(checkpoint)
    (tmp_path / "shown.py").write_text(shown)
    assert "'train_loss'" in run(["shown.py"], tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_python_compiles_and_its_names_exist(page):
    for code in blocks(page, "python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "hf_distca":
                assert hasattr(hf_distca, node.attr), node.attr


def test_the_demo_prints_the_shown_lines():
    (shown,) = (block for block in blocks("quickstart.md") if "plain DDP" in block)
    source = Path(EXAMPLES, "demo.py").read_text()
    labels = [line.split("  ")[0] for line in shown.splitlines() if re.match(r"(step time|idle|imbalance|loss)", line)]
    assert len(labels) == 5
    for label in labels:
        assert f'"{label}"' in source, label
