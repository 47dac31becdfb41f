"""Report of one plan."""

from collections.abc import Mapping
from typing import Any

from hf_distca.sim.report.drawing import loads_picture
from hf_distca.sim.report.page import figure, lengths_section, origin_section, page, section, table_of_ranks

LEGEND = [("planned", "planned"), ("level", "mean of the ranks")]


def plan_report(figures: Mapping[str, Any]) -> str:
    """Return one HTML file.

    Args:
        figures: the figures that `hf-distca plan --json` prints with a report.
    """
    given, bins, ranks = figures["setting"], figures["histogram"], figures["by_rank"]
    packed, planned, sent, received = (
        [value / 1e6 for value in ranks[name]] for name in ("pairs_packed", "pairs", "bytes_sent", "bytes_received")
    )
    columns = {"packed, million pairs": packed, "planned, million pairs": planned, "sent, MB": sent}
    columns |= {"received, MB": received, "tokens": ranks["tokens"], "tasks": ranks["tasks"]}
    load = section(
        "Load of the ranks, before and after",
        [
            "Millions of query-key pairs that each rank computes in a layer. They are core attention alone: the "
            "whole step gains less, since other layers take their part of it. hf-distca simulate predicts both. "
            f"The most tokens of a rank are {figures['tokens_max_over_mean']:.3f}× the mean."
        ],
        figure(
            "Query-key pairs of each rank, before and after",
            loads_picture([("packed in order", packed, "plain"), ("planned", planned, "planned")], " M"),
            [("plain", "packed in order"), *LEGEND],
        ),
    )
    in_bytes = section(
        "Bytes by rank",
        [
            "Megabytes that each rank sends and receives in one layer's forward: rows of Q, K and V, and O rows "
            f"back. All ranks send {figures['bytes_total'] / 1e6:,.1f} MB, the busiest "
            f"{figures['bytes_bottleneck'] / 1e6:,.1f} MB. K and V travel in {figures['stages']} stages; exchange "
            f"buffers of the busiest rank take {figures['exchange_buffers'] / 1e6:,.1f} MB. {figures['tasks']:,} "
            f"tasks in {figures['nano_batches']} nano-batches; the smallest has {figures['min_rows']:,} rows."
        ],
        figure(
            "Megabytes that each rank sends and receives",
            loads_picture([("sent", sent, "planned"), ("received", received, "planned")], " MB"),
            LEGEND,
        ),
        table_of_ranks("Each rank", columns, ",.10g"),
    )
    return page(
        "hf-distca plan",
        f"The busiest rank has {figures['max_over_mean']:.3f}× the mean core attention; packed in order, "
        f"{figures['packed_max_over_mean']:.2f}×",
        "everything here is counted from the plan of one micro-batch.",
        f"{sum(each['documents'] for each in bins):,} documents, {sum(each['tokens'] for each in bins):,} tokens; "
        f"{given['ranks']} ranks of at most {given['tokens_per_rank']:,} tokens.",
        [
            lengths_section(bins),
            load,
            in_bytes,
            origin_section({**given, "planned in": f"{figures['plan_ms']:.1f} ms"}),
        ],
    )
