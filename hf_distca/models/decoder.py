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


def backbone(model: PreTrainedModel) -> nn.Module:
    """Return a model without its head, or the model itself if it has none."""
    inner: nn.Module = model.base_model
    # Llama4ForCausalLM, for one, names another attribute than it has.
    return getattr(model, "model", model) if inner is model else inner


def text_decoder(model: PreTrainedModel) -> nn.Module:
    """Return the decoder that gives a model's head its rows, or the model itself if it has none.

    The decoder has no towers for images or sound.
    """
    decoder: nn.Module = model.get_decoder()
    # In some models get_decoder() returns the model itself, or a part of the head.
    if decoder is model or not has_attention(decoder):
        return backbone(model)
    # Llama 4's is a causal language model, with a head.
    return text_decoder(decoder) if isinstance(decoder, PreTrainedModel) else decoder


def decoder_attentions(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the attention layers of a model's decoder by name."""
    decoder = text_decoder(model)
    return {name: inner for name, inner in decoder.named_modules() if is_attention(inner)}


def is_attention(module: nn.Module) -> bool:
    """Return whether a module is an attention layer whose core attention a plan can move.

    Its forward then calls transformers' attention interface.
    """
    if not _is_named_attention(module):
        return False
    for cls in type(module).__mro__:
        forward = vars(cls).get("forward")
        if inspect.isroutine(forward) and INTERFACE in inspect.unwrap(forward).__code__.co_names:
            return True
    return False


def _is_named_attention(module: nn.Module) -> bool:
    """Return whether a module is called an attention layer of a decoder."""
    return type(module).__name__.endswith(("Attention", "MLA")) and hasattr(module, "layer_idx")


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model's decoder of text in order.

    They are layers that transformers can checkpoint. They have attention, or share a module list
    with a layer that has attention.
    """
    base = base_model(model)
    decoder = text_decoder(base) if isinstance(base, PreTrainedModel) else base
    ids_in_decoder_lists: set[int] = set()
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and any(map(has_attention, module)):
            ids_in_decoder_lists.update(id(layer) for layer in module)
    return [
        layer
        for layer in decoder.modules()
        if isinstance(layer, GradientCheckpointingLayer)
        and (id(layer) in ids_in_decoder_lists or has_attention(layer))
    ]


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
    mixing: list[nn.Module] = []
    for module in layer.children():
        if _is_named_attention(module):
            mixes = not is_attention(module)
        else:
            # An adapter wraps the convolution as its base layer.
            parts = [getattr(child, "base_layer", child) for child in module.children()]
            mixes = any(isinstance(part, nn.Conv1d) for part in parts)
        if mixes:
            mixing.append(module)
        else:
            mixing += mixing_modules(module)
    return mixing


def takes_keywords(module: nn.Module) -> bool:
    """Return whether a module accepts keywords that it does not name, such as the plan."""
    parameters = inspect.signature(module.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def stock_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the forward of a module's class as transformers has it."""
    for cls in type(module).__mro__:
        forward: Callable[..., Any] | None = vars(cls).get("forward")
        if forward is not None and not forward.__module__.startswith("hf_distca."):
            return forward
    raise TypeError(f"{type(module).__name__} has no forward")


def hands_on(module: nn.Module, name: str) -> bool:
    """Return whether an attention layer's forward names an argument of the attention function."""
    forward: Any = inspect.unwrap(stock_forward(module))
    for constant in forward.__code__.co_consts:
        # Python keeps the names of keyword arguments in one tuple.
        names = constant if isinstance(constant, tuple) else (constant,)
        if name in names:
            return True
    return False
