"""Checkpoints of a model's layers, under the names of the installed version of transformers."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

LATER = "activation_checkpointing"
"""Name since transformers 5.23."""
EARLIER = "gradient_checkpointing"
"""Name before transformers 5.23, of which later versions warn."""
CHECKPOINTING = LATER if hasattr(PreTrainedModel, f"{LATER}_enable") else EARLIER
"""Name of the setting of `TrainingArguments`, and part of the names of methods."""


def enable_checkpointing(
    model: nn.Module, options: dict[str, Any] | None = None, **kwargs: Any
) -> None:
    """Turn on checkpoints of layers.

    Args:
        options: options of torch's checkpoints, as transformers takes them.
        kwargs: further arguments of transformers' method.
    """
    getattr(model, f"{CHECKPOINTING}_enable")(options, **kwargs)


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
    if not getattr(args, CHECKPOINTING):
        return None
    return dict(getattr(args, f"{CHECKPOINTING}_kwargs") or {})


def move_default(args: Any) -> None:
    """Move a default of the earlier setting of checkpoints to the later setting.

    Another library may turn on checkpoints by default, under the earlier name. transformers would
    warn of that name, which nobody has written. A value that somebody gave stays there.
    """
    default = type(args).__dataclass_fields__[EARLIER].default
    is_default = default is not None and args.gradient_checkpointing == default
    if CHECKPOINTING == LATER and args.activation_checkpointing is None and is_default:
        args.activation_checkpointing = default
