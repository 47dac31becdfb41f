"""Reference pages: `python -m tests.docs.reference` writes what lies between their marks, from the
code.
"""

import argparse
import dataclasses
import inspect
import re
from importlib import import_module
from itertools import chain
from pathlib import Path
from string import Formatter
from typing import Any, get_args

import hf_distca
from hf_distca.checks import argument_rules, integration_rules, launch_rules
from hf_distca.checks.batch_rules import Batch
from hf_distca.checks.capacity_rules import Capacity
from hf_distca.checks.data_rules import Data, Source
from hf_distca.checks.kernel_rules import Kernels
from hf_distca.checks.model_rules import ADAPTERS, Models
from hf_distca.checks.plan_rules import Plans
from hf_distca.checks.refusal import Refusal
from hf_distca.checks.run_rules import Resume, Run
from hf_distca.checks.server_rules import ServerPool
from hf_distca.checks.step_rules import PlannedStep
from hf_distca.checks.trace_rules import Traces
from hf_distca.cli.main import TOOLS
from hf_distca.planning_settings import Planning, PlanningOrNone
from hf_distca.server_settings import AttentionServers, Servers
from hf_distca.trainer.metrics import METRICS, PREFIX
from hf_distca.units import Bytes, BytesOrAuto, NumberOrAuto, Switch, TokensOrAuto, Tolerance

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
PAGES = ("settings.md", "metrics.md", "cli.md", "refusals.md")
MARK = re.compile(r"(<!-- (\w+): (.*?) -->\n).*?(?=<!-- end of \2 -->)", re.S)
"""Mark of what is written, its subject, and the text up to its end."""
GROUPED = [
    names.split(", ")
    for names in re.findall(r"<!-- settings: (.*) -->", (FOLDER / PAGES[0]).read_text())
]
"""Names of the settings in each section of their page."""
CLASSES = (
    *(hf_distca.DistCAConfig, hf_distca.DistCAArguments),
    *(hf_distca.DistCATrainingArguments, hf_distca.DistCASFTConfig),
)
FIELDS = {
    field.name: (field, inspect.get_annotations(cls)[field.name])
    for cls in CLASSES
    for field in dataclasses.fields(cls)
    if field.name in inspect.get_annotations(cls) and "help" in field.metadata
}
"""Fields that hf_distca adds, or gives another meaning, with their types as written:
HfArgumentParser changes them."""
TYPES: dict[Any, str] = {
    TokensOrAuto: 'integer, text such as `"32k"`, or `"auto"`',
    Bytes: 'integer, or text such as `"128MiB"`',
    BytesOrAuto: 'integer, text such as `"128MiB"`, or `"auto"`',
    NumberOrAuto: 'integer, or `"auto"`',
    PlanningOrNone: "dictionary, as JSON on a command line, or `None`",
    Servers: 'integer, `"external"`, or a dictionary, as JSON on a command line',
    Tolerance: 'number, or `"auto"`',
    Switch: '`True`, `False` or `"auto"`',
    bool: "`True` or `False`",
    int: "integer",
    float: "number",
    str: "text",
    int | None: "integer, or `None`",
    str | None: "text, or `None`",
    dict[str, Any] | str | None: "dictionary, or `None`",
}
GROUPS: dict[Any, type] = {Servers: AttentionServers, PlanningOrNone: Planning}
"""Settings that are groups, by their types."""
UNITS = {
    "tokens": ("tokens_per_rank", "max_length"),
    "rows": (
        "mlp_chunk_rows",
        *("per_device_train_batch_size", "per_device_eval_batch_size"),
    ),
    "bytes": ("loss_chunk_bytes",),
    "ranks": ("ranks_per_node",),
    "seconds": ("exchange_timeout",),
    "steps": ("trace_steps",),
    "processes": ("attention_servers", "dataloader_num_workers"),
}


def entries(table: type) -> tuple[Refusal, ...]:
    """Entries of a table whose code raises each of them by its name."""
    return tuple(entry for entry in vars(table).values() if isinstance(entry, Refusal))


REFUSALS: dict[str, tuple[Refusal, ...]] = {
    "Models": entries(Models),
    "Adapters": ADAPTERS,
    "Arguments": (*argument_rules.ARGUMENTS, *argument_rules.PACKED_ARGUMENTS),
    "Arguments of the trainer": (
        *argument_rules.WITHOUT_SETTINGS,
        *argument_rules.PACKED_GIVEN,
        *argument_rules.GIVEN,
    ),
    "Arguments of `make_dispatcher`": argument_rules.DISPATCHED,
    "Launch and model": (
        *launch_rules.PROCESSES,
        launch_rules.NOT_CONNECTED,
        launch_rules.SHARED_GPU,
        *(rule for rule in launch_rules.TRAINER if rule not in entries(ServerPool)),
    ),
    "axolotl and ms-swift": (
        *integration_rules.AXOLOTL,
        *integration_rules.SWIFT,
        *integration_rules.SWIFT_PACKED,
        *integration_rules.SWIFT_DOCUMENTS,
        *entries(integration_rules.Swift),
    ),
    "Files and names of data": entries(Source),
    "Data": (*entries(Data), *entries(Batch)),
    "What ranks hold": entries(Capacity),
    "Kernels": entries(Kernels),
    "Plans": entries(Plans),
    "Attention servers": entries(ServerPool),
    "Runs": entries(Run),
    "Steps": entries(PlannedStep),
    "Resuming": entries(Resume),
    "Traces": entries(Traces),
}
"""Sections of the page that are tables of the code."""


def written(page: str) -> str:
    """A page with everything between its marks written anew."""
    return MARK.sub(lambda mark: f"{mark[1]}\n{WRITERS[mark[2]](mark[3])}\n", page)


def table(*rows: tuple[str, ...]) -> str:
    head, *others = (f"| {' | '.join(row)} |\n" for row in rows)
    return f"{head}|{' --- |' * len(rows[0])}\n{''.join(others)}"


def defaults(_: str) -> str:
    rows = ((f"[`{name}`](#{name})", default(name)) for name in chain(*GROUPED))
    return table(("setting", "default"), *rows)


def default(name: str) -> str:
    field, kind = FIELDS[name]
    return f"`{shown(field.default)}`" + (
        f" ({field.default // 2**20} MiB)" if kind is Bytes else ""
    )


def settings(names: str) -> str:
    texts = []
    for name in names.split(", "):
        field, kind = FIELDS[name]
        of_type = TYPES.get(kind)
        if of_type is None or "choices" in field.metadata:
            *others, last = [
                f'`"{choice}"`' for choice in field.metadata.get("choices") or get_args(kind)
            ]
            of_type = f"{', '.join(others)} or {last}"
        unit = "".join(f"; unit: {unit}" for unit, of_unit in UNITS.items() if name in of_unit)
        facts = f"{of_type}{unit}; default: {default(name)}"
        meaning = prose(field.metadata["help"])
        group = GROUPS.get(kind)
        if kind is PlanningOrNone:  # no help shows it
            summary, forms, *_ = inspect.getdoc(Planning).split("\n\n")
            meaning = f"{summary} {forms}".replace("\n", " ")
        texts.append(f"### `{name}`\n\n*{facts}*\n\n{meaning}\n")
        if group is not None:
            texts.append(members(group))
    return "\n".join(texts)


def members(group: type) -> str:
    """A table of the members of a setting that is a group."""
    rows = (
        (f"`{member.name}`", f"`{shown(member.default)}`", prose(member.metadata["help"]))
        for member in dataclasses.fields(group)
    )
    return table(("member", "default", "meaning"), *rows)


def shown(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def metrics(where: str) -> str:
    names = [
        (name, metric)
        for name, metric in METRICS.items()
        if where == (metric.condition or "Always")
    ]
    rows = ((f"`{PREFIX}{name}`", metric.unit, metric.meaning) for name, metric in names)
    return table(("name", "unit", "meaning"), *rows)


def refused(title: str) -> str:
    rows = (
        (entry.condition or message(entry.found), message(entry.reason), message(entry.remedy))
        for entry in REFUSALS[title]
    )
    return table(("condition", "why", "instead"), *rows)


def tools(_: str) -> str:
    return table(
        ("tool", "use"), *((f"[`{name}`](#hf-distca-{name})", use) for name, use in TOOLS.items())
    )


def tool(name: str) -> str:
    module = import_module(f"hf_distca.cli.{name}")
    parser = argparse.ArgumentParser(prog=f"hf-distca {name}", add_help=False)
    module.add_options(parser)
    parts = []
    for block in module.DESCRIPTION.strip().split("\n\n"):
        if block.startswith("  "):  # commands
            parts.append("```\n" + re.sub(r"^  ", "", block, flags=re.M) + "\n```\n\n")
        else:
            code = r"(?<!\w)(--[a-z-]+|hf-distca [a-z]+(?: --[a-z-]+)?|\w+:[A-Z]+,[A-Z]+)"
            parts.append(re.sub(code, r"`\1`", prose(block)) + "\n\n")
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    return "".join([*parts, *map(option, shown)])


def option(action: argparse.Action) -> str:
    names = ", ".join(action.option_strings)
    if action.nargs != 0:  # it takes a value
        choices = None if action.choices is None else "{" + ",".join(map(str, action.choices)) + "}"
        names = f"{names} {action.metavar or choices or action.dest.upper()}".strip()
    text = (action.help or "").replace("%%", "%")
    fact = ""
    if shown := re.fullmatch(r"(.*) (\(default: .*\))", text):
        text = shown[1]
        fact = f" {shown[2]}"
    elif action.required and action.option_strings:
        fact = " (required)"
    if action.dest in FIELDS and text == FIELDS[action.dest][0].metadata["help"]:
        return f"- `{names}`{fact}: The setting [`{action.dest}`](settings.md#{action.dest}).\n"
    return f"- `{names}`{fact}: {prose(text[0].upper() + text[1:]).rstrip('.')}.\n"


WRITERS = {
    "defaults": defaults,
    "settings": settings,
    "metrics": metrics,
    "refusals": refused,
    "tools": tools,
    "tool": tool,
}
"""What writes the text of a mark, from its subject."""
CODE = re.compile(
    r"(?<!\w)(?:--[a-z_]+"
    r"|(?!hf_distca\b)[\w.]+\((?:[^()]|\([^()]*\))*\)"
    r"|\w+=(?:'[^']*'|\{[^}]*\}|[\w.]+)"
    r"|'[^' ]+'"
    r"|(?!hf_distca\b)[A-Za-z][\w.]*_[\w.*]*\w|\*\*kwargs)"
)
"""What is code in a message."""


def message(text: str) -> str:
    """A text of a refusal as Markdown, with an ellipsis for each value."""
    return CODE.sub(lambda code: f"`{code[0]}`", template(text))


def template(text: str) -> str:
    """A format string with an ellipsis for each value."""
    return "".join(
        part + ("" if name is None else "…") for part, name, _, _ in Formatter().parse(text)
    )


def prose(text: str) -> str:
    """Plain text as Markdown: values in quotation marks and names with underscores are code."""
    text = re.sub(r"'([^' ]+)'", r'`"\1"`', text).replace(" * ", " × ")
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [
        re.sub(r"(?<![\w.])(?!hf_distca\b)([A-Za-z][\w.]*_[\w.*]*\w)", r"`\1`", part)
        for part in parts[::2]
    ]
    return "".join(parts)


if __name__ == "__main__":
    for name in PAGES:
        (FOLDER / name).write_text(written((FOLDER / name).read_text()))
