"""Reference pages agree with the code."""

import ast
import dataclasses
import inspect
import re
from itertools import chain

import pytest
from transformers import Trainer

import hf_distca
from hf_distca.kernels import KERNEL_NAMES
from hf_distca.trainer.metrics import METRICS, StepMeter
from hf_distca.trainer.refusals import ARGUMENTS, GIVEN, PACKING
from tests.docs.reference import FOLDER, GROUPS, PAGES, REFUSALS, UNITS

FIELDS = {field.name for field in dataclasses.fields(hf_distca.DistCATrainingArguments)}
SFT_FIELDS = {field.name for field in dataclasses.fields(hf_distca.DistCASFTConfig)}
OWN = {field.name for field in dataclasses.fields(hf_distca.DistCAConfig)}


def page(name: str) -> str:
    return (FOLDER / name).read_text()


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_those_of_the_code(name):
    assert page(name) == PAGES[name](), f"run python -m tests.docs.reference: {name} is out of date"


def test_every_setting_is_in_one_group():
    shown = list(chain(*GROUPS.values()))
    assert len(shown) == len(set(shown))
    assert set(shown) >= OWN
    assert set(UNITS) <= set(shown)


def test_metrics_are_those_that_are_logged():
    """Keys of the dictionaries that `figures` returns, from its source: no run logs all of them."""
    logged = set()
    for node in ast.walk(ast.parse("class Meter:\n" + inspect.getsource(StepMeter).split("\n", 1)[1])):
        if isinstance(node, ast.Dict):
            logged |= {ast.literal_eval(key) for key in node.keys if isinstance(key, ast.Constant)}
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            logged.add(ast.literal_eval(node.slice))
    assert logged == set(METRICS)


def test_the_api_and_all_kernels_are_listed():
    assert set(re.findall(r"^::: hf_distca\.(\w+)$", page("api.md"), re.M)) == set(hf_distca.__all__)
    assert {*re.findall(r"^\| `(\w+)` \|", page("kernels.md"), re.M), "auto"} == set(KERNEL_NAMES)


@pytest.mark.parametrize("name", hf_distca.__all__)
def test_public_docstrings_name_their_parameters(name):
    public = getattr(hf_distca, name)
    text = inspect.getdoc(public)
    first = text.splitlines()[0]
    assert first.endswith("."), first
    assert len(first.split()) <= 20, first
    described = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", text, re.S | re.M)
    if described:
        named = set(re.findall(r"^    (\w+): ", described[1], re.M))
        assert named == set(inspect.signature(public).parameters), name


def test_refused_arguments_exist():
    named = {
        name for rule in (*ARGUMENTS, *GIVEN, *PACKING) for name in re.findall(r"^(\w+)(?:=| is given)", rule.found)
    }
    init = set(inspect.signature(Trainer.__init__).parameters)
    known = FIELDS | SFT_FIELDS | init | {"DPOTrainer", "args"}
    assert len(named) > 20
    assert named <= known, named - known


def test_a_case_is_in_one_table_only():
    cases = [entry.condition or entry.found for entry in chain(*REFUSALS.values())]
    assert len(cases) == len(set(cases))
