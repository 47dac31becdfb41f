"""The documents of benchmarks/data, and how they are planned and timed."""

import gzip
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hf_distca.plan import SEGMENT, AttentionKind, Layout, Plan
from hf_distca.plan.cost import RowBytes
from hf_distca.plan.figures import bytes_moved, loads_of
from hf_distca.plan.intervals import row_counts
from hf_distca.planner.balance import balance
from hf_distca.planner.build import balanced, lay_out_as_set
from hf_distca.planner.layout import fixed_layout
from hf_distca.planner.settings import PlanSettings

DATA = Path(__file__).parent / "data"


def read_batches() -> list[dict[str, Any]]:
    with gzip.open(DATA / "planner_batches.json.gz", "rt") as file:
        batches: list[dict[str, Any]] = json.load(file)["batches"]
    return batches


def plan_once(
    batch: dict[str, Any],
    ranks: int,
    kind: str,
    tolerance: float,
    ranks_per_node: int | None = None,
    window: int | None = None,
) -> Plan:
    """Plan one input, flat if `ranks_per_node` is None."""
    rows = batch["rows"][: ranks // (4 if batch["layout"] == "cp4" else 1)]
    attention = AttentionKind(window)
    settings = PlanSettings(
        ranks,
        batch["T"],
        (attention,),
        balance_tolerance=tolerance,
        ranks_per_node=ranks_per_node or 1,
    )
    if kind == "auto":
        lengths = np.array([length for row in rows for length in row])
        (nano_batch,) = balanced(lay_out_as_set(lengths, settings), settings)
        return nano_batch.plans[attention]
    layout = fixed_layout(rows, ranks)
    if kind == "fixed, head-tail":
        layout = head_tail(layout)
    return balance(layout, attention, settings)


@dataclass(frozen=True)
class PlanMetrics:
    """Figures of one plan; bytes travel in one layer's forward.

    Attributes:
        max_over_mean: largest pairs of a worker over the mean; 1.0 for a plan without tasks.
        bytes_bottleneck: the largest number of bytes that a worker sends or receives.
        tasks_cut_below_block: tasks below a block of 128 rows that do not end where their document
            ends.
    """

    max_over_mean: float
    tokens_max_over_mean: float
    bytes_total: int
    bytes_bottleneck: int
    tasks: int
    tasks_cut_below_block: int


def measure(plan: Plan) -> PlanMetrics:
    """Count the balance and the bytes of a plan of Llama-3-8B."""
    loads = loads_of(plan)
    tokens = plan.layout.tokens
    moved = bytes_moved(plan, RowBytes())
    at_end = plan.tasks["stop"] == plan.layout.lengths[plan.tasks["document"]]
    return PlanMetrics(
        max_over_mean=float(loads.max() / loads.mean()) if loads.any() else 1.0,
        tokens_max_over_mean=float(tokens.max() / tokens.mean()) if tokens.any() else 1.0,
        bytes_total=int(moved[0].sum()),
        bytes_bottleneck=int(moved.max()),
        tasks=len(plan.tasks),
        tasks_cut_below_block=int(np.sum((row_counts(plan.tasks) < 128) & ~at_end)),
    )


def head_tail(layout: Layout) -> Layout:
    """The same rows per document and rank, those of documents on several ranks from both ends
    inwards.
    """
    shares = []
    taken = dict.fromkeys(range(len(layout.lengths)), 0)
    left = dict(enumerate(layout.lengths.tolist()))
    for doc, start, stop, rank, _ in layout.segments.tolist():
        head = (stop - start) // 2
        tail = stop - start - head
        shares += [
            (rank, doc, taken[doc], taken[doc] + head),
            (rank, doc, left[doc] - tail, left[doc]),
        ]
        taken[doc] += head
        left[doc] -= tail
    segments = []
    filled = [0] * layout.ranks
    for rank, doc, start, stop in sorted(share for share in shares if share[2] < share[3]):
        last = segments[-1] if segments else (-1,) * 5
        if (doc, start, rank) == (last[0], last[2], last[3]):
            segments[-1] = (doc, last[1], stop, rank, last[4])
        else:
            segments.append((doc, start, stop, rank, filled[rank]))
        filled[rank] += stop - start
    return Layout(layout.lengths, np.array(segments, SEGMENT), layout.ranks)


def timed(make: Callable[[], Plan], repeats: int) -> tuple[Plan, float]:
    """A plan and the median of the processor times that it took, in ms."""
    times = []
    for _ in range(repeats):
        began = time.process_time()
        plan = make()
        times.append((time.process_time() - began) * 1e3)
    return plan, statistics.median(times)
