"""Files that people and tools expect of a repository: they are valid, and agree with the code."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

import hf_distca

ROOT = Path(__file__).parents[1]
CI = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("pattern", [".github/**/*.yml", "CITATION.cff", ".pre-commit-config.yaml"])
def test_files_are_valid_yaml(pattern):
    assert all(yaml.safe_load(path.read_text()) for path in ROOT.glob(pattern))


def asked_by(job):
    """Targets of the Makefile that a job of CI runs, for every value of its matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})
    lines = [step["run"] for step in job["steps"] if "run" in step]
    named = r"\$\{\{ matrix\.(\w+) \}\}"
    asked = [re.sub(named, lambda value: " ".join(matrix[value[1]]), line) for line in lines]
    return {name for line in asked for name in line.split()[1:]}


def test_ci_runs_targets_of_the_makefile_on_the_declared_pythons():
    targets = " ".join(re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.M)).split()
    asked = {name for job in CI["jobs"].values() for name in asked_by(job)}
    expected = {"lint", "types", "tests", "oldest", "newest", "axolotl", "swift"}
    assert expected <= asked <= set(targets)
    declared = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert (
        CI["jobs"]["tests"]["strategy"]["matrix"]["python"] == declared == ["3.11", "3.12", "3.13"]
    )


def test_version_and_form_of_the_changelog():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == hf_distca.__version__
    heading = "Unreleased" if ".dev" in hf_distca.__version__ else hf_distca.__version__
    assert re.search(r"^## \[(.*?)\]", CHANGELOG, re.M)[1] == heading
    kinds = set(re.findall(r"^### (.*)$", CHANGELOG, re.M))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_map_for_agents_is_short_and_whole():
    agents = (ROOT / "AGENTS.md").read_text()
    assert len(agents.splitlines()) <= 60
    packages = {
        f"hf_distca/{path.parent.name}" for path in (ROOT / "hf_distca").glob("*/__init__.py")
    }
    assert (
        set(re.findall(r"`(hf_distca/\w+)`", agents.split("## Packages")[1].split("## Rules")[0]))
        == packages
    )


def test_experimental_settings_are_listed():
    marked = {
        field.name
        for field in fields(hf_distca.DistCAConfig)
        if field.metadata["help"].startswith("Experimental")
    }
    page = (ROOT / "docs" / "development" / "contributing.md").read_text()
    listed = page.split('begins with "Experimental":')[1].split("##")[0]
    assert marked == set(re.findall(r"^- `(\w+)`", listed, re.M))


VALUES = {"config.py", "units.py", "cli/script.py", "pool/launch.py"}
"""Files that refuse with a sentence of their own: values of settings and options, and the sentence
of another process."""


def test_what_is_refused_stands_in_checks():
    package = Path(hf_distca.__file__).parent
    refusing = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if "checks" not in path.parts and "RefusedError(" in path.read_text()
    }
    assert refusing == VALUES
