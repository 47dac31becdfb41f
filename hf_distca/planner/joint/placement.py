"""State of the joint layout while it is made, which every phase reads and changes."""

import numpy as np

from hf_distca.planner.cost import pairs
from hf_distca.planner.intervals import IntArray, Table, grain

Segment = tuple[int, int, int, int]
"""(index, start, stop, rank) of rows that were cut off"""
Item = tuple[int, int, int]
"""(index, rows, pairs) of a piece's rows that are not cut off"""

ROUNDING = 0.1
"""Share of the slack in pairs that rounding one cut may cost; beyond it, the cut leaves the block's boundary."""


class Placement:
    """Rows of documents placed on ranks so far. When nodes are given rows, a node stands for a rank.

    Every piece to be placed, a document or a node's rows of it, has an index. So has each stretch that the head of a
    cut piece is divided into. Lists over [indices] describe the rows that are not cut off; rows that were cut off are
    in `cuts`.

    Args:
        lengths: [documents] tokens of each document.
        pieces: table of the rows to place.
        room: [ranks] rows that each rank takes; lowered by what it gets.
        need: [ranks] pairs that each rank should get, likewise.
        slack: how far above its share a rank's pairs may be, as a fraction of the mean.
        block: rows of a kernel block.
        inside: whether these are the ranks of one node of several.
        inter_node: [pieces] inter-node cost of a row, in intra-node rows; None if no other node reads the pieces.

    Attributes:
        mean: pairs of all ranks over the number of ranks.
        lengths: [indices] tokens of the whole document.
        starts: [indices] first row that is not cut off.
        stops: [indices] one past the last row that is not cut off.
        rank_of: [indices] rank of these rows; -1 if no rows are left or they are not placed yet.
    """

    def __init__(
        self,
        lengths: IntArray,
        pieces: Table,
        room: list[int],
        need: list[float],
        window: int | None,
        slack: float,
        block: int,
        inside: bool = False,
        inter_node: list[float] | None = None,
    ) -> None:
        self.room, self.need, self.ranks, self.mean = list(room), list(need), len(room), sum(need) / len(need)
        self.window, self.slack, self.block, self.inside = window, slack, block, inside
        self.lengths: list[int] = lengths[pieces["document"]].tolist()
        self.documents: list[int] = pieces["document"].tolist()
        self.starts: list[int] = pieces["start"].tolist()
        self.stops: list[int] = pieces["stop"].tolist()
        self.rank_of = [-1] * len(pieces)
        self.inter_node = inter_node or [0.0] * len(pieces)
        self.cuts: list[Segment] = []

    def pairs(self, start: int, stop: int) -> int:
        """Return the query-key pairs of rows [start, stop) of a document."""
        return pairs(start, stop, self.window)

    def cut_near(self, start: int, least: int, first: int) -> int:
        """Return a cut near row `start`, at least `least`, that leaves no head from row `first` on below a block.

        The cut falls on a block's boundary if that moves few pairs, otherwise on a finer one.
        """
        pairs_a_row, most = min(start, self.window or start), ROUNDING * self.slack * self.mean
        multiple = grain(self.block, lambda size: size * pairs_a_row > most)
        row = round(start / multiple) * multiple
        if row - first < self.block:
            row = first + self.block if start - first >= self.block // 2 else first
        return max(row, least)

    def uncut_rows(self) -> IntArray:
        """Return [indices] int64: rows that are not cut off."""
        return np.array(self.stops, np.int64) - np.array(self.starts, np.int64)

    def add(self, index: int, start: int, stop: int) -> None:
        """Add rows of a piece as a piece of their own."""
        self.lengths.append(self.lengths[index])
        self.documents.append(self.documents[index])
        self.inter_node.append(self.inter_node[index])
        self.starts.append(start)
        self.stops.append(stop)
        self.rank_of.append(-1)

    def segments(self) -> IntArray:
        """Return [segments, 4] int64: (document, start, stop, rank) of all rows that are placed."""
        documents = np.array(self.documents, np.int64)
        uncut = np.array([documents, self.starts, self.stops, self.rank_of], np.int64).T
        cut = np.array(self.cuts, np.int64).reshape(-1, 4)
        cut[:, 0] = documents[cut[:, 0]]
        return np.concatenate([uncut[uncut[:, 3] >= 0], cut])
