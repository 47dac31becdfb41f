"""Options that subcommands share: numbers, settings, nodes, models, and files to write.

Modules of subcommands import torch and transformers only once their arguments have been checked:
both take seconds.
"""

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from math import nan
from pathlib import Path
from typing import Any

from hf_distca.checks.server_rules import ServerPool
from hf_distca.cli import InputError
from hf_distca.cli.arguments_file import CONFIG_HELP, settings_in
from hf_distca.cli.names import MODEL_SOURCES
from hf_distca.config import DistCAConfig
from hf_distca.plan.nodes import node_sizes
from hf_distca.predict.device_profile import DeviceProfile
from hf_distca.predict.shapes import ModelShape
from hf_distca.progress import importing
from hf_distca.run import RunSpec
from hf_distca.units import AUTO, Switch, read_tokens

MOST_RANKS = 16384
"""With 32768 tokens a rank, `hf-distca plan` takes 30 to 40 s of a core for 16384 ranks, and
`hf-distca simulate` takes 85 s for each micro-batch."""
LEAST_STAGE = 128
"""Minimum number of K/V rows in a stage: shorter stages are too many to plan."""
LONGEST_WAIT = 1e8
"""Seconds of the longest wait: three years."""
RANKS_PER_NODE = 8
"""Default of the command line: the number of GPUs in most hosts."""
HEADS = {
    "q_heads": (32, "query heads"),
    "kv_heads": (8, "key-value heads"),
    "head_dim": (128, "size of a head"),
}
"""Options of a layer's heads, with the numbers of Llama-3-8B."""
GB = 1e9
DEFAULT_MODEL = "llama-8b"
DEFAULT_PROFILE = "h100"
READING_MODEL = "Reading the model"
"""Line that a terminal shows while a command reads a model."""


def number(
    expected: str,
    read: Callable[[str], Any] = int,
    minimum: float = 1,
    maximum: float = 2**31 - 1,
    why: str = "",
) -> Callable[[str], Any]:
    """Return a parser of numbers from `minimum` to `maximum`.

    `read` raises ValueError if a text is no number.
    """

    def parse(text: str) -> Any:
        try:
            value = read(text)
        except ValueError:
            value = nan
        if not value >= minimum:  # true of nan too
            raise argparse.ArgumentTypeError(f"must be {expected}, got {text!r}")
        if value > maximum:
            raise argparse.ArgumentTypeError(f"must be at most {maximum:.10g}, got {text}{why}")
        return value

    return parse


POSITIVE = "a positive whole number"
FROM_ZERO = "0 or a positive whole number"
positive = number(POSITIVE)
port = number(FROM_ZERO, minimum=0, maximum=65535)
threads = number(POSITIVE, maximum=4096)
ranks = number(POSITIVE, maximum=MOST_RANKS, why=": planning would not end in time")
sequences = number(POSITIVE, maximum=100_000, why=": no device holds so many")
batches = number(POSITIVE, maximum=100_000, why=": simulating would not end in time")
tokens = number(POSITIVE, read_tokens, maximum=2**27, why=": no device holds so many")
gigabytes = number("a positive number of gigabytes", float, minimum=1e-9, maximum=1e9)
seconds = number("0 or a positive number of seconds", float, minimum=0, maximum=LONGEST_WAIT)
positive_seconds = number("a positive number of seconds", float, minimum=1e-9, maximum=LONGEST_WAIT)


def add_settings(parser: argparse.ArgumentParser, *names: str, **changes: Any) -> None:
    """Add the options of settings, such as `--tokens-per-rank` for `tokens_per_rank`."""
    settings = {setting.name: setting for setting in fields(DistCAConfig)}
    for name in names:
        setting = settings[name]
        options: dict[str, Any] = {
            "default": setting.default,
            "help": setting.metadata["help"].replace("%", "%%"),
        }
        if setting.type in (bool, Switch):
            options["action"] = argparse.BooleanOptionalAction
        else:
            options |= {"type": setting.type, "choices": setting.metadata.get("choices")}
        options |= changes
        if not options.get("required"):
            default = options["default"]
            if isinstance(default, bool):
                default = "on" if default else "off"
            options["help"] += f" (default: {default})"
        parser.add_argument(f"--{name.replace('_', '-')}", **options)


def add_planning_options(parser: argparse.ArgumentParser) -> None:
    """Add options of documents, ranks, nodes, the model, its costs, and output."""
    add = parser.add_argument
    add(
        "--lengths",
        required=True,
        metavar="SOURCE",
        help="where document lengths come from, see above",
    )
    add("--split", default="train", help="split of a data set (default: train)")
    columns = (
        "column with lengths, lists of tokens or text (default: length or input_ids; with "
        "--tokenizer also text or "
    )
    add("--column", help=f"{columns}messages)")
    add(
        "--tokenizer",
        metavar="NAME",
        help="tokenizer that counts the tokens of text: a name on the Hub or a folder",
    )
    divided = "documents of a text file: the whole file, or its paragraphs (default: document)"
    add("--sample-by", choices=("document", "paragraph"), default="document", help=divided)
    add(
        "--ranks",
        required=True,
        type=ranks,
        metavar="N",
        help=f"number of ranks that train, at most {MOST_RANKS}",
    )
    most_tokens = "most tokens that a rank holds in a micro-batch, such as 32k (default: "
    add("--tokens-per-rank", type=tokens, metavar="T", help=f"{most_tokens}that of --config)")
    nodes = (
        "ranks that share a node: one number, or one for each node in the order of the ranks, such "
        "as 8,8,4; 1 treats all links alike (default: 8, and the rest on the last node; or that of "
        "--config)"
    )
    add("--ranks-per-node", metavar="K", help=nodes)
    model_help = f"model: {MODEL_SOURCES} (default: {DEFAULT_MODEL})"
    add("--model", default=DEFAULT_MODEL, metavar="CONFIG", help=model_help)
    costs = (
        "costs of the device and its links, by which plans are chosen: h100, h200, cpu, or a file "
        "that hf-distca profile wrote (default: h100, or device_profile of --config)"
    )
    add("--profile", help=costs)
    add("--config", metavar="FILE", help=CONFIG_HELP)
    add("--json", action="store_true", help="print one JSON object and nothing else")
    add(
        "--report",
        metavar="FILE.html",
        help="write a report: one file with pictures and tables, for a browser",
    )


def config_of(arguments: Mapping[str, Any], options: argparse.Namespace) -> DistCAConfig:
    """Return the settings from options, and from the arguments of a file for all others.

    Raises:
        ValueError: a value cannot be used, or one is missing.
    """
    settings = settings_in(arguments)
    for name in ("tokens_per_rank", "ranks_per_node"):
        if getattr(options, name) is not None:
            settings[name] = getattr(options, name)
    if "tokens_per_rank" not in settings:
        raise InputError("--tokens-per-rank is missing; give it, or --config with tokens_per_rank")
    config = DistCAConfig(**settings)
    try:
        tokens(str(config.tokens_per_rank))
    except argparse.ArgumentTypeError as error:
        raise InputError(f"tokens_per_rank {error}") from error
    if config.remote_workers:
        raise ServerPool.NOT_PLANNED.error(file=options.config)
    return config


def profile_of(config: DistCAConfig, options: argparse.Namespace) -> DeviceProfile:
    """Return the costs of the device that options or settings name.

    Raises:
        ValueError: there is no such profile.
    """
    return DeviceProfile.load(options.profile or config.device_profile or DEFAULT_PROFILE)


def nodes_of_ranks(config: DistCAConfig, ranks: int) -> tuple[int, ...]:
    """Return the number of ranks of each node, [nodes].

    Raise ValueError if nodes do not add up to `ranks`.
    """
    # Hosts of `RANKS_PER_NODE` ranks, and the rest on one more host.
    full_hosts, remaining_ranks = divmod(ranks, RANKS_PER_NODE)
    hosts = [RANKS_PER_NODE] * full_hosts
    if remaining_ranks:
        hosts.append(remaining_ranks)
    ranks_per_node = config.plan_settings(ranks, tuple(hosts))["ranks_per_node"]
    if isinstance(ranks_per_node, int):
        ranks_per_node = min(ranks_per_node, ranks)
    return node_sizes(ranks, ranks_per_node)


def shown_nodes(config: DistCAConfig) -> str:
    """Return the ranks of each node as a report shows them."""
    return str(RANKS_PER_NODE) if config.ranks_per_node == AUTO else config.ranks_per_node


def run_of(
    config: DistCAConfig,
    model: ModelShape,
    ranks: int,
    profile: DeviceProfile,
    *,
    document_layout: str,
    checkpointing: bool,
    **facts: Any,
) -> RunSpec:
    """Describe the run that a command plans, with the costs of its kernel, see `RunSpec.of`.

    Raise ValueError if settings contradict each other or cannot be planned in time.
    """
    run = RunSpec.of(
        config,
        model,
        ranks=ranks,
        profile=profile,
        planning={
            "document_layout": document_layout,
            "bytes_per_value": profile.bytes_per_value,
            "ranks_per_node": nodes_of_ranks(config, ranks),
        },
        checkpointing={} if checkpointing else None,
        mixed=profile.bytes_per_value == 2,
        **facts,
    )
    settings = run.plans
    rows = settings.exchange_buffer_bytes // settings.row_bytes(settings.dominant_kind).kv
    if rows < LEAST_STAGE:
        raise InputError(
            f"exchange_buffer_bytes={settings.exchange_buffer_bytes} holds {rows} rows of K and V, "
            f"but stages of fewer than {LEAST_STAGE} rows are too many to plan; leave it out of "
            "planning"
        )

    with importing("torch"):
        from hf_distca.kernels import KERNELS

    name = config.attention_kernel
    if name == AUTO:
        name = "cpu" if profile.name.startswith("CPU") else "torch_varlen"
    kernel = KERNELS[name]
    plans = replace(
        settings, kernel=name, row_overhead=kernel.row_overhead, gather_cost=kernel.gather_cost
    )
    return replace(run, plans=plans)


def check_writable(*names: str | None) -> None:
    """Raise InputError unless files can be written.

    Called before the work whose results they take.
    """
    for name in filter(None, names):
        path = Path(name).absolute()
        if not path.parent.is_dir():
            raise InputError(f"cannot write {name}: there is no such folder; make the folder first")
        if path.is_dir():
            raise InputError(f"cannot write {name}: it is a folder; name a file")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise InputError(f"cannot write {name}: no permission; name a file that you may write")


def write(path: str, content: str) -> None:
    """Write a file; raise InputError if the file cannot be written."""
    try:
        Path(path).write_text(content, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; name another file") from error


def wrapped(sentence: str) -> str:
    """Break a sentence at the width of the terminal; leave it whole where no terminal shows it."""
    if not sys.stdout.isatty():
        return sentence
    columns = shutil.get_terminal_size().columns
    return textwrap.fill(sentence, columns, break_on_hyphens=False, break_long_words=False)
