"""The documents of benchmarks/data, and how they are planned and timed."""

import gzip
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hf_distca.plan import SEGMENT, Layout, Plan
from hf_distca.planner.balance import balance
from hf_distca.planner.cost import BALANCE_TOLERANCE
from hf_distca.planner.layout import fixed_layout, joint_layout
from hf_distca.planner.nodes import node_sizes, nodes_of

DATA = Path(__file__).parent / "data"


def read_batches() -> list[dict[str, Any]]:
    """The documents: data/README.md says what they are."""
    with gzip.open(DATA / "planner_batches.json.gz", "rt") as file:
        batches: list[dict[str, Any]] = json.load(file)["batches"]
    return batches


def rows_of(batch: dict[str, Any], ranks: int) -> list[list[int]]:
    """The rows of documents that `ranks` ranks take."""
    return batch["rows"][: ranks // (4 if batch["layout"] == "cp4" else 1)]


def plan_once(
    batch: dict[str, Any],
    ranks: int,
    kind: str,
    tolerance: float,
    ranks_per_node: int | None = None,
    window: int | None = None,
) -> Plan:
    """Plan one input.

    Args:
        batch: the documents.
        ranks: which take its first rows.
        kind: "joint", "fixed", or "fixed, head-tail".
        tolerance: balance_tolerance.
        ranks_per_node: that the plan knows of; None for a flat plan.
        window: width of the sliding window; None for full causal attention.
    """
    rows = rows_of(batch, ranks)
    sizes = None if ranks_per_node is None else node_sizes(ranks, ranks_per_node)
    if kind == "joint":
        lengths = [length for row in rows for length in row]
        layout = joint_layout(lengths, ranks, batch["T"], window=window, balance_tolerance=tolerance, node_sizes=sizes)
    else:
        layout = fixed_layout(rows, ranks)
        if kind == "fixed, head-tail":
            layout = head_tail(layout)
    nodes = None if sizes is None else nodes_of(sizes)
    return balance(layout, nodes=nodes, window=window, balance_tolerance=tolerance)


def head_tail(layout: Layout) -> Layout:
    """The same rows per document and rank, those of documents on several ranks from both ends inwards."""
    shares = []
    taken = dict.fromkeys(range(len(layout.lengths)), 0)
    left = dict(enumerate(layout.lengths.tolist()))
    for doc, start, stop, rank, _ in layout.segments.tolist():
        head = (stop - start) // 2
        tail = stop - start - head
        shares += [(rank, doc, taken[doc], taken[doc] + head), (rank, doc, left[doc] - tail, left[doc])]
        taken[doc] += head
        left[doc] -= tail
    segments, filled = [], [0] * layout.ranks
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


def growth(
    batches: list[dict[str, Any]], repeats: int, ranks_per_node: int | None = None
) -> dict[str, dict[str, float]]:
    """Planning time in ms by ranks of 128K tokens, from rows of batches of that size, for both layouts.

    Args:
        batches: the documents.
        repeats: runs per timing.
        ranks_per_node: as in `plan_once`.
    """
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
            make = partial(plan_once, batch, ranks, kind, BALANCE_TOLERANCE, ranks_per_node)
            by_ranks[str(ranks)] = timed(make, repeats)[1]
    return times
