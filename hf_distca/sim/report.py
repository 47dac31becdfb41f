"""Reports of a simulation and of a plan: one HTML file each that needs nothing else."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hf_distca.sim.compare import columns_of, meaning_of_seconds, parts_of_step, ranks_of_tokens
from hf_distca.sim.drawing import (
    Drawing,
    lengths_picture,
    loads_picture,
    stacks_picture,
    style_sheet,
)
from hf_distca.sim.strategies import PLAIN
from hf_distca.units import counted

STYLE = Path(__file__).with_suffix(".css")
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""Content policy of the page: a browser runs no script and loads nothing from outside."""
MOST_RANKS = 256
"""Maximum number of ranks in a table; `--json` has all of them."""
STEP_PARTS = {
    "encoder": "encoder of images",
    "attention": "core attention",
    "other": "other layers",
    "waits": "waits for rows of other ranks",
    "idle": "idle until the slowest rank is done",
}
"""Names of the parts of the mean rank's step; the keys are also classes of marks, and columns of
the table."""
LAUNCH_CONFIG = "examples/configs/fsdp2.yaml"
"""Configuration of the launch under which memory is counted."""
MEAN = ("level", "mean of the ranks")
COLUMNS = (
    "imbalance: core attention of the busiest rank over that of the mean rank. "
    "tokens/s: of all ranks. MFU, model FLOPs utilization: operations of the model over those "
    "that the GPUs can do in the same time. cut: documents that lose context. sent: the busiest "
    "rank's bytes in one layer's forward. GB: memory of one GPU, with weights, gradients and "
    "optimizer divided over all GPUs as by FSDP2. A step of the model was run on fake tensors "
    "and counted: a planned strategy with the plan that exchanges the most; the others without "
    "an exchange, and groups of ranks with the rows that a rank receives besides. CUDA, NCCL and "
    "gaps between tensors, some 2 GB, are left out. runs today: whether transformers, "
    "accelerate or TRL run the strategy on packed documents."
)
"""Meaning of the further columns of the table of strategies."""
ON_RANKS = (
    "Plain packing gives every rank equal tokens and cuts documents that a rank cannot hold, as "
    "TRL does with packing=True. Whole documents balanced: every document lies on one rank. "
    "transformers has batch_rebalance for it, which balances the cost of padded rows."
)
IN_GROUPS = {
    "Ulysses": (
        "Ulysses: the ranks of a group divide the heads of core attention, as accelerate does with "
        "DeepSpeed."
    ),
    "context parallel": "Context parallel: the ranks of a group divide the rows of each document.",
}
PLANNED = (
    "hf_distca plans which rank computes which core attention. Fixed: documents are packed in "
    "order and cut where the tokens of a rank end. Chosen: the fastest plan of each micro-batch, "
    "as training takes it by default."
)
"""Meanings of the names of strategies; those of groups of ranks by the beginning of the name."""
PADDED_ROWS = (
    "Trainers of preferences and rollouts pad the sequences of a batch. Padded to the longest: "
    "every rank computes its padding too. Packed on each rank: a rank computes its own tokens "
    "only. Whole sequences balanced: sequences move between ranks, and none is cut. hf_distca: "
    "what pack_padded does; rows and core attention are balanced, and equal prefixes are computed "
    "once. No prefix sharing: with share_prefixes=False. Rows: those that all ranks compute. "
    "Imbalance: computation of the busiest rank over the mean."
)
"""Meaning of the table of padded batches."""
MEMORY = (
    "Gigabytes of the rank that exchanges the most, at the peak of this micro-batch, by strategy "
    "and without or with gradient checkpointing. A step of the model was run on fake tensors and "
    "counted. CUDA, NCCL and gaps between tensors, some 2 GB, are left out."
)
"""Meaning of the table of memory."""
PARTS_OF_MEMORY = (
    "optimizer: its state, such as the two moments of Adam. encoder of images: pixels, features "
    "and what the encoder's backward reads. activations: results that the backward "
    "reads. autocast's copies of weights: in the dtype of the computation. kept O and "
    "log-sum-exp: results of core attention that gradient checkpointing does not compute again. "
    "exchange buffers: rows that arrive from other ranks. row numbers of the plan: tensors by "
    "which rows are gathered. loss: logits of a chunk of rows, and gradients that the loss "
    "computes. gradients under way: what the backward has made, other than gradients of weights."
)
"""Meaning of the rows of the table of memory."""

PARTS_OF_STEP = {
    1: (
        "All rows travel before the rank that needs them computes with them: the micro-batch is "
        "one nano-batch."
    ),
    2: (
        "The micro-batch is divided into two nano-batches: one computes while rows of the other "
        "travel."
    ),
}
"""Meaning of nano-batches, by their number."""


def simulation_report(figures: Mapping[str, Any]) -> str:
    """Return one HTML file.

    Args:
        figures: the figures that `hf-distca simulate --json` prints: the fields of `Simulation`,
            `settings` (to be copied), `setting` (the given settings), `profile`, `profile_source`
            and `simulated_in`.
    """
    setting = figures["setting"]
    strategies = figures["strategies"]
    best = figures["best_plain"]
    pays = figures["pays"]

    # 1. What to do.
    settings_text = "".join(
        f"    {name}={json.dumps(value) if isinstance(value, str) else repr(value)},\n"
        for name, value in figures["settings"].items()
    )
    processes = figures["ranks"] * setting["tensor_parallel"]
    advice = _section(
        "What to do",
        [
            *figures["advice"],
            f"By micro-batch: {_by_micro_batch(figures)}.",
            *([] if pays else ["Settings to try it all the same:"]),
        ],
        _code(
            f'args = hf_distca.DistCATrainingArguments(\n    output_dir="out",\n{settings_text})',
            "settings in Python",
        ),
        _code(
            f"accelerate launch --config_file {LAUNCH_CONFIG} --num_processes {processes} train.py",
            "the launch",
        ),
    )

    # 2. Seconds of each strategy.
    compared = [PLAIN, figures["best_in_transformers"], best, figures["best_planned"]]
    bars = {}
    for strategy in strategies:
        seconds_of_parts = parts_of_step(strategy)
        bars[strategy["name"]] = [
            (seconds, part, STEP_PARTS[part]) for part, seconds in seconds_of_parts.items()
        ]
    rows = [
        columns_of(strategy)
        | {
            "sent, MB": f"{strategy['bytes_bottleneck'] / 1e6:,.1f}",
            "runs today": _runs_today(strategy),
        }
        for strategy in strategies
    ]
    strategies_section = _section(
        "Strategies",
        [
            _meaning_of_names(list(bars)),
            (
                "The bars and the table have the same seconds: those of the mean rank. Gradient "
                "synchronisation and the optimizer take equally long under all strategies and are "
                "left out. The strategies in bold are compared; bars far longer than theirs are "
                "broken off."
            ),
        ],
        _figure(
            "Seconds of a step by strategy, divided into core attention, other layers, waits and "
            "idle time",
            stacks_picture(bars, " s", compared),
            [(part, STEP_PARTS[part]) for part in parts_of_step(strategies[0])],
        ),
        _table(
            "Means over all micro-batches",
            list(rows[0]),
            [list(row.values()) for row in rows],
            compared,
        ),
        f"<p class='caption'>{escape(f'{meaning_of_seconds(strategies[0])} {COLUMNS}')}</p>",
    )

    # 3. Padded batches, if they were simulated.
    padded_sections = []
    padded = figures.get("padded")
    if padded:
        rows = padded["columns"]
        sequences = counted(padded["sequences"], "sequence")
        caption = f"Means over all batches of {sequences} a rank"
        table = _table(caption, list(rows[0]), [list(row.values()) for row in rows])
        padded_sections = [_section("Padded batches", [PADDED_ROWS, padded["advice"]], table)]

    # 4. Load of each rank.
    planned = {
        strategy["name"] for strategy in strategies if strategy["document_layout"] is not None
    }
    panels = [
        (name, load, "planned" if name in planned else "plain")
        for name, load in figures["load"].items()
    ]
    cut = strategies[0]["documents_cut"]
    load_section = _section(
        "Load of the ranks in one step",
        [
            (
                "Seconds of core attention that each rank computes in the first micro-batch: all "
                "layers, forward and backward. All ranks wait for the busiest one."
            ),
            *(
                ["Plain packing cuts the longest documents. Their parts attend to fewer tokens."]
                if cut
                else []
            ),
        ],
        _figure(
            "Core attention of each rank, before and after",
            loads_picture(panels, " s"),
            [("plain", "without plans"), ("planned", "planned by hf_distca"), MEAN],
        ),
        table_of_ranks("Core attention of each rank, seconds", figures["load"]),
    )

    # 5. The page.
    facts = {
        **setting,
        "device": f"{figures['profile']}: {figures['profile_source']}",
        "simulated in": f"{figures['simulated_in']:.1f} s",
    }
    return _page(
        "hf-distca simulate",
        headline(figures),
        "costs of the device were measured; steps, with the plans that training makes, were "
        "simulated.",
        f"{counted(setting['batches'], 'micro-batch', 'micro-batches')} of {setting['lengths']}: "
        f"{counted(figures['documents'], 'document')}, {counted(figures['tokens'], 'token')}. "
        f"{ranks_of_tokens(figures)}; {setting['model']}; "
        f"{figures['profile']}. {meaning_of_sizes(best)}",
        [
            advice,
            _lengths(figures["histogram"]),
            strategies_section,
            *padded_sections,
            load_section,
            _origin(facts, ["Every strategy trains the same micro-batches."]),
        ],
    )


def headline(figures: Mapping[str, Any]) -> str:
    """Return the speed over TRL's packing and over the best other strategy."""
    best = figures["best_plain"]
    speeds = f"{figures['over_packing']['speed_up']:.2f}× the speed of TRL's packing"
    if best == PLAIN:
        speeds += ", the best alternative"
    else:
        speeds += f", {figures['over_best']['speed_up']:.2f}× that of {best}, the best alternative"
    return speeds if figures["pays"] else f"No gain expected: {speeds}"


def _least_to_most(gain: Mapping[str, float]) -> str:
    """Return the least and the greatest speed-up of a micro-batch, from the fields of `Gain`.

    One number if they are alike.
    """
    least, most = f"{gain['least']:.2f}×", f"{gain['most']:.2f}×"
    return least if least == most else f"{least} to {most}"


def _by_micro_batch(figures: Mapping[str, Any]) -> str:
    """Return the least and the greatest speed-up of a micro-batch over each strategy compared."""
    gains = {
        PLAIN: figures["over_packing"],
        figures["best_in_transformers"]: figures["over_transformers"],
        figures["best_plain"]: figures["over_best"],
    }
    return ", ".join(f"{_least_to_most(gain)} the speed of {name}" for name, gain in gains.items())


def _runs_today(strategy: Mapping[str, Any]) -> str:
    """Return the cell of a strategy; planned strategies need hf_distca."""
    if strategy["document_layout"] is not None:
        return ""
    return "yes" if strategy["in_transformers"] else "no"


def _meaning_of_names(names: Sequence[str]) -> str:
    """Return sentences on the names of the strategies that are shown."""
    meanings = [ON_RANKS]
    for beginning, meaning in IN_GROUPS.items():
        of_groups = [name for name in names if name.startswith(beginning)]
        if of_groups:
            meanings.append(f"{meaning} {meaning_of_sizes(of_groups[0])}")
    return " ".join([*meanings, PLANNED])


def meaning_of_sizes(strategy: str) -> str:
    """Return a sentence on the numbers in a strategy's name; nothing for a name without."""
    if " × " not in strategy:
        return ""
    groups, ranks = strategy.rpartition(", ")[2].split(" × ")
    divided = (
        f"{groups} groups of {ranks} ranks" if groups != "1" else f"one group of {ranks} ranks"
    )
    return f"{strategy[0].upper()}{strategy[1:]}: {divided} share their documents."


def plan_report(figures: Mapping[str, Any], memory: Mapping[str, Sequence[str]]) -> str:
    """Return one HTML file.

    Args:
        figures: the figures that `hf-distca plan --json` prints with a report.
        memory: rows of the table of memory, the first with the strategies; empty without a model.
    """
    setting = figures["setting"]
    bins = figures["histogram"]
    ranks = figures["by_rank"]
    packed_pairs_M = [pairs / 1e6 for pairs in ranks["pairs_packed"]]
    planned_pairs_M = [pairs / 1e6 for pairs in ranks["pairs"]]
    sent_MB = [count / 1e6 for count in ranks["bytes_sent"]]
    received_MB = [count / 1e6 for count in ranks["bytes_received"]]
    legend = [("planned", "planned"), MEAN]
    load_section = _section(
        "Load of the ranks, before and after",
        [
            (
                "Millions of query-key pairs that each rank computes in a layer. A pair is one "
                "query row and one row of K and V that it sees. Pairs are core attention alone: "
                "the whole step gains less, since other layers take their part of it. hf-distca "
                "simulate predicts both."
            ),
            (
                "Packed in order: documents follow one another, and each rank gets equal tokens. "
                "Planned: the plan that training makes. The most tokens of a rank are then "
                f"{figures['tokens_max_over_mean']:.3f}× the mean."
            ),
        ],
        _figure(
            "Query-key pairs of each rank, before and after",
            loads_picture(
                [
                    ("packed in order", packed_pairs_M, "plain"),
                    ("planned", planned_pairs_M, "planned"),
                ],
                " M",
            ),
            [("plain", "packed in order"), *legend],
        ),
    )
    columns = {
        "packed, million pairs": packed_pairs_M,
        "planned, million pairs": planned_pairs_M,
        "sent, MB": sent_MB,
        "received, MB": received_MB,
        "tokens": ranks["tokens"],
        "tasks": ranks["tasks"],
    }
    bytes_section = _section(
        "Bytes by rank",
        [
            (
                "Megabytes that each rank sends and receives in one layer's forward: rows of Q, K "
                "and V to the rank that computes, and rows of the output O back. All ranks send "
                f"{figures['bytes_total'] / 1e6:,.1f} MB, the busiest rank "
                f"{figures['bytes_bottleneck'] / 1e6:,.1f} MB."
            ),
            (
                "A task is the core attention of query rows that lie side by side in a document. "
                f"The plan has {counted(figures['tasks'], 'task')}; the smallest has "
                f"{counted(figures['min_rows'], 'row')}. {PARTS_OF_STEP[figures['nano_batches']]} "
                f"K and V travel in {counted(figures['stages'], 'stage')}. The memory for rows "
                f"that arrive takes {figures['exchange_buffers'] / 1e6:,.1f} MB on the busiest "
                "rank."
            ),
        ],
        _figure(
            "Megabytes that each rank sends and receives",
            loads_picture(
                [("sent", sent_MB, "planned"), ("received", received_MB, "planned")], " MB"
            ),
            legend,
        ),
        table_of_ranks("Each rank", columns, ",.10g"),
    )
    cut_sections = []
    if figures["advice"]:
        cut_sections.append(_section("Documents are cut", figures["advice"]))
    memory_sections = []
    if memory:
        titles, *rows = [[name, *cells] for name, cells in memory.items()]
        table = _table("Memory of a rank", titles, rows)
        memory_sections.append(
            _section("Memory", [MEMORY], table, f"<p class='caption'>{escape(PARTS_OF_MEMORY)}</p>")
        )
    return _page(
        "hf-distca plan",
        f"The busiest rank has {figures['max_over_mean']:.3f}× the mean core attention; packed in "
        f"order, {figures['packed_max_over_mean']:.2f}×",
        "everything here is counted from the plan of one micro-batch.",
        f"{counted(sum(length_bin['documents'] for length_bin in bins), 'document')}, "
        f"{counted(sum(length_bin['tokens'] for length_bin in bins), 'token')}; "
        f"{ranks_of_tokens(setting)}.",
        [
            _lengths(bins),
            *cut_sections,
            load_section,
            bytes_section,
            *memory_sections,
            _origin({**setting, "planned in": f"{figures['plan_ms']:.1f} ms"}),
        ],
    )


def _page(tool: str, title: str, source: str, lead: str, sections: Sequence[str]) -> str:
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)} – {escape(tool)}</title>
<style>
{style_sheet()}{STYLE.read_text(encoding="utf-8")}</style>
</head>
<body><main>
<header><p class="eyebrow">{escape(tool)}</p><h1>{escape(title)}</h1>
<p><strong>Predictions, not measurements:</strong> {escape(source)}</p>
<p class="lead">{escape(lead)}</p></header>
{"".join(sections)}
</main></body>
</html>
"""


def _section(title: str, sentences: Sequence[str], *parts: str) -> str:
    paragraphs = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)
    return f"<section><h2>{escape(title)}</h2>{paragraphs}{''.join(parts)}</section>"


def _figure(label: str, drawing: Drawing, legend: Sequence[tuple[str, str]]) -> str:
    """Return a picture below its legend, a class and a name for each colour.

    Readers who see neither get the label.
    """
    keys = "".join(f'<li class="{style}">{escape(name)}</li>' for style, name in legend)
    picture = f'<div class="picture" tabindex="0">{drawing.markup(label)}</div>'
    return f'<figure><ul class="legend">{keys}</ul>{picture}</figure>'


def _table(
    caption: str, titles: Sequence[str], rows: Sequence[Sequence[str]], marked: Sequence[str] = ()
) -> str:
    """Return a table whose first column heads the rows.

    Rows whose first cell is in `marked` stand out.
    """
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
    body = []
    for name, *values in rows:
        highlight = ' class="marked"' if name in marked else ""
        cells = "".join(f"<td>{escape(value)}</td>" for value in values)
        body.append(f'<tr{highlight}><th scope="row">{escape(name)}</th>{cells}</tr>')
    return (
        f'<p class="caption" aria-hidden="true">{escape(caption)}</p>'
        f'<div class="table" tabindex="0" role="region" aria-label="{escape(caption)}"><table '
        f'aria-label="{escape(caption)}"><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
    )


def table_of_ranks(
    caption: str, columns: Mapping[str, Sequence[float]], numbers: str = ",.3f"
) -> str:
    """Return a folded table with a row for each rank; empty if there are too many ranks to read.

    Args:
        columns: [ranks] values of each column, by its title.
    """
    values_of_ranks = list(zip(*columns.values(), strict=True))
    if len(values_of_ranks) > MOST_RANKS:
        return ""
    rows = []
    for rank, values in enumerate(values_of_ranks):
        cells = [format(value, numbers) for value in values]
        rows.append([str(rank), *cells])
    table = _table(caption, ["rank", *columns], rows)
    return f"<details><summary>{escape(caption)}</summary>{table}</details>"


def _code(text: str, label: str) -> str:
    """Return a block to copy: a click selects all of the text."""
    return f'<pre tabindex="0" aria-label="{escape(label)}">{escape(text)}</pre>'


def _origin(facts: Mapping[str, Any], sentences: Sequence[str] = ()) -> str:
    """Return the section on the settings that were given, and on what else figures come from."""
    rows = "".join(
        "<tr><th"
        f' scope="row">{escape(name.replace("_", " "))}</th><td>{escape(str(value))}</td></tr>'
        for name, value in facts.items()
    )
    return _section(
        "Where this comes from", sentences, f'<table class="facts"><tbody>{rows}</tbody></table>'
    )


def _lengths(bins: Sequence[Mapping[str, Any]]) -> str:
    """Return the section on documents by length, from bins of `histogram`."""
    # The longest documents that hold half of the tokens.
    document_share = 0.0
    token_share = 0.0
    for length_bin in reversed(bins):
        document_share += length_bin["document_share"]
        token_share += length_bin["token_share"]
        shortest = length_bin["shortest"]
        if token_share >= 0.5:
            break
    return _section(
        "Document lengths",
        [
            f"{document_share:.1%} of the documents have {shortest:,} tokens or more; "
            f"together they hold {token_share:.1%} of all tokens. The cost of core attention grows "
            "with the square of a document's length; the cost of all other layers grows with the "
            "length."
        ],
        _figure(
            "Shares of documents and of tokens by document length",
            lengths_picture(bins),
            [("documents", "share of documents"), ("tokens", "share of tokens")],
        ),
    )
