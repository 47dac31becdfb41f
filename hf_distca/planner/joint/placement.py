"""State of the joint layout while it is made, which every phase reads and changes."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hf_distca.planner.cost import pairs
from hf_distca.planner.intervals import Intervals, grain

Segment = tuple[int, int, int, int]
"""(index, start, stop, rank) of rows that were cut off"""
Item = tuple[int, int, int]
"""(index, rows, pairs) of a piece's rows that are not cut off"""

ROUNDING = 0.1
"""Share of the slack in pairs that rounding one cut may cost; beyond it, the cut leaves the block's boundary."""


@dataclass(frozen=True)
class Limits:
    """Precision with which pairs are placed.

    Attributes:
        slack: how far above its share a rank's pairs may be, as a fraction of the mean.
        block: rows of a kernel block.
        mean: pairs of all ranks over the number of ranks.
        inside: whether these are the ranks of one node of several.
    """

    ranks: int
    window: int | None
    slack: float
    block: int
    mean: float
    inside: bool = False

    def pairs(self, start: int, stop: int) -> int:
        """Return the query-key pairs of rows [start, stop) of a document."""
        return pairs(start, stop, self.window)

    def cut_near(self, start: int, least: int, first: int = 0) -> int:
        """Return a cut near row `start`, at least `least`, that leaves no head below a block.

        The cut falls on a block's boundary if that moves few pairs, otherwise on a finer one.

        Args:
            first: first row of the piece that is cut.
        """
        pairs_a_row, most = min(start, self.window or start), ROUNDING * self.slack * self.mean
        multiple = grain(self.block, lambda size: size * pairs_a_row > most)
        row = round(start / multiple) * multiple
        if row - first < self.block:
            row = first + self.block if start - first >= self.block // 2 else first
        return max(row, least)


@dataclass
class Placement:
    """Rows of documents placed on ranks so far. When nodes are given rows, a node stands for a rank.

    Every piece to be placed, a document or a node's rows of it, has an index. So has each stretch that the head of a
    cut piece is divided into. Lists over [indices] describe the rows that are not cut off; rows that were cut off are
    in `cuts`.

    Attributes:
        room: [ranks] rows that each rank still takes.
        need: [ranks] pairs that each rank is still short of its share; negative above it.
        lengths: [indices] tokens of the whole document.
        documents: [indices] document of the rows.
        starts: [indices] first row that is not cut off.
        stops: [indices] one past the last row that is not cut off.
        rank_of: [indices] rank of these rows; -1 if no rows are left or they are not placed yet.
        inter_node: [indices] inter-node cost of a row, in intra-node rows.
    """

    limits: Limits
    room: list[int]
    need: list[float]
    lengths: list[int]
    documents: list[int]
    starts: list[int]
    stops: list[int]
    rank_of: list[int]
    inter_node: list[float]
    cuts: list[Segment] = field(default_factory=list)

    @classmethod
    def of_pieces(
        cls,
        lengths: NDArray[np.int64],
        pieces: Intervals,
        limits: Limits,
        room: list[int],
        need: list[float],
        inter_node: list[float] | None = None,
    ) -> "Placement":
        """Return a placement with nothing cut and nothing placed.

        Args:
            room: [ranks] rows that each rank takes.
            need: [ranks] pairs that each rank should get.
            inter_node: [pieces] as in the attribute; None if no other node reads the pieces.
        """
        return cls(
            limits,
            room=list(room),
            need=list(need),
            lengths=lengths[pieces.document].tolist(),
            documents=pieces.document.tolist(),
            starts=pieces.start.tolist(),
            stops=pieces.stop.tolist(),
            rank_of=[-1] * len(pieces),
            inter_node=inter_node or [0.0] * len(pieces),
        )

    def uncut_rows(self) -> NDArray[np.int64]:
        """Return [indices] int64: rows that are not cut off."""
        return np.array(self.stops, np.int64) - np.array(self.starts, np.int64)

    def hold(self, item: Item, rank: int) -> None:
        """Place uncut rows on a rank."""
        index, rows, cost = item
        self.rank_of[index] = rank
        self.room[rank] -= rows
        self.need[rank] -= cost

    def segments(self) -> NDArray[np.int64]:
        """Return [segments, 4] int64: (document, start, stop, rank) of all rows that are placed."""
        documents = np.array(self.documents, np.int64)
        uncut = np.array([documents, self.starts, self.stops, self.rank_of], np.int64).T
        cut = np.array(self.cuts, np.int64).reshape(-1, 4)
        cut[:, 0] = documents[cut[:, 0]]
        return np.concatenate([uncut[uncut[:, 3] >= 0], cut])
