"""Joint layout: ranks have equal tokens and equal pairs, with few and cheap cuts of documents.

Only cut documents cost bytes: rows from row s on need K/V rows [0, s) of their document. So there
are three phases:

1. A document too large for one rank is cut from its end (`large_documents.cut_large`). Besides its
   segment a rank takes the shortest documents, so that every cut lies as early as possible, or else
   the head of the same document, whose K/V rows the segment needs anyway. The rows before all cuts
   are divided, so that no single rank sends them to all later segments.
2. Other documents stay whole (`_Placement.place_whole`). Longest first, each goes to the rank with
   the most missing pairs per missing token, so that every rank's need falls towards the shortest
   documents. Once the remaining documents hardly matter in pairs, each goes to the rank with the
   most room.
3. Ranks then differ by less than a short document. The ends of short documents make their tokens
   equal (`_Placement.even_out`).

The remaining differences in pairs are left to `balance`. With several nodes, documents are placed
on nodes first, and then each node's rows on its ranks: only rows of documents that are cut between
nodes cross between them.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hf_distca.plan import SEGMENT, Layout, nodes
from hf_distca.plan.cost import BALANCE_TOLERANCE, as_lengths, pairs
from hf_distca.plan.intervals import (
    ROWS,
    IntArray,
    Table,
    by_document,
    joined,
    merge_touching,
    table_of,
)
from hf_distca.planner.bin_packing import NOWHERE, Bins, largest_first
from hf_distca.planner.large_documents import Pieces, Segment, Targets, cut_large
from hf_distca.planner.layout import assemble, check_capacity, check_settings

SLACK_OF_NODES = 0.25
"""Share of the slack in pairs that nodes may use. Balancing nodes later would move rows between
them, over slow links; so the larger part is left for ranks inside a node, whose links are fast."""
NEGLIGIBLE = 0.3
"""Share of the slack in pairs that documents placed for their tokens alone may use. The larger part
is left for the cuts of large documents and for `even_out`."""


def joint_layout(
    lengths: Sequence[int] | IntArray,
    ranks: int,
    tokens_per_rank: int,
    *,
    window: int | None = None,
    balance_tolerance: float = BALANCE_TOLERANCE,
    balance_block_size: int = 128,
    node_sizes: Sequence[int] | None = None,
) -> Layout:
    """Place documents so that every rank has equal tokens and, as far as possible, equal attention.

    Query rows then stay where they are, and only K/V rows of cut documents travel. Every rank holds
    total / ranks rows, rounded down or up. Cuts fall on multiples of a block where tokens and
    balance allow.

    Args:
        balance_tolerance: how far above the mean a rank's pairs may be, as a fraction of the mean.
        node_sizes: [nodes] consecutive ranks of each node; documents are cut between nodes only if
            necessary. None if all links are alike.

    Raises:
        ValueError: a length below 1, settings out of range, or more tokens than the ranks take.
    """
    array = as_lengths(lengths)
    check_settings(balance_tolerance, balance_block_size)
    check_capacity(array, ranks, tokens_per_rank)
    sizes = (1,) * ranks if node_sizes is None else nodes.node_sizes(ranks, node_sizes)
    segments = joint_segments(array, sizes, window, balance_tolerance, balance_block_size)
    return assemble(array, segments, ranks, by_document=True)


def joint_segments(
    lengths: IntArray, node_sizes: Sequence[int], window: int | None, slack: float, block: int
) -> Table:
    """Return [segments] of dtype SEGMENT that place documents on ranks; offsets are not set.

    Args:
        node_sizes: [nodes] ranks of each node; all 1 if all links are alike.
        slack: how far above the mean a rank's pairs may be, as a fraction of the mean.
    """
    ranks = sum(node_sizes)
    rows_a_rank, more_rows = divmod(int(lengths.sum()), ranks)
    room = [rows_a_rank + (rank < more_rows) for rank in range(ranks)]
    mean = int(pairs(0, lengths, window).sum()) / ranks
    documents = table_of(ROWS, document=np.arange(len(lengths)), stop=lengths)
    if len(node_sizes) in (1, ranks):
        bins = _bins(room, mean)
        targets = Targets.of_bins(bins, slack, window, block)
        return _Placement(lengths, Pieces(documents), bins, targets).segments()
    # 1. Place documents on nodes. The largest nodes come first: a document that is too large for
    #    one node is too large for all later ones.
    ends = np.cumsum(node_sizes).tolist()
    all_nodes = [
        _Node(first_rank=end - size, room=room[end - size : end])
        for end, size in zip(ends, node_sizes, strict=True)
    ]
    largest_nodes = [all_nodes[number] for number in largest_first(np.array(node_sizes))]
    bins = Bins(
        [sum(node.room) for node in largest_nodes],
        work=[-(mean * len(node.room)) for node in largest_nodes],
    )
    targets = Targets.of_bins(bins, slack * SLACK_OF_NODES, window, block)
    node_segments = _Placement(lengths, Pieces(documents), bins, targets).segments()
    pieces_of_node = _pieces_on_nodes(node_segments, len(node_sizes))
    # 2. Place what each node has on its ranks. With a window few rows cross.
    if window is None:
        costs_of_node = _inter_node_costs(pieces_of_node)
    else:
        costs_of_node = [[0.0] * len(pieces) for pieces in pieces_of_node]
    segments_of_nodes = []
    for node, table, inter_node in zip(largest_nodes, pieces_of_node, costs_of_node, strict=True):
        own_mean = int(pairs(table["start"], table["stop"], window).sum()) / len(node.room)
        # Ranks of a node with few pairs may be farther above its mean.
        own_slack = mean * (1 + slack) / own_mean - 1 if own_mean else slack
        own_slack = max(own_slack, slack * SLACK_OF_NODES)
        bins = _bins(node.room, own_mean)
        targets = Targets.of_bins(bins, own_slack, window, block)
        placement = _Placement(lengths, Pieces(table, inter_node), bins, targets, inside=True)
        segments = placement.segments()
        segments["rank"] += node.first_rank
        segments_of_nodes.append(segments)
    return joined(*segments_of_nodes)


@dataclass(frozen=True)
class _Node:
    """Node that documents are placed on."""

    first_rank: int
    room: list[int]  # [ranks of the node] rows that each of them takes


def _bins(room: list[int], missing: float) -> Bins:
    """Return bins for ranks that miss equally many pairs; work above 0 is beyond a rank's share."""
    return Bins(room, work=[-missing] * len(room))


def _pieces_on_nodes(node_segments: Table, count: int) -> list[Table]:
    """Return for each node [pieces] of dtype ROWS: rows of documents that it has, joined.

    Args:
        node_segments: [segments] of dtype SEGMENT, with nodes in place of ranks.
        count: number of nodes.
    """
    rows = table_of(
        ROWS,
        document=node_segments["document"],
        start=node_segments["start"],
        stop=node_segments["stop"],
    )
    return [
        merge_touching(by_document(rows[node_segments["rank"] == number]))
        for number in range(count)
    ]


def _inter_node_costs(pieces_of_node: list[Table]) -> list[list[float]]:
    """Return for each node the inter-node cost of a row of each piece, in intra-node rows.

    A row crosses once to every other node that has later rows of the document.
    """
    pieces = np.concatenate(pieces_of_node)
    numbers = range(len(pieces_of_node))
    node = np.repeat(numbers, [len(table) for table in pieces_of_node])
    cost = np.zeros(len(pieces))
    pieces_of_document = np.bincount(pieces["document"])[pieces["document"]]
    # Only documents that are cut between nodes have rows that cross.
    cut = np.flatnonzero(pieces_of_document > 1)
    for piece in cut.tolist():
        is_later = (pieces["document"][cut] == pieces["document"][piece]) & (
            pieces["start"][cut] >= pieces["stop"][piece]
        )
        readers = set(node[cut[is_later]].tolist()) - {int(node[piece])}
        cost[piece] = len(readers) * nodes.NODE_BANDWIDTH / nodes.NETWORK_BANDWIDTH
    return [cost[node == number].tolist() for number in numbers]


class _Placement:
    """Rows of documents placed on ranks so far.

    When nodes are given rows, a node stands for a rank.

    Args:
        lengths: [documents] rows of each document.
        pieces: rows to be placed.
        bins: room of every rank, and the pairs that it misses as work below 0.
        inside: whether the ranks are those of one node of several.
    """

    def __init__(
        self,
        lengths: IntArray,
        pieces: Pieces,
        bins: Bins,
        targets: Targets,
        *,
        inside: bool = False,
    ) -> None:
        self._lengths = lengths
        self._pieces = pieces
        self._bins = bins
        self._targets = targets
        self._inside = inside
        self._cuts: list[Segment] = []
        # [pieces] rank of each; NOWHERE if no rows are left or they are not placed yet.
        self._rank_of_piece: list[int] = []

    def segments(self) -> Table:
        """Place all rows so that every rank is full, and return [segments] of dtype SEGMENT."""
        pieces = self._pieces
        self._cuts = cut_large(pieces, self._bins, self._targets, inside=self._inside)
        self.even_out(self.place_whole())
        uncut = table_of(
            SEGMENT,
            document=np.array(pieces.documents, np.int64),
            start=np.array(pieces.starts, np.int64),
            stop=np.array(pieces.stops, np.int64),
            rank=np.array(self._rank_of_piece, np.int64),
        )
        cuts = np.array(self._cuts, np.int64).reshape(-1, 4)
        cut_off = table_of(
            SEGMENT,
            document=uncut["document"][cuts[:, 0]],
            start=cuts[:, 1],
            stop=cuts[:, 2],
            rank=cuts[:, 3],
        )
        return joined(uncut.compress(uncut["rank"] != NOWHERE), cut_off)

    def place_whole(self) -> list[int]:
        """Place pieces on ranks with room for them, and return the pieces that fit nowhere."""
        bins, targets = self._bins, self._targets
        rows = self._pieces.rows()
        costs = self._pieces.pairs(targets.window)
        # Pieces without rows come last, and are left out.
        order = largest_first(costs if self._inside else rows)[: np.count_nonzero(rows)]
        # 1. The largest pieces go where most pairs are missing for the missing rows.
        remaining_pairs = np.cumsum(costs[order][::-1])[::-1]
        negligible = targets.mean * len(bins.room) * targets.slack * NEGLIGIBLE
        count = int((remaining_pairs > negligible).sum())
        rank_of_costly = bins.pack(rows, costs, order[:count], self._most_missing_pairs)
        # 2. The other pieces hardly matter in pairs: they go where most rows are missing.
        rank_of_cheap = bins.pack(rows, costs, order[count:], bins.most_room)
        # One of the two is NOWHERE, which is -1.
        rank_of_piece = np.maximum(rank_of_costly, rank_of_cheap)
        self._rank_of_piece = rank_of_piece.tolist()
        fits_nowhere: list[int] = order[rank_of_piece[order] == NOWHERE].tolist()
        return fits_nowhere

    def _most_missing_pairs(self, rank: int) -> float:
        """Prefer the rank with the most missing pairs for each missing row."""
        return self._bins.work[rank] / (self._bins.room[rank] or 1)

    def even_out(self, fits_nowhere: list[int]) -> None:
        """Move rows from overfull ranks to ranks with room.

        Args:
            fits_nowhere: pieces that no rank has room for. They are placed first, and fill ranks
                beyond their room.
        """
        room = self._bins.room
        rows = self._pieces.rows()
        # 1. Overfill the rank with the most room.
        for piece in fits_nowhere:
            rank = room.index(max(room))
            self._rank_of_piece[piece] = rank
            room[rank] -= int(rows[piece])
        # 2. Empty the overfull ranks. The rank with the most room comes first; it is the last to
        #    get rows.
        ranks_with_room = [rank for rank in range(len(room)) if room[rank] > 0]
        ranks_with_room.sort(key=lambda rank: (-room[rank], rank))
        rank_of_piece = np.array(self._rank_of_piece)
        for rank in range(len(room)):
            if room[rank] < 0:
                pieces = np.flatnonzero(rank_of_piece == rank).tolist()
                self._move_surplus(
                    rank, [_Held(int(rows[piece]), piece) for piece in pieces], ranks_with_room
                )

    def _move_surplus(self, rank: int, pieces: list["_Held"], ranks_with_room: list[int]) -> None:
        """Move rows of an overfull rank to ranks with room until it is full.

        Args:
            pieces: pieces of the rank.
            ranks_with_room: ranks with room; loses those that become full.
        """
        room, block = self._bins.room, self._targets.block
        # A document is cut once, near its end. So a segment below a block always ends a document.
        uncut = sorted(piece for piece in pieces if self._is_document(piece))
        cut_already = sorted(piece for piece in pieces if not self._is_document(piece))
        while room[rank] < 0:
            if not uncut:  # only pieces are left that are not whole documents
                uncut = cut_already
                cut_already = []
            target = ranks_with_room[-1]
            wanted_rows = min(-room[rank], room[target])
            chosen = uncut.pop(_best_to_move(uncut, wanted_rows, block))
            moved_rows = min(wanted_rows, chosen.rows)
            if moved_rows == chosen.rows:
                self._rank_of_piece[chosen.piece] = target
            else:
                self._cut_end(chosen.piece, moved_rows, target)
                insort(cut_already, _Held(chosen.rows - moved_rows, chosen.piece))
            room[rank] += moved_rows
            room[target] -= moved_rows
            if not room[target]:
                ranks_with_room.pop()

    def _is_document(self, piece: "_Held") -> bool:
        """Return whether a rank's piece is a whole document."""
        return piece.rows == int(self._lengths[self._pieces.documents[piece.piece]])

    def _cut_end(self, piece: int, rows: int, rank: int) -> None:
        """Give the last rows of a piece to a rank."""
        stop = self._pieces.stops[piece]
        segment = Segment(piece, stop - rows, stop, rank)
        self._pieces.cut_off(segment)
        self._cuts.append(segment)


class _Held(NamedTuple):
    """Piece that an overfull rank holds; pieces sort by their rows."""

    rows: int
    piece: int


def _best_to_move(pieces: list[_Held], rows: int, block: int) -> int:
    """Return which piece to move rows from: one of exactly these rows, if there is one.

    Otherwise it is the shortest one whose head keeps a block, else the longest.

    Args:
        pieces: pieces sorted by their rows.
    """
    exact = bisect_left(pieces, _Held(rows, -1))
    if exact < len(pieces) and pieces[exact].rows == rows:
        return exact
    keeps_block = bisect_left(pieces, _Held(rows + block, -1))
    return min(keeps_block, len(pieces) - 1)
