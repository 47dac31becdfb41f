"""Least seconds of the plans of a layout, whatever balancing moves.

Balancing makes ranks of a group compute alike. It saves no work, and it moves little more than it
has to: a rank that finishes within the tolerance keeps what it holds. Most rows that cross nodes as
documents are laid out cross in any plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_distca.plan import AttentionKind, Layout
from hf_distca.plan.arrays import FloatArray, IntArray
from hf_distca.plan.cost import RowBytes, pairs
from hf_distca.plan.intervals import local_tasks, row_counts
from hf_distca.planner.layout import layout_of_kind
from hf_distca.predict.seconds import DIAGONAL_ROWS, StepCosts, Tasks

AIM = 0.9
"""Share of the tolerance that balanced ranks use up at least: passes aim at 0.96 of it."""

CROSSING = 0.7
"""Share of the rows that cross nodes as documents are laid out, that cross in any plan. Balancing
may let a node compute rows whose K/V rows it holds."""


@dataclass(frozen=True, eq=False)
class LayoutWork:
    """Work of ranks if each computes the rows that it holds, and rows that have to travel.

    Attributes:
        attention: for each nano-batch, [ranks] seconds of core attention.
        other: [ranks] seconds of all else.
        exposed: seconds of exchanges between nodes that nothing hides.
        exchanged: seconds of all exchanges between nodes.
    """

    attention: Sequence[FloatArray]
    other: FloatArray
    exposed: float
    exchanged: float

    def least_seconds(self, sizes: Sequence[int], slack: FloatArray, costs: StepCosts) -> float:
        """Return the seconds that a plan takes at least.

        Args:
            sizes: [groups] ranks of each group; nothing moves between groups.
            slack: [groups] how far above its group's mean a rank may be, as a fraction of the mean.
        """
        firsts: IntArray = np.cumsum(sizes) - np.array(sizes)
        speeds: FloatArray = 1 / np.array(costs.slowness or (1.0,) * len(self.other))
        speed_of_group = np.add.reduceat(speeds, firsts)
        even = np.add.reduceat(sum(self.attention) + self.other, firsts) / speed_of_group
        slowest = float(even.max())
        if not costs.slowness:
            finishing = self.other.copy()
            for seconds in self.attention:
                mean = np.add.reduceat(seconds, firsts) / speed_of_group
                finishing += np.minimum(seconds, np.repeat(mean * (1 + AIM * slack), sizes))
            slowest = max(slowest, float(finishing.max()))
        computed = costs.until_done(np.repeat(even, sizes), slowest)
        return max(computed + self.exposed, self.exchanged)


def work_of(
    layouts: Sequence[Layout], costs: StepCosts, nodes: Sequence[int], bytes_per_value: int
) -> LayoutWork:
    """Return the work of ranks as nano-batches are laid out.

    Args:
        layouts: of each nano-batch.
        nodes: [ranks] node of each rank.
    """
    attention = []
    tokens = np.sum([layout.tokens for layout in layouts], axis=0)
    other: FloatArray = costs.calls(0) * len(layouts) + costs.token * tokens
    exposed = exchanged = 0.0
    for layout in layouts:
        seconds = np.zeros(layout.ranks)
        for of_kind in costs.kinds:
            tasks = _tasks_as_laid_out(layout, of_kind.kind)
            row_bytes = RowBytes.of_kind(of_kind.kind, bytes_per_value)
            crossing = _rows_from_other_nodes(layout, of_kind.kind, nodes)
            travel = float(crossing.max()) * row_bytes.kv / costs.exchange.between.bandwidth
            for direction in costs.directions:
                computing = of_kind.kernel(direction).seconds(tasks)
                seconds += of_kind.layers * computing
                # The backward sends K and V again, and returns their gradients.
                ways = 1 if direction == "forward" else 2
                exchanged += of_kind.layers * ways * travel
                exposed += of_kind.layers * max(ways * travel - float(computing.max()), 0.0)
        attention.append(seconds)
    # Each of two nano-batches hides the exchanges of the other behind all that it computes.
    return LayoutWork(attention, other, exposed if len(layouts) == 1 else 0.0, exchanged)


def _tasks_as_laid_out(layout: Layout, kind: AttentionKind) -> Tasks:
    """Return [ranks] counts of tasks if every rank computes the rows that it holds."""
    layout = layout_of_kind(layout, kind)
    tasks = local_tasks(layout.segments)
    rows = row_counts(tasks)
    # Rows of a cut document are computed in a second call, on the keys of earlier segments.
    is_cut = (tasks["start"] > 0).astype(np.int64)
    if kind.window is not None or layout.branches is not None:
        is_cut = np.zeros_like(rows)
    keys = tasks["stop"]
    if kind.window is not None:
        keys = np.minimum(keys, rows + kind.window - 1)

    def total(amount: IntArray) -> FloatArray:
        return np.bincount(tasks["worker"], amount, layout.ranks).astype(np.float64)

    return Tasks(
        rows=total(rows * (1 + is_cut)),
        keys=total(keys),
        pairs=total(pairs(tasks["start"], tasks["stop"], kind.window)),
        calls=np.add(total(rows) > 0, total(is_cut) > 0, dtype=np.float64),
        diagonal=total(rows * np.minimum(rows, DIAGONAL_ROWS)),
        tasks=total(1 + is_cut),
    )


def _rows_from_other_nodes(layout: Layout, kind: AttentionKind, nodes: Sequence[int]) -> FloatArray:
    """Return [nodes] K/V rows that a rank of each node receives from other nodes at least."""
    node = np.asarray(nodes)
    ranks_of_node = np.bincount(node)
    if len(ranks_of_node) == 1 or kind.window or kind.chunk or layout.branches is not None:
        return np.zeros(len(ranks_of_node))
    segments = layout.segments
    # Ranks of a node need a document's rows up to the last one that the node holds.
    place = node[segments["rank"]] * len(layout.lengths) + segments["document"]
    order = np.argsort(place, kind="stable")
    place = place[order]
    firsts = np.flatnonzero(np.diff(place, prepend=-1))
    held = np.add.reduceat(row_counts(segments)[order], firsts)
    needed = np.maximum.reduceat(segments["stop"][order], firsts)
    of_node = place[firsts] // len(layout.lengths)
    received = np.bincount(of_node, needed - held, len(ranks_of_node))
    return np.asarray(CROSSING * received / ranks_of_node)
