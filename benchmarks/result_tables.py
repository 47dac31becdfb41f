"""Writes the tables of README.md and of pages of docs/ that come from committed results.

python benchmarks/result_tables.py
"""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
RESULTS = ROOT / "benchmarks" / "results"
MARK = re.compile(r"<!-- (\w+) -->\n(?:\n(?:\|.*\n)+)?")


STEP_TIMES = {
    "step_time": "2",
    "step_time_4_ranks": "4",
    "step_time_100_mbit": "2, 100 Mbit/s",
    "step_time_420_mbit": "2, 420 Mbit/s",
}
"""Results of step_time.py: ranks, and the link between them where it is limited."""


def result(name: str) -> Any:
    """What a benchmark found."""
    return json.loads((RESULTS / f"{name}.json").read_text())["result"]


def lines(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ("---",) * len(header), *rows)) + "\n"


def predicted_steps() -> str:
    """Steps of two CPU ranks."""
    rows = []
    for name, found in result("predicted_steps")["steps"].items():
        if "seconds" in found:
            ratio = found["predicted / measured"]
            spread = f"{ratio['median']:.3f} ({ratio['lower']:.3f} to {ratio['upper']:.3f})"
            rows.append((name, f"{found['seconds']['median']:.2f}", spread))
    return lines(("documents, way", "measured, s", "predicted / measured: median (quartiles)"), rows)


def reference_steps() -> str:
    """Steps of the reference system."""
    rows = [
        (
            name,
            f"{found['baseline_r2']:.4f}",
            *(f"{found[f'balanced_error_{which}']:.1%}" for which in ("mean", "p90")),
            *(f"{found[f'whole_error_{which}']:.1%}" if "whole_steps" in found else "" for which in ("mean", "p90")),
        )
        for name, found in result("reference_steps").items()
    ]
    return lines(("set", "R² of the baseline", "balanced: error, mean", "90 %", "whole: error, mean", "90 %"), rows)


def paper_tables() -> str:
    """The paper's settings."""
    rows = [
        (
            row["model"],
            {"wlbllm": "pretraining mix", "prolong": "ProLong"}[row["documents"]],
            row["longest"],
            str(row["gpus"]),
            f"{row['speed_up']:.2f}",
            f"{row['fixed_speed_up']:.2f}",
            row["published"],
        )
        for row in result("paper_tables")["settings"]
    ]
    return lines(("model", "documents", "longest", "GPUs", "joint", "fixed", "the paper"), rows)


def typical_data() -> str:
    """What to expect for four kinds of documents."""
    rows = [
        (
            row["documents"],
            str(row["ranks"]),
            f"{row['imbalance']:.2f}",
            f"{row['attention_share']:.0%}",
            f"{row['over_plain']:.2f} ({row['plain_cuts']:.1%})",
            f"{row['over_best_other']:.2f} ({row['best_other']})",
        )
        for row in result("typical_data")["settings"]
    ]
    header = (
        "documents",
        "GPUs",
        "m",
        "attention's share",
        "over plain packing (documents it cuts)",
        "over the best other way",
    )
    return lines(header, rows)


def expectations() -> str:
    """What to expect for three kinds of documents on 64 GPUs."""
    rows = [
        (
            row["documents"],
            f"{row['attention_share']:.0%}",
            f"{row['imbalance']:.1f}",
            f"{row['over_plain']:.2f} ({row['plain_cuts']:.1%})",
            f"{row['over_best_other']:.2f} ({row['best_other']})",
        )
        for row in result("typical_data")["settings"]
        if row["ranks"] == 64 and "WLB" not in row["documents"]
    ]
    header = ("documents", "attention", "m", "over plain packing (documents it cuts)", "over the best other way")
    return lines(header, rows)


def chosen_networks() -> str:
    """Chosen plans on networks of several speeds."""
    found = result("chosen")["networks"]
    kinds = list(dict.fromkeys(row["documents"] for row in found))
    by_network: dict[tuple[int, float], dict[str, Any]] = {}
    for row in found:
        by_network.setdefault((row["GPUs a node"], row["GB/s"]), {})[row["documents"]] = row
    rows = [
        (str(per_node), f"{network:g}", *(f"{of[kind]['median']:.2f} ({of[kind]['worst']:.2f})" for kind in kinds))
        for (per_node, network), of in by_network.items()
    ]
    return lines(("GPUs a node", "GB/s between nodes", *kinds), rows)


def chosen_data_sets() -> str:
    """Chosen plans beside all other strategies on data sets."""
    rows = [
        (
            row["documents"],
            str(row["GPUs"]),
            f"{row['median']:.2f}",
            f"{row['worst']:.2f}",
            f"{row['share below 0.99']:.1%}",
            f"{row['planning, ms']:.0f} ({row['planning, 95 %, ms']:.0f})",
        )
        for row in result("chosen")["data_sets"]
    ]
    header = ("documents", "GPUs", "median", "worst", "micro-batches below 0.99", "planning, ms: median (95 %)")
    return lines(header, rows)


def step_time() -> str:
    """Steps of CPU ranks by default, beside the best other way."""
    rows = []
    for name, ranks in STEP_TIMES.items():
        found = result(name)["derived"]
        mixes = dict.fromkeys(key.split(":")[0] for key in found)
        for mix in mixes:
            ratios = [quartiles(found[f"{mix}: {way} / auto"]) for way in ("best other", "whole", "packed", "joint")]
            rows.append((ranks, mix, *ratios))
    return lines(("ranks", "documents", "best other", "whole documents", "packed in order", "joint"), rows)


def memory_guide() -> str:
    """The most tokens of a rank that fit."""
    found = result("memory_guide")["guide"]
    sizes = list(found[0]["longest"])
    rows = [
        (
            row["model"],
            str(row["ranks"]),
            row["strategy"],
            *(str(row["longest"][size]) if row["longest"][size] else "–" for size in sizes),
        )
        for row in found
        if any(row["longest"].values())
    ]
    return lines(("model", "GPUs", "strategy", *(f"{size} GB" for size in sizes)), rows)


def peers() -> str:
    """The same documents by five ways."""
    found = result("peers")
    rows = []
    for name, way in found["ways"].items():
        setting, mix, *words = name.split(", ")
        speed, imbalance = (found["figures"][f"{name}, {figure}"] for figure in ("tokens/s", "imbalance"))
        ratio = found["derived"].get(f"{setting}, {mix}: hf_distca / {', '.join(words)}")
        rows.append(
            (
                setting.removesuffix(" ranks"),
                mix,
                ", ".join(words),
                way["first_loss"],
                f"{way['largest_difference_of_losses']:.0e}",
                f"{imbalance['median']:.2f}",
                f"{way['MiB']:.0f}",
                f"{speed['median']:.0f} ({speed['lower']:.0f} to {speed['upper']:.0f})",
                f"{ratio['median']:.2f} ({ratio['lower']:.2f} to {ratio['upper']:.2f})" if ratio else "",
            )
        )
    header = ("ranks", "documents", "way", "first loss", "losses differ by", "m", "MiB", "tokens/s", "gain")
    return lines(header, rows)


def peers_ulysses() -> str:
    """What Ulysses says to what it does not take, and other losses of the same documents."""
    found = result("peers")
    rows = [(what, f"`{said}`") for what, said in found["ulysses_refuses"].items()]
    rows += [
        ("one long, all documents in one row", found["ways"]["2 ranks, one long, Ulysses"]["first_loss"]),
        ("the same in two rows of equal tokens", found["ulysses_two_rows_first_loss"]),
        ('the same in one row, "sdpa"', found["ulysses_sdpa_first_loss"]),
    ]
    return lines(("tried, two ranks", "error, or loss of the first step"), rows)


def by_transport(name: str) -> list[tuple[str, Any]]:
    """What a benchmark found with rows over each transport."""
    return [("TCP", result(name)), ("NIXL", result(f"{name}_nixl"))]


def quartiles(spread: dict[str, float]) -> str:
    """A median with its quartiles."""
    return f"{spread['median']:.2f} ({spread['lower']:.2f} to {spread['upper']:.2f})"


def servers() -> str:
    """A rank with one server."""
    rows = [
        (transport, *(quartiles(found["of_rounds"][figure]) for figure in ("speedup", "finish_ratio")))
        for transport, found in by_transport("servers")
    ]
    return lines(("rows over", "speed-up (quartiles)", "rank's finishing time / server's (quartiles)"), rows)


def faults() -> str:
    """A training whose servers are killed."""
    rows = [
        (transport, *(str(found[figure]) for figure in ("kills", "in_a_call", "steps", "lost")))
        for transport, found in by_transport("faults")
    ]
    return lines(("rows over", "servers killed", "while computing", "steps", "steps lost"), rows)


TABLES = {
    make.__name__: make
    for make in (
        chosen_data_sets,
        chosen_networks,
        expectations,
        memory_guide,
        typical_data,
        predicted_steps,
        reference_steps,
        step_time,
        paper_tables,
        peers,
        peers_ulysses,
        servers,
        faults,
    )
}


def written(text: str) -> str:
    """A page with its tables written anew."""
    return MARK.sub(lambda mark: f"<!-- {mark[1]} -->\n\n{TABLES[mark[1]]()}", text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page.read_text()))
