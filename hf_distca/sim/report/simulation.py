"""The report of a simulation."""

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
    ("exchange_mean_seconds", "waits", "waits for exchanges"),
    ("idle_seconds", "idle", "idle, until the slowest rank is done"),
)
"""Of the mean rank's step: field, class and name."""
MEMORY_PARTS = (("state_bytes", "other", "model state"), ("rows_bytes", "attention", "rows"))


def simulation_report(figures: Mapping[str, Any]) -> str:
    """One HTML file.

    Args:
        figures: what `hf-distca simulate --json` prints: the fields of `Simulation`, and `scaling` (the fields of
            each `ScalePoint`), `settings` (to be copied), `setting` (what was asked for), `profile`, `profile_source`
            and `simulated_in`.
    """
    setting = figures["setting"]
    lead = (
        f"{figures['documents']:,} documents, {figures['tokens']:,} tokens of {setting['lengths']}; "
        f"{figures['ranks']:,} ranks of {figures['tokens_per_rank']:,} tokens; "
        f"{setting['model']}; {figures['profile']}"
    )
    parts = [_keys, _advice, lengths_section, _load, _time, _scaling, _bytes, _memory, _origin]
    return page("hf-distca simulate", outcome(figures), lead, [part(figures) for part in parts], figures)


def outcome(figures: Mapping[str, Any]) -> str:
    """The result in a few words, both figures."""
    step, attention = (f"{figures[name]:.2f}×" for name in ("speed_up", "attention_speed_up"))
    if figures["speed_up"] < NOT_WORTH:
        return f"Balancing does not pay here: a step {step} as fast, core attention alone {attention}"
    return f"A step {step} as fast, core attention alone {attention}"


def load_panels(figures: Mapping[str, Any]) -> list[Panel]:
    """Core attention of each rank before and after."""
    return [
        Panel(
            load["name"], load["attention_seconds"], "after" if load["name"] == figures["best_planned"] else "before"
        )
        for load in figures["load"]
    ]


def step_rows(figures: Mapping[str, Any]) -> list[tuple[str, list[Part]]]:
    """What the time of a step goes into, by way."""
    return [
        (way["name"], [Part(way[field], style, name) for field, style, name in STEP_PARTS]) for way in figures["ways"]
    ]


def speed_ups(figures: Mapping[str, Any]) -> list[Series]:
    """The step and core attention alone over the number of ranks."""
    points = figures["scaling"]
    return [
        Series("core attention alone", [point["attention_speed_up"] for point in points], "before"),
        Series("the step", [point["speed_up"] for point in points], "after"),
    ]


def _keys(figures: Mapping[str, Any]) -> str:
    best = next(index for index, way in enumerate(figures["ways"]) if way["name"] == figures["best_planned"])
    return key_figures(
        figures,
        [
            ("the step, over the best other way", "speed_up", TIMES),
            ("core attention alone, busiest rank", "attention_speed_up", TIMES),
            ("busiest rank over the mean, as packed", "imbalance", TIMES),
            (f"model FLOPs utilization, {figures['best_planned']}", f"ways/{best}/mfu", SHARE),
        ],
    )


def _advice(figures: Mapping[str, Any]) -> str:
    settings = "".join(f"    {name}={_python(value)},\n" for name, value in figures["settings"].items())
    arguments = f'args = hf_distca.DistCATrainingArguments(\n    output_dir="out",\n{settings})'
    processes = figures["ranks"] * figures["setting"]["tensor_parallel"]
    return section(
        "What to do",
        [*figures["advice"], *(["To try it all the same:"] if figures["speed_up"] < NOT_WORTH else [])],
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
            "Core attention that each rank computes in the first micro-batch, all layers, forward and backward, in "
            "seconds. All ranks wait for the busiest one.",
            *(["Plain packing cuts the longest documents, whose pieces attend to less."] if cut else []),
        ],
        figure(
            "Core attention of each rank, before and after",
            partial(pictures.loads, load_panels(figures), SECONDS, " s", "of core attention"),
            [("before", "without plans"), ("after", "planned"), ("level", "mean of the ranks")],
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
            "A step of the mean rank, in seconds, by way to train. Gradient synchronisation and the optimizer, which "
            "are the same in all ways, are not in it. Bars far longer than those compared are broken off. “Cut” is "
            "the share of documents that lose context."
        ],
        figure(
            "Seconds of a step by way to train, divided into core attention, other layers, waits and idle time",
            partial(pictures.stacks, step_rows(figures), SECONDS, " s", strong=_compared(figures)),
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
    return section(
        "Speed-up over ranks",
        [
            f"The best planned way over the best other way, with {figures['tokens_per_rank']:,} tokens on each rank. "
            "Documents longer than all ranks hold together are cut to that."
        ],
        figure(
            "Speed-up of the step and of core attention alone over the number of ranks",
            partial(pictures.lines, [point["ranks"] for point in points], speed_ups(figures), TIMES, "ranks"),
            [("after", "the step"), ("before", "core attention alone, busiest rank"), ("level", "no change")],
        ),
        table(
            figures,
            "scaling",
            [
                Column("ranks", "ranks", COUNT),
                Column("the step", "speed_up", TIMES),
                Column("core attention alone", "attention_speed_up", TIMES),
                Column("planned, s", "planned_seconds", SECONDS),
                Column("other, s", "plain_seconds", SECONDS),
                Column("best planned way", "best_planned"),
                Column("best other way", "best_plain"),
            ],
            "Speed-up by number of ranks, and the steps behind it",
        ),
    )


def _bytes(figures: Mapping[str, Any]) -> str:
    rows = [(way["name"], [Part(way["bytes_bottleneck"], "attention", "sent")]) for way in figures["ways"]]
    return section(
        "Bytes",
        ["What the busiest rank sends, or receives, for the core attention of one layer's forward."],
        figure(
            "Megabytes of the busiest rank in one layer's forward, by way to train",
            partial(pictures.stacks, rows, MEGABYTES, " MB", strong=_compared(figures)),
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
    rows = [
        (way["name"], [Part(way[field] or 0, style, name) for field, style, name in MEMORY_PARTS])
        for way in figures["ways"]
    ]
    return section(
        "Memory",
        [_counted() if figures["memory_counted"] else _at_least(figures["setting"]["checkpointing"])],
        figure(
            "Gigabytes of a GPU, by way to train",
            partial(pictures.stacks, rows, GIGABYTES, " GB", strong=_compared(figures)),
            [(style, name) for _, style, name in MEMORY_PARTS],
        ),
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
        "What a GPU has in memory: weights, gradients and optimizer, divided over all GPUs as by FSDP2, and "
        "what rows take at the moment when that is the most. The model's step was run on tensors without numbers and "
        "counted: of planned ways with the plan of the micro-batch that exchanges the most, of the others without an "
        "exchange and along a line through two numbers of rows; under context parallelism K and V of the group, and "
        "their gradients, are added. All have hf_distca's loss, which makes no whole logits. Memory of CUDA, NCCL and "
        "of gaps between tensors, some 2 GB, is not in it."
    )


def _at_least(checkpointing: bool) -> str:
    kept = "the input of every layer, O and its log-sum-exp" if checkpointing else "not reckoned without checkpointing"
    return (
        "The least that a GPU has in memory: weights, gradients and optimizer, 16 bytes a parameter divided over all "
        f"GPUs as by FSDP2 or ZeRO-3, and what is kept of the rows for the backward ({kept}). A layer at work, the "
        "exchange and the loss come on top. GPUs that share layers are not counted."
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
        [
            "Predictions, not measurements: costs of the device were measured, plans are those that training makes, "
            "and the schedule that runs was walked with them."
        ],
        facts(rows),
    )


def _compared(figures: Mapping[str, Any]) -> Sequence[str]:
    return [figures["best_plain"], figures["best_planned"]]
