"""Tasks cut where segments begin and end, and which K/V rows each of them reads from where."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import Plan
from hf_distca.planner.intervals import Intervals
from hf_distca.planner.routes.moves import Moves
from hf_distca.planner.routes.tables import IntArray


@dataclass(frozen=True, eq=False)
class CutTasks:
    """Tasks cut at the borders of segments: all query rows of one lie on one rank.

    Attributes:
        queries: [n] the query rows, from the rank that holds them to the worker that computes them.
        segment_start: [n] the document's first row in the segment of the query rows.
    """

    queries: Moves
    segment_start: IntArray

    @classmethod
    def of(cls, plan: Plan, tasks: NDArray[np.void], segments: NDArray[np.void]) -> "CutTasks":
        """Some tasks of a plan, cut.

        Args:
            plan: the plan.
            tasks: those of its tasks.
            segments: its segments by (document, start).
        """
        found = Intervals.of(tasks).overlaps(Intervals.of(segments))
        home = segments[found.second]
        return cls(Moves.from_segments(found.rows, home, tasks["worker"][found.first]), home["start"])

    def __getitem__(self, index: IntArray | NDArray[np.bool_]) -> "CutTasks":
        return CutTasks(self.queries[index], self.segment_start[index])

    def pieces(self, which: IntArray, first: IntArray, last: IntArray) -> "CutTasks":
        """Parts of these tasks, see `Moves.pieces`."""
        return CutTasks(self.queries.pieces(which, first, last), self.segment_start[which])

    @property
    def at_home(self) -> NDArray[np.bool_]:
        """[n] whether the rank that holds the query rows computes them."""
        same: NDArray[np.bool_] = self.queries.source == self.queries.target
        return same


@dataclass(frozen=True, eq=False)
class KeysRead:
    """Which K/V rows cut tasks read: where queries lie, and among those brought to the worker. All [n].

    Attributes:
        local: whether a task reads rows [local_first, stop) of its document, up to its own last row, where they
            lie: in the segment of its queries.
        local_first: the first of these rows.
        brought: whether it reads rows `brought_rows` of its document that are brought to the worker.
        brought_rows: these rows; no rows where it reads none.
    """

    local: NDArray[np.bool_]
    local_first: IntArray
    brought: NDArray[np.bool_]
    brought_rows: Intervals

    def __getitem__(self, index: IntArray | NDArray[np.bool_]) -> "KeysRead":
        return KeysRead(self.local[index], self.local_first[index], self.brought[index], self.brought_rows[index])


@dataclass(frozen=True, eq=False)
class Reads:
    """Query rows and the K/V rows that arrive in one stage and that they see; no query row twice.

    Attributes:
        task: [n] the cut task of the query rows.
        queries: [n] rows of its document.
        counts: [n] how many intervals of keys they read.
        keys: [sum of counts] rows of the same document.
        pairs: [n] query-key pairs that are computed.
    """

    task: IntArray
    queries: Intervals
    counts: IntArray
    keys: Intervals
    pairs: IntArray
