"""Groups of neighbouring ranks that exchange nothing with each other, and the documents of each.

A document lies on the ranks of one group. Groups of one rank exchange nothing at all. One group per node exchanges
rows inside nodes only. One group of all ranks is the joint layout. Smaller groups exchange less, larger ones balance
better.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush, heapreplace

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import AttentionKind, Layout, Plan
from hf_distca.planner.balance import balance
from hf_distca.planner.build import local_plan
from hf_distca.planner.layout import assemble, joint_layout, layout_of_kind, mirrored, split_documents
from hf_distca.planner.seconds import StepCosts
from hf_distca.planner.settings import PlanSettings
from hf_distca.planner.walk import document_seconds

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

LONG_SHARE = 0.25
"""Share of a rank's work from which a document is long; shorter ones balance well enough uncut."""
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
    found = [_flat(nodes)]
    while any(len(groups) > 1 for groups in nodes):
        nodes = [_paired(groups) for groups in nodes]
        found.append(_flat(nodes))
    while len(found[-1]) > 1:
        found.append(tuple(_paired(list(found[-1]))))
    return found


def _flat(nodes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(size for groups in nodes for size in groups)


def _paired(sizes: list[int]) -> list[int]:
    """Join neighbouring groups in pairs and return the sizes."""
    return [sum(sizes[first : first + 2]) for first in range(0, len(sizes), 2)]


@dataclass(frozen=True, eq=False)
class Placing:
    """Documents of each group.

    Attributes:
        sizes: [groups] ranks of each group.
        left: documents that fit in no group; they are cut over any ranks with room.
        seconds: [groups] seconds that a rank of each group computes if the group's documents divide evenly.
    """

    sizes: tuple[int, ...]
    documents: tuple[IntArray, ...]
    left: tuple[int, ...]
    seconds: FloatArray

    @classmethod
    def of_all(cls, seconds: FloatArray, speeds: FloatArray) -> "Placing":
        """Return one group of all ranks, from [documents] seconds and [ranks] speeds."""
        every = float(seconds.sum() / speeds.sum())
        return cls((len(speeds),), (np.arange(len(seconds)),), (), np.array([every]))

    def longest_share(self, seconds: FloatArray) -> float:
        """Return the largest share of a group's work in one document, from [documents] seconds."""
        return max(float(seconds[documents].max() / seconds[documents].sum()) for documents in self.documents)

    @property
    def slowest(self) -> float:
        """Least seconds that ranks of the group with the most work compute."""
        return float(self.seconds.max())


def place_in_groups(
    lengths: IntArray, seconds: FloatArray, sizes: tuple[int, ...], tokens_per_rank: int, speeds: FloatArray
) -> Placing | None:
    """Give documents to groups of equal work: the costliest first, each to the group with the least work.

    Args:
        seconds: [documents] seconds of computing each document.
        sizes: [groups] ranks of each group.
        speeds: [ranks] work per second of each rank, in seconds of a usual rank.

    Returns:
        None if a document is too long for every group, or a group would have fewer tokens than ranks.
    """
    if int(lengths.max()) > max(sizes) * tokens_per_rank:
        return None
    if len(sizes) == 1:
        return Placing.of_all(seconds, speeds)
    speed_of = np.add.reduceat(speeds, np.cumsum((0, *sizes[:-1]))).tolist()
    room = [size * tokens_per_rank for size in sizes]
    order = np.argsort(-seconds, kind="stable")
    left: list[int] = []
    chosen, loads = _give_out(
        lengths[order].tolist(), seconds[order].tolist(), room, speed_of, lambda nth: left.append(int(order[nth]))
    )
    if any(size * tokens_per_rank - space < size for size, space in zip(sizes, room, strict=True)):
        return None
    group_of = np.full(len(lengths), -1)
    group_of[order] = chosen
    by_group = np.argsort(group_of, kind="stable")
    documents = tuple(np.split(by_group, np.searchsorted(group_of[by_group], np.arange(len(sizes)))))[1:]
    return Placing(sizes, documents, tuple(left), np.array(loads))


def _give_out(
    rows: list[int], costs: list[float], room: list[int], speeds: list[float], unplaced: Callable[[int], None]
) -> tuple[list[int], list[float]]:
    """Give each document in turn to the bin with the least work, of those with room for it.

    Args:
        rows, costs: [documents] of each document.
        room: [bins] rows that each bin still takes; lowered by what it gets.
        speeds: [bins] cost per unit of work of each bin.
        unplaced: called with the number of a document that no bin has room for; may lower `room`.

    Returns:
        [documents] the bin of each, or -1; [bins] the work of each.
    """
    ready = [(0.0, each) for each in range(len(room))]  # heap by work
    small: list[tuple[int, int, float]] = []  # heap by room of bins that had too little for an earlier document
    chosen, work = [], [0.0] * len(room)
    for nth, (size, cost) in enumerate(zip(rows, costs, strict=True)):
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
            unplaced(nth)
    return chosen, work


@dataclass(frozen=True, eq=False)
class Arrangement:
    """Layouts of a micro-batch in groups, and the tolerance of each group.

    Attributes:
        documents: for each nano-batch, [documents] indices of its documents.
        slack: [groups] how far above its group's mean a rank may be, as a fraction of the mean.
    """

    placing: Placing
    documents: tuple[IntArray, ...]
    layouts: tuple[Layout, ...]
    slack: tuple[float, ...]

    def tasks(self, layout: Layout, kind: AttentionKind, settings: PlanSettings) -> Plan:
        """Balance the core attention of one kind of layer inside each group, in one stage.

        The tolerance of each group replaces the one in the settings.
        """
        sizes = self.placing.sizes
        inside = self._inside_nodes(settings)
        if max(sizes) == 1:
            plan = local_plan(layout_of_kind(layout, kind), kind.window)
        else:
            flat = replace(settings, ranks_per_node=1) if inside else settings
            groups = np.repeat(np.arange(len(sizes)), sizes)
            plan = balance(layout, kind, flat, groups=groups.tolist(), tolerance=np.repeat(self.slack, sizes))
        return replace(plan, nodes=settings.nodes if self.placing.left or not inside else None)

    def _inside_nodes(self, settings: PlanSettings) -> bool:
        """Return whether every group lies inside one node."""
        stops = set(np.cumsum(settings.node_sizes or (settings.ranks,)).tolist())
        return stops <= set(np.cumsum(self.placing.sizes).tolist())


def _nodes_in(first: int, size: int, settings: PlanSettings) -> tuple[int, ...] | int:
    """Return how many of some consecutive ranks each node has; 1 if all their links are alike."""
    if settings.nodes is None:
        return 1
    sizes = np.unique(settings.nodes[first : first + size], return_counts=True)[1].tolist()
    return 1 if len(sizes) == 1 else tuple(sizes)


def arrange(
    lengths: IntArray, placing: Placing, settings: PlanSettings, costs: StepCosts, nano_batches: int, *, evenly: bool
) -> Arrangement | None:
    """Lay out the documents of every group on its ranks.

    Args:
        evenly: divide each long document evenly over its whole group and leave the others whole; otherwise the joint
            layout cuts as few documents as it can.

    Returns:
        None if the documents of a group cannot form two nano-batches, or a rank would hold no row of a nano-batch:
        models cannot run without rows.
    """
    slack = _slack(lengths, placing, settings, costs)
    seconds = document_seconds(lengths, costs)
    segments: list[list[IntArray]] = [[] for _ in range(nano_batches)]
    first = 0
    for documents, size, most in zip(placing.documents, placing.sizes, slack, strict=True):
        parts = [documents]
        if nano_batches == 2:
            halves = split_documents(lengths[documents], size) or _longest_apart(lengths[documents], size)
            if halves is None:
                return None
            parts = [documents[half] for half in halves]
        for number, part in enumerate(parts):
            if evenly and size > 1:
                # A rank that the first nano-batch filled could not share long documents of the second.
                share = int(lengths[part].sum()) / int(lengths[documents].sum())
                room = np.full(size, int(settings.tokens_per_rank * (share if number == 0 else 1)))
                if number == 1:
                    before = segments[0][-1]
                    np.subtract.at(room, before[:, 3] - first, before[:, 2] - before[:, 1])
                placed = divide_evenly(lengths[part], seconds[part], room)
            else:
                placed = _in_group(lengths[part], first, size, most, settings, backwards=number == 1)
            if placed is None:
                return None
            placed[:, 0] = part[placed[:, 0]]
            placed[:, 3] += first
            segments[number].append(placed)
        first += size
    tables = [np.concatenate(each) for each in segments]
    if placing.left:
        tables[0] = np.concatenate([tables[0], _wherever_room(lengths, placing.left, tables, settings)])
    every, layouts = [], []
    for table in tables:
        documents, own = np.unique(table[:, 0], return_inverse=True)
        columns = (own, table[:, 1], table[:, 2], table[:, 3])
        every.append(documents)
        layouts.append(assemble(lengths[documents], columns, settings.ranks, by_document=True))
    if min(int(layout.tokens.min()) for layout in layouts) == 0:
        return None
    return Arrangement(placing, tuple(every), tuple(layouts), slack)


def _longest_apart(lengths: IntArray, size: int) -> list[IntArray] | None:
    """Return the longest document, and all others; None if the others have fewer tokens than ranks.

    Other groups hide their exchanges, even if this group has little to hide its own behind.
    """
    longest = int(lengths.argmax())
    others = np.delete(np.arange(len(lengths)), longest)
    return [np.array([longest]), others] if int(lengths[others].sum()) >= size else None


def _slack(lengths: IntArray, placing: Placing, settings: PlanSettings, costs: StepCosts) -> tuple[float, ...]:
    """Return [groups] how far above its group's mean a rank may be.

    A rank may finish as late as the slowest group, plus the tolerance.
    """
    limit = placing.slowest * (1 + settings.balance_tolerance)
    slack = []
    for documents, size, seconds in zip(placing.documents, placing.sizes, placing.seconds.tolist(), strict=True):
        attention = seconds - costs.token * int(lengths[documents].sum()) / size
        spare = (limit - seconds) / attention if attention > 0 else MOST_SLACK
        slack.append(min(max(spare, settings.balance_tolerance), MOST_SLACK))
    return tuple(slack)


def _in_group(
    lengths: IntArray, first: int, size: int, slack: float, settings: PlanSettings, *, backwards: bool
) -> IntArray:
    """Return [segments, 4] document, start, stop and rank of a group's documents; ranks count from 0."""
    if size == 1:
        zeros = np.zeros_like(lengths)
        return np.stack([np.arange(len(lengths)), zeros, lengths, zeros], axis=1)
    nodes = _nodes_in(first, size, settings)
    sizes = nodes if isinstance(nodes, tuple) else None
    # The first ranks get one row more, in the second nano-batch the last ranks: so no rank holds too many rows.
    kind = settings.dominant_kind
    layout = joint_layout(
        lengths,
        size,
        settings.tokens_per_rank,
        node_sizes=sizes[::-1] if sizes and backwards else sizes,
        window=kind.window or kind.chunk,
        balance_tolerance=slack,
        balance_block_size=settings.balance_block_size,
    )
    segments = (mirrored(layout) if backwards else layout).segments
    return np.stack([segments[name] for name in ("document", "start", "stop", "rank")], axis=1)


def divide_evenly(lengths: IntArray, seconds: FloatArray, room: IntArray) -> IntArray | None:
    """Divide each long document evenly over all ranks of a group.

    Rank r of n has the parts r and 2 n - 1 - r of 2 n, so that all ranks compute alike. Shorter documents stay whole.

    Args:
        seconds: [documents] seconds of computing each document.
        room: [ranks] rows that each rank takes.

    Returns:
        [segments, 4] document, start, stop and rank; None if the ranks have too little room.
    """
    size = len(room)
    is_long = (seconds > LONG_SHARE * seconds.sum() / size) & (lengths >= 2 * size)
    long, short = np.flatnonzero(is_long), np.flatnonzero(~is_long)
    # Rows that do not divide evenly go to the ranks in turn, those with the most room first.
    share, more = np.divmod(lengths[long], size)
    turn = np.argsort(np.argsort(-room, kind="stable"), kind="stable")
    rows = share[:, None] + ((turn - (np.cumsum(more) - more)[:, None]) % size < more[:, None])
    parts = np.concatenate([rows // 2, (rows - rows // 2)[:, ::-1]], axis=1)
    stops = np.cumsum(parts, axis=1)
    ranks = np.tile(np.append(np.arange(size), np.arange(size)[::-1]), len(long))
    divided = np.stack([np.repeat(long, 2 * size), (stops - parts).ravel(), stops.ravel(), ranks], axis=1)
    left: list[int] = (room - rows.sum(axis=0)).tolist()
    short = short[np.argsort(-seconds[short], kind="stable")]
    cut: list[tuple[int, int, int, int]] = []
    chosen, _ = _give_out(
        lengths[short].tolist(),
        seconds[short].tolist(),
        left,
        [1.0] * size,
        lambda nth: cut.extend(_cut_where_room(int(short[nth]), int(lengths[short[nth]]), left)),
    )
    if min(left) < 0:
        return None
    rank_of = np.array(chosen, np.int64)
    short, rank_of = short[rank_of >= 0], rank_of[rank_of >= 0]
    whole = np.stack([short, np.zeros_like(short), lengths[short], rank_of], axis=1)
    return np.concatenate([divided, whole, np.array(cut, np.int64).reshape(-1, 4)])


def _wherever_room(
    lengths: IntArray, left: Sequence[int], placed: Sequence[IntArray], settings: PlanSettings
) -> IntArray:
    """Return [segments, 4] of documents that fit in no group, cut over the ranks with the most room."""
    held = np.concatenate(placed)
    used = np.bincount(held[:, 3], weights=held[:, 2] - held[:, 1], minlength=settings.ranks)
    room = (settings.tokens_per_rank - used.astype(np.int64)).tolist()
    cut = [piece for document in left for piece in _cut_where_room(document, int(lengths[document]), room)]
    return np.array(cut, np.int64)


def _cut_where_room(document: int, length: int, room: list[int]) -> list[tuple[int, int, int, int]]:
    """Cut a document over the ranks with the most room, and subtract its rows from their room.

    Args:
        room: [ranks] rows that each rank takes; becomes negative if all ranks together have too little.

    Returns:
        (document, start, stop, rank) of each piece.
    """
    pieces, start = [], 0
    while start < length:
        rank = room.index(max(room))
        stop = min(start + room[rank], length) if room[rank] > 0 else length
        pieces.append((document, start, stop, rank))
        room[rank] -= stop - start
        start = stop
    return pieces
