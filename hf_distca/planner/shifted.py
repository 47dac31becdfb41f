"""Rows as balancing counts them: what a row costs besides its pairs stands as rows before the document's first."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import TASK, Layout, Plan
from hf_distca.planner.cost import pairs
from hf_distca.planner.intervals import merge_touching


@dataclass(frozen=True, eq=False)
class ShiftedRows:
    """A view of a layout in which pairs tell all that rows cost.

    A row p that costs c pairs besides its own costs min(p + 1, window) + c in all: what row p + c costs with a
    window of window + c. So tasks are chosen with the rows of every document counted from c on.

    Attributes:
        layout: the layout as it is, rows counted from 0 on.
        origin: c, the first row that there is in the view.
        segments: [segments] of dtype SEGMENT, rows counted from `origin` on.
        stops: [documents] one past each document's last row in the view.
        window: by which K/V rows are needed; None for full causal attention.
        pair_window: by which a row of the view counts pairs; None likewise.
    """

    layout: Layout
    origin: int
    segments: NDArray[np.void]
    stops: NDArray[np.int64]
    window: int | None
    pair_window: int | None

    @classmethod
    def of(cls, layout: Layout, window: int | None, row_overhead: int, block: int) -> "ShiftedRows":
        """The view of a layout.

        Args:
            layout: where the rows are.
            window: width of the sliding window; None for full causal attention.
            row_overhead: what a query row costs besides its pairs, in pairs; rounded to whole blocks, so that cuts
                stay on the blocks' boundaries.
            block: rows of a kernel block.
        """
        origin = round(row_overhead / block) * block
        segments = layout.segments.copy()
        segments["start"] += origin
        segments["stop"] += origin
        return cls(
            layout, origin, segments, layout.lengths + origin, window, None if window is None else window + origin
        )

    def tasks_as_laid_out(self) -> NDArray[np.void]:
        """[tasks] of dtype TASK: every rank computes the rows that it holds."""
        return tasks_at_home(self.segments)

    def shifted(self, tasks: NDArray[np.void]) -> NDArray[np.void]:
        """Tasks with rows counted from 0 on, as the view counts them."""
        tasks = tasks.copy()
        tasks["start"] += self.origin
        tasks["stop"] += self.origin
        return tasks

    def loads(self, tasks: NDArray[np.void], workers: int) -> NDArray[np.int64]:
        """[workers] int64: pairs of each worker."""
        cost = pairs(tasks["start"], tasks["stop"], self.pair_window)
        return np.bincount(tasks["worker"], weights=cost, minlength=workers).astype(np.int64)

    def plan(self, tasks: NDArray[np.void], workers: int) -> Plan:
        """The plan of some tasks, with rows counted from 0 on again."""
        tasks = tasks.copy()
        tasks["start"] -= self.origin
        tasks["stop"] -= self.origin
        return Plan(self.layout, tasks, workers, self.window)


def tasks_at_home(segments: NDArray[np.void]) -> NDArray[np.void]:
    """[tasks] of dtype TASK: every rank computes the rows of its segments."""
    tasks = np.zeros(len(segments), TASK)
    for field in ("document", "start", "stop"):
        tasks[field] = segments[field]
    tasks["worker"] = segments["rank"]
    return merged(tasks)


def merged(tasks: NDArray[np.void]) -> NDArray[np.void]:
    """Tasks sorted by (worker, document, start), those that touch made one."""
    tasks = tasks[np.lexsort((tasks["start"], tasks["document"], tasks["worker"]))]
    return merge_touching(tasks, "worker")
