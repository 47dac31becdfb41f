"""Options of the command line that are settings: made from the fields of DistCAConfig, by whose rules they go."""

import argparse
from dataclasses import fields
from typing import Any

from hf_distca.config import SWITCHES, DistCAConfig


def add_setting(parser: argparse.ArgumentParser, name: str, **changes: Any) -> None:
    """Add the option of a setting, `--tokens-per-rank` for `tokens_per_rank`.

    Args:
        parser: takes the option.
        name: of the field, which says type, default, choices and help.
        changes: what differs here, as `add_argument` takes it.
    """
    setting = next(setting for setting in fields(DistCAConfig) if setting.name == name)
    kind: Any = bool if name in SWITCHES else setting.type
    options: dict[str, Any] = {"default": setting.default, "help": setting.metadata["help"].replace("%", "%%")}
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    else:
        options |= {"type": kind, "choices": setting.metadata.get("choices")}
    options |= changes
    if kind is not bool and not options.get("required"):
        options["help"] += f" (default: {options['default']})"
    parser.add_argument(f"--{name.replace('_', '-')}", **options)


def config_of(options: argparse.Namespace) -> DistCAConfig:
    """The settings that were given as options, the others as they are by default.

    Raises:
        ValueError: a value is out of range; says what was got and what is expected.
    """
    given = {setting.name for setting in fields(DistCAConfig)} & set(vars(options))
    return DistCAConfig(**{name: getattr(options, name) for name in given})
