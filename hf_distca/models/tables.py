"""Sizes of a model's tables that are indexed by the data: token embedding, output head and learned positions."""

import re
from collections.abc import Iterator
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel

from hf_distca.collator.limits import Limits
from hf_distca.models.decoder import base_model

TABLE_OF_POSITIONS = re.compile(r"(^|\.)(wpe|embed_positions|pos(ition)?s?_(embed|encod)\w*)(\.|$)")
"""Names of tables of positions, such as wpe (GPT-2), embed_positions (OPT) and pos_encoding (CTRL).
"""
Kind = TypeVar("Kind", bound=nn.Module)


def model_limits(model: nn.Module) -> Limits:
    """Return the limits of a model, or of a PEFT model around one, before it is wrapped for several ranks.

    Sizes come from the modules: they are those of the whole table, also where each rank holds a
    share of its weight.
    """
    base = base_model(model)
    embedding = _first(nn.Embedding, base.get_input_embeddings())
    head = _first(nn.Linear, base.get_output_embeddings())
    return Limits(
        None if embedding is None else embedding.num_embeddings,
        None if head is None else head.out_features,
        min(_positions(base, "", type(base.config.get_text_config(decoder=True))), default=None),
        trained_positions(base.config.get_text_config(decoder=True)),
    )


def trained_positions(config: Any) -> int | None:
    """Return the number of positions that a model with rotary embeddings is made for.

    None without a limit.

    A factor such as YaRN's extends the first positions. Dynamic NTK adapts to any length.
    """
    rope = getattr(config, "rope_parameters", None)
    stated = getattr(config, "max_position_embeddings", None)
    if not rope or not isinstance(stated, int):
        return None
    of_layer_types = [each for each in rope.values() if isinstance(each, dict)]
    numbers = [stated]
    for parameters in of_layer_types or [rope]:
        if "dynamic" in parameters.get("rope_type", "default"):
            return None
        first = parameters.get("original_max_position_embeddings") or stated
        numbers.append(int(first * (parameters.get("factor") or 1)))
    return max(numbers)


def _first(kind: type[Kind], module: nn.Module | None) -> Kind | None:
    """Return a module of a kind, or the one of this kind that an adapter wraps."""
    modules = () if module is None else module.modules()
    return next((inside for inside in modules if isinstance(inside, kind)), None)


def _positions(module: nn.Module, name: str, text_config: type) -> Iterator[int]:
    """Yield the numbers of positions in the tables of a module, called `name`.

    Towers have positions of their own.
    """
    if isinstance(module, PreTrainedModel):
        if type(module.config.get_text_config(decoder=True)) is not text_config:
            return
    elif isinstance(module, nn.Embedding) and TABLE_OF_POSITIONS.search(name):
        yield module.num_embeddings - getattr(
            module, "offset", 0
        )  # OPT's first rows are for padding
    for buffer_name, buffer in module.named_buffers(recurse=False):
        if TABLE_OF_POSITIONS.fullmatch(buffer_name) and buffer.ndim == 2:
            yield len(buffer)
    for child_name, child in module.named_children():
        yield from _positions(child, f"{name}.{child_name}", text_config)
