"""What README and docs show is so: commands print it, names exist, defaults are those of the code."""

import ast
import dataclasses
import inspect
import json
import re
import shlex
from importlib.metadata import requires
from pathlib import Path

import pytest
from accelerate import Accelerator

import hf_distca
from hf_distca.cli.main import main
from hf_distca.kernels import KERNEL_NAMES
from hf_distca.trainer.meter import StepMeter

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
FIELDS = {field.name: field for field in dataclasses.fields(hf_distca.DistCATrainingArguments)}
OWN = {field.name for field in dataclasses.fields(hf_distca.DistCAConfig)}
IN_WORDS = {"attention_server_token_file": "in `output_dir`"}


def section(title: str) -> str:
    return re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", README, re.S | re.M)[1]


def first_cells(table: str) -> list[str]:
    return re.findall(r"^\| `([^|]*)` \|", table, re.M)


def blocks(language: str) -> list[str]:
    return [code for page in PAGES.values() for code in re.findall(rf"^```{language}\n(.*?)^```", page, re.S | re.M)]


def test_the_shown_plan_is_printed(tmp_path, monkeypatch, capsys):
    (shown,) = re.findall(r"^```\n(\$ echo .*?)^```", section("Planning without training"), re.S | re.M)
    echo, command, *expected = shown.splitlines()
    lengths, file = re.fullmatch(r"\$ echo '(.*)' > (.*)", echo).groups()
    monkeypatch.chdir(tmp_path)
    Path(file).write_text(lengths)
    assert main(shlex.split(command)[2:]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[:-1] == expected[:-1]
    assert printed[-1].split()[:2] == expected[-1].split()[:2] == ["planned", "in"]
    (shown,) = re.findall(
        r"^```\n(\$ hf-distca [^\n]*--ranks-per-node.*?)^```", section("Planning without training"), re.S | re.M
    )
    command, *expected = shown.splitlines()
    assert main(shlex.split(command)[2:]) == 0
    assert set(expected) <= set(capsys.readouterr().out.splitlines())
    assert len(expected) == 3


def test_options_of_the_plan_exist(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    shown = set(re.findall(r"--[a-z-]+", section("Planning without training")))
    assert {"--lengths", "--document-layout", "--dump"} <= shown <= known


def test_the_shown_simulation_is_printed(capsys):
    (shown,) = re.findall(r"^```\n\$ (hf-distca simulate .*?)^```", section("Know before"), re.S | re.M)
    command, *expected = shown.splitlines()
    assert main(shlex.split(command)[1:]) == 0
    printed = capsys.readouterr().out.splitlines()
    begin = printed.index(expected[0])
    assert printed[begin : begin + len(expected)] == expected


@pytest.mark.parametrize("tool", ["simulate", "plan"])
def test_options_of_reports_exist(tool, capsys):
    with pytest.raises(SystemExit):
        main([tool, "--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    lines = [line for line in section("Know before").splitlines() if f"hf-distca {tool} --" in line]
    shown = {option for line in lines for option in re.findall(r"--[a-z-]+", line)}
    assert {"--lengths", "--report"} <= shown <= known


def test_the_shown_findings_are_those_of_the_doctor():
    shown = re.findall(r"^(ok|advice|wrong) +(\w+(?: \w+)*)  +", section("Looking before training"), re.M)
    assert {state for state, _ in shown} == {"ok", "advice"}
    sources = "".join(path.read_text() for path in (ROOT / "hf_distca" / "cli").rglob("*.py"))
    packages = [re.match(r"[\w-]+", need)[0] for need in requires("hf-distca")]
    for _, name in shown:
        assert name in packages or f'"{name}"' in sources, name


def test_options_of_serve_exist(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    shown = [line for page in PAGES.values() for line in page.splitlines() if "hf-distca serve --" in line]
    shown += [line for line in PAGES["attention_servers.md"].splitlines() if "of `serve`" in line]
    options = {option for line in shown for option in re.findall(r"--[a-z-]+", line)}
    assert {"--join", "--bind", "--threads"} <= options <= known


def test_settings_and_their_defaults():
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| ", section("Settings"), re.M)
    assert {name for name, _ in rows} == OWN
    for name, shown in rows:
        if name in IN_WORDS:
            assert (shown, FIELDS[name].default) == (IN_WORDS[name], None)
        else:
            assert ast.literal_eval(shown.strip("`")) == FIELDS[name].default, name


def test_settings_of_attention_servers():
    named = set(re.findall(r"`((?:attention_server|ranks_serve)\w*)`", PAGES["attention_servers.md"]))
    assert {"attention_servers", "ranks_serve"} <= named <= set(FIELDS) | {"attention_servers"}


@pytest.mark.parametrize("page", PAGES)
def test_options_of_training_scripts_are_arguments(page):
    for line in PAGES[page].splitlines():
        if "accelerate launch" in line and "train.py" in line:
            for option in re.findall(r"--(\w+)", line.split("train.py")[1].split("`")[0]):
                assert option in FIELDS, line


def test_logged_names_are_those_of_the_meter():
    rows = re.findall(r"^\| (`distca/.*?) \|", section("What is logged"), re.M)
    logged = {name for row in rows for name in re.findall(r"`distca/(\w+)`", row)}
    source = inspect.getsource(StepMeter.figures) + inspect.getsource(StepMeter._chosen)
    given = re.findall(r"^ +\"([a-z_]+)\": ", source, re.M) + re.findall(r"figures\[\"([a-z_]+)\"\] =", source)
    assert logged == set(given)


def test_kernels():
    assert {*first_cells(section("Kernels")), "auto"} == set(KERNEL_NAMES)


def test_python_compiles_and_its_names_exist():
    shown = blocks("python")
    assert len(shown) >= 2
    for code in shown:
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                owner = {"hf_distca": hf_distca, "dispatcher": hf_distca.Dispatcher, "accelerator": Accelerator}
                if node.value.id in owner:
                    known = owner[node.value.id]
                    made = inspect.isclass(known) and f"self.{node.attr} = " in inspect.getsource(known.__init__)
                    assert hasattr(known, node.attr) or made, node.attr
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("hf_distca."):
                called = getattr(hf_distca, node.func.attr)
                given = {keyword.arg: None for keyword in node.keywords}
                if called is not hf_distca.DistCATrainer:  # hands keywords on
                    inspect.signature(called).bind(*node.args, **given)


def test_examples_named_in_the_documents_exist():
    for page in PAGES.values():
        for path in re.findall(r"`((?:examples|benchmarks)/\w+\.py)`", page):
            assert (ROOT / path).is_file(), path


def test_the_demos_summary_has_the_shown_fields():
    (shown,) = re.findall(r"^```\n(\{.*?)^```", section("Two commands"), re.S | re.M)
    source = (ROOT / "examples" / "finetune_llama.py").read_text()
    for name in json.loads(shown):
        assert f'"{name}"' in source, name
