"""Groups of neighbouring ranks that exchange nothing with each other, and the documents of each.

A document lies on the ranks of one group. Groups of one rank exchange nothing at all. One group per
node exchanges rows inside nodes only. Smaller groups exchange less, larger ones balance better.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from hf_distca.plan import AttentionKind, Layout, NanoBatch, Plan
from hf_distca.plan.arrays import FloatArray, IntArray
from hf_distca.plan.intervals import split_at
from hf_distca.planner.balance import balance
from hf_distca.planner.bin_packing import Bins, largest_first, ranks_of_whole, split_documents
from hf_distca.planner.build import LaidOut, local_plan
from hf_distca.planner.division import Division
from hf_distca.planner.layout import layout_of_rows
from hf_distca.planner.prefix_trees import PrefixTrees, with_branches
from hf_distca.planner.settings import PlanSettings
from hf_distca.predict.seconds import StepCosts

ALIKE = 0.01
"""Share by which a group may have more work per rank than the mean and still count as equal. It is
the finest tolerance of balancing, below which the time of a step no longer changes measurably."""
MOST_SLACK = 8.0
"""Maximum tolerance of a group with little work. Beyond it nothing has to be balanced, and larger
numbers would only lose precision."""


def partitions(node_sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return ways to divide ranks into groups, from single ranks to one group of all.

    Neighbours are joined in pairs, first inside nodes, then whole nodes.

    Args:
        node_sizes: [nodes] ranks of each node.

    Returns:
        For each partition, [groups] ranks of each group.
    """
    # 1. Join ranks inside nodes, until every node is a group.
    groups_of_nodes = [[1] * size for size in node_sizes]
    levels = [tuple(chain(*groups_of_nodes))]
    while any(len(groups) > 1 for groups in groups_of_nodes):
        groups_of_nodes = [_paired(groups) for groups in groups_of_nodes]
        levels.append(tuple(chain(*groups_of_nodes)))
    # 2. Join nodes, until all ranks are one group.
    while len(levels[-1]) > 1:
        levels.append(tuple(_paired(list(levels[-1]))))
    return levels


def _paired(sizes: list[int]) -> list[int]:
    """Join neighbouring groups in pairs and return the sizes."""
    return [sum(sizes[first : first + 2]) for first in range(0, len(sizes), 2)]


@dataclass(frozen=True, eq=False)
class Placing:
    """Placement of documents in groups of ranks, which exchange nothing with each other."""

    sizes: tuple[int, ...]  # [groups] ranks of each group
    documents: tuple[IntArray, ...]
    unplaced: tuple[int, ...]  # documents that fit in no group; cut over any ranks with room
    # [groups] seconds that a rank of each group computes if its documents divide evenly.
    seconds: FloatArray

    @classmethod
    def of_all(cls, seconds: FloatArray, speeds: FloatArray) -> "Placing":
        """Return one group of all ranks, from [documents] seconds and [ranks] speeds."""
        divided_evenly = float(seconds.sum() / speeds.sum())
        return cls((len(speeds),), (np.arange(len(seconds)),), (), np.array([divided_evenly]))

    @property
    def slowest(self) -> float:
        """Least seconds that ranks of the group with the most work compute."""
        return float(self.seconds.max())


def place_in_groups(
    lengths: IntArray,
    seconds: FloatArray,
    sizes: tuple[int, ...],
    rows_per_rank: int,
    speeds: FloatArray,
    *,
    fill_to: float = 0.0,
) -> Placing | None:
    """Give documents to groups of equal work.

    The costliest document comes first. Each document goes to the group with the least work that has
    room for it.

    Args:
        seconds: [documents] seconds of computing each document.
        sizes: [groups] ranks of each group.
        speeds: [ranks] work per second of each rank, in seconds of a usual rank.
        fill_to: seconds up to which groups are filled one after another, once each has a document;
            0 for equal work.

    Returns:
        None if a document is too long for every group, or a group would have fewer tokens than
        ranks.
    """
    if int(lengths.max()) > max(sizes) * rows_per_rank:
        return None
    if len(sizes) == 1:
        return Placing.of_all(seconds, speeds)
    bins = Bins(
        [size * rows_per_rank for size in sizes],
        speeds=np.add.reduceat(speeds, _starts(sizes)).tolist(),
    )
    order = largest_first(seconds)
    if fill_to:
        group_of_document = bins.fill_up(lengths, seconds, order, fill_to)
    else:
        group_of_document = bins.pack(lengths, seconds, order, bins.least_work)
    for size, room in zip(sizes, bins.room, strict=True):
        if size * rows_per_rank - room < size:
            return None
    # Sort the documents by group; those that no group has room for come first.
    sorted_documents = np.argsort(group_of_document, kind="stable")
    group_starts = np.searchsorted(group_of_document[sorted_documents], np.arange(len(sizes)))
    unplaced, *documents = split_at(sorted_documents, group_starts)
    return Placing(sizes, tuple(documents), tuple(unplaced.tolist()), np.array(bins.work))


def _starts(sizes: Sequence[int]) -> IntArray:
    """Return the first rank of each group, or node, from its number of ranks."""
    return np.cumsum((0, *sizes[:-1]))


def place_on_ranks(
    lengths: IntArray, seconds: FloatArray, ranks: int, rows_per_rank: int, speeds: FloatArray
) -> Placing | None:
    """Give whole documents to ranks so that they fit, if need be with unequal work.

    Args:
        seconds, speeds: as in `place_in_groups`.

    Returns:
        None if a document is too long, documents do not fit, or a rank would have none.
    """
    if int(lengths.max()) > rows_per_rank:
        return None
    rank_of_document = ranks_of_whole(lengths, ranks, rows_per_rank)
    if rank_of_document is None or len(np.unique(rank_of_document)) < ranks:
        return None
    documents = tuple(np.flatnonzero(rank_of_document == rank) for rank in range(ranks))
    work = np.bincount(rank_of_document, seconds, ranks)
    return Placing((1,) * ranks, documents, (), work / speeds)


def joined_nodes(
    lengths: IntArray,
    seconds: FloatArray,
    node_sizes: Sequence[int],
    rows_per_rank: int,
    speeds: FloatArray,
) -> tuple[int, ...] | None:
    """Join as few nodes as documents need, for groups of about equal work per rank.

    Args:
        seconds, speeds: as in `place_in_groups`.

    Returns:
        [groups] ranks of each group, largest first; None if nodes differ in size, or together have
        too little room.
    """
    node_count = len(node_sizes)
    node_ranks = max(node_sizes)
    if min(node_sizes) < node_ranks:
        return None
    limit = float(seconds.sum() / speeds.sum()) * (1 + ALIKE)
    # 1. Give documents that are too large for a node several nodes.
    nodes_by_work = seconds / (limit * node_ranks)
    nodes_by_rows = lengths / (node_ranks * rows_per_rank)
    needed_nodes = np.ceil(np.maximum(nodes_by_work, nodes_by_rows)).astype(np.int64)
    nodes_of_groups = sorted(needed_nodes[needed_nodes > 1].tolist(), reverse=True)
    single_nodes = node_count - sum(nodes_of_groups)
    if single_nodes < 0:
        return None
    nodes_of_groups += [1] * single_nodes
    # 2. Place all documents, and join groups with too much work to those with the least.
    sizes = tuple(node_ranks * nodes for nodes in nodes_of_groups)
    placing = place_in_groups(lengths, seconds, sizes, rows_per_rank, speeds)
    if placing is None:
        return None
    nodes_of_groups = _joined_until_alike(placing.seconds.tolist(), nodes_of_groups, limit)
    return tuple(node_ranks * nodes for nodes in sorted(nodes_of_groups, reverse=True))


def _joined_until_alike(
    seconds: Sequence[float], nodes_of_groups: Sequence[int], limit: float
) -> list[int]:
    """Join groups that compute longer than a limit to the groups with the least work.

    Args:
        seconds: [groups] seconds that a rank of each group computes.
        nodes_of_groups: [groups] nodes of each group.

    Returns:
        Nodes of each group that there is then.
    """
    # Seconds of a rank times nodes is work, up to the ranks of a node.
    waiting = deque(sorted(zip(seconds, nodes_of_groups, strict=True)))
    joined_groups = []
    while waiting:
        most_seconds, nodes = waiting.pop()
        work = most_seconds * nodes
        while waiting and work > limit * nodes:
            least_seconds, more_nodes = waiting.popleft()
            work += least_seconds * more_nodes
            nodes += more_nodes
        joined_groups.append(nodes)
    return joined_groups


def lay_out_in_groups(
    lengths: IntArray,
    seconds: FloatArray,
    placing: Placing,
    settings: PlanSettings,
    count: int,
    *,
    over_all: bool,
    trees: PrefixTrees | None = None,
) -> list[LaidOut] | None:
    """Lay out each group's documents on its ranks, nano-batch after nano-batch.

    Args:
        seconds: as in `place_in_groups`.
        count: number of nano-batches.
        over_all: divide long documents over all ranks of their group; otherwise over few.
        trees: prefix trees, each laid out as one document; None without prefix sharing.

    Returns:
        None if the documents of a group cannot form two nano-batches.
    """
    divisions = [Division(lengths, seconds, over_all=over_all) for _ in range(count)]
    nodes = np.array(settings.node_of_ranks)
    for documents, first_rank, ranks in zip(
        placing.documents, _starts(placing.sizes).tolist(), placing.sizes, strict=True
    ):
        nano_batches = [documents]
        if count == 2:
            nano_batches = _two_nano_batches(lengths, documents, ranks)
        if len(nano_batches) < count:
            return None
        node_sizes = [ranks]
        if ranks > 1:
            group_nodes = nodes[first_rank : first_rank + ranks]
            node_sizes = np.bincount(group_nodes - group_nodes[0]).tolist()
        for number, (division, members) in enumerate(zip(divisions, nano_batches, strict=True)):
            division.place(members, node_sizes, first_rank=first_rank, is_second=number == 1)
    # Documents that fit into no group belong to the first nano-batch.
    if placing.unplaced:
        room = np.full(settings.ranks, settings.rows_per_rank)
        divisions[0].cut_over_all(np.array(placing.unplaced), room, divisions[1:])
    laid_out = []
    for division in divisions:
        documents, layout = layout_of_rows(lengths, division.segments, settings.ranks)
        laid_out.append(LaidOut(*with_branches(documents, layout, trees)))
    return laid_out


def _two_nano_batches(lengths: IntArray, documents: IntArray, ranks: int) -> list[IntArray]:
    """Return the documents of two nano-batches of a group; none if it cannot form two."""
    group_lengths = lengths[documents]
    halves = split_documents(group_lengths, ranks)
    if halves is None:
        halves = _longest_apart(group_lengths, ranks) or []
    return [documents[half] for half in halves]


def _longest_apart(lengths: IntArray, ranks: int) -> list[IntArray] | None:
    """Return the longest document, and all others; None if the others have fewer tokens than ranks.

    Other groups hide their exchanges, even if this group has little to hide its own behind.
    """
    longest = int(lengths.argmax())
    other_documents = np.delete(np.arange(len(lengths)), longest)
    if int(lengths[other_documents].sum()) < ranks:
        return None
    return [np.array([longest]), other_documents]


def balance_in_groups(
    laid_out: LaidOut, placing: Placing, settings: PlanSettings, slack: FloatArray
) -> NanoBatch:
    """Balance the core attention of a nano-batch inside each group, in one stage.

    Args:
        slack: [groups] as `slack_of_groups` returns.
    """
    slack_of_ranks = np.repeat(slack, placing.sizes)
    plans = {
        kind: _balanced_in_groups(laid_out.layout, kind, settings, placing, slack_of_ranks)
        for kind in settings.kinds
    }
    return NanoBatch(laid_out.documents, laid_out.layout, plans)


def slack_of_groups(
    lengths: IntArray, placing: Placing, tolerance: float, costs: StepCosts
) -> FloatArray:
    """Return [groups] how far above its group's mean a rank may be, as a fraction of the mean.

    A rank may finish as late as the slowest group, plus the tolerance.
    """
    groups = len(placing.sizes)
    group_of_document = np.repeat(np.arange(groups), list(map(len, placing.documents)))
    tokens = np.bincount(group_of_document, lengths[np.concatenate(placing.documents)], groups)
    # Only core attention can be uneven: a group's spare time is measured in its seconds.
    attention = placing.seconds - costs.token * tokens / placing.sizes
    spare = placing.slowest * (1 + tolerance) - placing.seconds
    slack = np.full(len(placing.sizes), MOST_SLACK)
    np.divide(spare, attention, out=slack, where=attention > 0)
    return np.asarray(slack.clip(tolerance, MOST_SLACK))


def _balanced_in_groups(
    layout: Layout,
    kind: AttentionKind,
    settings: PlanSettings,
    placing: Placing,
    slack_of_ranks: FloatArray,
) -> Plan:
    """Balance the core attention of one kind of layer inside each group.

    Args:
        slack_of_ranks: [ranks] how far above its group's mean each rank may be.
    """
    node_stops = np.cumsum(settings.node_sizes or (settings.ranks,)).tolist()
    group_stops = np.cumsum(placing.sizes).tolist()
    inside_nodes = set(node_stops) <= set(group_stops)
    if max(placing.sizes) == 1:
        plan = local_plan(layout, kind)
    else:
        # Inside a node all links are alike.
        group_settings = replace(settings, ranks_per_node=1) if inside_nodes else settings
        group_of_rank = np.repeat(np.arange(len(placing.sizes)), placing.sizes)
        plan = balance(
            layout, kind, group_settings, groups=group_of_rank.tolist(), tolerance=slack_of_ranks
        )
    crosses_nodes = bool(placing.unplaced) or not inside_nodes
    return replace(plan, nodes=settings.nodes if crosses_nodes else None)
