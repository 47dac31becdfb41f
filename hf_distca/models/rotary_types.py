"""Rotary embeddings that depend on the longest position of a call.

These are longrope, dynamic NTK, and the rotary embedding of Phi-3.5-MoE.
"""

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.modeling_rope_utils import dynamic_rope_update

from hf_distca.models.decoder import stock_forward

UPDATING: Any = dynamic_rope_update(lambda *_: None)
"""A forward that chooses the frequencies of a call by the longest position, as transformers'
decorator makes it."""
SCALING_BY_LENGTH = ("PhimoeRotaryEmbedding",)
"""Classes whose own forward chooses a factor on cos and sin by the longest position."""


def depends_on_length(rope_type: str) -> bool:
    """Return whether the frequencies of a type of RoPE depend on the longest position of a call."""
    return "dynamic" in rope_type or rope_type == "longrope"


def config_depends_on_length(config: Any) -> bool:
    """Return whether a config's rotary embedding depends on the longest position of a call."""
    for parameters in rope_parameters(config):
        # HunYuan calls its frequencies dynamic, but an `alpha` fixes them.
        if not parameters.get("alpha") and depends_on_length(
            parameters.get("rope_type", "default")
        ):
            return True
    return False


def rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Return the parameters of a config's RoPE, in a list of one, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    layer_types = [value for value in parameters.values() if isinstance(value, dict)]
    return layer_types or [parameters]


def rotary_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return by name the rotary embeddings that a planned step can compute for each document.

    They depend on the longest position of a call in a known way.
    """
    return {name: module for name, module in model.named_modules() if _is_known(module)}


def unknown_rotary_modules(model: nn.Module) -> Iterator[str]:
    """Yield the classes of modules that read the longest position of a call in an unknown way."""
    known_modules = rotary_modules(model)
    for name, module in model.named_modules():
        if name in known_modules:
            continue
        if any(map(depends_on_length, _rope_types(module))) or _reads_longest_position(module):
            yield type(module).__name__
    if not known_modules and config_depends_on_length(model.config):
        yield type(model).__name__


def _is_known(module: nn.Module) -> bool:
    """Return whether a module depends on the longest position of a call in a known way."""
    rope_types = _rope_types(module)
    if type(module).__name__ in SCALING_BY_LENGTH:
        return any(rope_type != "default" for rope_type in rope_types)
    return any(map(depends_on_length, rope_types)) and _updates_frequencies(module)


def _rope_types(module: Any) -> list[str]:
    """Return the types of RoPE of a rotary embedding.

    There is one type, or one for each type of layer.

    The list is empty for any other module.
    """
    rope_type = getattr(module, "rope_type", None)
    if isinstance(rope_type, str):
        return [rope_type] if rope_type else []
    if isinstance(rope_type, dict):
        return list(rope_type.values())
    return []


def _updates_frequencies(module: nn.Module) -> bool:
    """Return whether transformers' decorator chooses the frequencies of a module's calls."""
    forward: Any = stock_forward(module)
    while forward is not None:
        if getattr(forward, "__code__", None) is UPDATING.__code__:
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


def _reads_longest_position(module: nn.Module) -> bool:
    """Return whether a module's forward takes positions and computes a maximum."""
    forward: Any = inspect.unwrap(stock_forward(module))
    code: Any = getattr(forward, "__code__", None)
    # Modules of these classes compute a maximum for some types of RoPE only.
    if code is None or type(module).__name__ in SCALING_BY_LENGTH:
        return False
    return "position_ids" in code.co_varnames[: code.co_argcount] and "max" in code.co_names
