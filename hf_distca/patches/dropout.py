"""Check for attention dropout, under all names that transformers' models use."""

import re
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedConfig

IN_CONFIG = re.compile(r"(?!encoder_)(.*_)?(attn|attention)_.*drop.*")
"""Config fields: attention_dropout, attn_pdrop, attention_probs_dropout_prob, decoder_attention_dropout_rate, ..."""
IN_MODULE = re.compile(r"(attn|attention)_.*drop.*|dropout(_p|_prob)?")
"""Attributes of an attention layer; there plain "dropout" also means dropout of the weights."""


def check_dropout(config: PreTrainedConfig, attentions: dict[str, nn.Module]) -> None:
    """Raise if the model would drop attention weights in training.

    Raises:
        ValueError: a field of the config or an attribute of a layer, named in the message, asks for dropout.
    """
    for name, value in config.to_dict().items():
        if IN_CONFIG.fullmatch(name) and _probability(value) > 0:
            raise ValueError(
                f"{name} is {value}; dropped attention weights cannot be drawn alike on every worker. Load the model "
                f"with {name}=0.0"
            )
    for layer, module in attentions.items():
        for name, value in _attributes(module):
            if IN_MODULE.fullmatch(name) and (probability := _probability(value)) > 0:
                raise ValueError(
                    f"{name} of {layer} is {probability}; dropped attention weights cannot be drawn alike on every "
                    "worker. Set it to 0.0 in every attention layer"
                )


def _attributes(module: nn.Module) -> Iterator[tuple[str, object]]:
    yield from vars(module).items()
    yield from module.named_children()


def _probability(value: object) -> float:
    if isinstance(value, nn.Dropout):
        return value.p
    return float(value) if isinstance(value, int | float) else 0.0
