"""Report of a simulation."""

import json
from collections.abc import Mapping
from typing import Any

from hf_distca.sim.report.drawing import loads_picture, stacks_picture
from hf_distca.sim.report.page import (
    code,
    figure,
    lengths_section,
    origin_section,
    page,
    section,
    table,
    table_of_ranks,
)
from hf_distca.sim.simulate import NOT_WORTH, columns_of
from hf_distca.sim.strategies import PLAIN

STEP_PARTS = {
    "attention_mean_seconds": ("attention", "core attention"),
    "other_mean_seconds": ("other", "other layers"),
    "exchange_mean_seconds": ("waits", "waits for rows of other ranks"),
}
"""Parts of the mean rank's step: class and name, by field."""
IDLE = ("idle", "idle until the slowest rank is done")
LEGEND = [("plain", "without plans"), ("planned", "planned by hf_distca"), ("level", "mean of the ranks")]
COLUMNS = (
    "attention, other: of the busiest rank. waits: of the rank that waits the longest. idle: share of the ranks' time "
    "without computation. sent: the busiest rank's bytes in one layer's forward. cut: documents that lose context. "
    "GB: memory of one GPU, with weights, gradients and optimizer divided over all GPUs as by FSDP2. A step of the "
    "model was run on fake tensors and counted: a planned strategy with the plan that exchanges the most; the others "
    "without an exchange, and context parallelism with K and V of its group besides. CUDA, NCCL and gaps between "
    "tensors, some 2 GB, are left out."
)
"""What the columns of the table hold."""


def simulation_report(figures: Mapping[str, Any]) -> str:
    """Return one HTML file.

    Args:
        figures: the figures that `hf-distca simulate --json` prints: the fields of `Simulation`, `settings` (to be
            copied), `setting` (the given settings), `profile`, `profile_source` and `simulated_in`.
    """
    given, gain = figures["setting"], f"{figures['speed_up']:.2f}× the speed of {figures['best_plain']}"
    pays = figures["speed_up"] >= NOT_WORTH
    facts = {
        **given,
        "device": f"{figures['profile']}: {figures['profile_source']}",
        "simulated in": f"{figures['simulated_in']:.1f} s",
    }
    return page(
        "hf-distca simulate",
        f"{gain}, the best alternative" if pays else f"No gain expected: {gain}",
        "costs of the device were measured; steps, with the plans that training makes, were simulated.",
        f"{given['batches']:,} micro-batches of {given['lengths']}: {figures['documents']:,} documents, "
        f"{figures['tokens']:,} tokens. {figures['ranks']:,} ranks of {figures['tokens_per_rank']:,} tokens; "
        f"{given['model']}; {figures['profile']}.",
        [
            _advice(figures, pays=pays),
            lengths_section(figures["histogram"]),
            _strategies(figures),
            _load(figures),
            origin_section(facts, ["Every strategy trains the same micro-batches."]),
        ],
    )


def _advice(figures: Mapping[str, Any], *, pays: bool) -> str:
    settings = "".join(
        f"    {name}={json.dumps(value) if isinstance(value, str) else repr(value)},\n"
        for name, value in figures["settings"].items()
    )
    arguments = f'args = hf_distca.DistCATrainingArguments(\n    output_dir="out",\n{settings})'
    processes = figures["ranks"] * figures["setting"]["tensor_parallel"]
    packing, best = (
        f"{figures[gain]['least']:.2f}× to {figures[gain]['most']:.2f}×" for gain in ("over_packing", "over_best")
    )
    sentences = [
        *figures["advice"],
        f"By micro-batch, {packing} the speed of {PLAIN} and {best} that of {figures['best_plain']}; on average "
        f"{figures['attention_speed_up']:.2f}× for core attention alone.",
    ]
    if not pays:
        sentences.append("Settings to try it all the same:")
    return section(
        "What to do",
        sentences,
        code(arguments, "settings in Python"),
        code(f"accelerate launch --num_processes {processes} train.py", "the launch"),
    )


def _strategies(figures: Mapping[str, Any]) -> str:
    compared = [figures["best_plain"], figures["best_planned"]]
    bars = {}
    for each in figures["strategies"]:
        parts = [(each[part], style, name) for part, (style, name) in STEP_PARTS.items()]
        idle = max(each["step_seconds"] - sum(size for size, _, _ in parts), 0.0)
        bars[each["name"]] = [*parts, (idle, *IDLE)]
    columns = [
        columns_of(each) | {"sent, MB": f"{each['bytes_bottleneck'] / 1e6:,.1f}"} for each in figures["strategies"]
    ]
    return section(
        "Strategies",
        [
            "Seconds of a step on the mean rank. Gradient synchronisation and the optimizer take equally long under "
            "all strategies and are left out. The two strategies in bold are compared; bars far longer than theirs "
            "are broken off."
        ],
        figure(
            "Seconds of a step by strategy, divided into core attention, other layers, waits and idle time",
            stacks_picture(bars, " s", compared),
            [*STEP_PARTS.values(), IDLE],
        ),
        table("Means over all micro-batches", list(columns[0]), [list(each.values()) for each in columns], compared),
        f"<p class='caption'>{COLUMNS}</p>",
    )


def _load(figures: Mapping[str, Any]) -> str:
    planned = {each["name"] for each in figures["strategies"] if each["document_layout"] is not None}
    panels = [(name, load, "planned" if name in planned else "plain") for name, load in figures["load"].items()]
    cut = figures["strategies"][0]["documents_cut"]
    return section(
        "Load of the ranks in one step",
        [
            "Seconds of core attention that each rank computes in the first micro-batch: all layers, forward and "
            "backward. All ranks wait for the busiest one.",
            *(["Plain packing cuts the longest documents. Their parts attend to fewer tokens."] if cut else []),
        ],
        figure("Core attention of each rank, before and after", loads_picture(panels, " s"), LEGEND),
        table_of_ranks("Core attention of each rank, seconds", figures["load"]),
    )
