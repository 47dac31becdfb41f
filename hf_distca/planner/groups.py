"""Groups of neighbouring ranks that exchange nothing with each other, and the documents of each.

A document lies on the ranks of one group. Groups of one rank exchange nothing at all. One group per
node exchanges rows inside nodes only. One group of all ranks is the joint layout. Smaller groups
exchange less, larger ones balance better.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import SEGMENT, AttentionKind, Layout, NanoBatch, Plan
from hf_distca.plan.intervals import Table, joined, row_counts, table_of
from hf_distca.planner.balance import balance
from hf_distca.planner.bin_packing import (
    NOWHERE,
    Bins,
    largest_first,
    ranks_of_whole,
    split_documents,
)
from hf_distca.planner.branches import Forest, reach, seconds_of, with_branches
from hf_distca.planner.build import local_plan
from hf_distca.planner.joint import joint_segments
from hf_distca.planner.layout import assemble
from hf_distca.planner.settings import PlanSettings
from hf_distca.predict.seconds import StepCosts

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

LONG_SHARE = 0.25
"""Share of a rank's work from which a document is long; shorter ones balance well enough uncut."""
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
    tokens_per_rank: int,
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
    if int(lengths.max()) > max(sizes) * tokens_per_rank:
        return None
    if len(sizes) == 1:
        return Placing.of_all(seconds, speeds)
    bins = Bins(
        [size * tokens_per_rank for size in sizes],
        speeds=np.add.reduceat(speeds, _starts(sizes)).tolist(),
    )
    order = largest_first(seconds)
    if fill_to:
        group_of_document = bins.fill_up(lengths, seconds, order, fill_to)
    else:
        group_of_document = bins.pack(lengths, seconds, order, bins.least_work)
    for size, room in zip(sizes, bins.room, strict=True):
        if size * tokens_per_rank - room < size:
            return None
    # Sort the documents by group; those that no group has room for come first.
    sorted_documents = np.argsort(group_of_document, kind="stable")
    group_starts = np.searchsorted(group_of_document[sorted_documents], np.arange(len(sizes)))
    unplaced, *documents = np.split(sorted_documents, group_starts)
    return Placing(sizes, tuple(documents), tuple(unplaced.tolist()), np.array(bins.work))


def _starts(sizes: Sequence[int]) -> IntArray:
    """Return the first rank of each group, or node, from its number of ranks."""
    return np.cumsum((0, *sizes[:-1]))


def place_on_ranks(
    lengths: IntArray, seconds: FloatArray, ranks: int, tokens_per_rank: int, speeds: FloatArray
) -> Placing | None:
    """Give whole documents to ranks so that they fit, if need be with unequal work.

    Args:
        seconds, speeds: as in `place_in_groups`.

    Returns:
        None if a document is too long, documents do not fit, or a rank would have none.
    """
    if int(lengths.max()) > tokens_per_rank:
        return None
    rank_of_document = ranks_of_whole(lengths, ranks, tokens_per_rank)
    if rank_of_document is None or len(np.unique(rank_of_document)) < ranks:
        return None
    documents = tuple(np.flatnonzero(rank_of_document == rank) for rank in range(ranks))
    work = np.bincount(rank_of_document, seconds, ranks)
    return Placing((1,) * ranks, documents, (), work / speeds)


def joined_nodes(
    lengths: IntArray,
    seconds: FloatArray,
    node_sizes: Sequence[int],
    tokens_per_rank: int,
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
    nodes_by_rows = lengths / (node_ranks * tokens_per_rank)
    needed_nodes = np.ceil(np.maximum(nodes_by_work, nodes_by_rows)).astype(np.int64)
    nodes_of_groups = sorted(needed_nodes[needed_nodes > 1].tolist(), reverse=True)
    single_nodes = node_count - sum(nodes_of_groups)
    if single_nodes < 0:
        return None
    nodes_of_groups += [1] * single_nodes
    # 2. Place all documents, and join groups with too much work to those with the least.
    sizes = tuple(node_ranks * nodes for nodes in nodes_of_groups)
    placing = place_in_groups(lengths, seconds, sizes, tokens_per_rank, speeds)
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


@dataclass(frozen=True, eq=False)
class _Group:
    """Group of neighbouring ranks, and its documents."""

    documents: IntArray
    first_rank: int
    ranks: int
    # [nodes] how many of its ranks each node has; (1,) if all links of the group are alike.
    node_sizes: Sequence[int]
    # How far above the group's mean a rank may be, as a fraction of the mean.
    slack: float


def nano_batches_in_groups(
    lengths: IntArray,
    placing: Placing,
    settings: PlanSettings,
    costs: StepCosts,
    count: int,
    *,
    evenly: bool,
    forest: Forest | None = None,
) -> tuple[NanoBatch, ...] | None:
    """Lay out each group's documents on its ranks and balance core attention there, in one stage.

    Args:
        count: number of nano-batches.
        evenly: divide each long document evenly over its whole group and leave the others whole;
            otherwise the joint layout cuts as few documents as it can.
        forest: the documents are its trees; None if no document continues another.

    Returns:
        None if the documents of a group cannot form two nano-batches, or a rank would hold no row
        of a nano-batch: models cannot run without rows.
    """
    # 1. Place the documents of every group on its ranks, nano-batch after nano-batch.
    groups = _groups_of(lengths, placing, settings, costs)
    seconds = seconds_of(lengths, costs, forest)
    segments_of_groups = []
    for group in groups:
        nano_batches = [group.documents]
        if count == 2:
            nano_batches = _two_nano_batches(lengths, group)
        if len(nano_batches) < count:
            return None
        if group.ranks == 1:
            placed = [_on_one_rank(lengths[documents]) for documents in nano_batches]
        elif evenly:
            divided = _divided_in_group(lengths, seconds, group, nano_batches, settings)
            if divided is None:
                return None
            placed = divided
        else:
            placed = _joint_in_group(lengths, group, nano_batches, settings, forest)
        for documents, segments in zip(nano_batches, placed, strict=True):
            segments["document"] = documents[segments["document"]]
            segments["rank"] += group.first_rank
        segments_of_groups.append(placed)
    tables = [joined(*segments) for segments in zip(*segments_of_groups, strict=True)]
    # 2. Cut documents that fit into no group; they belong to the first nano-batch.
    if placing.unplaced:
        room = np.full(settings.ranks, settings.tokens_per_rank)
        room_left = _room_left(room, joined(*tables)).tolist()
        tables[0] = joined(tables[0], _cut_where_room(placing.unplaced, lengths, room_left))
    # 3. Make layouts, in which every rank needs a row.
    laid_out = []
    for table in tables:
        documents, table["document"] = np.unique(table["document"], return_inverse=True)
        layout = assemble(lengths[documents], table, settings.ranks, by_document=True)
        if int(layout.tokens.min()) == 0:
            return None
        laid_out.append(with_branches(documents, layout, forest))
    # 4. Balance core attention inside the groups.
    slack_of_ranks = np.repeat([group.slack for group in groups], placing.sizes)
    finished = []
    for documents, layout in laid_out:
        plans = {
            kind: _balanced_in_groups(layout, kind, settings, placing, slack_of_ranks)
            for kind in settings.kinds
        }
        finished.append(NanoBatch(documents, layout, plans))
    return tuple(finished)


def _groups_of(
    lengths: IntArray, placing: Placing, settings: PlanSettings, costs: StepCosts
) -> list[_Group]:
    """Return the groups of a placing, with the slack and the nodes of each.

    A rank may finish as late as the slowest group, plus the tolerance.
    """
    tolerance = settings.balance_tolerance
    latest = placing.slowest * (1 + tolerance)
    first_ranks = _starts(placing.sizes).tolist()
    groups = []
    for documents, first_rank, ranks, seconds in zip(
        placing.documents, first_ranks, placing.sizes, placing.seconds.tolist(), strict=True
    ):
        # Only core attention can be uneven: a group's spare time is measured in its seconds.
        attention = seconds - costs.token * int(lengths[documents].sum()) / ranks
        spare = (latest - seconds) / attention if attention > 0 else MOST_SLACK
        slack = min(max(spare, tolerance), MOST_SLACK)
        node_sizes = _nodes_in(first_rank, ranks, settings)
        groups.append(_Group(documents, first_rank, ranks, node_sizes, slack))
    return groups


def _two_nano_batches(lengths: IntArray, group: _Group) -> list[IntArray]:
    """Return the documents of two nano-batches of a group; none if it cannot form two."""
    group_lengths = lengths[group.documents]
    halves = split_documents(group_lengths, group.ranks)
    if halves is None:
        halves = _longest_apart(group_lengths, group.ranks) or []
    return [group.documents[half] for half in halves]


def _on_one_rank(lengths: IntArray) -> Table:
    """Return [segments] of dtype SEGMENT of whole documents on rank 0."""
    return table_of(SEGMENT, document=np.arange(len(lengths)), stop=lengths)


def _divided_in_group(
    lengths: IntArray,
    seconds: FloatArray,
    group: _Group,
    nano_batches: Sequence[IntArray],
    settings: PlanSettings,
) -> list[Table] | None:
    """Divide a group's long documents evenly over its ranks.

    Args:
        nano_batches: documents of each nano-batch.

    Returns:
        [segments] of dtype SEGMENT of each nano-batch, with documents and ranks counted from 0;
        None if the ranks have too little room.
    """
    room: IntArray = np.full(group.ranks, settings.tokens_per_rank)
    group_tokens = int(lengths[group.documents].sum())
    tables = []
    for number, documents in enumerate(nano_batches):
        # A rank that the first nano-batch filled could not share long documents of the second. So
        # the first gets a share of every rank's room.
        is_last = number == len(nano_batches) - 1
        share = 1 if is_last else int(lengths[documents].sum()) / group_tokens
        segments = divide_evenly(
            lengths[documents],
            seconds[documents],
            (room * share).astype(np.int64),
            group.node_sizes,
        )
        if segments is None:
            return None
        room = _room_left(room, segments)
        tables.append(segments)
    return tables


def _joint_in_group(
    lengths: IntArray,
    group: _Group,
    nano_batches: Sequence[IntArray],
    settings: PlanSettings,
    forest: Forest | None,
) -> list[Table]:
    """Place a group's documents with few cuts.

    Returns:
        [segments] of dtype SEGMENT of each nano-batch, with documents and ranks counted from 0.
    """
    node_sizes = group.node_sizes if len(group.node_sizes) > 1 else (1,) * group.ranks
    tables = []
    for number, documents in enumerate(nano_batches):
        # The joint layout gives its first ranks one row more. The second nano-batch is mirrored, so
        # that its last ranks have one row more: no rank holds too many rows.
        is_mirrored = number == 1
        segments = joint_segments(
            lengths[documents],
            node_sizes[::-1] if is_mirrored else node_sizes,
            reach(settings.dominant_kind, forest),
            group.slack,
            settings.balance_block_size,
        )
        if is_mirrored:
            segments["rank"] = group.ranks - 1 - segments["rank"]
        tables.append(segments)
    return tables


def _longest_apart(lengths: IntArray, ranks: int) -> list[IntArray] | None:
    """Return the longest document, and all others; None if the others have fewer tokens than ranks.

    Other groups hide their exchanges, even if this group has little to hide its own behind.
    """
    longest = int(lengths.argmax())
    other_documents = np.delete(np.arange(len(lengths)), longest)
    if int(lengths[other_documents].sum()) < ranks:
        return None
    return [np.array([longest]), other_documents]


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


def _nodes_in(first_rank: int, ranks: int, settings: PlanSettings) -> Sequence[int]:
    """Return [nodes] how many of some consecutive ranks each node has.

    (1,) if all their links are alike.
    """
    if settings.nodes is None:
        return (1,)
    _, sizes = np.unique(settings.nodes[first_rank : first_rank + ranks], return_counts=True)
    return tuple(sizes.tolist()) if len(sizes) > 1 else (1,)


def divide_evenly(
    lengths: IntArray, seconds: FloatArray, room: IntArray, node_sizes: Sequence[int] = (1,)
) -> Table | None:
    """Divide each long document evenly over all ranks of a group.

    Rank r of n has the parts r and 2 n - 1 - r of 2 n, so that all ranks compute alike. In a group
    of several nodes other documents are divided inside a node. Shorter documents stay whole.

    Args:
        seconds: [documents] seconds of computing each document.
        room: [ranks] rows that each rank takes.
        node_sizes: [nodes] ranks of each node, if there are several.

    Returns:
        [segments] of dtype SEGMENT, offsets not set; None if the ranks have too little room.
    """
    # 1. Divide long documents over all ranks. Every part needs a row.
    ranks = len(room)
    long_seconds = LONG_SHARE * seconds.sum() / ranks * max(node_sizes)
    is_long = (seconds > long_seconds) & (lengths >= 2 * ranks)
    divided = _even_parts(lengths, np.flatnonzero(is_long), room)
    room = _room_left(room, divided)
    # 2. Place the other documents inside nodes, or on single ranks.
    short = np.flatnonzero(~is_long)
    if len(node_sizes) > 1:
        short_segments = _divided_inside_nodes(lengths, seconds, short, room, node_sizes)
        if short_segments is None:
            return None
    else:
        bins = Bins(room.tolist())
        order = largest_first(seconds[short])
        rank_of_short = bins.pack(lengths[short], seconds[short], order, bins.least_work)
        has_rank = rank_of_short != NOWHERE
        uncut = short[has_rank]
        short_segments = table_of(
            SEGMENT, document=uncut, stop=lengths[uncut], rank=rank_of_short[has_rank]
        )
    # 3. Cut documents that fit nowhere.
    room_left = _room_left(room, short_segments).tolist()
    unplaced = short[~np.isin(short, short_segments["document"])]
    cut = _cut_where_room(unplaced.tolist(), lengths, room_left)
    return None if min(room_left) < 0 else joined(divided, short_segments, cut)


def _even_parts(lengths: IntArray, documents: IntArray, room: IntArray) -> Table:
    """Return [segments] of dtype SEGMENT of documents that are divided evenly over all ranks.

    Args:
        documents: indices of documents.
        room: [ranks] rows that each rank takes.
    """
    ranks = len(room)
    rows_a_rank, more_rows = np.divmod(lengths[documents], ranks)
    # 1. Rows that do not divide evenly go to the ranks in turn, those with the most room first.
    turn_of_rank = np.empty(ranks, np.int64)
    turn_of_rank[largest_first(room)] = np.arange(ranks)
    first_turn = np.cumsum(more_rows) - more_rows
    gets_more = (turn_of_rank - first_turn[:, None]) % ranks < more_rows[:, None]
    rows = rows_a_rank[:, None] + gets_more  # [documents, ranks]
    # 2. Each rank has one part of the first half of a document and one of the second, mirrored.
    first_parts = rows // 2
    second_parts = rows - first_parts
    parts = np.concatenate([first_parts, second_parts[:, ::-1]], axis=1)
    stops = np.cumsum(parts, axis=1)
    rank_of_part = np.append(np.arange(ranks), np.arange(ranks)[::-1])
    return table_of(
        SEGMENT,
        document=np.repeat(documents, 2 * ranks),
        start=(stops - parts).ravel(),
        stop=stops.ravel(),
        rank=np.tile(rank_of_part, len(documents)),
    )


def _divided_inside_nodes(
    lengths: IntArray,
    seconds: FloatArray,
    documents: IntArray,
    room: IntArray,
    node_sizes: Sequence[int],
) -> Table | None:
    """Give documents to nodes of equal work, and divide the longest over the ranks of their node.

    Args:
        documents: indices of documents.
        room: [ranks] rows that each rank takes.

    Returns:
        [segments] of dtype SEGMENT; a document that fits into no node has none. None if the ranks
        of a node have too little room.
    """
    first_ranks = _starts(node_sizes)
    bins = Bins(
        np.add.reduceat(room, first_ranks).tolist(), speeds=[float(size) for size in node_sizes]
    )
    order = largest_first(seconds[documents])
    node_of_document = bins.pack(lengths[documents], seconds[documents], order, bins.least_work)
    # Inside a node, documents and ranks are numbered from 0 on.
    tables = [table_of(SEGMENT, document=np.zeros(0, np.int64))]
    for node, (first_rank, ranks) in enumerate(zip(first_ranks.tolist(), node_sizes, strict=True)):
        node_documents = documents[node_of_document == node]
        if not len(node_documents):
            continue
        segments = divide_evenly(
            lengths[node_documents],
            seconds[node_documents],
            room[first_rank : first_rank + ranks],
        )
        if segments is None:
            return None
        segments["document"] = node_documents[segments["document"]]
        segments["rank"] += first_rank
        tables.append(segments)
    return joined(*tables)


def _room_left(room: IntArray, segments: Table) -> IntArray:
    """Return [ranks] rows that each rank takes besides segments."""
    used = np.bincount(segments["rank"], row_counts(segments), len(room))
    return np.asarray(room - used.astype(np.int64))


def _cut_where_room(documents: Iterable[int], lengths: IntArray, room: list[int]) -> Table:
    """Cut documents that fit nowhere whole over the ranks with the most room.

    Args:
        room: [ranks] rows that each rank takes, lowered by what it gets; negative if all have too
            little together.

    Returns:
        [segments] of dtype SEGMENT.
    """
    pieces = []
    for document in documents:
        start = 0
        length = int(lengths[document])
        while start < length:
            rank = room.index(max(room))
            # Without room anywhere the rest overfills a rank, and the caller sees negative room.
            stop = min(start + room[rank], length) if room[rank] > 0 else length
            pieces.append((document, start, stop, rank, 0))
            room[rank] -= stop - start
            start = stop
    return np.array(pieces, SEGMENT)
