"""Imports go one way: each package may import only those named for it here."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hf_distca

ROOT = Path(hf_distca.__file__).parent
PURE = {"plan", "planner"}
ALLOWED = {
    "plan": set(),
    "planner": {"plan"},
    "kernels": set(),
    "config": {"kernels"},
    "dispatch": PURE | {"kernels"},
    "patches": PURE | {"config", "kernels", "dispatch"},
    "collator": PURE,
    "pool": PURE | {"kernels", "dispatch"},
    "trainer": PURE | {"config", "kernels", "dispatch", "patches", "collator", "pool"},
    "cli": PURE | {"config", "kernels", "pool"},
}


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(source: str, module: str) -> set[str]:
    """Full names of the modules that a module's source imports, wherever in it: `hf_distca.plan`, `torch.nn`.

    Args:
        source: its text.
        module: its full name, from which relative imports go.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            # What is imported may be a module itself.
            found |= {f"{origin}.{alias.name}" for alias in node.names}
    return found


def packages(names: set[str]) -> set[str]:
    """The packages of hf_distca among them."""
    return {name.split(".")[1] for name in names if name.startswith("hf_distca.")}


def imports_of(path: Path) -> set[str]:
    relative = path.relative_to(ROOT.parent).with_suffix("")
    return imported(path.read_text(), ".".join(relative.parts))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("import torch", {"torch"}),
        ("import torch.nn as nn", {"torch.nn"}),
        ("from torch.nn import Linear", {"torch.nn.Linear"}),
        ("from hf_distca import planner", {"hf_distca.planner"}),
        ("from ..dispatch import pool", {"hf_distca.dispatch.pool"}),
        ("from . import plans", {"hf_distca.server.plans"}),
        ("from .calls import Calls", {"hf_distca.server.calls.Calls"}),
        ("def late():\n    from .. import plan", {"hf_distca.plan"}),
    ],
)
def test_imports_of_any_form_are_seen(line, expected):
    assert imported(line, "hf_distca.server.compute") == expected


MODULES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_imports_what_its_package_may(path):
    package = package_of(path)
    assert packages(imports_of(path)) <= ALLOWED[package] | {package}


@pytest.mark.parametrize("package", ["plan.py", "planner", "pool/messages", "pool/wire"])
def test_pure_packages_know_neither_torch_nor_transformers(package):
    found = ROOT / package
    for path in [found] if found.is_file() else found.rglob("*.py"):
        assert not {"torch", "transformers"} & {name.split(".")[0] for name in imports_of(path)}


def test_public_names():
    for name in hf_distca.__all__:
        assert getattr(hf_distca, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hf_distca.nothing  # noqa: B018 - the access is the test


def test_importing_it_leaves_the_trainer_out():
    code = "import sys, hf_distca; print('transformers.trainer' in sys.modules, hf_distca.DistCATrainer.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "DistCATrainer"]
