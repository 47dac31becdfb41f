"""Plans that know of nodes beside flat ones, on the same documents, at the same balance_tolerance."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from harness import Spread, spread, table
from planner_inputs import plan_once, timed

from hf_distca.planner.cost import RowBytes
from hf_distca.planner.metrics import BETWEEN, WITHIN, bytes_by_link, link_seconds, measure
from hf_distca.planner.nodes import node_sizes, nodes_of

RANKS, RANKS_PER_NODE = 64, 8
KINDS = ("joint", "fixed")
HEADER = (
    *("", "max/mean", "tokens", "bytes between nodes", "(max)"),
    *("busiest inside", "(max)", "link seconds", "(max)", "all bytes", "(max)", "ms", "flat"),
)


@dataclass(frozen=True)
class Planned:
    """One plan.

    Attributes:
        max_over_mean: pairs of the most loaded rank over the mean.
        tokens_max_over_mean: tokens of the fullest rank over the mean.
        total: bytes that all ranks send in one layer's forward.
        busiest: bytes of the busiest rank, the larger of those it sends and receives over links of any kind.
        within_busiest: the same, of those inside its node.
        between: bytes that all ranks send to other nodes.
        seconds: that the busiest link takes.
        plan_ms: planning time.
    """

    max_over_mean: float
    tokens_max_over_mean: float
    total: int
    busiest: int
    within_busiest: int
    between: int
    seconds: float
    plan_ms: float


def planned(batch: dict[str, Any], kind: str, tolerance: float, ranks_per_node: int | None, repeats: int) -> Planned:
    """Plan one input on ranks in nodes.

    Args:
        batch: the documents.
        kind: "joint" or "fixed".
        tolerance: balance_tolerance.
        ranks_per_node: that the plan knows of; None for a flat plan.
        repeats: runs per timing.
    """
    plan, plan_ms = timed(partial(plan_once, batch, RANKS, kind, tolerance, ranks_per_node), repeats)
    metrics = measure(plan)
    moved = bytes_by_link(plan, RowBytes(), nodes_of(node_sizes(RANKS, RANKS_PER_NODE)))
    return Planned(
        metrics.max_over_mean,
        metrics.tokens_max_over_mean,
        metrics.bytes_total,
        metrics.bytes_bottleneck,
        int(moved[WITHIN].max()),
        int(moved[BETWEEN, 0].sum()),
        link_seconds(moved),
        plan_ms,
    )


@dataclass(frozen=True)
class Pair:
    """One input.

    Attributes:
        batch: which documents.
        flat: the flat plan.
        aware: the node-aware one.
    """

    batch: str
    flat: Planned
    aware: Planned


def ratios(pairs: Sequence[Pair], aware: str, flat: str) -> dict[str, float]:
    """By batch, a figure of the node-aware plan over one of the flat plan, where that is not 0."""
    return {
        pair.batch: getattr(pair.aware, aware) / getattr(pair.flat, flat) for pair in pairs if getattr(pair.flat, flat)
    }


def summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    """The figures of one kind of plan at one tolerance, by the names that `planner.py` explains."""
    figures: dict[str, Any] = {
        "plans": len(pairs),
        "plans_with_bytes_between_nodes": sum(pair.aware.between > 0 for pair in pairs),
        "flat_plans_with_bytes_between_nodes": sum(pair.flat.between > 0 for pair in pairs),
    }
    for side in ("aware", "flat"):
        plans = [getattr(pair, side) for pair in pairs]
        prefix = "" if side == "aware" else "flat_"
        figures[f"{prefix}percent_above_mean"] = spread([100 * (plan.max_over_mean - 1) for plan in plans])
        figures[f"{prefix}percent_above_mean_worst"] = max(100 * (plan.max_over_mean - 1) for plan in plans)
        figures[f"{prefix}tokens_max_over_mean_worst"] = max(plan.tokens_max_over_mean for plan in plans)
        figures[f"{prefix}plan_ms"] = spread([plan.plan_ms for plan in plans])
        figures[f"{prefix}plan_ms_worst"] = max(plan.plan_ms for plan in plans)
    for name, aware, flat in (
        ("bytes_between_nodes_ratio", "between", "between"),
        ("busiest_within_node_ratio", "within_busiest", "busiest"),
        ("link_seconds_ratio", "seconds", "seconds"),
        ("bytes_total_ratio", "total", "total"),
    ):
        found = ratios(pairs, aware, flat)
        worst = max(found, key=found.__getitem__)
        figures[name] = spread(list(found.values()))
        figures[f"{name}_worst"] = found[worst]
        figures[f"{name}_worst_input"] = worst
    return figures


def line(name: str, figures: dict[str, Any]) -> list[str]:
    """One line of the table."""

    def shown(ratio: str) -> list[str]:
        return [str(figures[ratio]), f"{figures[f'{ratio}_worst']:.3f}"]

    times: list[Spread] = [figures["plan_ms"], figures["flat_plan_ms"]]
    return [
        name,
        f"{1 + figures['percent_above_mean_worst'] / 100:.4f}",
        f"{figures['tokens_max_over_mean_worst']:.4f}",
        *shown("bytes_between_nodes_ratio"),
        *shown("busiest_within_node_ratio"),
        *shown("link_seconds_ratio"),
        *shown("bytes_total_ratio"),
        *(f"{ms.median:.1f}" for ms in times),
    ]


def compare_nodes(batches: list[dict[str, Any]], tolerances: Sequence[float], repeats: int) -> dict[str, Any]:
    """Every batch on ranks in nodes, planned both ways; prints a table and returns the figures."""
    figures = {}
    for kind in KINDS:
        for tolerance in tolerances:
            pairs = [
                Pair(
                    batch["id"],
                    planned(batch, kind, tolerance, None, repeats),
                    planned(batch, kind, tolerance, RANKS_PER_NODE, repeats),
                )
                for batch in batches
            ]
            figures[f"{kind}, at {tolerance}"] = summary(pairs)
    print(f"{RANKS} ranks in nodes of {RANKS_PER_NODE}: node-aware / flat, medians (quartiles)")
    table(HEADER, [line(name, found) for name, found in figures.items()])
    return figures
