"""Docstrings name arguments and attributes that are there.

Ruff's DOC102 sees single arguments of functions; here are several in a line, and those of classes.
"""

import ast
import re
from pathlib import Path

import hf_distca

ROOT = Path(hf_distca.__file__).parent
NAMES = re.compile(r"    ((?:\*{0,2}\w+, )*\*{0,2}\w+): ")


def named_in(docstring: str, section: str) -> set[str]:
    """Names that lines of a section begin with."""
    body = re.search(rf"^{section}:\n((?:    .*\n|\n)*)", docstring + "\n", re.M)
    lines = body[1].splitlines() if body else []
    entries = [match[1] for line in lines if (match := NAMES.match(line))]
    return {name.strip("*") for entry in entries for name in entry.split(", ")}


def attributes_of(cls: ast.ClassDef) -> set[str]:
    """Fields, methods, and what methods set."""
    targets = [node.target for node in cls.body if isinstance(node, ast.AnnAssign)]
    fields = {target.id for target in targets if isinstance(target, ast.Name)}
    methods = {node.name for node in cls.body if isinstance(node, ast.FunctionDef)}
    stored = [node for node in ast.walk(cls) if isinstance(node, ast.Attribute)]
    return fields | methods | {node.attr for node in stored if isinstance(node.ctx, ast.Store)}


def arguments_of(node: ast.ClassDef | ast.FunctionDef) -> set[str]:
    """Arguments of a function, or of the constructor of a class."""
    if isinstance(node, ast.FunctionDef):
        return {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
    functions = [method for method in node.body if isinstance(method, ast.FunctionDef)]
    made = [arguments_of(method) for method in functions if method.name == "__init__"]
    return made[0] if made else attributes_of(node)


def missing_in(source: str) -> list[tuple[str, set[str]]]:
    """Functions and classes, with names that their docstrings have and they have not."""
    missing = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef):
            continue
        docstring = ast.get_docstring(node) or ""
        names = named_in(docstring, "Args") - arguments_of(node)
        if isinstance(node, ast.ClassDef):
            names |= named_in(docstring, "Attributes") - attributes_of(node)
        if names:
            missing.append((node.name, names))
    return missing


def test_docstrings_name_what_is_there():
    sources = {path: path.read_text() for path in sorted(ROOT.rglob("*.py"))}
    found = {str(path): missing_in(source) for path, source in sources.items()}
    assert {name: missing for name, missing in found.items() if missing} == {}


def test_names_that_are_not_there_are_found():
    wrong = '''
def function(a, *b):
    """Do.

    Args:
        a, c: two.
        *b: others.
            d: goes on about them.
    """
class Made:
    """It.

    Args:
        e, f: two.

    Attributes:
        g, h, i: three.
    """
    g: int
    def __init__(self, e):
        self.h = e
'''
    assert missing_in(wrong) == [("function", {"c"}), ("Made", {"f", "i"})]
