"""Checkpoints of a model's layers, under the names that the installed version of transformers has for them."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

LATER, EARLIER = "activation_checkpointing", "gradient_checkpointing"
"""Names since transformers 5.23, which warns of the earlier ones, and before."""
CHECKPOINTING = LATER if hasattr(PreTrainedModel, f"{LATER}_enable") else EARLIER
"""Name of the setting of `TrainingArguments`, and part of the names of methods."""


def enable_checkpointing(
    model: nn.Module, options: dict[str, Any] | None = None, **others: Any
) -> None:
    """Turn on checkpoints of layers.

    `options` are those of torch's checkpoints, as transformers takes them.
    """
    getattr(model, f"{CHECKPOINTING}_enable")(options, **others)


def disable_checkpointing(model: nn.Module) -> None:
    """Turn off checkpoints of layers."""
    getattr(model, f"{CHECKPOINTING}_disable")()


def is_checkpointing(model: nn.Module) -> bool:
    """Return whether checkpoints of layers are turned on."""
    return bool(getattr(model, f"is_{CHECKPOINTING}"))


def checkpointing_options(args: Any) -> dict[str, Any] | None:
    """Return the options with which a trainer's arguments turn on checkpoints.

    None if they turn none on.
    """
    return (
        dict(getattr(args, f"{CHECKPOINTING}_kwargs") or {})
        if getattr(args, CHECKPOINTING)
        else None
    )


def move_default(args: Any) -> None:
    """Move checkpoints that another library turns on by default under the earlier names to the later ones.

    transformers would warn of the earlier name, which nobody has written. A value that somebody
    gave stays there.
    """
    default = type(args).__dataclass_fields__[EARLIER].default
    by_default = default is not None and args.gradient_checkpointing == default
    if CHECKPOINTING == LATER and args.activation_checkpointing is None and by_default:
        args.activation_checkpointing = default
