"""Report of one plan."""

from collections.abc import Mapping
from typing import Any

from hf_distca.sim.report.drawing import loads_picture
from hf_distca.sim.report.page import (
    figure,
    lengths_section,
    origin_section,
    page,
    section,
    table_of_ranks,
)

MILLION = 1e6


def plan_report(figures: Mapping[str, Any]) -> str:
    """Return one HTML file.

    Args:
        figures: the figures that `hf-distca plan --json` prints with a report. They include `histogram`,
            `packed_max_over_mean`, `by_rank` (for each rank lists `pairs_packed`, `pairs`, `tokens`, `tasks`,
            `bytes_sent` and `bytes_received`) and `setting` (the given settings).
    """
    given, bins = figures["setting"], figures["histogram"]
    title = (
        f"The busiest rank has {figures['max_over_mean']:.3f}× the mean core attention; "
        f"packed in order, {figures['packed_max_over_mean']:.2f}×"
    )
    source = "everything here is counted from the plan of one micro-batch."
    lead = (
        f"{sum(each['documents'] for each in bins):,} documents, {sum(each['tokens'] for each in bins):,} tokens; "
        f"{given['ranks']} ranks of at most {given['tokens_per_rank']:,} tokens."
    )
    sections = [
        lengths_section(bins),
        *_ranks(figures),
        origin_section({**given, "planned in": f"{figures['plan_ms']:.1f} ms"}),
    ]
    return page("hf-distca plan", title, source, lead, sections)


def _ranks(figures: Mapping[str, Any]) -> list[str]:
    """Return sections on the ranks' core attention and bytes."""
    ranks = figures["by_rank"]
    packed, planned, sent, received = (
        [value / MILLION for value in ranks[name]]
        for name in ("pairs_packed", "pairs", "bytes_sent", "bytes_received")
    )
    load = figure(
        "Query-key pairs of each rank, before and after",
        loads_picture([("packed in order", packed, "plain"), ("planned", planned, "planned")], " M"),
        [("plain", "packed in order"), ("planned", "planned"), ("level", "mean of the ranks")],
    )
    in_bytes = figure(
        "Megabytes that each rank sends and receives",
        loads_picture([("sent", sent, "planned"), ("received", received, "planned")], " MB"),
        [("planned", "planned"), ("level", "mean of the ranks")],
    )
    columns = {"packed, million pairs": packed, "planned, million pairs": planned, "sent, MB": sent}
    columns |= {"received, MB": received, "tokens": ranks["tokens"], "tasks": ranks["tasks"]}
    return [
        section(
            "Load of the ranks, before and after",
            [
                "Millions of query-key pairs that each rank computes in a layer. They are core attention alone: the "
                "whole step gains less, since other layers take their part of it. hf-distca simulate predicts both. "
                f"The most tokens of a rank are {figures['tokens_max_over_mean']:.3f}× the mean."
            ],
            load,
        ),
        section(
            "Bytes by rank",
            [
                "Megabytes that each rank sends and receives in one layer's forward: rows of Q, K and V, and O rows "
                f"back. All ranks send {figures['bytes_total'] / MILLION:,.1f} MB, the busiest "
                f"{figures['bytes_bottleneck'] / MILLION:,.1f} MB. K and V travel in "
                f"{figures['stages']} stages; exchange buffers of the busiest rank take "
                f"{figures['exchange_buffers'] / MILLION:,.1f} MB. {figures['tasks']:,} tasks in "
                f"{figures['nano_batches']} nano-batches; the smallest has {figures['min_rows']:,} rows."
            ],
            in_bytes,
            table_of_ranks("Each rank", columns, ",.10g"),
        ),
    ]
