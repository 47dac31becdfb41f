"""Models whose hidden states depend on differences of positions alone, by the code that reads them.

A rotary embedding turns queries and keys by their positions, so that attention depends on how far
apart two rows are. Learned positions, and factors that grow with a position, depend on where a row
is. The code of a decoder shows which of them it has: it hands `position_ids` on, gives them to a
rotary embedding, or computes with them.
"""

import ast
import inspect
import textwrap
from typing import Any

from torch import nn

from hf_distca.models.decoder import backbone, base_model, stock_forward, text_decoder
from hf_distca.models.rotary_types import rotary_modules, unknown_rotary_modules

POSITIONS = "position_ids"
ROTARY = ("rotary", "rope")
"""Parts of the names of rotary embeddings and of their classes."""
MASK = "mask"
"""Part of the names of functions that make masks; a plan takes the place of their masks."""
OF_SHAPE = ("shape", "ndim", "device", "dtype", "unsqueeze", "expand", "view")
"""Attributes of positions that say nothing about where a row is, or change the shape alone."""


def are_relative(model: nn.Module) -> bool:
    """Return whether hidden states stay the same, but for rounding, if all positions grow alike.

    False where nothing is known.
    """
    base = base_model(model)
    if rotary_modules(base) or next(unknown_rotary_modules(base), None) is not None:
        return False
    modules = [backbone(base), *text_decoder(base).modules()]
    classes = {type(module): module for module in modules}
    return any(map(_is_rotary, classes)) and not any(
        _computes_with_positions(module) for cls, module in classes.items() if not _is_rotary(cls)
    )


def _is_rotary(cls: type) -> bool:
    """Return whether a class is a rotary embedding."""
    return any(part in cls.__name__.lower() for part in ROTARY)


def _computes_with_positions(module: nn.Module) -> bool:
    """Return whether a module's forward does more with positions than to hand them on."""
    try:
        forward: Any = inspect.unwrap(stock_forward(module))
        code = getattr(forward, "__code__", None)
        if code is not None and POSITIONS not in (*code.co_varnames, *code.co_cellvars):
            return False
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except TypeError:  # a list of modules has no forward
        return False
    except OSError:  # no source, as of a class that was typed into an interpreter
        return True
    allowed = {id(inner) for node in ast.walk(tree) for inner in _handed_on(node)}
    return any(_reads_positions(node) and id(node) not in allowed for node in ast.walk(tree))


def _reads_positions(node: ast.AST) -> bool:
    """Return whether a node is a name of positions, or the string by which keywords have them."""
    if isinstance(node, ast.Constant):
        return bool(node.value == POSITIONS)
    if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load):
        return False
    return node.id.endswith(POSITIONS)  # such as text_position_ids


def _handed_on(node: ast.AST) -> list[ast.expr]:
    """Return the parts of a node that are handed on by name, or given to a rotary embedding.

    Tests for None and changes of the shape do not depend on positions either.
    """
    if isinstance(node, ast.Call):
        by_name = [word.value for word in node.keywords if (word.arg or "").endswith(POSITIONS)]
        callee = ast.unparse(node.func).lower()
        return by_name + (node.args if any(part in callee for part in (*ROTARY, MASK)) else [])
    if isinstance(node, ast.Dict):
        pairs = [(key, value) for key, value in zip(node.keys, node.values, strict=True) if key]
        return [part for pair in pairs if _reads_positions(pair[0]) for part in pair]
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot):
        return [node.left]
    if isinstance(node, ast.Attribute) and node.attr in OF_SHAPE:
        return [node.value]
    if isinstance(node, ast.Subscript):
        return [node.value]
    return []
