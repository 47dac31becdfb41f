"""Reference pages agree with the code."""

import ast
import dataclasses
import inspect
import re
from itertools import chain

import pytest
from transformers import Trainer

import hf_distca
from hf_distca.checks.argument_rules import ARGUMENTS, GIVEN, PACKED_ARGUMENTS, PACKED_GIVEN
from hf_distca.cli.main import TOOLS
from hf_distca.kernels import KERNEL_NAMES
from hf_distca.pool.rank.pool import FIGURES
from hf_distca.trainer.arguments import BY_PLAN
from hf_distca.trainer.metrics import METRICS, StepMeter
from tests.docs.reference import FIELDS, FOLDER, GROUPED, PAGES, REFUSALS, UNITS, written


def page(name: str) -> str:
    return (FOLDER / name).read_text()


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_those_of_the_code(name):
    assert page(name) == written(page(name)), (
        f"run python -m tests.docs.reference: {name} is out of date"
    )


def test_everything_is_on_its_page_once():
    assert sorted(chain(*GROUPED)) == sorted(FIELDS)
    assert set(chain(*UNITS.values())) <= set(FIELDS)
    cases = [entry.condition or entry.found for entry in chain(*REFUSALS.values())]
    assert len(cases) == len(set(cases))
    assert set(re.findall(r"^::: hf_distca\.(\w+)$", page("api.md"), re.M)) == set(
        hf_distca.__all__
    )
    assert {*re.findall(r"^\| `(\w+)` \|", page("kernels.md"), re.M), "auto"} == set(KERNEL_NAMES)


@pytest.mark.parametrize(
    ("name", "mark", "expected"),
    [
        (
            "metrics.md",
            "metrics",
            dict.fromkeys(metric.condition or "Always" for metric in METRICS.values()),
        ),
        ("cli.md", "tool", TOOLS),
        ("refusals.md", "refusals", REFUSALS),
    ],
    ids=["metrics", "tools", "refusals"],
)
def test_sections_of_a_page_are_those_of_the_code(name, mark, expected):
    assert re.findall(rf"<!-- {mark}: (.*) -->", page(name)) == list(expected)


def test_metrics_are_those_that_are_logged():
    """Keys of the dictionaries that `figures` returns, from its source: no run logs all of them."""
    logged = set(FIGURES)  # of servers
    for node in ast.walk(
        ast.parse("class Meter:\n" + inspect.getsource(StepMeter).split("\n", 1)[1])
    ):
        if isinstance(node, ast.Dict):
            logged |= {ast.literal_eval(key) for key in node.keys if isinstance(key, ast.Constant)}
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            logged.add(ast.literal_eval(node.slice))
    assert logged == set(METRICS)


@pytest.mark.parametrize("name", hf_distca.__all__)
def test_public_docstrings_name_their_parameters(name):
    public = getattr(hf_distca, name)
    text = inspect.getdoc(public)
    first = text.splitlines()[0]
    assert first[-1] == ".", first
    assert len(first.split()) <= 20, first
    if described := re.search(r"^Args:\n(.*?)(?=^\S|\Z)", text, re.S | re.M):
        named = set(re.findall(r"^    (\w+): ", described[1], re.M))
        assert named == set(inspect.signature(public).parameters), name


def test_refused_arguments_exist():
    rules = (*ARGUMENTS, *PACKED_ARGUMENTS, *GIVEN, *PACKED_GIVEN)
    named = {name for rule in rules for name in re.findall(r"^(\w+)(?:=| is given)", rule.found)}
    named |= {path.partition(".")[0] for path in BY_PLAN}
    named |= hf_distca.DistCAArguments._done_anyway.keys()
    known = {"DPOTrainer", "args", *inspect.signature(Trainer.__init__).parameters}
    classes = (hf_distca.DistCATrainingArguments, hf_distca.DistCASFTConfig)
    for arguments in (*classes, hf_distca.DistCAGRPOConfig):
        known |= {field.name for field in dataclasses.fields(arguments)}
    assert len(named) > 20
    assert named <= known, named - known
