"""A deep model counted as two shallow ones: every layer that repeats others adds what these add."""

import copy
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from hf_distca.memory.live import Part
from hf_distca.patches.kinds import attention_reaches
from hf_distca.patches.layers import decoder_layers


def repeated_layers(model: PreTrainedModel) -> int | None:
    """After how many decoder layers a model's layers repeat themselves; None where they do not.

    Args:
        model: with all of its layers.
    """
    reaches = attention_reaches(model.config)
    layers = [
        (type(layer), reaches[i % len(reaches)], sum(p.numel() for p in layer.parameters()))
        for i, layer in enumerate(decoder_layers(model))
    ]
    for period in range(1, len(layers) // 3 + 1):
        if all(layer == layers[i % period] for i, layer in enumerate(layers)):
            return period
    return None


def with_layers(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """A config of a model of fewer layers, the first ones."""
    shallow = copy.deepcopy(config)
    text: Any = shallow.get_text_config(decoder=True)
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == text.num_hidden_layers:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    return shallow


def count_by_layers(
    count: Callable[[PreTrainedConfig], dict[Part, int]], config: PreTrainedConfig, period: int | None
) -> dict[Part, int]:
    """Bytes by part of a model of a config.

    The most is alive when the forward has ended and the first gradients are computed, or shortly before or after.
    Then each layer has left what it keeps for its backward, so that bytes grow with the number of layers along a line.

    Args:
        count: of a model, see `count_micro_batch`.
        config: of the whole model.
        period: see `repeated_layers`.
    """
    depth = config.get_text_config(decoder=True).num_hidden_layers
    if period is None:
        return count(config)
    few = 2 if period == 1 else period
    less, more = (count(with_layers(config, layers)) for layers in (few, few + period))
    steps = (depth - few) / period
    return {part: round(less.get(part, 0) + steps * (more[part] - less.get(part, 0))) for part in more}
