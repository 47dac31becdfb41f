"""Imports go one way: each package may import only those named for it here."""

import ast
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

import hf_distca

ROOT = Path(hf_distca.__file__).parent
CODECS = {"plan_codec", "call_codec"}
PURE = {"plan", "planner"}
ALLOWED = {
    "plan": set(),
    "plan_codec": {"plan"},
    "call_codec": set(),
    "planner": {"plan"},
    "kernels": set(),
    "wire": set(),
    "config": {"kernels"},
    "dispatch": PURE | CODECS | {"kernels", "wire"},
    "patches": PURE | {"kernels", "dispatch"},
    "collator": PURE,
    "server": PURE | CODECS | {"kernels", "dispatch", "wire"},
    "trainer": PURE | {"config", "kernels", "dispatch", "patches", "collator", "wire"},
    "cli": PURE | {"kernels", "server", "wire"},
}


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Packages of hf_distca that a module imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module]
            if node.module == "hf_distca":
                names = [f"hf_distca.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("hf_distca.")}
    return found


MODULES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_imports_what_its_package_may(path):
    package = package_of(path)
    assert imported(path) <= ALLOWED[package] | {package}


@pytest.mark.parametrize("package", ["plan.py", "planner", "plan_codec.py", "call_codec.py", "wire"])
def test_pure_packages_know_neither_torch_nor_transformers(package):
    found = ROOT / package
    for path in [found] if found.is_file() else found.rglob("*.py"):
        words = path.read_text().split()
        assert not {"torch", "transformers"} & {b for a, b in itertools.pairwise(words) if a in ("import", "from")}


def test_public_names():
    for name in hf_distca.__all__:
        assert getattr(hf_distca, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hf_distca.nothing  # noqa: B018 - the access is the test


def test_importing_it_leaves_the_trainer_out():
    code = "import sys, hf_distca; print('transformers.trainer' in sys.modules, hf_distca.DistCATrainer.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "DistCATrainer"]
