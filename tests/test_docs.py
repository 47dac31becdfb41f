"""The documentation site builds; files, names and Python on its pages exist."""

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from accelerate import Accelerator

import hf_distca

ROOT = Path(__file__).parents[1]
DOCS = {str(path.relative_to(ROOT / "docs")): path for path in sorted((ROOT / "docs").rglob("*.md"))}
PAGES = {"README.md": ROOT / "README.md", **DOCS}
WRITTEN_ON_GPUS = "benchmarks/results/gpu.json"
FOLDERS = ("hf_distca", "tests", "benchmarks", "examples", "docs")
OBJECTS = {"hf_distca": hf_distca, "dispatcher": hf_distca.Dispatcher, "accelerator": Accelerator}
"""What names in examples stand for."""


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page):
    text = PAGES[page].read_text()
    for path in re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w/.]*)`", text):
        assert (ROOT / path).exists() or path == WRITTEN_ON_GPUS, path
    for path in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (PAGES[page].parent / path).exists(), path


def test_names_exist_that_contributors_look_for():
    code = [path for folder in ("hf_distca", "tests") for path in (ROOT / folder).rglob("*.py")]
    known = {path.stem for path in code} | set(re.findall(r"\w+", "".join(path.read_text() for path in code)))
    known |= set(re.findall(r"[\w-]+", (ROOT / "Makefile").read_text()))
    known |= {field.name for field in fields(hf_distca.DistCATrainingArguments)}
    text = re.sub(r"^```.*?^```", "", DOCS["development/contributing.md"].read_text(), flags=re.S | re.M)
    for quoted in re.findall(r"`([^`\n]+)`", text):
        for name in re.findall(r"[a-z]\w*_\w+|[A-Z][a-z]+[A-Z]\w+", quoted):
            assert name in known, f"{name} in `{quoted}`"


@pytest.mark.parametrize("page", PAGES)
def test_python_compiles_and_its_names_exist(page):
    for code in re.findall(r"^```python\n(.*?)^```", PAGES[page].read_text(), re.S | re.M):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in OBJECTS:
                known = OBJECTS[node.value.id]
                made = inspect.isclass(known) and f"self.{node.attr} = " in inspect.getsource(known.__init__)
                assert hasattr(known, node.attr) or made, node.attr
            if isinstance(node, ast.Call) and re.fullmatch(r"hf_distca\.\w+", ast.unparse(node.func)):
                called = getattr(hf_distca, node.func.attr)
                inspect.signature(called).bind(*node.args, **{keyword.arg: None for keyword in node.keywords})


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="no mkdocs: the dependency group docs has it")
def test_the_site_builds_without_a_warning_and_needs_no_other_host(tmp_path):
    """A broken link or anchor, and a page that the navigation lacks, are warnings, which end a strict build."""
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    built = {path: path.read_text() for path in tmp_path.rglob("*.html")}
    assert len(built) > len(DOCS)  # and the page for addresses that do not exist
    for path, page in built.items():
        for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page):
            assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", tag), f"{tag} in {path.name}"
    assert (tmp_path / "search" / "search_index.js").is_file()
