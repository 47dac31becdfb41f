"""The planner beside a reference planner, on the same documents.

Run: python benchmarks/planner.py --batches FILE.json.gz --reference FILE.csv [--repeats 3]

--batches: {"batches": [{"id", "layout": "dp" | "cp4", "T", "rows": [[lengths]...]}...]}, gzipped JSON. Layout
"dp" has one row per rank, "cp4" one row per 4 consecutive ranks of T tokens. R ranks take the first rows.
--reference: what another planner did with them; columns id, R, tol, max_mean, tot_bytes, max_rank, tasks, plan_ms.
Rows with tol 0 are compared.

The reference places a "cp4" document that spans ranks head-tail (its dp_max_mean column is that of this placement):
each of its ranks holds as many rows as in order, half of them from the front and half from the back. The kind "fixed,
head-tail" has this placement, so it is the one on the reference's own inputs; "fixed" keeps the rows of these
documents in order, which asks for other bytes: the first rank must send its K/V rows to all later ones.

Prints a table of medians per kind of batch, then timings at 512 ranks, and one JSON object as the last line.
"cut<128" counts tasks below a kernel block that do not end where their document ends, "unneeded" those of them
that neither are a whole segment at home nor are needed for the balance (hf_distca/planner/short_tasks.py).
Ratios are ours / reference, over inputs where the reference moves anything. Bytes are those of one layer of
Llama-3-8B in bfloat16. Times are the least of --repeats runs.
"""

import argparse
import csv
import gzip
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hf_distca.plan import SEGMENT, Layout, Plan
from hf_distca.planner.balance import balance
from hf_distca.planner.layout import fixed_layout, joint_layout
from hf_distca.planner.metrics import PlanMetrics, loads_of, measure
from hf_distca.planner.short_tasks import without_short

RANKS = (4, 8, 16, 32, 64)
HEADER = ("kind", "plans", "max/mean", "tokens", "bytes", "(max)", "busiest", "(max)", "cut<128", "unneeded", "ms")
BLOCK = 128
"""Rows of a kernel block."""


@dataclass(frozen=True)
class Result:
    """One planned input.

    Attributes:
        batch: what it was.
        ranks: number of ranks.
        metrics: what was achieved.
        total: bytes of all ranks over the reference's; None where that moves nothing.
        busiest: bytes of the busiest rank over the reference's; None likewise.
        unneeded: short tasks without a reason.
        plan_ms: planning time.
    """

    batch: str
    ranks: int
    metrics: PlanMetrics
    total: float | None
    busiest: float | None
    unneeded: int
    plan_ms: float


def plan_once(batch: dict, ranks: int, kind: str) -> Plan:
    """Plan one input the way `kind` says."""
    rows = rows_of(batch, ranks)
    if kind == "joint":
        lengths = [length for row in rows for length in row]
        return balance(joint_layout(lengths, ranks, batch["T"]))
    layout = fixed_layout(rows, ranks)
    return balance(head_tail(layout) if kind == "fixed, head-tail" else layout, balance_tolerance=tolerance_of(kind))


def head_tail(layout: Layout) -> Layout:
    """The same rows per document and rank, those of documents on several ranks from both ends inwards."""
    pieces = []
    taken = dict.fromkeys(range(len(layout.lengths)), 0)
    left = dict(enumerate(layout.lengths.tolist()))
    for doc, start, stop, rank, _ in layout.segments.tolist():
        head = (stop - start) // 2
        tail = stop - start - head
        pieces += [(rank, doc, taken[doc], taken[doc] + head), (rank, doc, left[doc] - tail, left[doc])]
        taken[doc] += head
        left[doc] -= tail
    segments, filled = [], [0] * layout.ranks
    for rank, doc, start, stop in sorted(piece for piece in pieces if piece[2] < piece[3]):
        last = segments[-1] if segments else (-1,) * 5
        if (doc, start, rank) == (last[0], last[2], last[3]):
            segments[-1] = (doc, last[1], stop, rank, last[4])
        else:
            segments.append((doc, start, stop, rank, filled[rank]))
        filled[rank] += stop - start
    return Layout(layout.lengths, np.array(segments, SEGMENT), layout.ranks)


def tolerance_of(kind: str) -> float:
    """The tolerance of a kind of plan."""
    return 0.05 if kind == "fixed, 5 %" else 0.0


def unneeded_short(plan: Plan, balance_tolerance: float) -> int:
    """Short tasks that can go one by one while every worker stays within the tolerance."""
    loads = loads_of(plan)
    room = loads.mean() * (1 + balance_tolerance) - loads
    fewer = without_short(plan.tasks, plan.layout, room.tolist(), plan.window, BLOCK)
    without = Plan(plan.layout, fewer, plan.workers, plan.window)
    return measure(plan).tasks_cut_below_block - measure(without).tasks_cut_below_block


def rows_of(batch: dict, ranks: int) -> list[list[int]]:
    """The rows of documents that `ranks` ranks take."""
    return batch["rows"][: ranks // (4 if batch["layout"] == "cp4" else 1)]


def timed(make: Callable[[], Plan], repeats: int) -> tuple[Plan, float]:
    """A plan and the least of the times it took, in ms."""
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        plan = make()
        best = min(best, (time.perf_counter() - began) * 1e3)
    return plan, best


def compare(batches: list[dict], reference: dict, kind: str, repeats: int) -> list[Result]:
    """Every batch at every number of ranks."""
    results = []
    for batch in batches:
        for ranks in RANKS:
            plan, plan_ms = timed(lambda batch=batch, ranks=ranks: plan_once(batch, ranks, kind), repeats)
            metrics = measure(plan)
            theirs = reference[batch["id"], ranks]
            total, busiest = float(theirs["tot_bytes"]), float(theirs["max_rank"])
            results.append(
                Result(
                    batch["id"],
                    ranks,
                    metrics,
                    metrics.bytes_total / total if total else None,
                    metrics.bytes_bottleneck / busiest if busiest else None,
                    unneeded_short(plan, tolerance_of(kind)),
                    plan_ms,
                )
            )
    return results


def spread(values: list[float | None]) -> dict[str, float]:
    """Least, median and largest."""
    known = [value for value in values if value is not None]
    return {
        "min": round(min(known), 4),
        "median": round(statistics.median(known), 4),
        "max": round(max(known), 4),
    }


def summary(results: list[Result]) -> dict:
    """The figures of one kind of plan."""
    return {
        "plans": len(results),
        "max_over_mean": spread([r.metrics.max_over_mean for r in results]),
        "tokens_max_over_mean": spread([r.metrics.tokens_max_over_mean for r in results]),
        "bytes_total_ratio": spread([r.total for r in results]),
        "bytes_bottleneck_ratio": spread([r.busiest for r in results]),
        "plans_with_cut_tasks_below_block": sum(r.metrics.tasks_cut_below_block > 0 for r in results),
        "cut_tasks_below_block": sum(r.metrics.tasks_cut_below_block for r in results),
        "unneeded_tasks_below_block": sum(r.unneeded for r in results),
        "plan_ms": spread([r.plan_ms for r in results]),
        "plan_ms_64_ranks": spread([r.plan_ms for r in results if r.ranks == 64]),
    }


def line(name: str, results: list[Result]) -> list[str]:
    """One line of the table."""
    figures = summary(results)
    total, busiest = figures["bytes_total_ratio"], figures["bytes_bottleneck_ratio"]
    return [
        name,
        str(len(results)),
        f"{figures['max_over_mean']['max']:.4f}",
        f"{figures['tokens_max_over_mean']['max']:.4f}",
        f"{total['median']:.3f}",
        f"{total['max']:.3f}",
        f"{busiest['median']:.3f}",
        f"{busiest['max']:.3f}",
        str(figures["cut_tasks_below_block"]),
        str(figures["unneeded_tasks_below_block"]),
        f"{figures['plan_ms']['median']:.1f}",
    ]


def show(lines: list[list[str]]) -> None:
    """Print lines of text in columns."""
    widths = [max(len(row[column]) for row in lines) for column in range(len(HEADER))]
    for row in lines:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        print("  ".join(cells))
    print()


def growth(batches: list[dict], repeats: int) -> dict[str, dict[str, float]]:
    """Planning time in ms by ranks of 128K tokens, from rows of batches of that size, for both layouts."""
    rows = [row for b in batches if b["T"] == 131072 and b["layout"] == "dp" for row in b["rows"]]
    # One row of every batch in turn, so that any first rows are a mixture of all of them.
    per = len(batches[0]["rows"])
    rows = [rows[start] for first in range(per) for start in range(first, len(rows), per)]
    times: dict[str, dict[str, float]] = {"fixed": {}, "joint": {}}
    for ranks in (64, 128, 256, 512):
        batch = {"rows": rows[:ranks], "layout": "dp", "T": 131072}
        if len(batch["rows"]) < ranks:
            break
        for kind, by_ranks in times.items():
            by_ranks[str(ranks)] = round(
                timed(lambda batch=batch, ranks=ranks, kind=kind: plan_once(batch, ranks, kind), repeats)[1], 2
            )
    return times


def main() -> None:
    """Run all comparisons and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=Path, required=True, help="documents, as said above")
    parser.add_argument("--reference", type=Path, required=True, help="the reference's results, as said above")
    parser.add_argument("--repeats", type=int, default=3, help="runs per timing (default: 3)")
    options = parser.parse_args()
    with gzip.open(options.batches, "rt") as file:
        batches = json.load(file)["batches"]
    with options.reference.open() as file:
        reference = {(row["id"], int(row["R"])): row for row in csv.DictReader(file) if float(row["tol"]) == 0}

    report: dict = {}
    for kind in ("fixed", "fixed, head-tail", "fixed, 5 %", "joint"):
        results = compare(batches, reference, kind, options.repeats)
        report[kind] = summary(results)
        by_kind: dict[str, list[Result]] = defaultdict(list)
        for result in results:
            by_kind[result.batch.rsplit("-s", 1)[0]].append(result)
        print(f"{kind}: worst max/mean of attention and tokens; bytes over the reference's, median and largest")
        show([list(HEADER), *(line(name, some) for name, some in by_kind.items()), line("all", results)])
    theirs = [float(row["plan_ms"]) for (_, ranks), row in reference.items() if ranks == 64]
    report["reference_plan_ms_64_ranks"] = spread(theirs)
    report["plan_ms_128k_tokens"] = growth(batches, options.repeats)
    for kind, times in report["plan_ms_128k_tokens"].items():
        print(f"{kind}, ranks of 128K tokens:", ", ".join(f"{ranks}: {ms} ms" for ranks, ms in times.items()))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
