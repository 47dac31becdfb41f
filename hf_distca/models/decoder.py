"""Modules of a model's decoder: its layers, and what attends or mixes along the row in them."""

import inspect
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""Name under which transformers' modules look up their attention function."""


def base_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model itself, without PEFT around it."""
    inner: Any = model
    base: PreTrainedModel = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    return base


def decoder_attentions(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the attention layers of a model's decoder by name."""
    of_decoder = _attentions(model.get_decoder())  # leave out towers for images or sound
    return of_decoder or _attentions(model)  # in some models get_decoder() returns another module


def _attentions(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if is_attention(module)}


def is_attention(module: nn.Module) -> bool:
    """Return whether a module is a decoder's attention layer whose core attention a plan can move."""
    return _is_named_attention(module) and _calls_interface(module)


def _is_named_attention(module: nn.Module) -> bool:
    """Return whether a module is named as transformers names a decoder's attention layers."""
    return type(module).__name__.endswith(("Attention", "MLA")) and hasattr(module, "layer_idx")


def _calls_interface(module: nn.Module) -> bool:
    """Return whether a module computes attention through transformers' AttentionInterface."""
    forwards = (vars(cls).get("forward") for cls in type(module).__mro__)
    return any(
        INTERFACE in inspect.unwrap(forward).__code__.co_names for forward in forwards if inspect.isroutine(forward)
    )


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return a model's decoder layers in order.

    These are the layers that transformers can checkpoint and that have attention, or share a module list with such a
    layer.
    """
    beside = {
        id(layer)
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and any(map(has_attention, module))
        for layer in module
    }
    return [
        module
        for module in model.modules()
        if isinstance(module, GradientCheckpointingLayer) and (id(module) in beside or has_attention(module))
    ]


def has_attention(layer: nn.Module) -> bool:
    """Return whether a decoder layer has attention that a plan can move."""
    return any(map(is_attention, layer.modules()))


def mixing_layers(model: nn.Module) -> list[nn.Module]:
    """Return a model's decoder layers that mix along the row without attention."""
    return [layer for layer in decoder_layers(model) if mixing_modules(layer)]


def mixing_modules(layer: nn.Module) -> list[nn.Module]:
    """Return the outermost modules of a decoder layer that mix along the row.

    These own a convolution over the row, or are attention layers outside transformers' attention interface (linear
    attention). Attention layers that use the interface are searched too.
    """
    found: list[nn.Module] = []
    for module in layer.children():
        if _mixes(module):
            found.append(module)
        else:
            found.extend(mixing_modules(module))
    return found


def _mixes(module: nn.Module) -> bool:
    if _is_named_attention(module):
        return not _calls_interface(module)
    # An adapter wraps the convolution as its base layer.
    return any(isinstance(getattr(child, "base_layer", child), nn.Conv1d) for child in module.children())


def takes_keywords(module: nn.Module) -> bool:
    """Return whether a module accepts keywords that it does not name, such as the plan."""
    parameters = inspect.signature(module.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def hands_on(module: nn.Module, name: str) -> bool:
    """Return whether an attention layer's forward names an argument of the attention function."""
    forward: Any = next(vars(cls)["forward"] for cls in type(module).__mro__ if "forward" in vars(cls))
    constants = inspect.unwrap(forward).__code__.co_consts
    return any(name in (constant if isinstance(constant, tuple) else (constant,)) for constant in constants)
