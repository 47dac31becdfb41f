"""The main pictures of a simulation's report as one PNG, by matplotlib (extra: report)."""

import io
from collections.abc import Mapping
from typing import Any

from hf_distca.sim.report.pictures import longest_shown
from hf_distca.sim.report.simulation import load_panels, outcome, speed_ups, step_rows
from hf_distca.sim.report.units import short

COLOURS = {"attention": "#2f55c8", "other": "#8590a1", "waits": "#c06a12", "idle": "#dcdfe4"}
COLOURS |= {"before": COLOURS["other"], "after": COLOURS["attention"]}
INK, MUTED, RULE = "#191d24", "#59616e", "#e0e2e4"
MOST_LABELS = 12
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": RULE,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
}


def simulation_png(figures: Mapping[str, Any]) -> bytes:
    """Lengths, load before and after, the time of a step by way, and the speed-up over ranks.

    Args:
        figures: as `simulation_report` takes them.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        whole: Any = Figure(figsize=(11, 11), dpi=140, layout="constrained")
        whole.suptitle(outcome(figures), x=0.01, ha="left", fontsize=15, fontweight="bold")
        rows = whole.subfigures(3, 1, height_ratios=(1, 0.9, 1.25), hspace=0.04)
        left, right = rows[0].subplots(1, 2)
        _lengths(left, figures)
        _speed_up(right, figures)
        _loads(rows[1], figures)
        _steps(rows[2].subplots(), figures)
        content = io.BytesIO()
        whole.savefig(content, format="png")
    return content.getvalue()


def _lengths(axes: Any, figures: Mapping[str, Any]) -> None:
    bins = figures["histogram"]
    for offset, field, style, name in (
        (-0.2, "document_share", "before", "documents"),
        (0.2, "token_share", "after", "tokens"),
    ):
        places = [index + offset for index in range(len(bins))]
        axes.bar(places, [100 * each[field] for each in bins], 0.38, color=COLOURS[style], label=f"share of {name}, %")
    axes.set_title("Document lengths")
    every = -(-len(bins) // MOST_LABELS)
    axes.set_xticks(range(0, len(bins), every), [short(each["shortest"]) for each in bins[::every]])
    axes.set_xlabel("tokens of a document, from")
    axes.grid(axis="x", visible=False)
    axes.legend()


def _speed_up(axes: Any, figures: Mapping[str, Any]) -> None:
    ranks = [f"{point['ranks']:,}" for point in figures["scaling"]]
    for series in speed_ups(figures):
        dashed = "--" if series.style == "before" else "-"
        axes.plot(ranks, series.values, dashed, color=COLOURS[series.style], marker="o", label=series.name)
    axes.axhline(1, color=INK, linestyle=":", linewidth=1)
    axes.set_ylim(bottom=0)
    axes.set_title("Speed-up over ranks")
    axes.set_xlabel("ranks")
    axes.legend()


def _loads(row: Any, figures: Mapping[str, Any]) -> None:
    panels = load_panels(figures)
    for axes, panel in zip(row.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        mean = sum(panel.values) / len(panel.values)
        axes.bar(range(len(panel.values)), panel.values, 0.9, color=COLOURS[panel.style])
        axes.axhline(mean, color=INK, linestyle="--", linewidth=1)
        over = max(panel.values) / mean if mean else 1.0
        axes.set_title(f"{panel.title}\nbusiest rank {over:.2f}× the mean")
        axes.set_xlabel("rank")
        axes.grid(axis="x", visible=False)
    row.supylabel("core attention, s", color=MUTED, fontsize=9)


def _steps(axes: Any, figures: Mapping[str, Any]) -> None:
    rows = step_rows(figures)
    names = [name for name, _ in rows]
    begins = [0.0] * len(rows)
    for index, part in enumerate(rows[0][1]):
        sizes = [parts[index].size for _, parts in rows]
        axes.barh(names, sizes, 0.65, left=begins, color=COLOURS[part.style], label=part.name)
        begins = [begin + size for begin, size in zip(begins, sizes, strict=True)]
    compared = (figures["best_plain"], figures["best_planned"])
    longest = min(longest_shown(dict(zip(names, begins, strict=True)), compared), max(begins))
    for place, total in enumerate(begins):
        axes.text(min(total, longest), place, f" {total:.3f} s", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, longest)
    axes.set_title("Where the time of a step goes, mean rank")
    axes.set_xlabel("s")
    axes.grid(axis="y", visible=False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=len(rows[0][1]))
