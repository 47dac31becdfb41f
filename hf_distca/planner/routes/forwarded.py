"""Forwarded K/V rows, which cross to a node once and are sent on inside it, and their stages.

Between nodes a byte takes about nine times as long as inside one. Ranks of a node often read the same rows of a long
document. Such rows go to one of these ranks, the gateway, which forwards them to the others. A row is forwarded in the
stage in which it crosses, so ranks of a node that read it compute with it in the same stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_distca.planner.intervals import ROW_LIMIT, Intervals, expand, sortable
from hf_distca.planner.routes.moves import Moves
from hf_distca.planner.routes.stages import GRAIN
from hf_distca.planner.routes.tables import IntArray

PARTS = 8
"""Number of pieces that a stage should have room for.

Rows are spread over stages in pieces of GRAIN rows, or of fewer if a stage has too little room. Each piece is
forwarded to all its readers.
"""
_GOLDEN = (5**0.5 - 1) / 2
"""The golden ratio's fraction: fractions of its multiples spread evenly between 0 and 1, however many there are."""
_BITS = 62
PIECE = 128
"""Least rows of a piece: a kernel block.

Rows that several ranks of a node read are divided among them in such pieces, to be forwarded.
"""


@dataclass(frozen=True, eq=False)
class Hops:
    """Moves in two hops, after which every worker has the same rows as after direct moves.

    Attributes:
        second: from a rank that received the rows in the first hop; `local` still refers to the rank that holds them.
        source_move: [moves of second] index of the first hop's move whose rows each move forwards, all of them.
    """

    first: Moves
    second: Moves
    source_move: IntArray

    @classmethod
    def direct(cls, moves: Moves) -> "Hops":
        """Return moves that all go in the first hop."""
        none = np.zeros(0, np.int64)
        return cls(moves, moves[none], none)

    def __getitem__(self, index: NDArray[np.bool_]) -> "Hops":
        """Return some moves of the first hop, and the moves of the second that forward their rows."""
        forwarding = index[self.source_move]
        return Hops(self.first[index], self.second[forwarding], (np.cumsum(index) - 1)[self.source_move[forwarding]])

    def pieces(self, which: IntArray, first: IntArray, last: IntArray) -> "Hops":
        """Return parts of the first hop's moves, see `Moves.pieces`, and of the moves that forward them."""
        order = np.argsort(which, kind="stable")
        counts = np.bincount(which, minlength=len(self.first.source))
        of_move = np.cumsum(counts) - counts
        piece = order[expand(of_move[self.source_move], counts[self.source_move])]
        forwarding = np.repeat(np.arange(len(self.source_move)), counts[self.source_move])
        second = self.second.pieces(forwarding, first[piece], last[piece])
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
        for hop, travels in ((self.first, stage), (self.second, stage[self.source_move])):
            among = hop.target < ranks
            lengths, place = hop.rows.lengths[among], 2 * travels[among]
            for end, rank in enumerate((hop.source[among], hop.target[among])):
                rows += np.bincount((place + end) * ranks + rank, lengths, len(rows)).astype(np.int64)
        return rows.reshape(stages, 2, ranks)


def forward_inside_nodes(moves: Moves, nodes: Sequence[int] | None, ranks: int) -> Hops:
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
    parts, readers = between_borders(keyed)
    overlaps = keyed.overlaps(parts)
    which, part = overlaps.first, overlaps.second
    order = np.lexsort((crossed.target[which], part))
    which, part = which[order], part[order]
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


def between_borders(intervals: Intervals) -> tuple[Intervals, IntArray]:
    """Cut the rows of some intervals wherever one begins or ends.

    Returns:
        The parts by (document, start), and how many intervals each of them lies in.
    """
    # One number for document, row and whether an interval ends or begins there.
    begin, end = (2 * sortable(intervals.document, row) for row in (intervals.start, intervals.stop))
    places = np.sort(np.concatenate([begin + 1, end]))
    (document, row), begins = np.divmod(places >> 1, ROW_LIMIT), places & 1
    covering = np.cumsum(2 * begins - 1)[:-1]
    kept = (covering > 0) & (row[1:] > row[:-1])
    return Intervals(document[:-1][kept], row[:-1][kept], row[1:][kept]), covering[kept]


def hops_by_stage(hops: Hops, stage_rows: int, ranks: int) -> tuple[Hops, ...]:
    """Divide K/V rows into stages.

    Rows on the same path, from one rank to another and on to the same others, are spread evenly over the stages. So
    every rank has about equally much to receive and to compute in each stage.

    Args:
        stage_rows: the most rows of a stage that a rank sends, both hops together, or receives; or the number of ranks
            that a single row is forwarded to, if that is more.
        ranks: number of ranks; later workers are servers, which get all their rows in the first stage.

    Returns:
        The hops of each stage; at least one stage.
    """
    to_ranks = hops.first.target < ranks
    among_ranks, to_servers = hops[to_ranks], hops[~to_ranks]
    readers = int(np.bincount(among_ranks.source_move).max(initial=1))
    grain = int(np.clip(stage_rows // (PARTS * readers), 1, GRAIN))
    pieces, spread = _spread(among_ranks, grain)

    most = max(stage_rows, readers)
    count = 1
    while True:
        stage = spread * count // max(int(pieces.first.rows.lengths.sum()), 1)
        busiest = int(pieces.rows_by_stage(stage, count, ranks).max(initial=0))
        if busiest <= most:
            break
        count = max(count + 1, count * busiest // most)

    # A piece may be larger than a stage's share, which leaves some stages empty: drop them.
    numbers, stage = np.unique(stage, return_inverse=True)
    stages = [pieces[stage == number] for number in range(max(len(numbers), 1))]
    stages[0] = Hops(stages[0].first.followed_by(to_servers.first), stages[0].second, stages[0].source_move)
    return tuple(stages)


def _spread(hops: Hops, grain: int) -> tuple[Hops, IntArray]:
    """Cut moves into small pieces, and order them so that pieces of the same path lie far apart.

    Returns:
        The pieces of at most `grain` rows, and for each the number of rows before it in that order.
    """
    first = hops.first
    to_others = np.zeros_like(first.source)
    np.bitwise_or.at(to_others, hops.source_move, np.int64(1) << (hops.second.target % _BITS))
    path = np.stack([first.source, first.target, to_others])
    order = np.lexsort((first.rows.start, first.rows.document, *path[::-1]))
    lengths = first.rows.lengths[order]
    counts = -(-lengths // grain)
    which, begin = np.repeat(order, counts), grain * expand(np.zeros_like(counts), counts)
    pieces = hops.pieces(which, begin, np.minimum(begin + grain, np.repeat(lengths, counts)))

    path = path[:, which]
    begins = np.append(True, (path[:, 1:] != path[:, :-1]).any(0))[: len(which)]
    number = np.cumsum(begins) - 1
    size = np.bincount(number)[number] if len(number) else number
    nth = np.arange(len(which)) - np.flatnonzero(begins)[number]
    order = np.argsort((nth + number * _GOLDEN % 1) / size, kind="stable")
    rows = pieces.first.rows.lengths[order]
    before = np.empty_like(rows)
    before[order] = np.cumsum(rows) - rows
    return pieces, before
