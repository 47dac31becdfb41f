"""Arguments of a training in a YAML or JSON file, as `--config` of plan and simulate reads them."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from hf_distca.cli import InputError
from hf_distca.config import DistCAConfig

CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")
"""Names of the argument of gradient checkpointing, in later and earlier versions of transformers.
"""
CONFIG_HELP = (
    "YAML or JSON file with arguments of the training: those of DistCAConfig and "
    "gradient_checkpointing, which is on unless the file says false. All others are "
    "passed over (default: none)"
)


def read_arguments(path: str | None) -> dict[str, Any]:
    """Return the arguments in a file; none without a file.

    Raises:
        InputError: the file cannot be read, or holds no arguments.
    """
    if path is None:
        return {}
    try:
        text = Path(path).read_text(encoding="utf-8")
        content = json.loads(text) if Path(path).suffix.lower() == ".json" else _of_yaml(text)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        first_line = str(error).splitlines()[0]
        raise InputError(f"{path} is neither YAML nor JSON ({first_line})") from error
    if not isinstance(content, Mapping):
        raise InputError(
            f"{path} holds no arguments; expected names and values, such as document_layout: fixed"
        )
    return dict(content)


def _of_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(error) from error


def settings_in(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are settings of DistCAConfig."""
    names = [setting.name for setting in fields(DistCAConfig)]
    return {name: arguments[name] for name in names if name in arguments}


def has_checkpoints(arguments: Mapping[str, Any]) -> bool:
    """Return whether a training with these arguments runs layers again in the backward pass.

    Raises:
        InputError: the argument is neither true nor false.
    """
    for name in CHECKPOINTING:
        value = arguments.get(name, True)
        if not isinstance(value, bool):
            raise InputError(f"{name} must be true or false, got {value!r}")
        if not value:
            return False
    return True
