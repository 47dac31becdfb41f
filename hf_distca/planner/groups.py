"""Groups of neighbouring ranks that exchange nothing with each other, and the documents of each.

A document lies on the ranks of one group. Groups of one rank exchange nothing at all. One group per
node exchanges rows inside nodes only. One group of all ranks is the joint layout. Smaller groups
exchange less, larger ones balance better.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush, heapreplace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import AttentionKind, Layout, NanoBatch, Plan
from hf_distca.planner.balance import balance
from hf_distca.planner.bin_packing import ranks_of_whole
from hf_distca.planner.build import local_plan
from hf_distca.planner.joint import joint_segments
from hf_distca.planner.layout import assemble, split_documents
from hf_distca.planner.settings import PlanSettings
from hf_distca.predict.seconds import StepCosts
from hf_distca.predict.walk import document_seconds

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

LONG_SHARE = 0.25
"""Share of a rank's work from which a document is long; shorter ones balance well enough uncut."""
ALIKE = 0.01
"""Share by which a group may have more work per rank than the mean and still count as equal."""
MOST_SLACK = 8.0
"""Maximum tolerance of a group with little work."""


def partitions(node_sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return ways to divide ranks into groups, from single ranks to one group of all.

    Neighbours are joined in pairs, first inside nodes, then whole nodes.

    Args:
        node_sizes: [nodes] ranks of each node.

    Returns:
        For each partition, [groups] ranks of each group.
    """
    nodes = [[1] * size for size in node_sizes]
    found = [tuple(chain(*nodes))]
    while any(len(groups) > 1 for groups in nodes):
        nodes = [_paired(groups) for groups in nodes]
        found.append(tuple(chain(*nodes)))
    while len(found[-1]) > 1:
        found.append(tuple(_paired(list(found[-1]))))
    return found


def _paired(sizes: list[int]) -> list[int]:
    """Join neighbouring groups in pairs and return the sizes."""
    return [sum(sizes[first : first + 2]) for first in range(0, len(sizes), 2)]


@dataclass(frozen=True, eq=False)
class Placing:
    """Documents of each group."""

    sizes: tuple[int, ...]  # [groups] ranks of each group
    documents: tuple[IntArray, ...]
    left: tuple[int, ...]  # documents that fit in no group; they are cut over any ranks with room
    # [groups] seconds that a rank of each group computes if its documents divide evenly.
    seconds: FloatArray

    @classmethod
    def of_all(cls, seconds: FloatArray, speeds: FloatArray) -> "Placing":
        """Return one group of all ranks, from [documents] seconds and [ranks] speeds."""
        every = float(seconds.sum() / speeds.sum())
        return cls((len(speeds),), (np.arange(len(seconds)),), (), np.array([every]))

    def longest_share(self, seconds: FloatArray) -> float:
        """Return the largest share of a group's work in one document, from [documents] seconds."""
        return max(
            float(seconds[documents].max() / seconds[documents].sum())
            for documents in self.documents
        )

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
    """Give documents to groups of equal work: the costliest first, each to the group with the least work.

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
    speed_of = np.add.reduceat(speeds, np.cumsum((0, *sizes[:-1]))).tolist()
    room = [size * tokens_per_rank for size in sizes]
    if fill_to:
        group_of, loads = _filled(lengths, seconds, room, speed_of, fill_to)
    else:
        group_of, loads = _give_out(lengths, seconds, room, speed_of)
    if any(size * tokens_per_rank - space < size for size, space in zip(sizes, room, strict=True)):
        return None
    by_group = np.argsort(group_of, kind="stable")
    left, *documents = np.split(
        by_group, np.searchsorted(group_of[by_group], np.arange(len(sizes)))
    )
    return Placing(sizes, tuple(documents), tuple(left.tolist()), np.array(loads))


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
    rank_of = ranks_of_whole(lengths, ranks, tokens_per_rank)
    if rank_of is None or len(np.unique(rank_of)) < ranks:
        return None
    documents = tuple(np.flatnonzero(rank_of == rank) for rank in range(ranks))
    return Placing((1,) * ranks, documents, (), np.bincount(rank_of, seconds, ranks) / speeds)


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
    size, nodes = max(node_sizes), len(node_sizes)
    if min(node_sizes) < size:
        return None
    most = float(seconds.sum() / speeds.sum()) * (1 + ALIKE)
    # 1. Documents that are too large for a node get several.
    needs = np.ceil(np.maximum(seconds / (most * size), lengths / (size * tokens_per_rank))).astype(
        np.int64
    )
    joined = sorted(needs[needs > 1].tolist(), reverse=True)
    if sum(joined) > nodes:
        return None
    joined += [1] * (nodes - sum(joined))
    # 2. Groups with too much work are joined with those that have the least.
    placing = place_in_groups(
        lengths, seconds, tuple(size * each for each in joined), tokens_per_rank, speeds
    )
    if placing is None:
        return None
    left = sorted(zip(placing.seconds.tolist(), joined, strict=True))
    together = []
    while left:
        load, count = left.pop()
        work = load * count
        while left and work > most * count:
            load, more = left.pop(0)
            work, count = work + load * more, count + more
        together.append(count)
    return tuple(size * each for each in sorted(together, reverse=True))


def _give_out(
    lengths: IntArray, costs: FloatArray, room: list[int], speeds: list[float]
) -> tuple[IntArray, list[float]]:
    """Give each document, the costliest first, to the bin with the least work of those with room for it.

    Args:
        lengths, costs: [documents] of each document.
        room: [bins] rows that each bin still takes; lowered by what it gets.
        speeds: [bins] cost per unit of work of each bin.

    Returns:
        [documents] the bin of each, -1 where no bin has room; [bins] the work of each.
    """
    ready = [(0.0, each) for each in range(len(room))]  # heap by work
    small: list[
        tuple[int, int, float]
    ] = []  # heap by room of bins that had too little for an earlier document
    chosen, work = [], [0.0] * len(room)
    order = np.argsort(-costs, kind="stable")
    for size, cost in zip(lengths[order].tolist(), costs[order].tolist(), strict=True):
        while small and -small[0][0] >= size:
            _, each, load = heappop(small)
            heappush(ready, (load, each))
        while ready and room[ready[0][1]] < size:
            load, each = heappop(ready)
            heappush(small, (-room[each], each, load))
        if ready:
            load, each = ready[0]
            chosen.append(each)
            room[each] -= size
            work[each] = load = load + cost / speeds[each]
            heapreplace(ready, (load, each))
        else:
            chosen.append(-1)
    bin_of = np.empty(len(order), np.int64)
    bin_of[order] = chosen
    return bin_of, work


def _filled(
    lengths: IntArray, costs: FloatArray, room: list[int], speeds: list[float], fill_to: float
) -> tuple[IntArray, list[float]]:
    """Give each document, the costliest first, to the bin with the most work that stays below `fill_to`.

    Empty bins get a document first. If no bin stays below, the bin with the least work gets the
    document.

    Args, returns: as in `_give_out`.
    """
    work = [0.0] * len(room)
    bin_of = np.full(len(costs), -1)
    for document in np.argsort(-costs, kind="stable").tolist():
        size, cost = int(lengths[document]), float(costs[document])
        fitting = [each for each, space in enumerate(room) if space >= size]
        none_empty = min(work) > 0
        below = [
            each for each in fitting if none_empty and work[each] + cost / speeds[each] <= fill_to
        ]
        if fitting:
            chosen = (
                max(below, key=work.__getitem__) if below else min(fitting, key=work.__getitem__)
            )
            bin_of[document] = chosen
            room[chosen] -= size
            work[chosen] += cost / speeds[chosen]
    return bin_of, work


def nano_batches_in_groups(
    lengths: IntArray,
    placing: Placing,
    settings: PlanSettings,
    costs: StepCosts,
    count: int,
    *,
    evenly: bool,
) -> tuple[NanoBatch, ...] | None:
    """Lay out the documents of every group on its ranks and balance their core attention there, in one stage.

    Args:
        count: number of nano-batches.
        evenly: divide each long document evenly over its whole group and leave the others whole;
            otherwise the joint layout cuts as few documents as it can.

    Returns:
        None if the documents of a group cannot form two nano-batches, or a rank would hold no row
        of a nano-batch: models cannot run without rows.
    """
    slack = _slack(lengths, placing, settings, costs)
    seconds = document_seconds(lengths, costs)
    segments: list[list[IntArray]] = [[] for _ in range(count)]
    first = 0
    for documents, size, most in zip(placing.documents, placing.sizes, slack, strict=True):
        parts = [documents]
        if count == 2:
            halves = split_documents(lengths[documents], size) or _longest_apart(
                lengths[documents], size
            )
            if halves is None:
                return None
            parts = [documents[half] for half in halves]
        room, nodes = np.full(size, settings.tokens_per_rank), _nodes_in(first, size, settings)
        for number, part in enumerate(parts):
            if evenly and size > 1:
                # A rank that the first nano-batch filled could not share long documents of the
                # second.
                share = (
                    1
                    if number == count - 1
                    else int(lengths[part].sum()) / int(lengths[documents].sum())
                )
                placed = divide_evenly(
                    lengths[part], seconds[part], (room * share).astype(np.int64), nodes
                )
                if placed is None:
                    return None
                np.subtract.at(room, placed[:, 3], placed[:, 2] - placed[:, 1])
            else:
                placed = _in_group(
                    lengths[part], size, nodes, most, settings, backwards=number == 1
                )
            placed[:, 0] = part[placed[:, 0]]
            placed[:, 3] += first
            segments[number].append(placed)
        first += size
    tables = [np.concatenate(each) for each in segments]
    if placing.left:
        held = np.concatenate(tables)
        used = np.bincount(held[:, 3], weights=held[:, 2] - held[:, 1], minlength=settings.ranks)
        room = settings.tokens_per_rank - used.astype(np.int64)
        tables[0] = np.concatenate(
            [tables[0], _cut_where_room(placing.left, lengths, room.tolist())]
        )
    laid_out = []
    for table in tables:
        documents, own = np.unique(table[:, 0], return_inverse=True)
        columns = (own, table[:, 1], table[:, 2], table[:, 3])
        layout = assemble(lengths[documents], columns, settings.ranks, by_document=True)
        if int(layout.tokens.min()) == 0:
            return None
        laid_out.append((documents, layout))
    return tuple(
        NanoBatch(
            documents,
            layout,
            {kind: _tasks(layout, kind, settings, placing, slack) for kind in settings.kinds},
        )
        for documents, layout in laid_out
    )


def _longest_apart(lengths: IntArray, size: int) -> list[IntArray] | None:
    """Return the longest document, and all others; None if the others have fewer tokens than ranks.

    Other groups hide their exchanges, even if this group has little to hide its own behind.
    """
    longest = int(lengths.argmax())
    others = np.delete(np.arange(len(lengths)), longest)
    return [np.array([longest]), others] if int(lengths[others].sum()) >= size else None


def _slack(
    lengths: IntArray, placing: Placing, settings: PlanSettings, costs: StepCosts
) -> list[float]:
    """Return [groups] how far above its group's mean a rank may be, as a fraction of the mean.

    A rank may finish as late as the slowest group, plus the tolerance.
    """
    limit = placing.slowest * (1 + settings.balance_tolerance)
    slack = []
    for documents, size, seconds in zip(
        placing.documents, placing.sizes, placing.seconds.tolist(), strict=True
    ):
        attention = seconds - costs.token * int(lengths[documents].sum()) / size
        spare = (limit - seconds) / attention if attention > 0 else MOST_SLACK
        slack.append(min(max(spare, settings.balance_tolerance), MOST_SLACK))
    return slack


def _tasks(
    layout: Layout,
    kind: AttentionKind,
    settings: PlanSettings,
    placing: Placing,
    slack: Sequence[float],
) -> Plan:
    """Balance the core attention of one kind of layer inside each group."""
    sizes = placing.sizes
    inside = set(np.cumsum(settings.node_sizes or (settings.ranks,)).tolist()) <= set(
        np.cumsum(sizes).tolist()
    )
    if max(sizes) == 1:
        plan = local_plan(layout, kind)
    else:
        flat = replace(settings, ranks_per_node=1) if inside else settings
        groups = np.repeat(np.arange(len(sizes)), sizes)
        plan = balance(
            layout, kind, flat, groups=groups.tolist(), tolerance=np.repeat(slack, sizes)
        )
    return replace(plan, nodes=settings.nodes if placing.left or not inside else None)


def _nodes_in(first: int, size: int, settings: PlanSettings) -> Sequence[int]:
    """Return [nodes] how many of some consecutive ranks each node has; 1 if all their links are alike."""
    if settings.nodes is None:
        return (1,)
    sizes: list[int] = np.unique(settings.nodes[first : first + size], return_counts=True)[
        1
    ].tolist()
    return sizes if len(sizes) > 1 else (1,)


def _in_group(
    lengths: IntArray,
    size: int,
    nodes: Sequence[int],
    slack: float,
    settings: PlanSettings,
    *,
    backwards: bool,
) -> IntArray:
    """Return [segments, 4] document, start, stop and rank of a group's documents.

    Ranks count from 0.
    """
    if size == 1:
        zeros = np.zeros_like(lengths)
        return np.stack([np.arange(len(lengths)), zeros, lengths, zeros], axis=1)
    # The first ranks get one row more, in the second nano-batch the last ranks: so no rank holds
    # too many rows.
    sizes, kind = nodes if len(nodes) > 1 else (1,) * size, settings.dominant_kind
    window, block = kind.window or kind.chunk, settings.balance_block_size
    segments = joint_segments(lengths, sizes[::-1] if backwards else sizes, window, slack, block)
    if backwards:
        segments[:, 3] = size - 1 - segments[:, 3]
    return segments


def divide_evenly(
    lengths: IntArray, seconds: FloatArray, room: IntArray, node_sizes: Sequence[int] = (1,)
) -> IntArray | None:
    """Divide each long document evenly over all ranks of a group.

    Rank r of n has the parts r and 2 n - 1 - r of 2 n, so that all ranks compute alike. In a group
    of several nodes other documents are divided inside a node. Shorter documents stay whole.

    Args:
        seconds: [documents] seconds of computing each document.
        room: [ranks] rows that each rank takes.
        node_sizes: [nodes] ranks of each node, if there are several.

    Returns:
        [segments, 4] document, start, stop and rank; None if the ranks have too little room.
    """
    size = len(room)
    is_long = (seconds > LONG_SHARE * seconds.sum() / size * max(node_sizes)) & (
        lengths >= 2 * size
    )
    long, short = np.flatnonzero(is_long), np.flatnonzero(~is_long)
    # Rows that do not divide evenly go to the ranks in turn, those with the most room first.
    share, more = np.divmod(lengths[long], size)
    turn = np.argsort(np.argsort(-room, kind="stable"), kind="stable")
    rows = share[:, None] + ((turn - (np.cumsum(more) - more)[:, None]) % size < more[:, None])
    parts = np.concatenate([rows // 2, (rows - rows // 2)[:, ::-1]], axis=1)
    stops = np.cumsum(parts, axis=1)
    ranks = np.tile(np.append(np.arange(size), np.arange(size)[::-1]), len(long))
    divided = [
        np.stack([np.repeat(long, 2 * size), (stops - parts).ravel(), stops.ravel(), ranks], axis=1)
    ]
    left = room - rows.sum(axis=0)
    if len(node_sizes) > 1:
        begins = np.cumsum((0, *node_sizes[:-1]))
        node_of, _ = _give_out(
            lengths[short],
            seconds[short],
            np.add.reduceat(left, begins).tolist(),
            [float(each) for each in node_sizes],
        )
        for node, (begin, ranks_here) in enumerate(zip(begins.tolist(), node_sizes, strict=True)):
            here = short[node_of == node]
            if not len(here):
                continue
            inside = divide_evenly(lengths[here], seconds[here], left[begin : begin + ranks_here])
            if inside is None:
                return None
            inside[:, 0], inside[:, 3] = here[inside[:, 0]], inside[:, 3] + begin
            np.subtract.at(left, inside[:, 3], inside[:, 2] - inside[:, 1])
            divided.append(inside)
        room_left, unplaced = left.tolist(), short[node_of < 0]
    else:
        room_left = left.tolist()
        rank_of, _ = _give_out(lengths[short], seconds[short], room_left, [1.0] * size)
        whole, rank_of, unplaced = short[rank_of >= 0], rank_of[rank_of >= 0], short[rank_of < 0]
        divided.append(np.stack([whole, np.zeros_like(whole), lengths[whole], rank_of], axis=1))
    divided.append(_cut_where_room(unplaced.tolist(), lengths, room_left))
    return None if min(room_left) < 0 else np.concatenate(divided)


def _cut_where_room(documents: Iterable[int], lengths: IntArray, room: list[int]) -> IntArray:
    """Return [segments, 4] of documents that fit nowhere whole, cut over the ranks with the most room.

    Args:
        room: [ranks] rows that each rank takes, lowered by what it gets; negative if all have too
            little together.
    """
    pieces = []
    for document in documents:
        start, length = 0, int(lengths[document])
        while start < length:
            rank = room.index(max(room))
            stop = min(start + room[rank], length) if room[rank] > 0 else length
            pieces.append((document, start, stop, rank))
            room[rank] -= stop - start
            start = stop
    return np.array(pieces, np.int64).reshape(-1, 4)
