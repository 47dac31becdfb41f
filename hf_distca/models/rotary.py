"""Rotary embeddings that depend on the longest position of a call: longrope, dynamic NTK, and those of Phi-3.5-MoE."""

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
    """Return whether transformers chooses the frequencies of a type of RoPE by the longest position of a call."""
    return "dynamic" in rope_type or rope_type == "longrope"


def config_depends_on_length(config: Any) -> bool:
    """Return whether a config asks for a rotary embedding that depends on the longest position of a call."""
    parameters = getattr(config, "rope_parameters", None) or {}
    of_layer_types = [each for each in parameters.values() if isinstance(each, dict)]
    # HunYuan calls its frequencies dynamic, but an `alpha` fixes them.
    types = [
        each.get("rope_type", "default")
        for each in of_layer_types or [parameters]
        if not each.get("alpha")
    ]
    return any(map(depends_on_length, types))


def rotary_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return by name the rotary embeddings that depend on the longest position of a call in a known way."""
    return {name: module for name, module in model.named_modules() if _is_known(module)}


def unknown_rotary_modules(model: nn.Module) -> Iterator[str]:
    """Yield the classes of modules that read the longest position of a call in an unknown way."""
    known = rotary_modules(model)
    for name, module in model.named_modules():
        if name not in known and (
            any(map(depends_on_length, _types(module))) or _reads_longest_position(module)
        ):
            yield type(module).__name__
    if not known and config_depends_on_length(model.config):
        yield type(model).__name__


def _is_known(module: nn.Module) -> bool:
    if type(module).__name__ in SCALING_BY_LENGTH:
        return any(rope_type != "default" for rope_type in _types(module))
    return any(map(depends_on_length, _types(module))) and _updates_frequencies(module)


def _types(module: Any) -> list[str]:
    """Return the types of RoPE that a rotary embedding computes, one or one for each type of layer."""
    types = getattr(module, "rope_type", None) or []
    return (
        [types]
        if isinstance(types, str)
        else list(types.values())
        if isinstance(types, dict)
        else []
    )


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
    if (
        code is None or type(module).__name__ in SCALING_BY_LENGTH
    ):  # which does so for some types of RoPE
        return False
    return "position_ids" in code.co_varnames[: code.co_argcount] and "max" in code.co_names
