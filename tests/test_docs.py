"""The documentation site builds, and what its pages say exists: files, names, quoted errors."""

import ast
import importlib.util
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import hf_distca

ROOT = Path(__file__).parents[1]
DOCS = {str(path.relative_to(ROOT / "docs")): path for path in sorted((ROOT / "docs").rglob("*.md"))}
PAGES = {"README.md": ROOT / "README.md", **DOCS}
SOURCES = {path: path.read_text() for path in (ROOT / "hf_distca").rglob("*.py")}
NAMES_CHECKED = ("development/contributing.md", "help/troubleshooting.md")
OTHERS = {"accelerate", "transformers", "torch", "expandable_segments", "set_device"}
"""Names of other libraries on these pages."""
WRITTEN_ON_GPUS = "benchmarks/results/gpu.json"
FOLDERS = ("hf_distca", "tests", "benchmarks", "examples", "docs")


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
    return [re.sub(r"%\w", "…", text) for text in found]


def matches(quoted: str, text: str) -> bool:
    """Whether a quoted error is a text of the code, or a part of it; … in the quotation stands for anything."""
    return re.search(".*?".join(map(re.escape, quoted.split("…"))), text, re.S) is not None


def test_quotations_are_told_from_other_texts():
    (text,) = texts_of('raise ValueError(f"rank {rank} failed: " f"{why}; start again")')
    assert text == "rank … failed: …; start again"
    assert matches("rank … failed", text)
    assert matches("failed: …; start again", text)
    assert not matches("rank … failed; start again", text)
    assert texts_of('logger.warning("lost %s (%s)", a, b)')[0] == "lost … (…)"


def test_quoted_errors_are_those_of_the_code():
    texts = [text for source in SOURCES.values() for text in texts_of(source)]
    quoted = re.findall(r"^> (.*)$", DOCS["help/troubleshooting.md"].read_text(), re.M)
    assert len(quoted) > 10
    for line in quoted:
        assert any(matches(line.strip(), text) for text in texts), line


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page):
    text = PAGES[page].read_text()
    for path in re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w/.]*)`", text):
        assert (ROOT / path).exists() or path == WRITTEN_ON_GPUS, path
    for path in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (PAGES[page].parent / path).exists(), path


@pytest.mark.parametrize("page", NAMES_CHECKED)
def test_names_exist(page):
    tests = {path.stem: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    known = set(re.findall(r"\w+", "\n".join([*SOURCES.values(), *tests.values()]))) | set(tests)
    known |= set(re.findall(r"[\w-]+", (ROOT / "Makefile").read_text()))
    known |= {field.name for field in fields(hf_distca.DistCATrainingArguments)}
    for code in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", DOCS[page].read_text(), flags=re.S | re.M)):
        for name in re.findall(r"[a-z]\w*_\w+|[A-Z][a-z]+[A-Z]\w+", code):
            assert name in known | OTHERS, f"{name} in `{code}`"


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="no mkdocs: the dependency group docs has it")
def test_the_site_builds_without_a_warning_and_needs_no_other_host(tmp_path):
    """A broken link or anchor, and a page that the navigation lacks, are warnings, which end a strict build."""
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    built = {path: path.read_text() for path in tmp_path.rglob("*.html")}
    assert len(built) > len(DOCS)
    for path, page in built.items():
        for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page):
            assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", tag), f"{tag} in {path.name}"
    assert (tmp_path / "search" / "search_index.js").is_file()
