"""Imports go one way, file by file: each part of the house may import those below it, and nothing goes in circles."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hf_distca

ROOT = Path(hf_distca.__file__).parent
PLANNER = {"plan", "planner"}
DISPATCH = PLANNER | {"kernels", "dispatch"}
WIRE = {"pool.messages", "pool.wire", "pool.token"}
ROWS = {"pool.nixl", "pool.transport"}
# What the files of a part may import besides those of the part itself. A file belongs to the longest name that fits.
ALLOWED = {
    "refusal": set(),
    "units": set(),
    "version": set(),
    "when_imported": set(),
    "plan": set(),
    "planner": {"plan"},
    "kernels": set(),
    "config": {"kernels", "refusal", "units"},
    "collator": PLANNER | {"refusal"},
    "dispatch": PLANNER | {"kernels", "collator.padding_free"},
    "dispatch.remote": PLANNER | {"kernels", "dispatch.recorder", "dispatch.rows"},
    "models": PLANNER | {"kernels", "config", "refusal", "units", "sim.model"},
    "patches": DISPATCH | {"config", "models", "refusal"},
    "memory": DISPATCH | {"config", "models", "patches", "sim"},
    "pool": DISPATCH | ROWS | {"pool.token", "pool.child", "pool.directory", "pool.rank"},
    "pool.child": set(),
    "pool.token": set(),
    "pool.messages": PLANNER,
    "pool.wire": {"pool.messages"},
    "pool.nixl": {"pool.messages", "pool.wire"},
    "pool.transport": {"pool.messages", "pool.wire", "pool.nixl"},
    "pool.directory": WIRE,
    "pool.rank": DISPATCH | WIRE | ROWS | {"pool.directory"},
    "pool.server": DISPATCH | WIRE | ROWS | {"pool.directory"},
    "trainer": DISPATCH
    | {"config", "units", "refusal", "collator", "models", "patches", "measure", "memory", "timeline", "sim"}
    | {"pool.launch", "pool.rank"},
    "sim": PLANNER,
    "measure": DISPATCH | {"sim"},
    "timeline": {"plan", "dispatch.recorder", "sim.report"},
    "cli": DISPATCH
    | WIRE
    | {"config", "units", "version", "models", "patches", "measure", "memory", "sim", "timeline"}
    | {"pool.server", "pool.transport"},
}
PURE = {"plan", "planner", "sim"} | WIRE


def name_of(path: Path) -> str:
    """A module's name within hf_distca; a package's own file is that of the package."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"}


def imported(source: str, package: str) -> set[str]:
    """Full names of what a module's source imports, wherever in it: `hf_distca.plan.Plan`, `torch.nn`.

    Args:
        source: its text.
        package: full name of the package that it is in, from which relative imports go.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            # What is imported may be a module itself.
            found |= {f"{origin}.{alias.name}" for alias in node.names}
    return found


def imports_of(module: str) -> set[str]:
    """Full names of what a module of hf_distca imports."""
    path = MODULES[module]
    parts = ["hf_distca", *module.split(".")]
    return imported(path.read_text(), ".".join(parts if path.name == "__init__.py" else parts[:-1]))


def modules_of(names: set[str]) -> set[str]:
    """The modules of hf_distca that imported names are, or are in."""
    found = set()
    for name in names:
        parts = name.split(".")
        if parts[0] == "hf_distca":
            known = (".".join(parts[1:end]) for end in range(len(parts), 1, -1))
            found |= {next((module for module in known if module in MODULES), name)}
    return found


def part_of(module: str) -> str:
    """The part of the house that a module belongs to."""
    return max((part for part in ALLOWED if is_in(module, {part})), key=len)


def is_in(module: str, parts: set[str]) -> bool:
    return any(module == part or module.startswith(f"{part}.") for part in parts)


def test_imports_of_any_form_are_seen():
    source = "import torch\nimport torch.nn as nn\nfrom torch.nn import Linear\nfrom ..dispatch import rows\n"
    source += "from . import plans\nfrom .calls import Calls\ndef late():\n    from .. import plan"
    assert imported(source, "hf_distca.server") == {
        *("torch", "torch.nn", "torch.nn.Linear", "hf_distca.dispatch.rows", "hf_distca.server.plans"),
        *("hf_distca.server.calls.Calls", "hf_distca.plan"),
    }
    names = {"hf_distca.plan.Plan", "hf_distca.planner", "hf_distca.planner.cost", "torch.nn"}
    assert modules_of(names) == {"plan", "planner", "planner.cost"}


@pytest.mark.parametrize("module", MODULES)
def test_a_file_imports_what_its_part_may(module):
    part = part_of(module)
    allowed = ALLOWED[part] | {part}
    assert not {name for name in modules_of(imports_of(module)) if not is_in(name, allowed)}


def test_a_server_and_a_rank_know_nothing_of_each_other():
    for module in MODULES:
        for end, other in (("pool.rank", "pool.server"), ("pool.server", "pool.rank")):
            if is_in(module, {end}):
                assert not {name for name in modules_of(imports_of(module)) if is_in(name, {other})}


def test_no_circles():
    named = {module: modules_of(imports_of(module)) for module in MODULES}
    # A package's own file is imported with any of its modules.
    imports = {
        module: found | {package for package in MODULES if any(is_in(name, {package}) for name in found)}
        for module, found in named.items()
    }
    left = {
        module: {name for name in found if not is_in(module, {name})} & MODULES.keys()
        for module, found in imports.items()
    }
    # What imports none of those that are left is in no circle, nor is what none of them imports.
    while free := [
        module
        for module, found in left.items()
        if not found & left.keys() or not any(module in others for others in left.values())
    ]:
        for module in free:
            del left[module]
    assert not left, f"these import each other: {sorted(left)}"


def test_pure_parts_know_neither_torch_nor_transformers():
    for module in MODULES:
        if is_in(module, PURE):
            assert not {"torch", "transformers"} & {name.split(".")[0] for name in imports_of(module)}, module


def test_public_names():
    assert set(hf_distca.__all__) <= set(dir(hf_distca))
    for name in hf_distca.__all__:
        assert getattr(hf_distca, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hf_distca.nothing  # noqa: B018 - the access is the test


FIRST = (
    "import hf_distca",
    "import transformers.modeling_utils, hf_distca",
    "from hf_distca.patches.head import adapted_heads",
    "from hf_distca import DistCATrainer",
    "from hf_distca import DistCASFTTrainer",
)
"""What a process may import first."""
SEEN = (
    "\nfrom transformers import AttentionInterface as A, AttentionMaskInterface as M\n"
    "assert 'distca' in A().keys() and 'distca' in M().keys()"
)
SCRIPT = f"""
import os, sys

def in_a_process_of_its_own(lines):
    if not os.fork():
        exec(lines)
        os._exit(0)
    assert os.wait()[1] == 0, lines

in_a_process_of_its_own("import hf_distca; assert not {{'torch', 'transformers'}} & set(sys.modules)")
import torch
for lines in {FIRST}:
    in_a_process_of_its_own(lines + {SEEN!r})
"""


def test_transformers_knows_the_implementation_whatever_is_imported_first():
    """And importing hf_distca alone imports no library."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
