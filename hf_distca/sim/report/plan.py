"""Report of one plan."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from hf_distca.sim.report import pictures
from hf_distca.sim.report.lengths import lengths_section
from hf_distca.sim.report.page import facts, figure, folded, key_figures, page, section
from hf_distca.sim.report.pictures import Panel
from hf_distca.sim.report.tables import MOST_RANKS, Column, side_by_side, table
from hf_distca.sim.report.units import COUNT, MEGABYTES, RATIO, TIMES, Unit

PAIRS = Unit(scale=1e6, digits=2)
"""Query-key pairs, in millions."""


def plan_report(figures: Mapping[str, Any]) -> str:
    """Return one HTML file.

    Args:
        figures: the figures that `hf-distca plan --json` prints with a report. They include `histogram`,
            `packed_max_over_mean`, `by_rank` (for each rank lists `pairs_packed`, `pairs`, `tokens`, `tasks`,
            `bytes_sent` and `bytes_received`), `task_rows` (tasks by their rows) and `setting` (the given settings).
    """
    setting = figures["setting"]
    documents = sum(each["documents"] for each in figures["histogram"])
    tokens = sum(each["tokens"] for each in figures["histogram"])
    title = (
        f"The busiest rank has {figures['max_over_mean']:.3f}× the mean core attention; "
        f"packed in order, {figures['packed_max_over_mean']:.2f}×"
    )
    source = "everything here is counted from the plan of one micro-batch."
    lead = (
        f"{documents:,} documents, {tokens:,} tokens; {setting['ranks']} ranks of at most "
        f"{setting['tokens_per_rank']:,} tokens."
    )
    parts = [_keys, lengths_section, _load, _bytes, _tasks, _origin]
    return page("hf-distca plan", title, source, lead, [part(figures) for part in parts], figures)


def _keys(figures: Mapping[str, Any]) -> str:
    return key_figures(
        figures,
        [
            ("core attention alone, as planned over as packed", "attention_speed_up", TIMES),
            ("busiest rank over the mean, as planned", "max_over_mean", RATIO),
            ("busiest rank over the mean, as packed", "packed_max_over_mean", RATIO),
            ("most tokens of a rank over the mean", "tokens_max_over_mean", RATIO),
        ],
    )


def _load(figures: Mapping[str, Any]) -> str:
    ranks = figures["by_rank"]
    panels = [Panel("packed in order", ranks["pairs_packed"], "plain"), Panel("planned", ranks["pairs"], "planned")]
    columns = [
        ("packed, million pairs", "by_rank/pairs_packed"),
        ("planned, million pairs", "by_rank/pairs"),
    ]
    return section(
        "Load of the ranks, before and after",
        [
            "Millions of query-key pairs that each rank computes in a layer. They are core attention alone: the whole "
            "step gains less, since other layers take their part of it. hf-distca simulate predicts both."
        ],
        figure(
            "Query-key pairs of each rank, before and after",
            partial(pictures.loads, panels, PAIRS, " M", "of query-key pairs"),
            [("plain", "packed in order"), ("planned", "planned"), ("level", "mean of the ranks")],
        ),
        _ranks(figures, columns, PAIRS, "Query-key pairs of each rank"),
        _ranks(
            figures, [("tokens", "by_rank/tokens"), ("tasks", "by_rank/tasks")], COUNT, "Tokens and tasks of each rank"
        ),
    )


def _bytes(figures: Mapping[str, Any]) -> str:
    ranks = figures["by_rank"]
    panels = [Panel("sent", ranks["bytes_sent"], "planned"), Panel("received", ranks["bytes_received"], "planned")]
    return section(
        "Bytes by rank",
        ["Megabytes that each rank sends and receives in one layer's forward: rows of Q, K and V, and O rows back."],
        figure(
            "Megabytes that each rank sends and receives",
            partial(pictures.loads, panels, MEGABYTES, " MB", "in a layer's forward"),
            [("planned", "planned"), ("level", "mean of the ranks")],
        ),
        key_figures(
            figures,
            [
                ("all ranks, MB", "bytes_total", MEGABYTES),
                ("busiest rank, MB", "bytes_bottleneck", MEGABYTES),
                ("exchange buffers of the busiest rank, MB", "exchange_buffers", MEGABYTES),
                ("stages of a layer's K and V", "stages", COUNT),
            ],
        ),
        _ranks(
            figures,
            [("sent, MB", "by_rank/bytes_sent"), ("received, MB", "by_rank/bytes_received")],
            MEGABYTES,
            "Bytes of each rank in one layer's forward",
        ),
    )


def _tasks(figures: Mapping[str, Any]) -> str:
    return section(
        "Tasks",
        [
            f"{figures['tasks']:,} tasks in {figures['nano_batches']} nano-batches; the smallest has "
            f"{figures['min_rows']:,} rows."
        ],
        table(
            figures,
            "task_rows",
            [
                Column("from, rows", "shortest", COUNT),
                Column("to, rows", "longest", COUNT),
                Column("tasks", "tasks", COUNT),
                Column("rows of them", "rows", COUNT),
            ],
            "Tasks by their query rows",
        ),
    )


def _origin(figures: Mapping[str, Any]) -> str:
    rows = [(name.replace("_", " "), str(value)) for name, value in figures["setting"].items()]
    return section("Where this comes from", [], facts([*rows, ("planned in", f"{figures['plan_ms']:.1f} ms")]))


def _ranks(figures: Mapping[str, Any], columns: list[tuple[str, str]], unit: Unit, caption: str) -> str:
    """Return a table of all ranks, if they are few enough to read."""
    if figures["setting"]["ranks"] > MOST_RANKS:
        return ""
    return folded(caption, side_by_side(figures, "rank", columns, unit, caption))
