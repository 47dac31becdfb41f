"""README and the pages agree with the code: files, names, options and messages exist, commands
print what is shown.
"""

import ast
import html
import importlib.util
import inspect
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from accelerate import Accelerator
from accelerate.commands.launch import launch_command_parser
from transformers import HfArgumentParser
from transformers.distributed import DistributedConfig

import hf_distca
from benchmarks import result_tables as tables
from benchmarks.result_tables import result
from hf_distca.cli.main import main
from hf_distca.server_settings import AttentionServers
from hf_distca.trainer.metrics import METRICS
from tests.docs.reference import REFUSALS, template
from tests.launch import CONFIGS, ROOT

PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").rglob("*.md")))
}
README = PAGES["README.md"]
GUIDES = [page for page in PAGES if page.startswith("docs/guides/")]
WITH_NAMES = [*GUIDES, "docs/help/troubleshooting.md", "docs/development/contributing.md"]
"""Pages whose names of settings, functions and files are looked up."""
QUOTING = WITH_NAMES[:-1]
SOURCES = [path.read_text() for path in (ROOT / "hf_distca").rglob("*.py")]
SETTINGS = {field.name: field for field in fields(hf_distca.DistCATrainingArguments)}
OBJECTS = {"hf_distca": hf_distca, "dispatcher": hf_distca.Dispatcher, "accelerator": Accelerator}
"""Objects behind names in examples."""
OTHERS = {
    *(
        "expandable_segments",
        "max_inflight_tasks",
        "rollout_wait_s",
        "row_imbalance",
        "set_device",
        "attention_server_token",
        "vision_tower",
        "load_universal",
        "batch_size",
    ),
    *(
        "ds_to_universal",
        "inject_missing_state",
        "sample_packing",
        "micro_batch_size",
        "padding_free",
        "attn_impl",
    ),
    *("sequence_len", "truncation_strategy", "vit_gradient_checkpointing", "eval_loss"),
    *("LigerPlugin", "CutCrossEntropyPlugin"),
    *("fsdp_state_dict_type", "zero3_save_16bit_model", "ParallelismConfig", "dp_shard_size"),
    *("output_router_logits", "router_aux_loss_coef", "packing_strategy"),
}
"""Names of others', and of files and folders, that pages speak of."""
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(" ".join(re.findall(r"^([\w -]+):", MAKEFILE, re.M)).split())


def blocks(page: str, language: str = "", part: str | None = None) -> list[str]:
    """Blocks of code of a page or of one of its sections: those of commands are in no language."""
    text = PAGES[page]
    if part is not None:
        text = text.split(f"\n## {part}\n")[1].split("\n## ")[0]
    code_blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M)
    return [code for its_language, code in code_blocks if its_language == language]


def commands(page: str) -> list[str]:
    """Lines that a reader enters, without the prompt and what follows on them."""
    lines = "\n".join(blocks(page)).replace("\\\n", " ").splitlines()
    lines = [re.sub(r" +# .*", "", line.removeprefix("$ ")) for line in lines]
    first = r"(\w+=\S* )*(hf-distca|accelerate|python|torchrun|echo|make) "
    return [line for line in lines if re.match(first, line)]


EVERY_COMMAND = {f"{page}: {line}": line for page in PAGES for line in commands(page)}


# Files, names, options


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page):
    text = PAGES[page]
    folders = r"(?:benchmarks|docs|examples|hf_distca|tests)"
    named = set(re.findall(rf"`({folders}/[\w/.]*)`", text))
    named |= set(re.findall(rf"(?<![\w/])({folders}/[\w/]+\.(?:py|yaml|json(?:\.gz)?))\b", text))
    assert not [path for path in named if not (ROOT / path).exists()], page
    for path in re.findall(r"\]\((?!https?:|../../actions/)([^)#]+)", text):
        assert (ROOT / page).parent.joinpath(path).exists(), (page, path)
    assert set(re.findall(r"\bdistca/([a-z_]+)", text)) <= set(METRICS), page


def test_python_compiles_and_its_names_exist():
    for node in (
        node
        for page in PAGES
        for code in blocks(page, "python")
        for node in ast.walk(ast.parse(code))
    ):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in OBJECTS
        ):
            known = OBJECTS[node.value.id]
            made = inspect.isclass(known) and f"self.{node.attr} = " in inspect.getsource(
                known.__init__
            )
            assert hasattr(known, node.attr) or made, node.attr
        if isinstance(node, ast.Call) and re.fullmatch(r"hf_distca\.\w+", ast.unparse(node.func)):
            called = getattr(hf_distca, node.func.attr)
            inspect.signature(called).bind(
                *node.args, **{keyword.arg: None for keyword in node.keywords}
            )


def test_names_exist(subtests):
    paths = [
        path
        for folder in ("examples", "benchmarks", "tests")
        for path in (ROOT / folder).rglob("*.*")
    ]
    code = [*SOURCES, *(path.read_text() for path in paths if path.suffix == ".py")]
    known = {
        *re.findall(r"\w+", "\n".join(code)),
        *re.findall(r"[\w-]+", MAKEFILE),
        *(path.stem for path in paths),
    }
    known |= {*SETTINGS, *OTHERS, *inspect.signature(DistributedConfig).parameters}
    for page in WITH_NAMES:
        prose = re.sub(r"^```.*?^```", "", PAGES[page], flags=re.S | re.M)
        named = set(
            re.findall(
                r"[a-z]\w*_\w+|[A-Z][a-z]+[A-Z]\w+", " ".join(re.findall(r"`([^`\n]+)`", prose))
            )
        )
        with subtests.test(page):
            assert {name for name in named - known if not hasattr(transformers, name)} == set()


@pytest.mark.parametrize("line", EVERY_COMMAND.values(), ids=EVERY_COMMAND)
def test_options_and_targets_of_commands_exist(line, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "examples")
    if match := re.search(r"(?:hf-distca|hf_distca\.cli\.main) (\w+)(.*)", line):
        with pytest.raises(SystemExit):
            main([match[1], "--help"])
        known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
        assert set(re.findall(r"(?<= )--[a-z-]+", match[2])) <= known
    if line.startswith("accelerate launch"):
        options = re.split(r"\S+\.py|(?<=--module)", line)[0]
        assert (
            set(re.findall(r"--\w+", options))
            <= launch_command_parser()._option_string_actions.keys()
        )
    if line.startswith("make "):
        assert set(re.findall(r" ([a-z][\w-]*)(?= |$)", line)) <= TARGETS
    if match := re.search(r"examples/make_checkpoint\.py (.*)", line):
        known = set(
            re.findall(r"\"(--\w+)\"", (ROOT / "examples" / "make_checkpoint.py").read_text())
        )
        assert set(re.findall(r"--\w+", match[1])) <= known
    if match := re.search(
        r"examples/(train|finetune_llama|sft_chat|sft_images|grpo|dpo)\.py (.*)", line
    ):
        of_trl = {"sft_chat": "SFT", "sft_images": "SFT", "grpo": "GRPO", "dpo": "DPO"}
        name = of_trl.get(match[1])
        arguments = (
            getattr(hf_distca, f"DistCA{name}Config") if name else hf_distca.DistCATrainingArguments
        )
        own = [] if match[1] == "train" else [import_module(match[1]).ScriptArguments]
        parser = HfArgumentParser([*own, arguments])
        if not own:
            parser.add_argument("model")
            parser.add_argument("documents", nargs="+")
            parser.add_argument("--sample_by", choices=("document", "paragraph"))
        parser.parse_args([option for option in shlex.split(match[2]) if "…" not in option])


def test_targets_that_pages_name_exist():
    texts = "\n".join(
        [*PAGES.values(), (ROOT / ".github" / "PULL_REQUEST_TEMPLATE.md").read_text()]
    )
    assert set(re.findall(r"`make ([a-z-]+)", texts)) <= TARGETS


# Messages


def texts_of(source: str) -> list[str]:
    """All strings of a module, with … for what is filled in."""
    texts = []
    inside = set()
    for node in ast.walk(ast.parse(source)):  # from the outside inwards
        if isinstance(node, ast.JoinedStr):
            inside |= set(node.values)
            parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
            texts.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inside:
            texts.append(node.value)
    return [re.sub(r"%(\.\d)?\w", "…", text) for text in texts]


def test_quoted_messages_are_those_of_the_code(subtests):
    """A quotation is a message or a part of one, and … in it stands for anything."""
    tables = [
        template(f"{entry.found}, but {entry.reason}; {entry.remedy}")
        for entry in chain(*REFUSALS.values())
    ]
    known = "\0".join([*tables, *(text for source in SOURCES for text in texts_of(source))])
    for page in QUOTING:
        quoted = re.findall(r"^> (.*)$", PAGES[page], re.M)
        assert len(quoted) >= 5
        for line in quoted:
            pattern = r"[^\0]*".join(map(re.escape, line.strip().split("…")))
            with subtests.test(page, line=line):
                assert re.search(pattern, known)


# Shape


def test_length_and_sections_of_pages():
    assert len(README.splitlines()) <= 160
    assert len(README.split()) <= 1500


@pytest.mark.parametrize("page", GUIDES)
def test_sections_of_guides(page):
    assert re.findall(r"^## (.*)$", PAGES[page], re.M) == [
        "Run it",
        "What you see",
        "What goes wrong",
    ]


def test_extras_versions_and_configs_are_those_that_are_declared():
    def in_first_column(page: str, pattern: str) -> set[str]:
        """Names of a form in the first column of a page's tables, some of which share a cell."""
        cells = re.findall(rf"^\| ((?:`{pattern}`(?:, )?)+) \|", PAGES[page], re.M)
        return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert in_first_column("docs/start/install.md", r"[\w-]+") == set(
        declared["optional-dependencies"]
    )
    needs = dict(
        re.match(r"(\w+)>=([\d.]+)", need).groups()
        for need in declared["dependencies"]
        if ">=" in need
    )
    assert all(
        f"{name} {needs[name]}" in PAGES["docs/start/install.md"]
        for name in ("torch", "transformers", "accelerate")
    )
    shown = in_first_column("docs/start/launching.md", r"\w+\.yaml")
    assert shown == {path.name for path in CONFIGS.glob("*.yaml")}


@pytest.mark.parametrize(
    ("page", "tool"),
    [("docs/guides/will-it-pay.md", "simulate"), ("docs/guides/servers.md", "serve")],
)
def test_defaults_of_options(capsys, subtests, page, tool):
    with pytest.raises(SystemExit):
        main([tool, "--help"])
    described = re.split(r"^  (?=--)", capsys.readouterr().out, flags=re.M)
    described = {text.split()[0].rstrip(","): " ".join(text.split()) for text in described}
    row = r"^\| `(--[a-z-]+)`(?:, `--[a-z-]+`)? \| [^|]* \| ([^|]*) \|"
    rows = re.findall(row, PAGES[page], re.M)
    assert len(rows) >= 5
    for option, default in rows:
        with subtests.test(option):
            assert f"(default: {default.strip('`').split(',')[0]}" in described[option]


def test_defaults_of_settings_of_servers():
    rows = re.findall(r"^\| `(\w+)` \| [^|]* \| ([^|]*) \|", PAGES["docs/guides/servers.md"], re.M)
    assert {name: default.replace("`", "") for name, default in rows} == {
        member.name: shown_default(member.default) for member in fields(AttentionServers)
    }


def shown_default(default: Any) -> str:
    """A default as a page shows it, but for the marks of code."""
    if default is True:
        return "on"
    if default is None:
        return "in output_dir"
    return f"{default:g}" if isinstance(default, float) else str(default)


# What commands print


def shown_runs() -> Iterator[tuple[str, str, list[str]]]:
    """A line before a command, the command, and the lines shown below it."""
    pages = ("docs/guides/will-it-pay.md", "docs/explanation/plans.md")
    for page, part in (("README.md", "Will it pay?"), *((page, None) for page in pages)):
        before = ""
        for block in blocks(page, part=part):
            for command, *lines in (run.splitlines() for run in block.split("$ ")[1:]):
                if command.startswith("echo"):
                    before = command
                else:
                    yield before, command, lines


@pytest.mark.parametrize(
    ("before", "command", "lines"),
    [
        pytest.param(*run, marks=[pytest.mark.survey] * ("simulate" in run[1]), id=run[1])
        for run in shown_runs()
    ],
)
def test_shown_plans_and_simulations_are_printed(
    before, command, lines, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    if before:
        lengths, file = re.fullmatch(r"echo '(.*)' > (.*)", before).groups()
        Path(file).write_text(lengths)
    assert main(shlex.split(command)[1:]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert lines
    assert not [
        line
        for line in lines
        if line not in printed and not line.startswith(("planned", "simulated"))
    ]


@pytest.mark.survey
def test_the_shown_memory_is_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = "docs/guides/memory.md"
    echo, command = commands(page)[:2]
    Path("lengths.json").write_text(re.search("'(.*)'", echo)[1])
    assert main(shlex.split(command)[1:]) == 0
    tables_printed = capsys.readouterr().out.split("\n\n")
    (first,) = (shown for shown in tables_printed if " ddp " in shown)
    printed = {" ".join(line.split()[:-6]): line.split()[-6:] for line in first.splitlines()}
    (table,) = (block for block in blocks(page) if block.startswith("memory of a rank"))
    rows = [line.split() for line in table.splitlines()[2:]]
    assert len(rows) == 12
    for row in rows:
        assert printed[" ".join(row[:-4])][:4] == row[-4:]


# Figures


def test_all_tables_have_the_figures_of_the_results():
    texts = {page: page.read_text() for page in tables.PAGES}
    stale = [
        str(page.relative_to(ROOT)) for page, text in texts.items() if tables.written(text) != text
    ]
    assert not stale, "python benchmarks/result_tables.py writes their tables anew"
    shown = [mark.group(1, 2) for text in texts.values() for mark in tables.MARK.finditer(text)]
    assert {name for name, _ in shown} == set(tables.TABLES)
    by = {"planner_nodes": "planner", "peers_ulysses": "peers"}
    by |= {"left_padding_errors": "left_padding"}
    by |= dict.fromkeys(
        ("chosen_data_sets", "expectations", "expected_gains", "plain_packing"), "one_strategy"
    )
    assert {by.get(name, name) for name, _ in shown} - {"memory_guide"} <= {
        name for name, command in shown if command
    }


def test_the_formula_gives_the_simulated_gains(subtests):
    for row in result("typical_data")["settings"]:
        gain = tables.gain_by_formula(row)
        upper_bound = (row["t"] * row["r"] + row["m"]) / (row["r"] + 1)
        with subtests.test(row["documents"], ranks=row["ranks"]):
            assert abs(gain - row["over_plain"]) <= 0.02
            assert gain <= upper_bound + 1e-3
    _, *rows = tables.paper_tables()
    assert len({(row[0], row[1], row[3:]) for row in rows}) == len(
        rows
    )  # rows that are equal share one


README_TEXT = " ".join(README.replace(" %", "%").split())
"""The words of README, without line breaks."""


def words_of(page: str) -> str:
    return " ".join(PAGES[page].split())


def test_gains_in_sentences_are_those_of_the_results():
    greatest = {}
    by_fixed_strategy = []
    for ranks in (8, 64):
        rows = [row for row in result("typical_data")["settings"] if row["ranks"] == ranks]
        medians = [row["over_transformers_of_batches"]["median"] for row in rows]
        greatest[ranks] = max(medians)
        fixed = [row["over_best_fixed"] for row in rows]
        by_fixed_strategy.append(f"{min(fixed):.2f} to {max(fixed):.2f} on {ranks}")
        drops_little = [row["over_plain"] for row in rows if row["plain_drops"] < 0.1]
        assert min(drops_little) > 1  # "Where it drops little, hf_distca is faster"
    assert greatest[8] < 1.05  # "hardly anything to gain"
    on_8 = f"at most {greatest[8] - 1:.0%} on one node of 8 GPUs"
    assert f"{on_8}, and up to {greatest[64] - 1:.0%} on 64" in README_TEXT
    assert "it is {} GPUs and {}.".format(*by_fixed_strategy) in README_TEXT
    on_512 = re.search(
        r"--ranks 512 .*?\n([\d.]+)× the speed of", PAGES["docs/explanation/plans.md"], re.S
    )
    assert f"On 512 GPUs ProLong gains [{on_512[1]}]" in README_TEXT


def test_picture_caption_and_table_have_the_gain_over_packing():
    picture = result("step_picture")
    (packed, planned), gain = picture["steps"], f"{picture['gain']:.2f}×"
    assert picture["gain"] == picture["gains"]["median"]
    count = re.search(r"--batches (\d+)", tables.command("typical_data"))[1]
    caption = f"Of {count} micro-batches of ProLong, the one whose gain is the median, {gain}"
    assert caption in README_TEXT
    assert caption in words_of("docs/index.md")
    (row,) = (
        row
        for row in result("typical_data")["settings"]
        if (row["documents"], row["ranks"]) == ("ProLong", 8)
    )
    assert gain == f"{row['over_plain_of_batches']['median']:.2f}×"
    drawn = (ROOT / "docs" / "step.svg").read_text()
    for shown in (html.escape(packed["title"]), planned["title"], f">{gain} speed<"):
        assert shown in drawn
    assert "TRL's packing=True" in packed["title"]


def test_faults_in_sentences_are_those_of_the_results():
    page = PAGES["docs/evidence/comparison.md"]
    results = [result(name) for name in ("faults", "faults_nixl")]
    assert [faults["lost"] for faults in results] == [0, 0]
    kills = sum(faults["kills"] for faults in results)
    assert f"{kills} attention servers were killed" in page
    assert f"**{kills} attention servers killed**" in README
    assert f"of {sum(faults['steps'] for faults in results)} steps none was lost" in README


def test_memory_in_sentences_is_that_of_the_results():
    page = PAGES["docs/evidence/comparison.md"]
    assert f"{result('memory_loss')['loss_memory_ratio']:.2f} of the memory of all logits" in page
    loss = result("memory_loss")["derived"]
    assert f"{loss['8192 chunked / own, MiB']['median']:.3f} of the memory" in README
    assert loss["8192 chunked / own, s"]["median"] == pytest.approx(0.5, abs=0.05)
    document = result("long_document")
    assert f"{document['tokens']:,} tokens over {len(document['peak_mib'])} ranks" in README
    assert f"within {max(document['relative_errors'].values()):.1e} of float64" in README


def test_encoders_in_sentences_are_those_of_the_results():
    page, guide = words_of("docs/evidence/benchmarks.md"), words_of("docs/guides/images.md")
    results = result("encoder_balance")["ranks"]
    means = {
        ranks: {
            name: {figure: of["mean"] for figure, of in found.items()}
            for name, found in strategies.items()
        }
        for ranks, strategies in results.items()
    }
    planned, in_place = (
        {ranks: strategies[name] for ranks, strategies in means.items()}
        for name in ("planned", "in place")
    )
    of_mean = [f"{planned[ranks]['mean, s']:.2f} s on {ranks}" for ranks in means]
    assert f"The mean rank takes {of_mean[0]} ranks and {of_mean[1]}." in page
    saved = [
        f"{in_place[ranks]['busiest, s'] - planned[ranks]['busiest, s']:.2f} s" for ranks in means
    ]
    assert f"so a plan saves {saved[0]} and {saved[1]} of a micro-batch" in page
    read = "pixels read by the mean rank, GB"
    assert (
        f"reads {planned['64'][read]:.1f} GB as planned, and {in_place['64'][read]:.1f} GB in"
        in page
    )
    assert f"[{planned['64'][read] / in_place['64'][read]:.1f} times the pixels]" in guide
    work = "work, busiest over mean"
    assert {f"{planned[ranks][work]:.2f}" for ranks in means} == {"1.01"}
    assert "{:.1f} to {:.1f} times".format(*(in_place[ranks][work] for ranks in means)) in guide
    travelling = [planned[ranks]["travelling, of all rows"] for ranks in means]
    assert "{:.0%} to {:.0%} of all rows".format(*travelling).replace(
        "% to", " to"
    ) in guide.replace(" %", "%")
    steps = result("encoder_balance")["steps"]["64"]
    whole, packed = (
        steps[name]["mean"] / steps["hf_distca"]["mean"]
        for name in ("whole documents balanced", "plain packing")
    )
    assert f"balanced* takes {whole:.2f} times as long as the plan" in page
    assert f"and plain packing {packed:.2f} times" in page
    share = result("encoder_balance")["documents"]["placeholders, of all tokens"]
    assert f"{share:.0%} of all tokens placeholders" in page.replace(" %", "%")


KINDS_OF_TARGETS = ("answers, ", "turns, ", "all tokens, ")
"""Kinds of targets that are counted."""


def test_curves_of_losses_in_sentences_are_those_of_the_results():
    found = result("convergence")
    ways, seeds = (float(np.mean(found[f"difference_of_{of}"])) for of in ("ways", "seeds"))
    assert found["steps"] == 1000
    assert f"losses differ by {ways:.3f} between ways, {seeds:.3f} between seeds" in README_TEXT
    assert max(found["difference_of_first_losses"]) < 0.0003  # docs/evidence/training.md says so


def test_tasks_in_sentences_are_those_of_the_results():
    rows = result("tasks")["rows"]
    longest = max((row for row in rows if row["task"] == "needle"), key=lambda row: row["length"])
    assert longest["length"] > result("tasks")["tokens_per_rank"]
    found = f"{longest['stock']:.2f} after stock training, {longest['planned']:.2f} after planned"
    assert found in README_TEXT
    for row in rows:
        assert len(row["seeds"]["planned"]) == 5
        assert abs(row["difference"]) <= 2.776 * row["standard error of the difference"]
    assert f"None of the {len(rows)} is." in words_of("docs/evidence/training.md")


def test_rewards_of_both_ways_in_sentences_are_those_of_the_results():
    assert "In these trainings they never do" in words_of("docs/evidence/training.md")
    for name in ("dpo", "grpo"):
        found = result(f"{name}_curves")[name]
        assert set(found["steps_alike"]) == {found["steps"]}
        assert min(found["last"]["planned"]) > 2 * max(found["first"]["planned"])


def test_targets_in_sentences_are_those_of_the_results():
    counts = result("targets")["counts"]
    most = {
        kind: max(of["most"] for name, of in counts.items() if kind in name)
        for kind in KINDS_OF_TARGETS
    }
    assert max(most["answers, "], most["turns, "]) <= 1
    assert f"up to {most['all tokens, ']:.1f} times as many" in words_of("docs/start/chats.md")


def test_models_in_sentences_are_those_of_the_survey():
    survey = r"(\d+) give the loss and gradients.*? (\d+) are refused.*? (\d+) cannot be tested"
    page = words_of("docs/reference/compatibility.md")
    equal, refused, untested = map(int, re.search(survey, page).groups())
    models = equal + refused + untested
    comparison = words_of("docs/evidence/comparison.md")
    assert f"{equal} of transformers' {models} causal language models" in comparison
    assert f"{equal} of {models} causal language models" in README
    (with_towers,) = re.search(r"(\d+) further models take images", page).groups()
    assert f"{with_towers} of the {models} take images or sound, too." in comparison
    reasons = f"{refused} are refused with the reason, {untested} cannot be tested"
    assert reasons in README_TEXT
    assert reasons in comparison


def test_steps_and_plans_in_sentences_are_those_of_the_results():
    planner = result("planner")["auto, at 0.001"]
    assert 0.55 < planner["bytes_total_ratio"]["median"] < 0.65  # "about 60 %"
    assert 0.18 < planner["bytes_bottleneck_ratio"]["median"] < 0.22  # "a fifth"
    steps = {name: result(name)["derived"] for name in tables.STEP_TIMES}
    over_best_other = [
        ratio["median"]
        for derived in steps.values()
        for name, ratio in derived.items()
        if "best other" in name
    ]
    ratios = f"{min(over_best_other):.2f}× to {max(over_best_other):.2f}×"
    assert f"of each mix of documents {ratios}, slow networks included" in README_TEXT
    one_long = steps["step_time"]["one long: whole / auto"]["median"]
    long_tail = steps["step_time"]["long tail: whole / auto"]["median"]
    assert (
        f"{one_long:.2f}× for one long document and {long_tail:.2f}× for a long tail" in README_TEXT
    )
    planning = result("plan_time")["figures"]["chosen, 512 ranks, prolong, ms"]["median"]
    sentence = f"a plan takes {planning:.0f} ms of a core, and a step of 32,768 tokens takes 4.0 s"
    assert sentence in words_of("docs/explanation/plans.md")


def test_figures_of_chunks_and_of_ligers_kernels_are_those_of_the_results():
    small, large, liger, *_ = result("gpu_loss_chunks")["steps"].values()
    chunks, kernels = (100 * (1 - faster["step_s"] / small["step_s"]) for faster in (large, liger))
    evidence, gpus = (
        " ".join(PAGES[f"docs/{name}.md"].split())
        for name in ("evidence/benchmarks", "explanation/gpus")
    )
    more = large["peak_gb"] - small["peak_gb"]
    assert (
        f"cost {chunks:.1f} % of a step beside chunks of 1 GiB, which take {more:.1f} GB more"
        in evidence
    )
    assert f"took {kernels:.1f} % of a step away" in evidence
    assert (
        f"{kernels:.1f} % shorter, and its peak of memory fell from {small['peak_gb']} to "
        f"{liger['peak_gb']} GB" in gpus
    )
    assert f"costs {chunks:.1f} % of a step" in gpus
    assert (
        f"{kernels:.1f} % shorter on an H200" in import_module("hf_distca.cli.findings").LIGER_GAIN
    )


def test_bytes_of_rows_add_up():
    page = PAGES["docs/explanation/exchange.md"]

    def rows(table: str) -> list[list[str]]:
        return [
            [cell.strip().replace(",", "") for cell in row.strip("| ").split("|")]
            for row in table.splitlines()
        ]

    q, kv, lse = (int(row[2]) for row in rows(re.search(r"\| Q, O.*?(?=\n\n)", page, re.S)[0]))
    row_bytes = import_module("hf_distca.plan.cost").RowBytes()
    assert q == row_bytes.q
    assert kv == row_bytes.kv
    assert q == row_bytes.o
    size_of = {"log-sum-exp": lse} | dict.fromkeys(("Q", "O", "dO", "dQ"), q)
    size_of |= dict.fromkeys(("K", "V", "dK", "dV"), kv // 2)
    (table,) = re.findall(r"\| when \|.*?(?=\n\n)", page, re.S)
    *sent, total = rows(table)[2:]
    for when, *cells in sent:
        for names, size in zip(cells[::2], cells[1::2], strict=False):
            assert not names or sum(size_of[name] for name in names.split()) == int(size), when
    assert [int(total[at]) for at in (2, 4)] == [
        sum(int(row[at]) for row in sent if row[at:]) for at in (2, 4)
    ]


def test_patches_for_other_packages_apply_to_the_installed_versions():
    patches = re.findall(r"```diff\n(.*?)```", PAGES["docs/development/upstream.md"], re.S)
    assert len(patches) == 7
    done = subprocess.run(
        ["git", "apply", "--check", "-"],
        cwd=Path(transformers.__file__).parents[1],
        env={**os.environ, "GIT_DIR": os.devnull},  # the packages may lie within a repository
        input="".join(patches),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


# The site and PyPI


@pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="no mkdocs: the dependency group docs has it"
)
def test_the_site_builds_without_a_warning_and_needs_no_other_host(tmp_path):
    """A broken link or anchor, and a page that the navigation lacks, are warnings, which end a
    strict build.
    """
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    built = {path: path.read_text() for path in tmp_path.rglob("*.html")}
    assert (
        len(built) >= len(PAGES) - 1
    )  # README and AGENTS are no pages; one is for addresses that do not exist
    for path, page in built.items():
        for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page):
            assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", tag), (
                f"{tag} in {path.name}"
            )
    assert (tmp_path / "search" / "search_index.js").is_file()


def test_what_pypi_shows_names_the_repository():
    module = runpy.run_path(str(ROOT / ".ci" / "name_repository.py"))
    at = ("https://example.org/a/b", "v1")
    links = re.findall(r"\]\(([^)]*)\)", module["with_absolute_links"](README, *at))
    assert "https://example.org/a/b/raw/v1/docs/step.svg" in links
    assert "https://example.org/a/b/blob/v1/examples/train.py" in links
    assert "https://example.org/a/b/actions/workflows/ci.yml/badge.svg" in links
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    settings = module["with_addresses"]((ROOT / "pyproject.toml").read_text(), *at)
    assert tomllib.loads(settings)["project"]["urls"] == {
        "Repository": "https://example.org/a/b",
        "Documentation": "https://example.org/a/b/blob/v1/docs/index.md",
        "Changelog": "https://example.org/a/b/blob/v1/CHANGELOG.md",
        "Issues": "https://example.org/a/b/issues",
        "Paper": "https://arxiv.org/abs/2510.18121",
    }
    assert "name_repository.py" in (ROOT / ".github" / "workflows" / "release.yml").read_text()
