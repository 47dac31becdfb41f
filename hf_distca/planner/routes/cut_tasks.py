"""Tasks cut at the borders of segments, and the K/V rows that each of them reads."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import Plan
from hf_distca.planner.intervals import Intervals
from hf_distca.planner.routes.moves import Moves
from hf_distca.planner.routes.tables import IntArray


@dataclass(frozen=True, eq=False)
class CutTasks:
    """Tasks cut at the borders of segments: all query rows of a task lie on one rank.

    Attributes:
        queries: [n] query rows, from the rank that holds them to the worker that computes them.
        segment_start: [n] the document's first row in the segment of the query rows.
    """

    queries: Moves
    segment_start: IntArray

    @classmethod
    def of(cls, plan: Plan, tasks: NDArray[np.void], segments: NDArray[np.void]) -> "CutTasks":
        """Cut some tasks of a plan.

        Args:
            segments: the plan's segments by (document, start).
        """
        found = Intervals.of(tasks).overlaps(Intervals.of(segments))
        home = segments[found.second]
        return cls(Moves.from_segments(found.rows, home, tasks["worker"][found.first]), home["start"])

    def __getitem__(self, index: IntArray | NDArray[np.bool_]) -> "CutTasks":
        return CutTasks(self.queries[index], self.segment_start[index])

    def pieces(self, which: IntArray, first: IntArray, last: IntArray) -> "CutTasks":
        """Return parts of these tasks, see `Moves.pieces`."""
        return CutTasks(self.queries.pieces(which, first, last), self.segment_start[which])

    @property
    def at_home(self) -> NDArray[np.bool_]:
        """[n] whether the rank that holds the query rows computes them."""
        same: NDArray[np.bool_] = self.queries.source == self.queries.target
        return same


@dataclass(frozen=True, eq=False)
class KeysRead:
    """K/V rows that cut tasks read, in the queries' segment or sent to the worker. All [n].

    Attributes:
        local: whether a task reads rows [local_first, stop) of its document, up to its own last row, in the segment of
            its queries.
        brought_rows: rows of the document that are sent to the worker and read, if `brought`; else empty.
    """

    local: NDArray[np.bool_]
    local_first: IntArray
    brought: NDArray[np.bool_]
    brought_rows: Intervals

    def __getitem__(self, index: IntArray | NDArray[np.bool_]) -> "KeysRead":
        return KeysRead(self.local[index], self.local_first[index], self.brought[index], self.brought_rows[index])


@dataclass(frozen=True, eq=False)
class Reads:
    """Query rows and the K/V rows of one stage that they attend to; no query row is listed twice.

    Attributes:
        task: [n] cut task of the query rows.
        queries: [n] query rows.
        counts: [n] number of intervals of keys.
        keys: [sum of counts] K/V rows of the same document.
        pairs: [n] query-key pairs that are computed.
    """

    task: IntArray
    queries: Intervals
    counts: IntArray
    keys: Intervals
    pairs: IntArray
