"""What the guides and the page of help show is so: commands print it, names exist, quoted messages are the code's."""

import ast
import dataclasses
import importlib
import inspect
import re
import shlex
from itertools import chain
from pathlib import Path

import pytest
from transformers import HfArgumentParser
from transformers.distributed import DistributedConfig

import hf_distca
from hf_distca.cli.main import main
from hf_distca.trainer.metrics import StepMeter
from tests.docs.reference import REFUSALS, template

ROOT = Path(__file__).parents[2]
GUIDES = {path.stem: path.read_text() for path in sorted((ROOT / "docs" / "guides").glob("*.md"))}
PAGES = {**GUIDES, "troubleshooting": (ROOT / "docs" / "help" / "troubleshooting.md").read_text()}
SOURCES = [path.read_text() for path in (ROOT / "hf_distca").rglob("*.py")]
FIELDS = {field.name: field for field in dataclasses.fields(hf_distca.DistCATrainingArguments)}
TIMED = ("planned", "simulated")
"""First words of printed lines that hold a time."""
OTHERS = {
    *("expandable_segments", "set_device", "attention_server_token", "vision_tower", "load_universal", "batch_size"),
    *("ds_to_universal", "inject_missing_state", "sample_packing", "micro_batch_size", "padding_free", "attn_impl"),
    *("pre_model_load", "get_training_args_mixin", "get_trainer_cls", "TrainerFactory", "eval_loss"),
    *("fsdp_state_dict_type", "zero3_save_16bit_model", "ParallelismConfig", "dp_shard_size"),
    *("output_router_logits", "router_aux_loss_coef"),
}
"""Names of others', and of files and folders, that these pages speak of."""


def blocks(page: str, language: str = "") -> list[str]:
    every = re.findall(r"^```(\w*)\n(.*?)^```$", PAGES[page], re.S | re.M)
    return [block for of, block in every if of == language]


def commands(page: str) -> list[str]:
    """Lines that a reader enters, without the prompt."""
    lines = [line.removeprefix("$ ") for block in blocks(page) for line in block.splitlines()]
    return [line for line in lines if re.match(r"(\w+=\S* )*(hf-distca|accelerate|python|torchrun|echo) ", line)]


def help_of(tool: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main([tool, "--help"])
    return capsys.readouterr().out


# Quoted messages


def texts_of(source: str) -> list[str]:
    """All strings of a module, with … for what is filled in."""
    found, inside = [], set()
    for node in ast.walk(ast.parse(source)):  # from the outside inwards
        if isinstance(node, ast.JoinedStr):
            inside |= set(node.values)
            parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inside:
            found.append(node.value)
    return [re.sub(r"%(\.\d)?\w", "…", text) for text in found]


def matches(quoted: str, text: str) -> bool:
    """Whether a quoted message is a text of the code, or a part of it; … in the quotation stands for anything."""
    at = 0
    for part in quoted.split("…"):
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


def test_quotations_are_told_from_other_texts():
    (text,) = texts_of('raise ValueError(f"rank {rank} failed: " f"{why}; start again")')
    assert text == "rank … failed: …; start again"
    assert matches("rank … failed", text)
    assert matches("failed: …; start again", text)
    assert not matches("rank … failed; start again", text)
    assert texts_of('logger.warning("lost %s (%.1f)", a, b)')[0] == "lost … (…)"


@pytest.fixture(scope="module")
def texts():
    """All strings of the code, and the messages of its tables of refusals."""
    tables = [template(f"{entry.found}, but {entry.reason}; {entry.remedy}") for entry in chain(*REFUSALS.values())]
    return [*tables, *(text for source in SOURCES for text in texts_of(source))]


@pytest.mark.parametrize("page", PAGES)
def test_quoted_messages_are_those_of_the_code(page, texts):
    quoted = re.findall(r"^> (.*)$", PAGES[page], re.M)
    assert len(quoted) >= 5
    for line in quoted:
        assert any(matches(line.strip(), text) for text in texts), line


# Shape and names


@pytest.mark.parametrize("page", GUIDES)
def test_a_guide_has_its_three_parts(page):
    assert re.findall(r"^## (.*)$", GUIDES[page], re.M) == ["Run it", "What you see", "What goes wrong"]


@pytest.mark.parametrize("page", PAGES)
def test_names_exist(page):
    examples = [path.read_text() for path in (ROOT / "examples").glob("*.py")]
    known = set(re.findall(r"\w+", "\n".join([*SOURCES, *examples]))) | set(FIELDS) | OTHERS
    known |= set(inspect.signature(DistributedConfig).parameters)
    files = [path.stem for folder in ("examples", "benchmarks") for path in (ROOT / folder).rglob("*.*")]
    transformers = importlib.import_module("transformers")
    prose = re.sub(r"^```.*?^```", "", PAGES[page], flags=re.S | re.M)
    code = " ".join(re.findall(r"`([^`\n]+)`", prose))
    named = set(re.findall(r"[a-z]\w*_\w+|[A-Z][a-z]+[A-Z]\w+", code))
    assert not {name for name in named - known - set(files) if not hasattr(transformers, name)}


def test_logged_names_are_those_of_the_meter():
    source = inspect.getsource(StepMeter.figures) + inspect.getsource(StepMeter._chosen)
    logged = {name for page in PAGES.values() for name in re.findall(r"\bdistca/([a-z_]+)", page)}
    assert len(logged) >= 8
    for name in logged:
        assert f'"{name}"' in source, name


# Commands


@pytest.mark.parametrize("tool", ["plan", "simulate", "serve", "timeline", "profile"])
def test_options_of_the_tools_exist(tool, capsys):
    known = set(re.findall(r"--[a-z-]+", help_of(tool, capsys)))
    shown = [command for page in PAGES for command in commands(page) if f"hf-distca {tool} " in command]
    assert shown
    for command in shown:
        assert set(re.findall(r"(?:^| )(--[a-z-]+)", command.split(f"hf-distca {tool} ")[1])) <= known, command


@pytest.mark.parametrize(("page", "tool"), [("will-it-pay", "simulate"), ("servers", "serve")])
def test_defaults_of_options(page, tool, capsys):
    described = re.split(r"^  (?=--)", help_of(tool, capsys), flags=re.M)
    described = {text.split()[0].rstrip(","): " ".join(text.split()) for text in described}
    rows = re.findall(r"^\| `(--[a-z-]+)`(?:, `--[a-z-]+`)? \| ([^|]*) \|", PAGES[page], re.M)
    assert len(rows) >= 5
    for option, default in rows:
        assert f"(default: {default.strip('`').split(',')[0]}" in described[option], option


def test_settings_of_servers_and_their_defaults():
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", PAGES["servers"], re.M)
    assert {name for name, _ in rows} == {name for name in FIELDS if re.match("attention_server|ranks_serve", name)}
    for name, shown in rows:
        default = {True: "on", None: "in `output_dir`"}.get(FIELDS[name].default, FIELDS[name].default)
        assert shown.strip("`") == f"{default:g}" if isinstance(default, float) else str(default).strip("`"), name


@pytest.mark.parametrize("page", PAGES)
def test_options_of_training_scripts_are_arguments(page, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    script = importlib.import_module("finetune_llama").ScriptArguments
    parser = HfArgumentParser((script, hf_distca.DistCATrainingArguments))
    of_script = {option.lstrip("-") for action in parser._actions for option in action.option_strings}
    for command in commands(page):
        for path in re.findall(r"examples/[\w/.]+", command):
            assert (ROOT / path).is_file(), path
        if "accelerate launch" in command and (match := re.search(r"(finetune_llama|train)\.py(.*)", command)):
            for option in re.findall(r" --(\w+)", match[2]):
                assert option in (of_script if match[1] == "finetune_llama" else FIELDS), option


def test_shown_plans_and_simulations_are_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shown = [block for block in blocks("will-it-pay") if block.startswith("$ ")]
    assert len(shown) == 4
    for block in shown:
        lines = block.splitlines()
        if lines[0].startswith("$ echo"):
            lengths, file = re.fullmatch(r"\$ echo '(.*)' > (.*)", lines.pop(0)).groups()
            Path(file).write_text(lengths)
        assert main(shlex.split(lines.pop(0))[2:]) == 0
        printed = capsys.readouterr().out.splitlines()
        for line in lines:
            if not line.startswith(TIMED):
                assert line in printed


def test_the_shown_memory_is_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    echo, command = commands("memory")[:2]
    Path("lengths.json").write_text(re.search("'(.*)'", echo)[1])
    assert main(shlex.split(command)[1:]) == 0
    printed = {" ".join(line.split()[:-10]): line.split()[-10:] for line in capsys.readouterr().out.splitlines()}
    (table,) = (block for block in blocks("memory") if block.startswith("memory of a rank"))
    rows = [line.split() for line in table.splitlines()[2:]]
    assert len(rows) == 12
    for row in rows:
        assert printed[" ".join(row[:-4])][:4] == row[-4:]
