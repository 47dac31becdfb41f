"""Reference pages from code, of settings, metrics and options: `python -m tests.docs.reference` writes them."""

import argparse
import dataclasses
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from itertools import groupby
from pathlib import Path
from string import Formatter
from typing import Any, get_args

import hf_distca
from hf_distca.cli.main import TOOLS
from hf_distca.collator.refusals import Data
from hf_distca.models.refusals import ADAPTERS, ALORA, PROMPT_LEARNING, Models
from hf_distca.refusal import Refusal
from hf_distca.trainer.metrics import METRICS, PREFIX
from hf_distca.trainer.refusals import (
    ARGUMENTS,
    GIVEN,
    LOADED_ALREADY,
    LOSES_DEEPSPEED,
    NOT_CONNECTED,
    PACKING,
    ROWS_ARE_PLACED,
    SFT_ARGUMENTS,
    SFT_TRAINER,
    TRAINER,
    Resume,
    Run,
)
from hf_distca.units import Bytes, Servers, Switch, Tokens, Tolerance

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
SETTINGS_TOP = """\
# Settings

<!-- Written by `python -m tests.docs.reference` from hf_distca/config.py and hf_distca/trainer/arguments.py. -->

Settings are fields of `DistCATrainingArguments`, beside those of transformers' `TrainingArguments`, and of
`DistCASFTConfig`, beside those of TRL's `SFTConfig`. In a [custom loop](../guides/custom-loops.md) they are fields of
`DistCAConfig`. Training scripts with `HfArgumentParser` take them as options: `--tokens_per_rank 32k`.

Choose `tokens_per_rank`; the defaults of all others are fast and exact. In numbers of tokens, `k` is 1,024 and `M` is
1,048,576. In numbers of bytes, `KiB`, `MiB` and `GiB` are powers of 1,024. Every rank needs the same settings.

"""
GROUPS = {
    "Packing": ("tokens_per_rank", "long_documents", "document_layout"),
    "Balance": ("balance_tolerance", "balance_block_size", "attention_kernel", "device_profile"),
    "Exchange": ("ping_pong", "exchange_buffer_bytes", "keep_received", "ranks_per_node", "exchange_timeout"),
    "Memory": ("keep_core_attention", "loss_chunk_bytes", "mlp_chunk_rows"),
    "Tracing": ("trace_steps",),
    "Attention servers": (
        *("attention_servers", "ranks_serve", "attention_server_address", "attention_server_token_file"),
        *("attention_server_timeout", "attention_server_transport"),
    ),
    "Data and model": (
        *("dataloader_num_workers", "dataset_text_field", "model_init_kwargs"),
        *("per_device_train_batch_size", "per_device_eval_batch_size"),
    ),
    "Chats": ("max_length",),
}
"""Sections of the page with their settings."""
NOTES = {
    "Attention servers": "All settings of attention servers are experimental. See "
    "[Attention servers](../guides/servers.md).",
    "Data and model": "These are fields of `DistCATrainingArguments` and `DistCASFTConfig`, not of `DistCAConfig`.",
    "Chats": "This is a field of `DistCASFTConfig` with another default than in TRL.",
}
TYPES: list[tuple[Any, str]] = [
    (Tokens, 'integer, or text such as `"32k"`'),
    (Bytes, 'integer, or text such as `"128MiB"`'),
    (Servers, 'integer, or `"external"`'),
    (Tolerance, 'number, or `"auto"`'),
    (Switch, '`True`, `False` or `"auto"`'),
    (bool, "`True` or `False`"),
    (int, "integer"),
    (float, "number"),
    (str, "text"),
    (int | None, "integer, or `None`"),
    (str | None, "text, or `None`"),
    (dict[str, Any] | str | None, "dictionary, or `None`"),
]
UNITS = {
    "tokens_per_rank": "tokens",
    "balance_tolerance": "fraction of the mean",
    "balance_block_size": "rows",
    "exchange_buffer_bytes": "bytes",
    "ranks_per_node": "ranks",
    "exchange_timeout": "seconds",
    "loss_chunk_bytes": "bytes",
    "mlp_chunk_rows": "rows",
    "trace_steps": "steps",
    "attention_servers": "processes",
    "attention_server_timeout": "seconds",
    "per_device_train_batch_size": "rows",
    "per_device_eval_batch_size": "rows",
    "dataloader_num_workers": "processes",
    "max_length": "tokens",
}
CLASSES = (
    *(hf_distca.DistCAConfig, hf_distca.DistCAArguments),
    *(hf_distca.DistCATrainingArguments, hf_distca.DistCASFTConfig),
)
ANNOTATED = {name: kind for cls in CLASSES for name, kind in inspect.get_annotations(cls).items()}
"""Types of fields as they are written: HfArgumentParser changes those of the fields."""
HELP = {field.name: field.metadata["help"] for field in dataclasses.fields(hf_distca.DistCAConfig)}
METRICS_TOP = f"""\
# Metrics

<!-- Written by `python -m tests.docs.reference` from hf_distca/trainer/metrics.py. -->

The trainer adds these metrics to every log with a `loss`. They cover the micro-batches since the last log; evaluations
are left out. All names begin with `{PREFIX}`: W&B and TensorBoard group them under `train/{PREFIX.rstrip("/")}`.
[Watching a run](../guides/watching-a-run.md) says which of them to look at.
"""
ALWAYS_LOGGED = "Always"
METRICS_NOTES = {
    ALWAYS_LOGGED: """\
- If `attention_ms` is far above `attention_ms_predicted`, one rank is slower than the others.
- `exchange_stages` is above 1 for a micro-batch that cannot be divided into two nano-batches, so that its exchange
  hides behind its own computation.
- `ping_pong_share` is 0 for a micro-batch with a document of more than half of its tokens, and for layers with a hook
  that needs all rows at once.
- `eval_loss` is the exact mean over all targets, however they are spread over ranks and micro-batches.
""",
    "CUDA": """\
- `mfu` counts the weights that a token meets and the query-key pairs that are not masked. A frozen weight counts 4
  operations per token instead of 6. Recomputation does not count.
""",
}
CLI_TOP = """\
# Command line

<!-- Written by `python -m tests.docs.reference` from hf_distca/cli. -->

`pip install` adds the command `hf-distca`. `hf-distca TOOL --help` prints the options below, and
`hf-distca --version` the version. The exit status is 0, or 2 for options and files that cannot be used.

"""


def settings_page() -> str:
    """Return the page of all settings."""
    known = {field.name: field for field in _own_fields()}
    parts = [SETTINGS_TOP, "| setting | default |\n| --- | --- |\n"]
    parts += [f"| [`{name}`](#{name}) | {_default(known[name])} |\n" for group in GROUPS.values() for name in group]
    for title, names in GROUPS.items():
        parts.append(f"\n## {title}\n")
        if title in NOTES:
            parts.append(f"\n{NOTES[title]}\n")
        parts += [_setting(known[name]) for name in names]
    return "".join(parts)


REFUSALS_TOP = """\
# What is refused

<!-- Written by `python -m tests.docs.reference` from tables in the code. -->

hf_distca raises an error for everything that would train wrongly or differently than asked. Every rank raises it,
before training begins. The message says what was found, why it cannot work and what to set. This page lists all
conditions; [Feature compatibility](features.md) and [Model compatibility](compatibility.md) show which were tested.
Models that are refused here still train with stock attention (`attn_implementation="sdpa"`) and transformers' Trainer.
"""


def entries(table: type) -> tuple[Refusal, ...]:
    """Entries of a table whose code raises each of them by its name."""
    return tuple(entry for entry in vars(table).values() if isinstance(entry, Refusal))


REFUSALS: dict[str, tuple[Refusal, ...]] = {
    "Models": entries(Models),
    "Adapters": (PROMPT_LEARNING, ALORA, *ADAPTERS.values()),
    "Arguments": ARGUMENTS,
    "Arguments of the trainer": (*GIVEN, *PACKING, *ROWS_ARE_PLACED, LOADED_ALREADY),
    "With TRL": (*SFT_ARGUMENTS, *SFT_TRAINER),
    "Launch and model": (LOSES_DEEPSPEED, NOT_CONNECTED, *TRAINER),
    "Data": entries(Data),
    "Runs": entries(Run),
    "Resuming": entries(Resume),
}
"""Sections of the page that are tables of the code."""


def metrics_page() -> str:
    """Return the page of all logged figures."""
    parts = [METRICS_TOP]
    for where, metrics in groupby(METRICS.items(), lambda item: item[1].where):
        parts.append(f"\n## {where or ALWAYS_LOGGED}\n\n| name | unit | meaning |\n| --- | --- | --- |\n")
        parts += [f"| `{PREFIX}{name}` | {metric.unit} | {metric.meaning} |\n" for name, metric in metrics]
        if notes := METRICS_NOTES.get(where or ALWAYS_LOGGED):
            parts.append(f"\n{notes}")
    return "".join(parts)


def cli_page() -> str:
    """Return the page of all subcommands."""
    parts = [CLI_TOP, "| tool | use |\n| --- | --- |\n"]
    parts += [f"| [`{name}`](#hf-distca-{name}) | {use} |\n" for name, use in TOOLS.items()]
    for name in TOOLS:
        tool = import_module(f"hf_distca.cli.{name}")
        parser = argparse.ArgumentParser(prog=f"hf-distca {name}", add_help=False)
        tool.add_options(parser)
        parts.append(f"\n## hf-distca {name}\n\n{_description(tool.DESCRIPTION)}\n\n")
        parts += [_option(action) for action in parser._actions]
    return "".join(parts)


def refusals_page() -> str:
    """Return the page of everything that is refused."""
    parts = [REFUSALS_TOP]
    for title, refusals in REFUSALS.items():
        parts.append(f"\n## {title}\n\n| condition | why | instead |\n| --- | --- | --- |\n")
        parts += [
            f"| {entry.condition or _message(entry.found)} | {_message(entry.reason)} | {_message(entry.remedy)} |\n"
            for entry in refusals
        ]
    return "".join(parts)


PAGES = {"settings.md": settings_page, "metrics.md": metrics_page, "cli.md": cli_page, "refusals.md": refusals_page}


def _own_fields() -> Iterator[dataclasses.Field[Any]]:
    """The fields that hf_distca adds to arguments of trainers, or gives another meaning."""
    yield from dataclasses.fields(hf_distca.DistCAConfig)
    for cls in CLASSES[1:]:
        for field in dataclasses.fields(cls):
            if field.name in inspect.get_annotations(cls) and "help" in field.metadata:
                yield field


def _setting(field: dataclasses.Field[Any]) -> str:
    unit = f"; unit: {UNITS[field.name]}" if field.name in UNITS else ""
    facts = f"{_type(field)}{unit}; default: {_default(field)}"
    return f"\n### `{field.name}`\n\n*{facts}*\n\n{_prose(field.metadata['help'])}\n"


def _type(field: dataclasses.Field[Any]) -> str:
    known = [text for kind, text in TYPES if kind == ANNOTATED[field.name] and "choices" not in field.metadata]
    if known:
        return known[0]
    *others, last = [f'`"{choice}"`' for choice in field.metadata.get("choices") or get_args(ANNOTATED[field.name])]
    return f"{', '.join(others)} or {last}"


def _default(field: dataclasses.Field[Any]) -> str:
    default = f'"{field.default}"' if isinstance(field.default, str) else repr(field.default)
    mebibytes = f" ({field.default // 2**20} MiB)" if ANNOTATED[field.name] is Bytes else ""
    return f"`{default}`{mebibytes}"


def _option(action: argparse.Action) -> str:
    names = ", ".join(action.option_strings)
    takes_value = action.nargs != 0
    if takes_value:
        choices = None if action.choices is None else "{" + ",".join(map(str, action.choices)) + "}"
        names = f"{names} {action.metavar or choices or action.dest.upper()}".strip()
    text = (action.help or "").replace("%%", "%")
    default = re.search(r" \(default: (.*)\)$", text)
    text = text[: default.start()] if default else text
    fact = " (required)" if action.required and action.option_strings else ""
    fact = f" (default: {default[1]})" if default else fact
    if text == HELP.get(action.dest):
        return f"- `{names}`{fact}: The setting [`{action.dest}`](settings.md#{action.dest}).\n"
    return f"- `{names}`{fact}: {_prose(text[0].upper() + text[1:]).rstrip('.')}.\n"


def _description(text: str) -> str:
    """A description as Markdown: indented lines are commands."""
    blocks = []
    for block in text.strip().split("\n\n"):
        is_code = block.startswith("  ")
        blocks.append(
            "```\n" + re.sub(r"^  ", "", block, flags=re.M) + "\n```"
            if is_code
            else re.sub(
                r"(?<!\w)(--[a-z-]+|hf-distca [a-z]+(?: --[a-z-]+)?|\w+:[A-Z]+,[A-Z]+)", r"`\1`", _prose(block)
            )
        )
    return "\n\n".join(blocks)


CODE = re.compile(
    r"(?<!\w)(?:--[a-z_]+|(?!hf_distca\b)[\w.]+\((?:[^()]|\([^()]*\))*\)|\w+=(?:'[^']*'|\{[^}]*\}|[\w.]+)|'[^' ]+'"
    r"|(?!hf_distca\b)[A-Za-z][\w.]*_[\w.*]*\w|\*\*kwargs)"
)
"""What is code in a message."""


def _message(text: str) -> str:
    """A text of a refusal as Markdown, with an ellipsis for each value."""
    return CODE.sub(lambda code: f"`{code[0]}`", template(text))


def template(text: str) -> str:
    """A format string with an ellipsis for each value."""
    return "".join(part + ("" if name is None else "…") for part, name, _, _ in Formatter().parse(text))


def _prose(text: str) -> str:
    """Plain text as Markdown: values in quotation marks and names with underscores are code."""
    text = re.sub(r"'([^' ]+)'", r'`"\1"`', text).replace(" * ", " × ")
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"(?<![\w.])(?!hf_distca\b)([A-Za-z][\w.]*_[\w.*]*\w)", r"`\1`", part) for part in parts[::2]]
    return "".join(parts)


if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())
