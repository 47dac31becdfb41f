"""Write the tables of all pages from the committed results of benchmarks.

A page names a table by `<!-- name -->`, and the commands that made its figures by `<!-- name
commands -->`. Whatever follows such a mark is written anew.

Run: python benchmarks/result_tables.py
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
RESULTS = ROOT / "benchmarks" / "results"
MARK = re.compile(r"<!-- (\w+)( commands)? -->\n(?:\n(?:(?:\|.*\n)+|```\n(?:(?!```).*\n)+```\n))?")

Rows = Iterator[tuple[str, ...]]
"""The header, then the rows of a table."""
TABLES: dict[str, tuple[Callable[[], Rows], tuple[str, ...]]] = {}
"""By name: the function that makes the rows, and the names of its results."""

STEP_TIMES = {
    "step_time": "2",
    "step_time_finalists": "2, 150 rounds",
    "step_time_4_ranks": "4",
    "step_time_100_mbit": "2, 100 Mbit/s",
    "step_time_420_mbit": "2, 420 Mbit/s",
    "step_time_960_mbit": "2, 960 Mbit/s",
}
"""Results of step_time.py, and what the column "ranks" says of each."""
PLANNED = ("shared", "unshared")
"""How prefix_plans.py plans sequences with equal prefixes."""
CORPORA = {"wlbllm": "pretraining mix", "prolong": "ProLong"}


def table_of(*names: str) -> Callable[[Callable[[], Rows]], Callable[[], Rows]]:
    """Enter a table under the name of the function that makes it."""

    def enter(make: Callable[[], Rows]) -> Callable[[], Rows]:
        TABLES[make.__name__] = make, names
        return make

    return enter


def stored(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def result(name: str) -> Any:
    return stored(name)["result"]


def command(name: str) -> str:
    return re.sub(r" --against \S+", "", stored(name)["command"])


def quartiles(spread: dict[str, float]) -> str:
    return f"{spread['median']:.2f} ({spread['lower']:.2f} to {spread['upper']:.2f})"


COMPARED = {
    "over_plain": "TRL's packing",
    "over_transformers": "the best in transformers",
    "over_best_other": "the best known",
}
"""Gains by micro-batch of typical_data.py, and what they are over."""


@table_of("typical_data")
def expectations() -> Rows:
    """Medians of `expected_gains`, a row for each kind of documents."""
    found: dict[str, list[Any]] = {}
    for row in result("typical_data")["settings"]:
        found.setdefault(row["documents"], []).append(row)
    counts = [row["ranks"] for row in next(iter(found.values()))]
    names = ("packing", "transformers", "any")
    yield "documents, GPUs", *(f"{count}, {name}" for count in counts for name in names)
    for documents, rows in found.items():
        medians = (row[f"{gain}_of_batches"]["median"] for row in rows for gain in COMPARED)
        yield documents, *(f"{median:.2f}" for median in medians)


@table_of("typical_data")
def expected_gains() -> Rows:
    over = (f"over {name}" for name in COMPARED.values())
    yield "documents", "GPUs", "attention that packing drops", *over
    for row in result("typical_data")["settings"]:
        yield (
            row["documents"],
            str(row["ranks"]),
            f"{row['plain_drops']:.0%}",
            *(quartiles(row[f"{gain}_of_batches"]) for gain in COMPARED),
        )


@table_of("typical_data")
def one_strategy() -> Rows:
    yield (
        "documents",
        "GPUs",
        "best strategy of most micro-batches",
        "over the best of each",
        "over the best single one",
        "over the best single one in transformers",
    )
    gains = ("over_best_other", "over_best_fixed", "over_fixed_in_transformers")
    for row in result("typical_data")["settings"]:
        figures = (f"{row[gain]:.2f}" for gain in gains)
        yield row["documents"], str(row["ranks"]), row["best_other"], *figures


@table_of("trl_packing")
def trl_packing() -> Rows:
    yield "documents", "GPUs", "rows filled", "TRL's rows, tokens/s", "plain packing", "ratio"
    for row in result("trl_packing")["settings"]:
        speeds = (f"{row[f'{name}_tokens_per_second']:,.0f}" for name in ("trl", "plain"))
        yield (
            row["documents"],
            str(row["ranks"]),
            f"{row['filled']:.1%}",
            *speeds,
            f"{row['plain_over_trl']:.2f}",
        )


@table_of("async_grpo")
def async_grpo() -> Rows:
    yield (
        "batcher",
        "dropped",
        "micro-batches",
        "rows",
        "rows over tokens",
        "busiest, rows",
        "pairs",
    )
    found = result("async_grpo")
    for row in found["batchers"]:
        ratios = (
            f"{row[name]:.2f}" for name in ("rows_over_tokens", "busiest_rows", "busiest_pairs")
        )
        name = {"trl": "TRL's", "here": "here"}[row["batcher"]]
        dropped = f"{row['dropped']} of {found['rollouts']}"
        yield name, dropped, str(row["micro_batches"]), f"{row['rows']:,}", *ratios


def gain_by_formula(row: dict[str, float]) -> float:
    """Return the speed-up over plain packing by the formula that pages show."""
    return (row["t"] * row["r"] + row["m"]) / (row["r"] + 1 + row["w"])


@table_of("typical_data")
def plain_packing() -> Rows:
    yield "documents", "GPUs", "attention dropped", "r", "m", "t", "w", "formula", "simulated"
    for row in result("typical_data")["settings"]:
        terms = (f"{row[name]:.2f}" for name in ("r", "m", "t", "w"))
        dropped = f"{row['plain_drops']:.0%}"
        formula = f"{gain_by_formula(row):.2f}"
        yield (
            row["documents"],
            str(row["ranks"]),
            dropped,
            *terms,
            formula,
            f"{row['over_plain']:.2f}",
        )


@table_of("predicted_steps")
def predicted_steps() -> Rows:
    yield "documents, strategy", "measured, s", "predicted / measured: median (quartiles)"
    for name, found in result("predicted_steps")["steps"].items():
        if "seconds" in found:
            ratio = "{median:.3f} ({lower:.3f} to {upper:.3f})".format(
                **found["predicted / measured"]
            )
            yield name, f"{found['seconds']['median']:.2f}", ratio


@table_of("reference_steps")
def reference_steps() -> Rows:
    yield (
        "set",
        "R² of the baseline",
        "balanced: error, mean",
        "90 %",
        "whole documents: error, mean",
        "90 %",
        "ranks that share a document",
    )
    for name, found in result("reference_steps").items():
        balanced = (f"{found[f'balanced_error_{which}']:.1%}" for which in ("mean", "p90"))
        whole = ["", "", ""]
        if "whole_steps" in found:
            counts = ", ".join(map(str, found["whole_ranks_a_document"]))
            origin = "named" if found["whole_ranks_a_document_named"] else "not named; fits best"
            errors = (f"{found[f'whole_error_{which}']:.1%}" for which in ("mean", "p90"))
            whole = [*errors, f"{counts} ({origin})"]
        yield name, f"{found['baseline_r2']:.4f}", *balanced, *whole


@table_of("hybrid_steps")
def hybrid_steps() -> Rows:
    yield (
        "documents, longest",
        "GPUs",
        "strategy",
        "step, s",
        "over whole",
        "attention, s",
        "mixing, s",
        "waits, s",
        "cut",
    )
    for row in result("hybrid_steps")["settings"]:
        seconds = (f"{row[name]:.2f}" for name in ("attention", "mixing", "waits"))
        yield (
            f"{CORPORA[row['documents']]}, {row['longest'] // 1024}K",
            str(row["ranks"]),
            row["strategy"],
            f"{row['seconds']:.2f}",
            f"{row['over_whole']:.2f}",
            *seconds,
            f"{row['documents_cut']:.1%}",
        )


@table_of("paper_tables")
def paper_tables() -> Rows:
    """Settings of the paper; those that differ in the longest document alone, with equal figures,
    in one row.
    """
    by_setting: dict[tuple[str, str, str], dict[int, str]] = {}
    published = {}
    for row in result("paper_tables")["settings"]:
        figures = f"{row['speed_up']:.2f} ({row['fixed_speed_up']:.2f})"
        by_setting.setdefault((row["model"], row["documents"], row["longest"]), {})[row["gpus"]] = (
            figures
        )
        published[row["model"], row["documents"]] = row["published"]
    folded: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for (model, documents, longest), by_gpus in by_setting.items():
        folded.setdefault((model, documents, tuple(by_gpus.values())), []).append(longest)
    yield "model", "documents", "longest", *(f"{gpus} GPUs" for gpus in by_gpus), "the paper"
    for (model, documents, figures_of_row), longest_ones in folded.items():
        yield (
            model,
            CORPORA[documents],
            ", ".join(longest_ones),
            *figures_of_row,
            published[model, documents],
        )


@table_of("chosen")
def chosen_networks() -> Rows:
    found = result("chosen")["networks"]
    kinds = list(dict.fromkeys(row["documents"] for row in found))
    by_network: dict[tuple[int, float], dict[str, Any]] = {}
    for row in found:
        by_network.setdefault((row["GPUs a node"], row["GB/s"]), {})[row["documents"]] = row
    yield "GPUs a node", "GB/s between nodes", *kinds
    for (per_node, network), of in by_network.items():
        yield (
            str(per_node),
            f"{network:g}",
            *(f"{of[kind]['median']:.2f} ({of[kind]['worst']:.2f})" for kind in kinds),
        )


@table_of("typical_data")
def chosen_data_sets() -> Rows:
    yield "documents", "GPUs", "median", "worst", "micro-batches below 0.99"
    for row in result("typical_data")["settings"]:
        median, worst = (f"{row['over_best_fitting'][name]:.2f}" for name in ("median", "worst"))
        yield (
            row["documents"],
            str(row["ranks"]),
            median,
            worst,
            f"{row['slower_than_best_fitting']:.1%}",
        )


@table_of(*STEP_TIMES)
def step_time() -> Rows:
    yield "ranks", "documents", "best other", "whole documents", "packed in order"
    for name, ranks in STEP_TIMES.items():
        found = result(name)["derived"]
        for mix in dict.fromkeys(key.split(":")[0] for key in found):
            strategies = ("best other", "whole", "packed")
            ratios = [found.get(f"{mix}: {strategy} / auto") for strategy in strategies]
            yield ranks, mix, *(quartiles(ratio) if ratio else "–" for ratio in ratios)


def beside_peers(name: str) -> Rows:
    """Rows of strategies that train the same documents."""
    found = result(name)
    yield (
        "ranks",
        "documents",
        "strategy",
        "losses differ by",
        "m",
        "MiB",
        "tokens/s",
        "speed-up of hf_distca",
    )
    for name, of_strategy in found["strategies"].items():
        setting, mix, *words = name.split(", ")
        speed, imbalance = (
            found["figures"][f"{name}, {figure}"] for figure in ("tokens/s", "imbalance")
        )
        ratio = found["derived"].get(f"{setting}, {mix}: hf_distca / {', '.join(words)}")
        yield (
            setting.removesuffix(" ranks"),
            mix,
            ", ".join(words),
            f"{of_strategy['largest_difference_of_losses']:.0e}",
            f"{imbalance['median']:.2f}",
            f"{of_strategy['MiB']:.0f}",
            f"{speed['median']:.0f} ({speed['lower']:.0f} to {speed['upper']:.0f})",
            quartiles(ratio) if ratio else "",
        )


@table_of("peers")
def peers() -> Rows:
    yield from beside_peers("peers")


@table_of("peers_ringmaster")
def peers_ringmaster() -> Rows:
    yield from beside_peers("peers_ringmaster")


@table_of("prefixes_tree_recurrence")
def prefixes_tree_recurrence() -> Rows:
    found = result("prefixes_tree_recurrence")
    yield (
        "documents",
        "strategy",
        "rows",
        "rows scanned",
        "MiB",
        "loss and gradients differ by",
        "seconds",
        "over hf_distca",
    )
    for name in found["largest_difference"]:
        case, strategy = name.split(", ")
        counted = {key: found["counted"][f"{name}, {key}"] for key in ("rows", "scanned", "MiB")}
        ratio = found["derived"].get(f"{case}, {strategy} / hf_distca")
        yield (
            case,
            strategy,
            f"{counted['rows']:.0f}",
            f"{counted['scanned']:.0f}",
            f"{counted['MiB']:.0f}",
            f"{found['largest_difference'][name]:.0e}",
            quartiles(found["figures"][f"{name}, s"]),
            quartiles(ratio) if ratio else "",
        )


@table_of("peers")
def peers_ulysses() -> Rows:
    found = result("peers")
    yield "rows, attention", "loss of the first step"
    yield (
        "all documents in one row",
        found["strategies"]["2 ranks, one long, Ulysses"]["first_loss"],
    )
    yield "two rows of equal tokens", found["ulysses_two_rows_first_loss"]
    yield 'one row, attention "sdpa"', found["ulysses_sdpa_first_loss"]


@table_of("padded")
def padded() -> Rows:
    found = result("padded")
    yield "strategy", "rows", "seconds", "speed-up of hf_distca", "MiB"
    for name, rows in found["rows"].items():
        ratio = found["derived"].get(f"{name} / hf_distca")
        yield (
            name,
            str(rows),
            quartiles(found["figures"][f"{name}, s"]),
            quartiles(ratio) if ratio else "",
            f"{found['memory_mib'][name]:.0f}",
        )


@table_of("padded")
def padded_before_model() -> Rows:
    found = result("padded")["figures"]
    step_s = seconds_of_packed()
    yield "part", "ms", "of the packed step on an H200"
    for name, spread in found.items():
        if name.endswith(", ms"):
            yield (
                name.removesuffix(", ms"),
                quartiles(spread),
                f"{spread['median'] / 1e3 / step_s:.2%}",
            )


@table_of("prefixes")
def prefixes() -> Rows:
    yield from _shared_prefixes(result("prefixes"))


@table_of("prefixes_hybrid", "prefixes_hybrid_again")
def prefixes_hybrid() -> Rows:
    header, *rows = _shared_prefixes(result("prefixes_hybrid"))
    _, *rows_again = _shared_prefixes(result("prefixes_hybrid_again"))
    yield header
    for case, case_again in zip(rows, rows_again, strict=True):
        yield case
        yield f"{case_again[0]}, again", *case_again[1:]


def _shared_prefixes(found: dict[str, Any]) -> Rows:
    yield (
        "sequences",
        "rows, unshared",
        "rows, shared",
        "ratio",
        "seconds, unshared",
        "seconds, shared",
        "speed-up",
        "MiB, unshared",
        "MiB, shared",
    )
    for case in ("groups", "pairs", "sessions"):
        names = [f"{case}, {strategy}" for strategy in ("unshared", "shared")]
        unshared, shared = (found["rows"][name] for name in names)
        yield (
            case,
            str(unshared),
            str(shared),
            f"{unshared / shared:.2f}",
            *(quartiles(found["figures"][f"{name}, s"]) for name in names),
            quartiles(found["derived"][f"{case}, unshared / shared"]),
            *(f"{found['memory'][f'{name}, MiB']:.0f}" for name in names),
        )


def seconds_of_packed() -> float:
    return float(padded_on_gpu()["packed, all at once"]["step_s"])


def padded_on_gpu() -> dict[str, Any]:
    found: dict[str, Any] = stored("gpu_padded")["parts"]["padded"]["figures"]["strategies"]
    return found


@table_of("overlap", "overlap_one_document")
def overlap() -> Rows:
    yield (
        "documents",
        "hidden by",
        "hidden",
        "hidden, by waits",
        "limited link: step that waits",
        "free link: overhead",
    )
    for name, documents, how, mark in (
        ("overlap", "several", "ping-pong", ""),
        ("overlap_one_document", "one", "stages", "one_document_"),
    ):
        found = {
            key.removeprefix(mark): quartiles(spread)
            for key, spread in result(name)["derived"].items()
        }
        link = found["what the limit adds to waiting"]
        yield documents, "local tasks first", *_hidden(found, "own first"), link, ""
        yield documents, how, *_hidden(found, how), link, found[f"overhead: {how} / own first"]


def _hidden(found: dict[str, str], how: str) -> tuple[str, str]:
    return found[f"hidden by {how}"], found[f"hidden by {how}, by waits"]


@table_of("overlap_nodes")
def overlap_nodes() -> Rows:
    found = result("overlap_nodes")["derived"]
    yield "node-aware plan over flat plan", "as users have them", "every exchange waited for"
    for what, key in (
        ("bytes over the link", "over the link: node-aware{} / flat{}"),
        ("time that the link adds", "exposed: node-aware{} / flat{}"),
        ("the same, by waits", "exposed: node-aware{} / flat{}, by waits"),
        ("step on a free link", "free: node-aware{} / flat{}"),
    ):
        yield (
            what,
            *(quartiles(found["nodes_" + key.format(kind, kind)]) for kind in ("", " waiting")),
        )


@table_of("planner")
def planner() -> Rows:
    found = result("planner")
    yield (
        "layout",
        "largest load above the mean",
        "bytes",
        "bytes of the busiest rank",
        "planning, ms",
        "reference, ms",
    )
    for layout in ("fixed", "auto"):
        for tolerance in ("0.001", "0.01"):
            row = found[f"{layout}, at {tolerance}"]
            yield (
                layout,
                f"{row['percent_above_mean_worst']:.1f}%",
                quartiles(row["bytes_total_ratio"]),
                quartiles(row["bytes_bottleneck_ratio"]),
                f"{row['plan_ms']['median']:.1f}",
                f"{row['their_plan_ms']['median']:.1f}",
            )


@table_of("planner")
def planner_nodes() -> Rows:
    found = result("planner")["nodes"]
    yield (
        "layout",
        "bytes between nodes",
        "largest",
        "time of the busiest link",
        "largest",
        "planning, ms",
    )
    for layout in ("fixed", "auto"):
        row = found[f"{layout}, at 0.001"]
        ratios = ("bytes_between_nodes_ratio", "link_seconds_ratio")
        cells = (
            cell
            for name in ratios
            for cell in (f"{row[name]['median']:.3f}", f"{row[f'{name}_worst']:.2f}")
        )
        yield layout, *cells, f"{row['plan_ms']['median']:.0f}"


@table_of("plan_time")
def plan_time() -> Rows:
    times = result("plan_time")["figures"]
    medians = {
        name.removesuffix(", ms"): figure["median"]
        for name, figure in times.items()
        if name.endswith(", ms")
    }
    return by_documents_and_ranks(medians, "ms")


@table_of("plan_time")
def plan_memory() -> Rows:
    return by_documents_and_ranks(result("plan_time")["memory_mb"], "MB")


def by_documents_and_ranks(figures: Mapping[str, float], unit: str) -> Rows:
    """Rows of the figures of chosen plans: a row for each kind of documents, a column for each
    number of ranks.
    """
    keys = [re.fullmatch(r"chosen, (\d+) ranks, (.*)", name) for name in figures]
    ranks = list(dict.fromkeys(key[1] for key in keys if key))
    yield "documents", *(f"{count} ranks, {unit}" for count in ranks)
    for kind in dict.fromkeys(key[2] for key in keys if key):
        cells = (f"{figures[f'chosen, {count} ranks, {kind}']:.0f}" for count in ranks)
        yield CORPORA.get(kind, kind), *cells


@table_of("typical_data", "typical_data_4096")
def thousands_of_ranks() -> Rows:
    """Predicted gains over the best other strategy on 64 and on 4,096 GPUs."""
    few = {
        row["documents"]: row for row in result("typical_data")["settings"] if row["ranks"] == 64
    }
    many = {row["documents"]: row for row in result("typical_data_4096")["settings"]}
    yield "documents", "64 GPUs", "4,096 GPUs", "best other on 4,096"
    for kind, row in many.items():
        gains = (few[kind]["over_best_other"], row["over_best_other"])
        yield kind, *(f"{gain:.2f}" for gain in gains), row["best_other"]


@table_of("pods")
def pods() -> Rows:
    """Predicted step with pods, divided by the predicted step of one plan for all ranks."""
    found = result("pods")["pods"]
    ranks = list(dict.fromkeys(row["ranks"] for row in found))
    yield "documents", *(f"{count} ranks, median / worst" for count in ranks)
    for kind in dict.fromkeys(row["documents"] for row in found):
        of_kind = [row for row in found if row["documents"] == kind]
        ratios = (f"{row['median']:.3f} / {row['worst']:.3f}" for row in of_kind)
        yield CORPORA.get(kind, kind), *ratios


@table_of("growth")
def growth() -> Rows:
    """What a rank takes for its part of a micro-batch, by number of ranks."""
    found = result("growth")
    exponents = found["exponents"]
    names = tuple(exponents)
    yield "ranks", "plans", *names
    for row in found["ranks"]:
        cells = ("" if row[name] is None else f"{row[name]:,.0f}" for name in names)
        yield f"{row['ranks']:,}", row["plans"], *cells
    yield "exponent of ranks", "pods", *(f"{exponents[name]:.2f}" for name in names)


@table_of("growth")
def growth_of_sampler() -> Rows:
    """What drawing micro-batches takes for each document of a data set, by number of ranks."""
    found = result("growth")["sampler"]
    names = [name for name in found[0] if name != "ranks"]
    yield "ranks", *names
    for row in found:
        start, epoch, memory = (row[name] for name in names)
        yield f"{row['ranks']:,}", f"{start:.2f}", f"{epoch:.2f}", f"{memory:.0f}"


@table_of("prefix_plans")
def prefix_plans() -> Rows:
    found = result("prefix_plans")
    gathering = ("gathered, GB", "merged, GB", "whole paths gathered, GB")
    yield "sequences", "computed", "shared", "planning, ms", "unshared, ms", *gathering
    for kind, counts in found["counts"].items():
        planning = (f"{found['figures'][f'{kind}, {how}, ms']['median']:.0f}" for how in PLANNED)
        rows = (f"{counts[name] / 1e6:.1f} M" for name in ("computed rows", "shared rows"))
        yield kind, *rows, *planning, *(f"{counts[name]:.0f}" for name in gathering)


@table_of("encoder_balance")
def encoder_balance() -> Rows:
    """Work of encoders, by number of ranks and by who encodes an image."""
    figures = (
        *("patches, busiest over mean", "work, busiest over mean"),
        *("busiest, s", "travelling, GB", "pixels read by the busiest rank, GB"),
    )
    yield (
        "ranks",
        "images encoded",
        *("patches, busiest over mean", "work, busiest over mean", "busiest encoder, s"),
        *("features that travel, GB", "pixels read by the busiest rank, GB"),
    )
    for ranks, strategies in result("encoder_balance")["ranks"].items():
        for name, found in strategies.items():
            spreads = (found[figure] for figure in figures)
            yield ranks, name, *(f"{of['mean']:.2f} ({of['worst']:.2f})" for of in spreads)


@table_of("encoder_balance")
def encoder_steps() -> Rows:
    """Predicted seconds of a step with images, by strategy and number of ranks."""
    steps = result("encoder_balance")["steps"]
    yield "step, s", *(f"{ranks} ranks" for ranks in steps)
    for name in next(iter(steps.values())):
        found = (of[name] for of in steps.values())
        yield name, *(f"{of['mean']:.2f} ({of['worst']:.2f})" for of in found)


@table_of("targets")
def targets() -> Rows:
    yield "targets, turns of a session", "median", "most"
    for kind, shares in result("targets")["counts"].items():
        yield kind, *(f"{shares[name]:.2f}" for name in ("median", "most"))


@table_of("distillation")
def distillation() -> Rows:
    yield "loss and models", "MiB", "loss"
    for way, found in result("distillation")["ways"].items():
        yield way, f"{found['MiB']:,.0f}", f"{found['loss']:.4g}"


@table_of("left_padding")
def left_padding() -> Rows:
    """Rows of rollouts, by the way in which positions are counted."""
    yield "positions count", "tokens", "rows that are computed"
    for way, found in result("left_padding")["rows"].items():
        yield (
            f"from the {way}" if way == "first token" else way,
            *(f"{found[figure]:,}" for figure in ("tokens", "rows")),
        )


@table_of("left_padding")
def left_padding_errors() -> Rows:
    """Errors of hidden states, by dtype and padding."""
    yield (
        *("dtype", "columns of padding"),
        *("error, columns", "error, from the first token", "difference"),
    )
    for dtype, found in result("left_padding")["errors"].items():
        for padding, errors in found.items():
            yield dtype, padding, *(f"{error:.1e}" for error in errors.values())


@table_of("dispatch")
def dispatch() -> Rows:
    found = result("dispatch")["figures"]
    yield (
        "layout",
        "nano-batches",
        "layer, ms",
        "of it dispatching",
        "of it collectives",
        "the model alone",
    )
    for layout in ("joint", "fixed"):
        for halves, name in (("2", "default"), ("1", "no turns")):
            of = f"{layout}, {name}"
            parts = (f"{of}, ms", f"{of}: dispatch, ms", f"{of}: collectives, ms", "plain, ms")
            yield layout, halves, *(f"{found[part]['median']:.1f}" for part in parts)


@table_of("checkpointing")
def checkpointing() -> Rows:
    found = result("checkpointing")
    yield "figure", "ratio"
    yield (
        "step that keeps core attention over one that computes it again",
        f"{found['step_ratio']:.2f}",
    )
    yield (
        "time saved in a layer over one forward of core attention",
        f"{found['saved_fraction']:.2f}",
    )


@table_of(
    *("memory_loss", "memory_exchange", "long_document"),
    *("memory_estimate", "memory_estimate_offload", "memory_images"),
)
def memory() -> Rows:
    loss = result("memory_loss")["derived"]
    document = result("long_document")
    yield "figure", "ratio"
    for tokens in dict.fromkeys(key.split()[0] for key in loss):
        memory_ratio, time_ratio = (
            loss[f"{tokens} chunked / own, {unit}"]["median"] for unit in ("MiB", "s")
        )
        yield f"loss of {tokens} tokens in chunks over all logits: memory", f"{memory_ratio:.2f}"
        yield f"loss of {tokens} tokens in chunks over all logits: time", f"{time_ratio:.2f}"
    yield (
        "exchange of one document, K and V in stages over all at once",
        f"{result('memory_exchange')['exchange_memory_ratio']:.2f}",
    )
    yield (
        f"document of {document['tokens']} tokens on 4 ranks: largest relative error",
        f"{max(document['relative_errors'].values()):.0e}",
    )
    yield "the same: estimated over measured memory", _from_to(document["estimated_over_measured"])
    yield (
        "training of four configurations: estimated over measured memory",
        _from_to(_of_configurations("memory_estimate", "estimated_over_measured")),
    )
    yield (
        "training of two with offload: estimated over measured memory of device and host",
        _from_to(_of_configurations("memory_estimate_offload", "estimated_over_measured")),
    )
    yield (
        "the same: estimated over copied bytes of host memory",
        _from_to(_of_configurations("memory_estimate_offload", "host_estimated_over_copied")),
    )
    images = result("memory_images")["configurations"].values()
    yield (
        "training on images, two models, three configurations each: counted over measured memory",
        _from_to([found["counted_over_measured"] for found in images]),
    )


def _of_configurations(name: str, figure: str) -> list[float]:
    """A figure of each rank of all configurations of a result."""
    configurations = result(name)["configurations"].values()
    return [ratio for configuration in configurations for ratio in configuration[figure]]


def _from_to(ratios: list[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


@table_of("memory_guide")
def memory_guide() -> Rows:
    found = result("memory_guide")["guide"]
    sizes = list(found[0]["longest"])
    yield "model", "GPUs", "strategy", *(f"{size} GB" for size in sizes)
    for row in found:
        if any(row["longest"].values()):
            fitting = (str(row["longest"][size]) if row["longest"][size] else "–" for size in sizes)
            yield row["model"], str(row["ranks"]), row["strategy"], *fitting


def by_transport(name: str) -> list[tuple[str, Any]]:
    return [("TCP", result(name)), ("NIXL", result(f"{name}_nixl"))]


@table_of("servers", "servers_nixl")
def servers() -> Rows:
    yield "rows over", "speed-up (quartiles)", "rank's finishing time / server's (quartiles)"
    for transport, found in by_transport("servers"):
        yield (
            transport,
            *(quartiles(found["of_rounds"][figure]) for figure in ("speedup", "finish_ratio")),
        )


@table_of("faults", "faults_nixl")
def faults() -> Rows:
    yield "rows over", "servers killed", "while computing", "steps", "steps lost"
    for transport, found in by_transport("faults"):
        yield transport, *(str(found[figure]) for figure in ("kills", "in_a_call", "steps", "lost"))


@table_of("gpu", "gpu_flash_attn_3")
def gpu() -> Rows:
    parts = [stored(name)["parts"] for name in ("gpu", "gpu_flash_attn_3")]
    attention = [each["exchange"]["figures"]["8 blocks"]["attention_ms"] for each in parts]

    def step(what: str) -> tuple[str, ...]:
        return tuple(
            f"{each['training']['figures']['variants'][what]['step_s']:.2f} s" for each in parts
        )

    yield "kernel of `hf_distca`", "`torch_varlen`", "`flash_attn_3`"
    yield "attention of 16,384 tokens", *(f"{each:.0f} ms" for each in attention)
    yield "step, documents with a long tail", *step("distca, documents")
    yield "step, one document", *step("distca, one document")
    yield 'step, one document, stock "sdpa"', *step("sdpa, one document")


@table_of("gpu_replays")
def gpu_replays() -> Rows:
    yield (
        "documents",
        "whole documents: busiest rank over mean",
        "planned",
        "busiest rank, times as fast",
    )
    for name, found in stored("gpu_replays")["parts"]["replays"]["figures"]["plans"].items():
        figures = ("whole_busiest_over_mean", "busiest_over_mean", "speed_up_of_busiest")
        yield name, *(f"{found[figure]:.2f}" for figure in figures)


@table_of("gpu_padded")
def gpu_padded() -> Rows:
    yield "strategy", "step", "over packed"
    for name, figures in padded_on_gpu().items():
        yield name, f"{figures['step_s']:.2f} s", f"{figures['step_s'] / seconds_of_packed():.1f}"


@table_of("gpu_loss_chunks")
def gpu_loss_chunks() -> Rows:
    found = result("gpu_loss_chunks")
    yield "setting", "step", "peak memory", "counted before", "counted now"
    for name, step in found["steps"].items():
        memory = found["memory"].get(name, {})
        sizes = step.get("peak_gb"), memory.get("counted_before_gb"), memory.get("counted_gb")
        yield (
            name,
            f"{step['step_s']:.3f} s",
            *("–" if size is None else f"{size:g} GB" for size in sizes),
        )


@table_of("convergence")
def convergence() -> Rows:
    found = result("convergence")
    ends = (f"{way}, last 100 steps" for way in found["last_losses"])
    yield "seed", *ends, "mean difference of the curves"
    losses_of_ways = zip(*found["last_losses"].values(), strict=True)
    differences = found["difference_of_ways"]
    for seed, (losses, difference) in enumerate(zip(losses_of_ways, differences, strict=True)):
        yield str(seed), *(f"{loss:.3f}" for loss in losses), f"{difference:.4f}"
    of_seeds = found["difference_of_seeds"]
    yield "two seeds, one way", "", "", f"{min(of_seeds):.4f} to {max(of_seeds):.4f}"


@table_of("tasks")
def tasks() -> Rows:
    yield (
        *("task", "length", "chance", "stock", "planned"),
        *("difference", "its standard error", "five seeds lie within"),
    )
    for row in result("tasks")["rows"]:
        of_seeds = max(max(shares) - min(shares) for shares in row["seeds"].values())
        yield (
            row["task"],
            f"{row['length']:,}",
            *(f"{row[name]:.3f}" for name in ("chance", "stock", "planned")),
            f"{row['difference']:+.3f}",
            f"{row['standard error of the difference']:.3f}",
            f"{of_seeds:.3f}",
        )


@table_of("dpo_curves", "grpo_curves")
def preference_curves() -> Rows:
    yield (
        *("training", "seed"),
        *("stock, first 10 steps", "stock, last 10 steps", "planned, last 10 steps"),
        *("mean difference of the curves", "two seeds, one way", "steps alike"),
    )
    for name in ("dpo", "grpo"):
        figures = result(f"{name}_curves")[name]
        of_seeds = figures["difference_of_seeds"]
        for seed, alike in enumerate(figures["steps_alike"]):
            values = (figures["first"]["stock"], *figures["last"].values())
            difference = figures["difference_of_ways"][seed]
            yield (
                name.upper(),
                str(seed),
                *(f"{of_seed[seed]:.3f}" for of_seed in values),
                f"{difference:.1e}" if difference else "0",
                f"{max(of_seeds):.3f}",
                f"{alike} of {figures['steps']}",
            )


def table(name: str) -> str:
    header, *rows = TABLES[name][0]()
    return (
        "\n".join("| " + " | ".join(row) + " |" for row in (header, ("---",) * len(header), *rows))
        + "\n"
    )


def commands(name: str) -> str:
    return "\n".join(["```", *dict.fromkeys(map(command, TABLES[name][1])), "```"]) + "\n"


def written(text: str) -> str:
    """Return a page with its tables and commands written anew."""
    return MARK.sub(
        lambda mark: mark[0].split("\n")[0] + f"\n\n{(commands if mark[2] else table)(mark[1])}",
        text,
    )


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page.read_text()))
