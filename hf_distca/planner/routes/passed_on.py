"""Forwarded K/V rows, which cross to a node once and are sent on inside it.

Between nodes a byte takes about nine times as long as inside one. Ranks of a node often read the same rows of a long
document. Such rows go to one of these ranks, the gateway, which forwards them to the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_distca.planner.intervals import Intervals, expand
from hf_distca.planner.routes.moves import Moves
from hf_distca.planner.routes.tables import IntArray

ROW_BITS = 31
"""Bits that are enough to number the rows of any document."""
PIECE = 128
"""Least rows of a piece: a kernel block.

Rows that several ranks of a node read are divided among them in such pieces, to be forwarded.
"""


@dataclass(frozen=True, eq=False)
class Hops:
    """Moves in two hops, after which every worker has the same rows as after direct moves.

    Attributes:
        second: from a rank that received the rows in the first hop; `local` still refers to the rank that holds them.
        passes: [moves of second] index of the first hop's move whose rows each move forwards, all of them.
    """

    first: Moves
    second: Moves
    passes: IntArray

    @classmethod
    def direct(cls, moves: Moves) -> "Hops":
        """Return moves that all go in the first hop."""
        none = np.zeros(0, np.int64)
        return cls(moves, moves[none], none)

    def __getitem__(self, index: NDArray[np.bool_]) -> "Hops":
        """Return some moves of the first hop, and the moves of the second that forward their rows."""
        passed = index[self.passes]
        return Hops(self.first[index], self.second[passed], (np.cumsum(index) - 1)[self.passes[passed]])

    def pieces(self, which: IntArray, first: IntArray, last: IntArray) -> "Hops":
        """Return parts of the first hop's moves, see `Moves.pieces`, and of the moves that forward them."""
        order = np.argsort(which, kind="stable")
        counts = np.bincount(which, minlength=len(self.first.source))
        of_move = np.cumsum(counts) - counts
        piece = order[expand(of_move[self.passes], counts[self.passes])]
        passed = np.repeat(np.arange(len(self.passes)), counts[self.passes])
        second = self.second.pieces(passed, first[piece], last[piece])
        return Hops(self.first.pieces(which, first, last), second, piece)

    def arriving(self, worker: int) -> Moves:
        """Return the rows that a worker receives, in the order in which it counts them: first hop first."""
        first, second = (hop[hop.target == worker] for hop in (self.first, self.second))
        return first.ordered(first.source).followed_by(second.ordered(second.source))

    def rows_by_stage(self, stage: IntArray, stages: int, ranks: int) -> IntArray:
        """Return [stages, 2, ranks] rows that each rank sends and receives, both hops together.

        Rows that servers receive are not counted.

        Args:
            stage: [moves of the first hop] stage in which each move travels and is forwarded.
        """
        rows = np.zeros(stages * 2 * ranks, np.int64)
        for hop, travels in ((self.first, stage), (self.second, stage[self.passes])):
            among = hop.target < ranks
            lengths, place = hop.rows.lengths[among], 2 * travels[among]
            for end, rank in enumerate((hop.source[among], hop.target[among])):
                rows += np.bincount((place + end) * ranks + rank, lengths, len(rows)).astype(np.int64)
        return rows.reshape(stages, 2, ranks)


def pass_on(moves: Moves, nodes: Sequence[int] | None, ranks: int) -> Hops:
    """Let rows that several ranks of another node receive cross to that node once.

    The path of a document's rows does not depend on other documents.

    Args:
        moves: K/V rows, each once per worker.
        nodes: [workers] node of each worker; None: nothing is forwarded.
        ranks: number of ranks; later workers are servers, which get their rows directly.
    """
    if nodes is None:
        return Hops.direct(moves)
    node = np.asarray(nodes, np.int64)
    crossing = (node[moves.source] != node[moves.target]) & (moves.target < ranks)
    crossed = moves[crossing]
    if not len(crossed.target):
        return Hops.direct(moves)

    # 1. Cut the moves into one node wherever any of them begins or ends, so that each part goes whole to its targets.
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

    # 2. Divide each part among its readers. Each piece crosses to one of them, in turn; every part begins with the
    #    next reader.
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

    # 3. The first hop goes to the gateways, the second from the gateways to the other readers.
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
    """Cut the rows of some intervals wherever one begins or ends; sort them by (document, start)."""
    # One number for document, row and whether an interval ends or begins there: numbers alone sort quickly.
    keys = (intervals.document << ROW_BITS) * 2
    keys = np.sort(np.concatenate([keys + 2 * intervals.start + 1, keys + 2 * intervals.stop]))
    document, row = keys >> (ROW_BITS + 1), (keys >> 1) & ((1 << ROW_BITS) - 1)
    covered = np.cumsum(2 * (keys & 1) - 1)[:-1] > 0
    within = covered & (document[1:] == document[:-1]) & (row[1:] > row[:-1])
    return Intervals(document[:-1][within], row[:-1][within], row[1:][within])
