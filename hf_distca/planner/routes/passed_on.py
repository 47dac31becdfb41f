"""K/V rows that cross to a node once and are passed on inside it.

Between nodes a byte takes about nine times as long as inside one, and ranks of a node often read the same rows of a
long document. Such rows go to one of these ranks, and from there to the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_distca.planner.intervals import Intervals, expand
from hf_distca.planner.routes.moves import Moves
from hf_distca.planner.routes.tables import IntArray

ROW_BITS = 31
"""No document has more rows than so many bits count."""
PIECE = 128
"""Rows, a kernel block. What several ranks of a node read is divided among them to be passed on, in pieces of so many
rows at least."""


@dataclass(frozen=True, eq=False)
class Hops:
    """Moves in two hops: every worker receives the same rows as in one.

    Attributes:
        first: from the rank that holds the rows.
        second: from a rank that has received the rows in the first hop; `local` still is where the rows lie at the
            rank that holds them.
        passes: [moves of second] the move of the first hop whose rows each passes on, all of them.
    """

    first: Moves
    second: Moves
    passes: IntArray

    @classmethod
    def direct(cls, moves: Moves) -> "Hops":
        """All in the first hop."""
        none = np.zeros(0, np.int64)
        return cls(moves, moves[none], none)

    def __getitem__(self, index: NDArray[np.bool_]) -> "Hops":
        """Some moves of the first hop, and those of the second that pass on their rows."""
        passed = index[self.passes]
        return Hops(self.first[index], self.second[passed], (np.cumsum(index) - 1)[self.passes[passed]])

    def pieces(self, which: IntArray, first: IntArray, last: IntArray) -> "Hops":
        """Parts of the moves of the first hop, see `Moves.pieces`, and of those of the second that pass them on."""
        order = np.argsort(which, kind="stable")
        counts = np.bincount(which, minlength=len(self.first.source))
        of_move = np.cumsum(counts) - counts
        piece = order[expand(of_move[self.passes], counts[self.passes])]
        passed = np.repeat(np.arange(len(self.passes)), counts[self.passes])
        second = self.second.pieces(passed, first[piece], last[piece])
        return Hops(self.first.pieces(which, first, last), second, piece)

    def arriving(self, worker: int) -> Moves:
        """What a worker receives, in the order in which it counts the rows: those of the first hop come first."""
        first, second = (hop[hop.target == worker] for hop in (self.first, self.second))
        return first.ordered(first.source).followed_by(second.ordered(second.source))

    def rows_by_stage(self, stage: IntArray, stages: int, ranks: int) -> IntArray:
        """[stages, 2, ranks] rows that each rank sends, in both hops together, and that it receives; what servers
        receive is not counted.

        Args:
            stage: [moves of the first hop] in which stage each travels; it is passed on in the same one.
            stages: how many there are.
            ranks: number of ranks.
        """
        rows = np.zeros(stages * 2 * ranks, np.int64)
        for hop, travels in ((self.first, stage), (self.second, stage[self.passes])):
            among = hop.target < ranks
            lengths, place = hop.rows.lengths[among], 2 * travels[among]
            for end, rank in enumerate((hop.source[among], hop.target[among])):
                rows += np.bincount((place + end) * ranks + rank, lengths, len(rows)).astype(np.int64)
        return rows.reshape(stages, 2, ranks)


def pass_on(moves: Moves, nodes: Sequence[int] | None, ranks: int) -> Hops:
    """Let rows that several ranks of another node receive go there once.

    A document's rows go the same way whatever other documents there are.

    Args:
        moves: K/V rows, each once per worker.
        nodes: [workers] the node of each worker; None: nothing is passed on.
        ranks: number of ranks; workers from this number on are servers, which get their rows directly.
    """
    if nodes is None:
        return Hops.direct(moves)
    node = np.asarray(nodes, np.int64)
    crossing = (node[moves.source] != node[moves.target]) & (moves.target < ranks)
    crossed = moves[crossing]
    if not len(crossed.target):
        return Hops.direct(moves)

    # 1. Cut the moves into one node where any of them begins or ends: of a part, every target gets all rows.
    into = node[crossed.target] * (int(crossed.rows.document.max()) + 1) + crossed.rows.document
    into = np.unique(into, return_inverse=True)[1]  # small enough to be sorted together with rows
    keyed = Intervals(into, crossed.rows.start, crossed.rows.stop)
    parts = _between_borders(keyed)
    overlaps = keyed.overlaps(parts)
    which, part = overlaps.first, overlaps.second
    order = np.lexsort((crossed.target[which], part))
    which, part = which[order], part[order]
    readers = np.bincount(part, minlength=len(parts))
    first_reader = np.cumsum(readers) - readers

    # 2. Divide each part among its readers, and let each piece cross to one of them: in turns, beginning with another
    #    one in every part.
    pieces = np.minimum(readers, np.maximum(parts.lengths // PIECE, 1))
    of_part = np.repeat(np.arange(len(parts)), pieces)
    nth = expand(np.zeros_like(pieces), pieces)
    share, more = np.divmod(parts.lengths, pieces)
    begin = parts.start[of_part] + nth * share[of_part] + np.minimum(nth, more[of_part])
    end = begin + share[of_part] + (nth < more[of_part])
    group_first = np.searchsorted(parts.document, parts.document)
    turn = (nth + (np.arange(len(parts)) - group_first)[of_part]) % readers[of_part]
    gateway_move = which[first_reader[of_part] + turn]
    gateway = crossed.target[gateway_move]

    # 3. The first hop goes to the gateways, the second from there to the other readers.
    first_row = crossed.rows.start[gateway_move]
    hop = crossed.pieces(gateway_move, begin - first_row, end - first_row)
    others = readers[of_part]
    piece = np.repeat(np.arange(len(of_part)), others)
    reader = which[expand(first_reader[of_part], others)]
    elsewhere = crossed.target[reader] != gateway[piece]
    piece, reader = piece[elsewhere], reader[elsewhere]
    second = Moves(hop.rows[piece], gateway[piece], crossed.target[reader], hop.local[piece])
    kept = moves[~crossing]
    return Hops(kept.followed_by(hop), second, len(kept.source) + piece)


def _between_borders(intervals: Intervals) -> Intervals:
    """The rows of some intervals, cut wherever one begins or ends; by (document, start)."""
    # One number for document, row and whether an interval ends or begins there: numbers alone sort quickly.
    keys = (intervals.document << ROW_BITS) * 2
    keys = np.sort(np.concatenate([keys + 2 * intervals.start + 1, keys + 2 * intervals.stop]))
    document, row = keys >> (ROW_BITS + 1), (keys >> 1) & ((1 << ROW_BITS) - 1)
    covered = np.cumsum(2 * (keys & 1) - 1)[:-1] > 0
    within = covered & (document[1:] == document[:-1]) & (row[1:] > row[:-1])
    return Intervals(document[:-1][within], row[:-1][within], row[1:][within])
