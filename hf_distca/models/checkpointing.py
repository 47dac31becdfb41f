"""Activation checkpointing, under the names of the installed version of transformers."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from hf_distca.checks.setting_names import CHECKPOINTING, EARLIER, LATER
from hf_distca.dispatch.host_copies import BUFFERS
from hf_distca.models.decoder import base_model, decoder_layers
from hf_distca.plan import AttentionKind

LSE_BYTES = 4
"""Bytes of a value of the log-sum-exp."""


def enable_checkpointing(
    model: nn.Module, options: dict[str, Any] | None = None, **kwargs: Any
) -> None:
    """Turn on activation checkpointing of layers.

    Args:
        options: options of torch's checkpointing, as transformers takes them.
        kwargs: further arguments of transformers' method.
    """
    getattr(model, f"{CHECKPOINTING}_enable")(options, **kwargs)


def disable_checkpointing(model: nn.Module) -> None:
    """Turn off activation checkpointing of layers."""
    getattr(model, f"{CHECKPOINTING}_disable")()


def is_checkpointing(model: nn.Module) -> bool:
    """Return whether activation checkpointing is turned on."""
    return bool(getattr(model, f"is_{CHECKPOINTING}"))


def checkpointing_options(args: Any) -> dict[str, Any] | None:
    """Return the options with which a trainer's arguments turn on activation checkpointing.

    None if they turn it off.
    """
    if not getattr(args, CHECKPOINTING):
        return None
    return dict(getattr(args, f"{CHECKPOINTING}_kwargs") or {})


def move_default(args: Any) -> None:
    """Move a default of the earlier setting of activation checkpointing to the later setting.

    Another library may turn on activation checkpointing by default, under the earlier name.
    transformers would warn of that name, which nobody has written. A value that a user set stays
    there.
    """
    default = type(args).__dataclass_fields__[EARLIER].default
    is_default = default is not None and args.gradient_checkpointing == default
    if CHECKPOINTING == LATER and args.activation_checkpointing is None and is_default:
        args.activation_checkpointing = default


def checkpoint_row_bytes(
    hidden: int,
    kinds: Iterable[AttentionKind],
    *,
    hidden_bytes: int,
    value_bytes: int,
) -> int:
    """Return the most bytes of a row in the activation checkpoint of a decoder layer.

    These are the layer's input, and O and log-sum-exp of its core attention.

    Args:
        hidden: width of the hidden state.
        kinds: kinds of attention of the model's layers.
        hidden_bytes: bytes of a value of the hidden state: 4 under autocast of float32 weights.
        value_bytes: bytes of a value of core attention.
    """
    results = max(kind.q_heads * (kind.dim_v * value_bytes + LSE_BYTES) for kind in kinds)
    return hidden * hidden_bytes + results


def checkpointed_layers(model: nn.Module, options: Mapping[str, Any] | None) -> int:
    """Return how many decoder layers have checkpoints, by transformers' options for them."""
    if options is None:
        return 0
    layers = len(decoder_layers(base_model(model)))
    return -(-layers // int(options.get("every_n_layers", 1)))


def layers_with_checkpoints(model: nn.Module) -> int:
    """Return how many decoder layers of a model have activation checkpointing now."""
    if not is_checkpointing(model):
        return 0
    layers = decoder_layers(base_model(model))
    return sum(getattr(layer, "gradient_checkpointing", True) for layer in layers)


def offloaded_layers(layers: int) -> int:
    """Return how many layers can have their activation checkpoints on the host.

    Those of the last layers stay on the device, because the backward begins with them.
    """
    return max(layers - BUFFERS, 0)
