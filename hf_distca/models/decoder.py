"""Modules of a model's decoder: its layers, and what attends or mixes along the row in them."""

import inspect
from collections.abc import Callable
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
    found: dict[str, nn.Module] = {}
    # The decoder alone has no towers for images or sound. In some models get_decoder() returns
    # another module.
    for root in (model.get_decoder(), model):
        found = found or {
            name: module for name, module in root.named_modules() if is_attention(module)
        }
    return found


def is_attention(module: nn.Module) -> bool:
    """Return whether a module is a decoder's attention layer whose core attention a plan can move."""
    forwards = (vars(cls).get("forward") for cls in type(module).__mro__)
    return _is_named_attention(module) and any(
        INTERFACE in inspect.unwrap(forward).__code__.co_names
        for forward in forwards
        if inspect.isroutine(forward)
    )


def _is_named_attention(module: nn.Module) -> bool:
    return type(module).__name__.endswith(("Attention", "MLA")) and hasattr(module, "layer_idx")


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return in order the checkpointable layers that have attention, or share a module list with such a layer."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    beside = {id(layer) for layers in lists if any(map(has_attention, layers)) for layer in layers}
    checkpointable = (
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    )
    return [layer for layer in checkpointable if id(layer) in beside or has_attention(layer)]


def has_attention(layer: nn.Module) -> bool:
    """Return whether a decoder layer has attention that a plan can move."""
    return any(map(is_attention, layer.modules()))


def mixing_layers(model: nn.Module) -> list[nn.Module]:
    """Return a model's decoder layers that mix along the row without attention."""
    return [layer for layer in decoder_layers(model) if mixing_modules(layer)]


def mixing_modules(layer: nn.Module) -> list[nn.Module]:
    """Return the outermost modules of a decoder layer that mix along the row.

    These own a convolution over the row, or are attention layers outside transformers' interface
    (linear attention).
    """
    found: list[nn.Module] = []
    for module in layer.children():
        # An adapter wraps the convolution as its base layer.
        mixes = any(
            isinstance(getattr(child, "base_layer", child), nn.Conv1d)
            for child in module.children()
        )
        if _is_named_attention(module):
            mixes = not is_attention(module)
        found += [module] if mixes else mixing_modules(module)
    return found


def takes_keywords(module: nn.Module) -> bool:
    """Return whether a module accepts keywords that it does not name, such as the plan."""
    parameters = inspect.signature(module.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def stock_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the forward of a module's class as transformers has it."""
    forwards = (vars(cls)["forward"] for cls in type(module).__mro__ if "forward" in vars(cls))
    forward: Callable[..., Any] = next(
        each for each in forwards if not each.__module__.startswith("hf_distca.")
    )
    return forward


def hands_on(module: nn.Module, name: str) -> bool:
    """Return whether an attention layer's forward names an argument of the attention function."""
    forward: Any = inspect.unwrap(stock_forward(module))
    constants = forward.__code__.co_consts
    return any(
        name in (constant if isinstance(constant, tuple) else (constant,)) for constant in constants
    )
