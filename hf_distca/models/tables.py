"""Sizes of a model's tables that are indexed by the data.

These are the token embedding, the output head and learned positions.
"""

import re
from collections.abc import Iterator
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel

from hf_distca.batches.limits import Limits
from hf_distca.models.decoder import base_model
from hf_distca.models.rotary_types import rope_parameters

TABLE_OF_POSITIONS = re.compile(r"(^|\.)(wpe|embed_positions|pos(ition)?s?_(embed|encod)\w*)(\.|$)")
"""Names of tables of positions, such as wpe (GPT-2), embed_positions (OPT) and pos_encoding (CTRL).
"""
Module = TypeVar("Module", bound=nn.Module)


def model_limits(model: nn.Module) -> Limits:
    """Return the limits of a model, or of a PEFT model around one.

    Call it before the model is wrapped for several ranks. Sizes come from the modules: they are
    those of the whole table, also where each rank holds a share of its weight.
    """
    base = base_model(model)
    text_config = base.config.get_text_config(decoder=True)
    embedding = _first_of_class(nn.Embedding, base.get_input_embeddings())
    head = _first_of_class(nn.Linear, base.get_output_embeddings())
    return Limits(
        vocabulary=None if embedding is None else embedding.num_embeddings,
        classes=None if head is None else head.out_features,
        positions=min(_positions(base, "", type(text_config)), default=None),
        trained_positions=trained_positions(text_config),
    )


def trained_positions(config: Any) -> int | None:
    """Return the number of positions that a model with rotary embeddings is made for.

    None without a limit.

    A factor such as YaRN's extends the first positions. Dynamic NTK adapts to any length.
    """
    stated = getattr(config, "max_position_embeddings", None)
    if not getattr(config, "rope_parameters", None) or not isinstance(stated, int):
        return None
    numbers = [stated]
    for parameters in rope_parameters(config):
        if "dynamic" in parameters.get("rope_type", "default"):
            return None
        unextended = parameters.get("original_max_position_embeddings") or stated
        factor = parameters.get("factor") or 1
        numbers.append(int(unextended * factor))
    return max(numbers)


def _first_of_class(module_class: type[Module], module: nn.Module | None) -> Module | None:
    """Return a module if it is of a class, or the module of this class that an adapter wraps."""
    if module is None:
        return None
    return next((inner for inner in module.modules() if isinstance(inner, module_class)), None)


def _positions(module: nn.Module, name: str, text_config: type) -> Iterator[int]:
    """Yield the numbers of positions in the tables of a module, called `name`.

    Towers have positions of their own.
    """
    if isinstance(module, PreTrainedModel):
        if type(module.config.get_text_config(decoder=True)) is not text_config:
            return
    elif isinstance(module, nn.Embedding) and TABLE_OF_POSITIONS.search(name):
        padding_rows = getattr(module, "offset", 0)  # OPT's first rows
        yield module.num_embeddings - padding_rows
    for buffer_name, buffer in module.named_buffers(recurse=False):
        if TABLE_OF_POSITIONS.fullmatch(buffer_name) and buffer.ndim == 2:
            yield len(buffer)
    for child_name, child in module.named_children():
        yield from _positions(child, f"{name}.{child_name}", text_config)
