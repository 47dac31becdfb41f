"""Shifted row numbers, with which pairs alone express the whole cost of a row."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import TASK, Layout, Plan
from hf_distca.planner.cost import pairs
from hf_distca.planner.intervals import merge_touching


@dataclass(frozen=True, eq=False)
class ShiftedRows:
    """View of a layout in which pairs express the whole cost of rows.

    A row p with an overhead of c pairs costs min(p + 1, window) + c in all. Row p + c costs the same with a window of
    window + c. So rows of every document are counted from c on while tasks are chosen.

    Attributes:
        layout: the original layout, with rows counted from 0 on.
        origin: c, the first row in the view.
        segments: [segments] of dtype SEGMENT, rows counted from `origin` on.
        stops: [documents] one past each document's last row in the view.
        window: window of K/V rows; None for full causal attention.
        pair_window: window by which a row of the view counts pairs; None for full causal attention.
    """

    layout: Layout
    origin: int
    segments: NDArray[np.void]
    stops: NDArray[np.int64]
    window: int | None
    pair_window: int | None

    @classmethod
    def of(cls, layout: Layout, window: int | None, row_overhead: int, block: int) -> "ShiftedRows":
        """Return the view of a layout.

        Args:
            row_overhead: cost of a query row besides its pairs, in pairs; rounded to whole blocks, so that cuts stay
                on the blocks' boundaries.
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
        """Return [tasks] of dtype TASK: every rank computes the rows that it holds."""
        return local_tasks(self.segments)

    def shifted(self, tasks: NDArray[np.void]) -> NDArray[np.void]:
        """Convert tasks from rows counted from 0 on to rows of the view."""
        tasks = tasks.copy()
        tasks["start"] += self.origin
        tasks["stop"] += self.origin
        return tasks

    def loads(self, tasks: NDArray[np.void], workers: int) -> NDArray[np.int64]:
        """Return [workers] int64: pairs of each worker."""
        cost = pairs(tasks["start"], tasks["stop"], self.pair_window)
        return np.bincount(tasks["worker"], weights=cost, minlength=workers).astype(np.int64)

    def plan(self, tasks: NDArray[np.void], workers: int) -> Plan:
        """Return the plan of tasks of the view, with rows counted from 0 on again."""
        tasks = tasks.copy()
        tasks["start"] -= self.origin
        tasks["stop"] -= self.origin
        return Plan(self.layout, tasks, workers, self.window)


def local_tasks(segments: NDArray[np.void]) -> NDArray[np.void]:
    """Return [tasks] of dtype TASK: every rank computes the rows of its segments."""
    tasks = np.zeros(len(segments), TASK)
    for field in ("document", "start", "stop"):
        tasks[field] = segments[field]
    tasks["worker"] = segments["rank"]
    return merged(tasks)


def merged(tasks: NDArray[np.void]) -> NDArray[np.void]:
    """Sort tasks by (worker, document, start) and join tasks that touch."""
    tasks = tasks[np.lexsort((tasks["start"], tasks["document"], tasks["worker"]))]
    return merge_touching(tasks, "worker")
