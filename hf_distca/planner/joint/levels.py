"""Placement on one level or two: documents on nodes, and then each node's rows on its ranks.

Only rows of documents that are cut between nodes cross between them. So a document goes to one node if it fits. Nodes
share the pairs per rank equally within a part of the tolerance; the rest of the tolerance is for the ranks inside.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hf_distca.planner.cost import pairs
from hf_distca.planner.intervals import Intervals
from hf_distca.planner.joint.place import place
from hf_distca.planner.joint.placement import Limits, Placement
from hf_distca.planner.nodes import NETWORK_BANDWIDTH, NODE_BANDWIDTH

OF_NODES = 0.25
"""Share of the slack in pairs that nodes may use."""


def place_on_ranks(
    lengths: NDArray[np.int64], sizes: Sequence[int], window: int | None, slack: float, block: int
) -> NDArray[np.int64]:
    """Place all rows of all documents; every rank gets total / ranks rows, rounded down or up.

    Args:
        lengths: [documents] int64, all positive.
        sizes: [nodes] ranks of each node.
        slack: how far above the mean a rank's pairs may be, as a fraction of the mean.
        block: rows of a kernel block.

    Returns:
        [segments, 4] int64: document, start, stop and rank of each segment, in no order.
    """
    ranks = sum(sizes)
    share, more = divmod(int(lengths.sum()), ranks)
    room = [share + (rank < more) for rank in range(ranks)]
    mean = int(pairs(0, lengths, window).sum()) / ranks
    documents = Intervals(np.arange(len(lengths)), np.zeros_like(lengths), lengths)
    if len(sizes) in (1, ranks):
        limits = Limits(ranks, window, slack, block, mean)
        return place(Placement.of_pieces(lengths, documents, limits, room, [mean] * ranks))

    # The largest nodes come first: a document that is too large for one node is too large for all later ones.
    order = np.argsort(-np.array(sizes), kind="stable")
    first = np.cumsum(sizes) - sizes
    limits = Limits(len(sizes), window, slack * OF_NODES, block, mean * ranks / len(sizes))
    rooms = [sum(room[first[node] : first[node] + sizes[node]]) for node in order]
    needs = [mean * sizes[node] for node in order]
    on_nodes = place(Placement.of_pieces(lengths, documents, limits, rooms, needs))
    pieces = [_joined(on_nodes[on_nodes[:, 3] == nth]) for nth in range(len(sizes))]
    abroad = [[0.0] * len(each) for each in pieces] if window else _abroad(pieces)
    placed = []
    for nth, node in enumerate(order):
        own = int(pairs(pieces[nth].start, pieces[nth].stop, window).sum()) / sizes[node]
        most = mean * (1 + slack) / own - 1 if own else slack
        limits = Limits(sizes[node], window, max(most, slack * OF_NODES), block, own, inside=True)
        its_room = room[first[node] : first[node] + sizes[node]]
        placement = Placement.of_pieces(lengths, pieces[nth], limits, its_room, [own] * sizes[node], abroad[nth])
        segments = place(placement)
        segments[:, 3] += first[node]
        placed.append(segments)
    return np.concatenate(placed)


def _joined(segments: NDArray[np.int64]) -> Intervals:
    """Return the rows of one node's segments by (document, start), with touching segments joined."""
    document, start, stop, _ = segments[np.lexsort((segments[:, 1], segments[:, 0]))].T
    begins = np.append(True, (document[1:] != document[:-1]) | (start[1:] != stop[:-1]))[: len(document)]
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(document))[: len(first)] - 1
    return Intervals(document[first], start[first], stop[last])


def _abroad(pieces: list[Intervals]) -> list[list[float]]:
    """Return the inter-node cost of a row of each piece, in intra-node rows."""
    document, start, stop = (
        np.concatenate([getattr(each, name) for each in pieces]) for name in ("document", "start", "stop")
    )
    node = np.repeat(np.arange(len(pieces)), [len(each) for each in pieces])
    cost = np.zeros(len(document))
    shared = np.flatnonzero(np.bincount(document)[document] > 1)
    for index in shared.tolist():
        later = shared[(document[shared] == document[index]) & (start[shared] >= stop[index])]
        readers = set(node[later].tolist()) - {int(node[index])}
        cost[index] = len(readers) * NODE_BANDWIDTH / NETWORK_BANDWIDTH
    return [cost[node == nth].tolist() for nth in range(len(pieces))]
