"""Report of a simulation."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from hf_distca.sim.advice import NOT_WORTH
from hf_distca.sim.report import pictures
from hf_distca.sim.report.lengths import lengths_section
from hf_distca.sim.report.page import code, facts, figure, folded, key_figures, page, section
from hf_distca.sim.report.pictures import Panel, Part, Series
from hf_distca.sim.report.tables import MOST_RANKS, Column, side_by_side, table
from hf_distca.sim.report.units import COUNT, GIGABYTES, MEGABYTES, RATIO, SECONDS, SHARE, TIMES

STEP_PARTS = (
    ("attention_mean_seconds", "attention", "core attention"),
    ("other_mean_seconds", "other", "other layers"),
    ("exchange_mean_seconds", "waits", "waits for rows of other ranks"),
    ("idle_seconds", "idle", "idle until the slowest rank is done"),
)
"""Parts of the mean rank's step: field, class and name."""
PLANNED = [("plain", "without plans"), ("planned", "planned by hf_distca")]


def simulation_report(figures: Mapping[str, Any]) -> str:
    """Return one HTML file.

    Args:
        figures: the figures that `hf-distca simulate --json` prints: the fields of `Simulation`, `scaling` (the fields
            of each `ScalePoint`), `settings` (to be copied), `setting` (the given settings), `profile`,
            `profile_source` and `simulated_in`.
    """
    setting = figures["setting"]
    source = "costs of the device were measured; steps, with the plans that training makes, were simulated."
    lead = (
        f"{setting['batches']:,} micro-batches of {setting['lengths']}: {figures['documents']:,} documents, "
        f"{figures['tokens']:,} tokens. {figures['ranks']:,} ranks of {figures['tokens_per_rank']:,} tokens; "
        f"{setting['model']}; {figures['profile']}."
    )
    parts = [_keys, _advice, lengths_section, _load, _time, _scaling, _bytes, _memory, _origin]
    return page("hf-distca simulate", outcome(figures), source, lead, [part(figures) for part in parts], figures)


def outcome(figures: Mapping[str, Any]) -> str:
    """Return the result in a few words."""
    packing, best = figures["over_packing"], figures["over_best"]
    if figures["speed_up"] < NOT_WORTH:
        return f"No gain expected: {best['speed_up']:.2f}× the speed of {best['name']}"
    if best["name"] == packing["name"]:
        return f"{best['speed_up']:.2f}× the speed of {best['name']}, the best alternative"
    gains = f"{packing['speed_up']:.2f}× the speed of {packing['name']}, {best['speed_up']:.2f}×"
    return f"{gains} that of the best alternative"


def _load_panels(figures: Mapping[str, Any]) -> list[Panel]:
    """Return panels of each rank's core attention before and after."""
    return [Panel(load["name"], load["attention_seconds"], _style(figures, load["name"])) for load in figures["load"]]


def _step_rows(figures: Mapping[str, Any]) -> list[tuple[str, list[Part]]]:
    """Return the parts of a step's time, by strategy."""
    return [
        (way["name"], [Part(way[field], style, name) for field, style, name in STEP_PARTS]) for way in figures["ways"]
    ]


def _style(figures: Mapping[str, Any], name: str) -> str:
    """Return the class of a strategy's marks."""
    planned = {way["name"] for way in figures["ways"] if way["document_layout"] is not None}
    return "planned" if name in planned else "plain"


def _keys(figures: Mapping[str, Any]) -> str:
    packing, best = figures["over_packing"], figures["over_best"]
    keys = [
        (f"the speed of {packing['name']}", "over_packing/speed_up", TIMES),
        (f"the speed of {best['name']}, the best alternative", "over_best/speed_up", TIMES),
        ("the best alternative's speed, for core attention alone", "attention_speed_up", TIMES),
        ("busiest rank over the mean, core attention under plain packing", "imbalance", TIMES),
    ]
    return key_figures(figures, keys[best["name"] == packing["name"] :])


def _advice(figures: Mapping[str, Any]) -> str:
    settings = "".join(f"    {name}={_python(value)},\n" for name, value in figures["settings"].items())
    arguments = f'args = hf_distca.DistCATrainingArguments(\n    output_dir="out",\n{settings})'
    processes = figures["ranks"] * figures["setting"]["tensor_parallel"]
    return section(
        "What to do",
        [*figures["advice"], *(["Settings to try it all the same:"] if figures["speed_up"] < NOT_WORTH else [])],
        code(arguments, "settings in Python"),
        code(f"accelerate launch --num_processes {processes} train.py", "the launch"),
    )


def _python(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _load(figures: Mapping[str, Any]) -> str:
    loads = figures["load"]
    each, cut = "", figures["ways"][0]["documents_cut"]
    if figures["ranks"] <= MOST_RANKS:
        columns = [(load["name"], f"load/{index}/attention_seconds") for index, load in enumerate(loads)]
        caption = "Core attention of each rank, seconds"
        each = folded("Each rank", side_by_side(figures, "rank", columns, SECONDS, caption))
    return section(
        "Load of the ranks, before and after",
        [
            "Seconds of core attention that each rank computes in the first micro-batch: all layers, forward and "
            "backward. All ranks wait for the busiest one.",
            *(["Plain packing cuts the longest documents. Their parts attend to fewer tokens."] if cut else []),
        ],
        figure(
            "Core attention of each rank, before and after",
            partial(pictures.loads, _load_panels(figures), SECONDS, " s", "of core attention"),
            [*PLANNED, ("level", "mean of the ranks")],
        ),
        table(
            figures,
            "load",
            [
                Column("", "name"),
                Column("busiest rank, s", "attention_most", SECONDS),
                Column("mean, s", "attention_mean", SECONDS),
                Column("busiest over mean", "max_over_mean", RATIO),
            ],
            "Core attention of the first micro-batch",
            [figures["best_planned"]],
        ),
        each,
    )


def _time(figures: Mapping[str, Any]) -> str:
    return section(
        "Where the time of a step goes",
        [
            "Seconds of a step on the mean rank, by strategy. Gradient synchronisation and the optimizer take "
            "equally long under all strategies and are left out. The two strategies in bold are compared; bars far "
            "longer than theirs are broken off. “Cut” is the share of documents that lose context."
        ],
        figure(
            "Seconds of a step by strategy, divided into core attention, other layers, waits and idle time",
            partial(pictures.stacks, _step_rows(figures), SECONDS, " s", strong=_compared(figures)),
            [(style, name) for _, style, name in STEP_PARTS],
        ),
        table(
            figures,
            "ways",
            [
                Column("", "name"),
                Column("step", "step_seconds", SECONDS),
                Column("core attention", "attention_mean_seconds", SECONDS),
                Column("of the busiest", "attention_seconds", SECONDS),
                Column("other layers", "other_mean_seconds", SECONDS),
                Column("waits", "exchange_mean_seconds", SECONDS),
                Column("idle", "idle_seconds", SECONDS),
                Column("tokens/s", "tokens_per_second", COUNT),
                Column("MFU", "mfu", SHARE),
                Column("cut", "documents_cut", SHARE),
            ],
            "Seconds of the mean rank, and core attention of the busiest; means over all micro-batches",
            _compared(figures),
        ),
    )


def _scaling(figures: Mapping[str, Any]) -> str:
    points = figures["scaling"]
    series = [
        Series("core attention alone", [point["attention_speed_up"] for point in points], "attention"),
        Series("the step", [point["speed_up"] for point in points], "planned"),
    ]
    return section(
        "Speed-up over ranks",
        [
            "The best planned strategy compared with the best alternative, with "
            f"{figures['tokens_per_rank']:,} tokens on each rank. A document longer than all ranks hold is cut to "
            "what they hold."
        ],
        figure(
            "Speed-up of the step and of core attention alone over the number of ranks",
            partial(pictures.lines, [point["ranks"] for point in points], series, TIMES, "ranks"),
            [("planned", "the step"), ("attention", "core attention alone, busiest rank"), ("level", "no change")],
        ),
        table(
            figures,
            "scaling",
            [
                Column("ranks", "ranks", COUNT),
                Column("the step", "speed_up", TIMES),
                Column("core attention alone", "attention_speed_up", TIMES),
                Column("planned, s", "planned_seconds", SECONDS),
                Column("alternative, s", "plain_seconds", SECONDS),
                Column("best planned", "best_planned"),
                Column("best alternative", "best_plain"),
            ],
            "Speed-up by number of ranks, and the steps behind it",
        ),
    )


def _bytes(figures: Mapping[str, Any]) -> str:
    rows = [
        (way["name"], [Part(way["bytes_bottleneck"], _style(figures, way["name"]), "busiest rank")])
        for way in figures["ways"]
    ]
    return section(
        "Bytes",
        ["Megabytes that the busiest rank sends, or receives, for the core attention of one layer's forward."],
        figure(
            "Megabytes of the busiest rank in one layer's forward, by strategy",
            partial(pictures.stacks, rows, MEGABYTES, " MB", strong=_compared(figures)),
            PLANNED,
        ),
        table(
            figures,
            "ways",
            [
                Column("", "name"),
                Column("one layer, MB", "bytes_bottleneck", MEGABYTES),
                Column("waits, mean, s", "exchange_mean_seconds", SECONDS),
                Column("waits, longest, s", "exchange_seconds", SECONDS),
                Column("not computing", "idle", SHARE),
            ],
            "Bytes of the busiest rank; waits in a step; share of the ranks' time in which they compute nothing",
            _compared(figures),
        ),
    )


def _memory(figures: Mapping[str, Any]) -> str:
    return section(
        "Memory",
        [_counted() if figures["memory_counted"] else _at_least(figures["setting"]["checkpointing"])],
        table(
            figures,
            "ways",
            [
                Column("", "name"),
                Column("most rows of a rank", "tokens_most", COUNT),
                Column("rows, GB", "rows_bytes", GIGABYTES),
                Column("model state, GB", "state_bytes", GIGABYTES),
            ],
            "Rows and memory of the rank that holds the most",
            _compared(figures),
        ),
    )


def _counted() -> str:
    return (
        "Memory of one GPU: weights, gradients and optimizer, divided over all GPUs as by FSDP2, and the most that "
        "rows take at any moment. The model's step was run on fake tensors and counted. A planned strategy was "
        "counted with the plan of the micro-batch that exchanges the most. The others were counted without an "
        "exchange, for two numbers of rows, and extended along a line; context parallelism adds K and V of its group "
        "and their gradients. All strategies have hf_distca's chunked loss. CUDA, NCCL and gaps between tensors, some "
        "2 GB, are left out."
    )


def _at_least(checkpointing: bool) -> str:
    kept = "the input of every layer, O and its log-sum-exp" if checkpointing else "not known without checkpointing"
    return (
        "The least memory of one GPU, from shapes: weights, gradients and optimizer, 16 bytes a parameter divided "
        f"over all GPUs as by FSDP2 or ZeRO-3, and what rows keep for the backward ({kept}). A layer at work, the "
        "exchange and the loss are left out. GPUs that share layers are not counted."
    )


def _origin(figures: Mapping[str, Any]) -> str:
    setting: dict[str, Any] = figures["setting"]
    rows = [(name.replace("_", " "), str(value)) for name, value in setting.items()]
    rows += [
        ("device", f"{figures['profile']}: {figures['profile_source']}"),
        ("simulated in", f"{figures['simulated_in']:.1f} s"),
    ]
    return section(
        "Where this comes from",
        ["Every strategy trains the same micro-batches. Planned ones follow the schedule that training follows."],
        facts(rows),
    )


def _compared(figures: Mapping[str, Any]) -> Sequence[str]:
    return [figures["best_plain"], figures["best_planned"]]
