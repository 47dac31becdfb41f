"""What docs/ say is so: files and names in them exist."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

import hf_distca

ROOT = Path(__file__).parents[1]
DOCS = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
PAGES = {"README.md": (ROOT / "README.md").read_text(), **DOCS}
SOURCES = {path: path.read_text() for path in (ROOT / "hf_distca").rglob("*.py")}
WRITTEN_HERE = ("CONTRIBUTING.md",)
OTHERS = {"accelerate", "transformers", "torch", "expandable_segments", "set_device"}
"""Names of others' that these pages speak of."""
WRITTEN_ON_GPUS = "benchmarks/results/gpu.json"
FOLDERS = ("hf_distca", "tests", "benchmarks", "examples", "docs")


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page):
    for path in re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w/.]*)`", PAGES[page]):
        assert (ROOT / path).exists() or path == WRITTEN_ON_GPUS, path
    here = ROOT if page == "README.md" else ROOT / "docs"
    for path in re.findall(r"\]\((?!https?:)([^)#]+)", PAGES[page]):
        assert (here / path).exists(), path


@pytest.mark.parametrize("page", WRITTEN_HERE)
def test_names_exist(page):
    tests = {path.stem: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    known = set(re.findall(r"\w+", "\n".join([*SOURCES.values(), *tests.values()]))) | set(tests)
    known |= set(re.findall(r"[\w-]+", (ROOT / "Makefile").read_text()))
    known |= {field.name for field in fields(hf_distca.DistCATrainingArguments)}
    for code in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", DOCS[page], flags=re.S | re.M)):
        for name in re.findall(r"[a-z]\w*_\w+|[A-Z][a-z]+[A-Z]\w+", code):
            assert name in known | OTHERS, f"{name} in `{code}`"


@pytest.mark.parametrize("page", DOCS)
def test_every_page_is_linked(page):
    others = "".join(text for name, text in PAGES.items() if name != page)
    assert f"({page})" in others or f"(docs/{page})" in others
