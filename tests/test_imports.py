"""Imports go one way, file by file: each part of the house may import those below it, and nothing goes in circles."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
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
    "pool": DISPATCH | ROWS | {"config", "pool.token", "pool.child", "pool.directory", "pool.rank"},
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
    "timeline": {"plan", "dispatch.recorder", "sim.drawing"},
    "cli": DISPATCH
    | WIRE
    | {"config", "units", "version", "models", "patches", "measure", "memory", "sim", "timeline"}
    | {"pool.server", "pool.transport"},
}
PURE = {"plan", "planner", "sim"} | WIRE
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
    if path != ROOT / "__init__.py"
}


def imported(path: Path) -> set[str]:
    """Full names of what a module imports, wherever in it: `hf_distca.plan.Plan`, `torch.nn`."""
    found, package = set(), ".".join(["hf_distca", *path.relative_to(ROOT).parent.parts])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= 1
            origin = node.module if node.level == 0 else f"{package}.{node.module}"
            found |= {f"{origin}.{alias.name}" for alias in node.names}
    return found


def is_in(module: str, parts: set[str]) -> bool:
    return any(module == part or module.startswith(f"{part}.") for part in parts)


def module_of(name: str) -> str:
    """The module of hf_distca that an imported name is, or is in."""
    name = name.removeprefix("hf_distca.")
    return max((module for module in MODULES if is_in(name, {module})), key=len, default=name)


NAMES = {module: imported(path) for module, path in MODULES.items()}
IMPORTS = {
    module: {module_of(name) for name in names if is_in(name, {"hf_distca"})} for module, names in NAMES.items()
}


def test_files_import_what_their_parts_may():
    wrong = {}
    for module, found in IMPORTS.items():
        part = max((part for part in ALLOWED if is_in(module, {part})), key=len)
        wrong[module] = {name for name in found if not is_in(name, ALLOWED[part] | {part})}
        for end, other in (("pool.rank", "pool.server"), ("pool.server", "pool.rank")):
            wrong[module] |= {name for name in found if is_in(module, {end}) and is_in(name, {other})}
        if is_in(module, PURE):
            wrong[module] |= {"torch", "transformers"} & {name.split(".")[0] for name in NAMES[module]}
    assert not {module: names for module, names in wrong.items() if names}


def test_no_circles():
    # A package's own file is imported with any of its modules.
    graph = {
        module: {each for each in MODULES if any(is_in(name, {each}) for name in found) and not is_in(module, {each})}
        for module, found in IMPORTS.items()
    }
    assert {"cli.options", "plan"} <= graph["cli.plan"]
    assert "kernels.contract" in graph["kernels.reference"]  # imports are seen, relative ones too
    TopologicalSorter(graph).prepare()  # its error names a circle


def test_public_names():
    assert set(hf_distca.__all__) <= set(dir(hf_distca))
    for name in hf_distca.__all__:
        assert getattr(hf_distca, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hf_distca.__getattr__("nothing")


FIRST = (
    "import hf_distca",
    "import transformers.modeling_utils, hf_distca",
    "from hf_distca.patches.head import adapted_heads",
    "from hf_distca import DistCASFTTrainer",
)
"""First imports of a process."""
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
