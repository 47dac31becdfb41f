"""Command-line options made from the fields of DistCAConfig."""

import argparse
from dataclasses import fields
from typing import Any

from hf_distca.config import SWITCHES, DistCAConfig
from hf_distca.planner.nodes import node_sizes

RANKS_PER_NODE = 8
"""Default of the command line: the number of GPUs in most hosts."""


def add_setting(parser: argparse.ArgumentParser, name: str, **changes: Any) -> None:
    """Add the option of a setting, such as `--tokens-per-rank` for `tokens_per_rank`.

    Args:
        changes: overrides, as `add_argument` takes them.
    """
    setting = next(setting for setting in fields(DistCAConfig) if setting.name == name)
    kind: Any = bool if name in SWITCHES else setting.type
    options: dict[str, Any] = {"default": setting.default, "help": setting.metadata["help"].replace("%", "%%")}
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    else:
        options |= {"type": kind, "choices": setting.metadata.get("choices")}
    options |= changes
    if not options.get("required"):
        default = options["default"]
        shown = {True: "on", False: "off"}.get(default, default) if kind is bool else default
        options["help"] += f" (default: {shown})"
    parser.add_argument(f"--{name.replace('_', '-')}", **options)


def config_of(options: argparse.Namespace) -> DistCAConfig:
    """Return the settings from the given options, with defaults for all others."""
    names = {setting.name for setting in fields(DistCAConfig)}
    return DistCAConfig(
        **{name: value for name, value in vars(options).items() if name in names and value is not None}
    )


def add_node_option(parser: argparse.ArgumentParser) -> None:
    """Add --ranks-per-node, whose default is nodes of 8 ranks."""
    parser.add_argument(
        "--ranks-per-node",
        metavar="K",
        help="ranks that share a node: one number, or one for each node in the order of the ranks, such as 8,8,4; 1 "
        "treats all links alike (default: 8, and the rest on the last node)",
    )


def nodes_of_ranks(config: DistCAConfig, ranks: int) -> tuple[int, ...]:
    """Return the number of ranks of each node, [nodes]; raise ValueError if nodes do not add up to `ranks`."""
    whole, left = divmod(ranks, RANKS_PER_NODE)
    default = (*[RANKS_PER_NODE] * whole, *[left] * (left > 0))
    planned = config.planning(ranks, default)["ranks_per_node"]
    return node_sizes(ranks, min(planned, ranks) if isinstance(planned, int) else planned)
