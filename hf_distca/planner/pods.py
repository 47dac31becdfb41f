"""Pods: ranks of whole nodes that plan together, and exchange nothing with other ranks.

All ranks deal the documents of a micro-batch to pods, by lengths alone. Then a rank plans its own
pod. A pod is dealt documents as a group of ranks is inside a pod: the costliest first, each to the
least work with room.

The smallest pods are blocks of equally many nodes. A document that is more work than a block, with
what the block has to hold besides, gets a larger pod. Larger pods are neighbouring blocks joined in
pairs, again and again: a rank has few process groups, whatever the documents are.
"""

from collections.abc import Sequence

import numpy as np

from hf_distca.plan.arrays import FloatArray, IntArray
from hf_distca.plan.intervals import split_at
from hf_distca.planner.bin_packing import NOWHERE, largest_first
from hf_distca.planner.rank_groups import Placing
from hf_distca.planner.settings import PlanSettings

UNEVEN = 0.03
"""Share by which the ranks of a pod may have more work than those of all pods, before a pod with
long documents gets more ranks. Larger pods take longer to plan."""
REPEATS = 3
"""Most times that documents are dealt again because pods are too uneven."""
CHEAPEST = 0.3
"""Share of all rows that the cheapest documents have, with which pods of long documents are filled.
"""


def pods_around(settings: PlanSettings, rank: int) -> list[range]:
    """Return the ranks of each pod that a rank may be in, the smallest pod first.

    There are as many for every rank. The last ranks may have the same pod twice.
    """
    stops = np.cumsum((0, *settings.block_sizes))
    blocks = len(stops) - 1
    block = int(np.searchsorted(stops, rank, side="right")) - 1
    pods = []
    for count in _block_counts(blocks):
        first = block // count * count
        pods.append(range(int(stops[first]), int(stops[min(first + count, blocks)])))
    return pods


def _block_counts(blocks: int) -> list[int]:
    """Return the numbers of blocks that a pod may have: 1, 2, 4, … up to all blocks."""
    counts = [1]
    while counts[-1] < blocks:
        counts.append(2 * counts[-1])
    return counts


def deal(lengths: IntArray, seconds: FloatArray, settings: PlanSettings) -> Placing:
    """Deal documents to pods of about equal work.

    Args:
        seconds: [documents] seconds of computing each document.

    Returns:
        The pods in the order of their ranks, and the documents of each in ascending order. One pod
        of all ranks if the documents do not fit into smaller ones.
    """
    assert settings.costs is not None
    speeds: FloatArray = 1 / np.array(settings.costs.slowness or (1.0,) * settings.ranks)
    one_pod = Placing.of_all(seconds, speeds)
    blocks = len(settings.block_sizes)
    if blocks == 1:
        return one_pod
    table = _Table(lengths, seconds, settings, speeds)
    # Documents share larger pods where there are too few pods of the smallest size that fits.
    counts = table.counts_needed()
    is_long = counts > 1
    while not table.place_long(counts):
        if counts.max() >= blocks:
            return one_pod
        counts = np.where(is_long, 2 * counts, counts)
    best = table.placed()
    # Documents of a pod with too much work get larger pods, as long as that makes pods more even.
    for _ in range(REPEATS):
        larger = table.counts_of_slow_pods(counts)
        if larger is None or larger.max() > max(blocks // 2, 2) or not table.place_long(larger):
            break
        placing = table.placed()
        if placing.slowest >= best.slowest:
            break
        best, counts = placing, larger
    tokens = [int(lengths[documents].sum()) for documents in best.documents]
    has_rows = all(count >= size for count, size in zip(tokens, best.sizes, strict=True))
    return best if has_rows else one_pod


class _Table:
    """Documents that are being dealt, and the blocks of ranks that get them.

    A pod of several blocks is dealt documents block by block, as if its blocks were pods.
    """

    def __init__(
        self,
        lengths: IntArray,
        seconds: FloatArray,
        settings: PlanSettings,
        speeds: FloatArray,
    ) -> None:
        self._lengths = lengths
        self._seconds = seconds
        sizes = np.array(settings.block_sizes)
        self._sizes = sizes
        self._speeds = np.add.reduceat(speeds, np.cumsum(sizes) - sizes)  # [blocks]
        self._capacity = sizes * settings.rows_per_rank
        self._room: FloatArray  # [blocks] rows
        self._work: FloatArray  # [blocks] seconds of each rank
        self._limit = float(seconds.sum() / speeds.sum()) * (1 + UNEVEN)
        # Seconds of a row of the cheapest documents, which pods with long documents get.
        by_cost = np.argsort(seconds / lengths, kind="stable")
        cheap = by_cost[np.cumsum(lengths[by_cost]) <= CHEAPEST * lengths.sum()]
        cheap = by_cost[: max(len(cheap), 1)]
        self._cheapest = float(seconds[cheap].sum() / lengths[cheap].sum())
        self._first_block: IntArray  # of each document's pod
        self._pods: list[range]  # blocks of each pod

    def place_long(self, counts: IntArray) -> bool:
        """Give documents that are too large for a block pods of several blocks.

        Args:
            counts: [documents] number of blocks of the smallest pod for each.

        Returns:
            Whether there are enough blocks.
        """
        blocks = len(self._sizes)
        self._room = self._capacity.astype(np.float64)
        self._work = np.zeros(blocks)
        self._first_block = np.full(len(self._lengths), NOWHERE)
        self._pods = [range(block, block + 1) for block in range(blocks)]
        order = largest_first(self._seconds)
        pods: list[range] = []
        for document in order[counts[order] > 1].tolist():
            count = int(counts[document])
            first = -(-(pods[-1].stop if pods else 0) // count) * count
            if first + count <= blocks:
                pods.append(range(first, first + count))
                self._put(document, pods[-1])
                continue
            rows = int(self._lengths[document])
            shared = [pod for pod in pods if len(pod) >= count and self._room_in(pod) >= rows]
            if not shared:
                return False
            pod = min(shared, key=lambda pod: (float(self._work[pod.start]), pod.start))
            self._put(document, pod)
        for pod in pods:
            self._join(pod)
        return True

    def counts_needed(self) -> IntArray:
        """Return [documents] the number of blocks of the smallest pod that may hold each."""
        needed = np.ones(len(self._lengths), np.int64)
        for count in _block_counts(len(self._sizes))[:-1]:
            rows = count * int(self._capacity.min())
            # A pod has to hold the rows that all other ranks have no room for.
            least_rows = int(self._lengths.sum()) - (int(self._capacity.sum()) - rows)
            besides = self._cheapest * np.maximum(least_rows - self._lengths, 0)
            fits = self._seconds + besides <= self._limit * count * float(self._speeds.min())
            fits &= self._lengths <= rows
            needed[(needed == count) & ~fits] = 2 * count
        return needed

    def _put(self, document: int, pod: range) -> None:
        """Give a document to the ranks of a pod alike."""
        blocks = slice(pod.start, pod.stop)
        self._work[blocks] += self._seconds[document] / self._speeds[blocks].sum()
        shares = self._capacity[blocks] / self._capacity[blocks].sum()
        self._room[blocks] -= self._lengths[document] * shares
        self._first_block[document] = pod.start

    def placed(self) -> Placing:
        """Deal all other documents, and return the placing of all."""
        self._place_others()
        return self._joined()

    def _place_others(self) -> None:
        """Deal all other documents, the costliest first, each to the block with the least work.

        Many are dealt at once: a block gets one of them if it has the least work before any other
        block would get its second.
        """
        order = largest_first(self._seconds)
        order = order[self._first_block[order] == NOWHERE]
        lengths, seconds = self._lengths[order], self._seconds[order]
        block_of_document = np.full(len(order), NOWHERE)
        blocks = len(self._sizes)
        dealt = 0
        while dealt < len(order):
            longest = lengths[dealt : dealt + blocks].max()
            ready = np.flatnonzero(self._room >= longest)
            if not len(ready):
                # Some of these documents may still fit, one by one.
                ready = np.flatnonzero(self._room >= lengths[dealt])
                if not len(ready):
                    dealt += 1
                    continue
                ready = ready[[self._work[ready].argmin()]]
            by_work = ready[np.argsort(self._work[ready], kind="stable")]
            work = self._work[by_work]
            second = work[0] + seconds[dealt] / self._speeds[by_work[0]]
            count = min(max(int(np.searchsorted(work, second)), 1), len(order) - dealt)
            chosen = by_work[:count]
            now = slice(dealt, dealt + count)
            self._work[chosen] += seconds[now] / self._speeds[chosen]
            self._room[chosen] -= lengths[now]
            block_of_document[now] = chosen
            dealt += count
        first_blocks = np.repeat([pod.start for pod in self._pods], list(map(len, self._pods)))
        placed = block_of_document != NOWHERE
        self._first_block[order[placed]] = first_blocks[block_of_document[placed]]

    def _joined(self) -> Placing:
        """Join pods for documents that no pod has room for, and return the placing of all."""
        order = largest_first(self._lengths)
        for document in order[self._first_block[order] == NOWHERE].tolist():
            rows = int(self._lengths[document])
            fitting = [pod for pod in self._candidates() if self._room_in(pod) >= rows]
            pod = min(fitting, key=lambda pod: (len(pod), float(self._work[pod].max())))
            self._join(pod)
            self._put(document, pod)
        starts = np.array([pod.start for pod in self._pods])
        pod_of_document = np.searchsorted(starts, self._first_block, side="right") - 1
        by_pod = np.argsort(pod_of_document, kind="stable")
        bounds = np.searchsorted(pod_of_document[by_pod], np.arange(1, len(starts)))
        documents = split_at(by_pod, bounds)
        sizes = np.add.reduceat(self._sizes, starts)
        speeds = np.add.reduceat(self._speeds, starts)
        work = np.bincount(pod_of_document, self._seconds, len(starts)) / speeds
        return Placing(tuple(sizes.tolist()), tuple(documents), (), work)

    def counts_of_slow_pods(self, counts: IntArray) -> IntArray | None:
        """Return counts with pods of twice the size for documents whose pods have too much work.

        None if no pod has too much.

        Args:
            counts: as in `place_long`.
        """
        larger = counts.copy()
        for pod in self._pods:
            if self._work[pod.start : pod.stop].mean() > self._limit:
                documents = np.flatnonzero(self._first_block == pod.start)
                costliest = documents[self._seconds[documents].argmax()]
                larger[costliest] = max(larger[costliest], 2 * len(pod))
        return None if np.array_equal(larger, counts) else larger

    def _candidates(self) -> list[range]:
        """Return all pods that there are, and all that joining them could make."""
        blocks = len(self._sizes)
        joinable = [
            range(first, min(first + count, blocks))
            for count in _block_counts(blocks)
            for first in range(0, blocks, count)
        ]
        largest = {block: len(pod) for pod in self._pods for block in pod}
        return [pod for pod in joinable if all(largest[block] <= len(pod) for block in pod)]

    def _room_in(self, pod: range) -> int:
        """Return the rows that the ranks of a pod still take."""
        return round(float(self._room[pod.start : pod.stop].sum()))

    def _join(self, pod: range) -> None:
        """Make one pod of all pods of its blocks."""
        others = [
            other for other in self._pods if other.stop <= pod.start or other.start >= pod.stop
        ]
        self._pods = sorted([*others, pod], key=lambda each: each.start)


def pod_of(placing: Placing, rank: int) -> int:
    """Return the number of the pod that a rank is in."""
    return int(np.searchsorted(np.cumsum(placing.sizes), rank, side="right"))


def first_ranks(sizes: Sequence[int]) -> list[int]:
    """Return the first rank of each pod, from its number of ranks."""
    stops: list[int] = np.cumsum((0, *sizes)).tolist()
    return stops[:-1]
