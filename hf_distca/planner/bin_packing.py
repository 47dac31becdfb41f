"""Packing of documents into bins: micro-batches, nodes, groups of ranks, or single ranks.

`Bins.pack` is the one packer: items come in a given order, and each goes to the bin that is
preferred among those with room. What differs from use to use is the order and the preference.
`pack_in_order` is apart, because it reads a stream of documents of unknown length.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, TypeVar

import numpy as np

from hf_distca.checks.capacity_rules import Capacity
from hf_distca.plan.arrays import FloatArray, IntArray
from hf_distca.plan.cost import as_lengths
from hf_distca.units import counted

Item = TypeVar("Item")
Preference = Callable[[int], Any]
"""Number or tuple of numbers of a bin; the bin with the least one is preferred. It may change only
when the bin gets an item."""

NOWHERE = -1
"""Bin of an item that no bin had room for."""
PLACED_AT_ONCE = 65536
"""Documents that `place_evenly` places before it looks whether all have fitted."""
LOOK_AHEAD = 16
"""Maximum number of documents that wait for the next micro-batch before the current one is closed.
"""


class Bins:
    """Bins that items are given to, one after another.

    Attributes:
        room: [bins] rows that each bin still takes.
        work: [bins] time that each bin takes for its items: their cost over the bin's speed. It may
            begin below 0: as what the bin should get.
        speeds: [bins] cost that each bin does in a unit of time.
        newest: [bins] number of the item that each bin got last, counted over all items; -1 for an
            empty bin.
    """

    def __init__(
        self,
        room: Sequence[int],
        *,
        work: Sequence[float] | None = None,
        speeds: Sequence[float] | None = None,
    ) -> None:
        self.room = list(room)
        self.work = [0.0] * len(room) if work is None else list(work)
        self.speeds = [1.0] * len(room) if speeds is None else list(speeds)
        self.newest = [-1] * len(room)
        self._items = 0

    @property
    def least_work(self) -> Preference:
        """Prefer the bin with the least work."""
        return self.work.__getitem__  # which is called for every item

    def most_room(self, number: int) -> int:
        """Prefer the bin with the most room."""
        return -self.room[number]

    def least_room(self, number: int) -> tuple[int, int]:
        """Prefer the bin with the least room, of equal ones the bin that got an item last."""
        return self.room[number], -self.newest[number]

    def put(self, number: int, size: int, cost: float) -> None:
        """Give an item to a bin, whether it has room or not."""
        self.room[number] -= size
        self.work[number] += cost / self.speeds[number]
        self.newest[number] = self._items
        self._items += 1

    def pack(
        self,
        sizes: IntArray,
        costs: IntArray | FloatArray,
        order: IntArray,
        preference: Preference,
        when_full: Preference | None = None,
    ) -> IntArray:
        """Give each item to the most preferred bin that has room.

        Of bins that are preferred alike the first one gets the item.

        Args:
            sizes: [items] rows of each item.
            costs: [items] cost of each item.
            order: [packed] items to pack, in the order in which bins are chosen.
            preference: as in `Preference`, such as `least_work`.
            when_full: preference for an item that no bin has room for, which overfills a bin. None
                to leave the item out.

        Returns:
            [items] the bin of each; NOWHERE for items that were left out, and for items that are
            not in `order`.
        """
        # Two heaps: bins that may have room for the item at hand, by preference; and bins that had
        # too little room for an earlier item, the one with the most room first.
        room, work, speeds, newest = self.room, self.work, self.speeds, self.newest
        ready = [(preference(number), number) for number in range(len(room))]
        heapify(ready)
        too_full: list[tuple[int, int]] = []
        bin_of_item = np.full(len(sizes), NOWHERE)
        chosen = []
        for size, cost in zip(sizes[order].tolist(), costs[order].tolist(), strict=True):
            # 1. Bins that have room for this item come back, and those without room leave.
            while too_full and -too_full[0][0] >= size:
                _, number = heappop(too_full)
                heappush(ready, (preference(number), number))
            while ready and room[ready[0][1]] < size:
                _, number = heappop(ready)
                heappush(too_full, (-room[number], number))
            # 2. The bin on top is preferred most, and gets the item.
            if ready:
                # As `put` does; a call for each of many items takes as long as all else.
                _, number = ready[0]
                room[number] -= size
                work[number] += cost / speeds[number]
                newest[number] = self._items
                self._items += 1
                heapreplace(ready, (preference(number), number))
            elif when_full is not None:
                number = min(range(len(room)), key=when_full)
                self.put(number, size, cost)
            else:
                number = NOWHERE
            chosen.append(number)
        bin_of_item[order] = chosen
        return bin_of_item

    def fill_up(
        self, sizes: IntArray, costs: FloatArray, order: IntArray, limit: float
    ) -> IntArray:
        """Give each item to the bin with the most work that stays within a limit.

        Empty bins get an item first. If no bin with room stays within the limit, the one with the
        least work gets the item.

        Args:
            sizes, costs, order: as in `pack`.
            limit: work that bins are filled up to.

        Returns:
            As `pack`.
        """
        bin_of_item = np.full(len(sizes), NOWHERE)
        for item in order.tolist():
            size, cost = int(sizes[item]), float(costs[item])
            with_room = [number for number, room in enumerate(self.room) if room >= size]
            if not with_room:
                continue
            number = min(with_room, key=self.least_work)
            if min(self.work) > 0:  # no bin is empty
                within_limit = [
                    number
                    for number in with_room
                    if self.work[number] + cost / self.speeds[number] <= limit
                ]
                number = max(within_limit, key=self.least_work, default=number)
            self.put(number, size, cost)
            bin_of_item[item] = number
        return bin_of_item


def largest_first(values: IntArray | FloatArray) -> IntArray:
    """Return the indices of values, the largest first; equal ones keep their order."""
    return np.argsort(-values, kind="stable")


def place_evenly(lengths: IntArray, order: IntArray, bins: int, capacity: int) -> IntArray | None:
    """Return [documents] the bin of each; a document goes to the bin with the fewest tokens.

    Of bins with equally few tokens the first one gets the document, as in `Bins.pack`. Ten million
    documents take a few seconds.

    Args:
        order: [documents] order in which they are placed.

    Returns:
        None if a document does not fit.
    """
    # A bin is one integer, tokens * bins + number: the least one is the bin for the next document.
    heap = list(range(bins))
    bin_of_document = np.empty(len(lengths), np.int64)
    for first in range(0, len(order), PLACED_AT_ONCE):
        documents = order[first : first + PLACED_AT_ONCE]
        added = (lengths[documents] * bins).tolist()
        bin_of_document[documents] = [heapreplace(heap, heap[0] + each) for each in added]
        # What does not fit into the emptiest bin fits into none.
        if max(heap) // bins > capacity:
            return None
    return bin_of_document % bins


def fits_evenly(lengths: IntArray, order: IntArray, bins: int, capacity: int) -> bool:
    """Return whether `place_evenly` has room for all documents.

    Args:
        order: [documents] order in which they are placed.
    """
    ordered = lengths[order]
    # The emptiest bin has at most the mean of the tokens that have been placed.
    means = (np.cumsum(ordered) - ordered) // bins
    if (means + ordered <= capacity).all():
        return True
    return place_evenly(lengths, order, bins, capacity) is not None


def place_tightly(lengths: IntArray, order: IntArray, capacity: int) -> IntArray:
    """Return [documents] the bin of each: the fullest bin with room, or else a new one.

    With the longest first this is best-fit decreasing. It needs at most 11/9 of the fewest possible
    bins, and usually exactly the fewest. No document may be longer than `capacity`.

    Args:
        order: [documents] order in which they are placed.
    """
    # What is in two bins together exceeds the capacity, since the later one was opened for a
    # document that did not fit into the earlier one. So bins are more than half full on average.
    most_bins = min(2 * -(-int(lengths.sum()) // capacity), len(lengths))
    fullest_first = Bins([capacity] * most_bins)
    return fullest_first.pack(lengths, lengths, order, fullest_first.least_room)


def pack_in_order(
    documents: Iterable[tuple[int, Item]], capacity: int, look_ahead: int = LOOK_AHEAD
) -> Iterator[list[Item]]:
    """Fill one bin after another, as nearly as possible in the given order, and yield their items.

    A document that does not fit waits for the next bin, while shorter ones behind it may still go
    in. A bin is closed when it is full or more than `look_ahead` documents wait. Only the documents
    needed are read.

    Args:
        documents: pairs of tokens, at most `capacity`, and an item.
    """
    source = iter(documents)
    waiting: list[tuple[int, Item]] = []
    while True:
        chosen: list[Item] = []
        passed_over: list[tuple[int, Item]] = []
        room = capacity
        # What has waited comes first. What is left of it, and what was passed over, waits again.
        waited = iter(waiting)
        for length, item in itertools.chain(waited, source):
            if length <= room:
                chosen.append(item)
                room -= length
            else:
                passed_over.append((length, item))
            if room == 0 or len(passed_over) > look_ahead:
                break
        if not chosen:
            return
        yield chosen
        waiting = [*passed_over, *waited]


def halves(lengths: IntArray) -> list[IntArray]:
    """Divide documents into two halves of about equal tokens, and return the documents of each.

    The longest comes first, and each goes to the smaller half.
    """
    bins = Bins([int(lengths.sum())] * 2)
    half_of_document = bins.pack(lengths, lengths, largest_first(lengths), bins.least_work)
    return [np.flatnonzero(half_of_document == half) for half in (0, 1)]


def split_documents(lengths: IntArray, ranks: int) -> list[IntArray] | None:
    """Divide documents into two nano-batches of a quarter of the tokens or more, see `halves`.

    None if a document has more than half of the tokens, or a half has fewer tokens than ranks.
    """
    if len(lengths) < 2 or 2 * int(lengths.max()) > int(lengths.sum()):
        return None
    nano_batches = halves(lengths)
    fewest_tokens = min(int(lengths[documents].sum()) for documents in nano_batches)
    return nano_batches if fewest_tokens >= ranks else None


def ranks_of_whole(lengths: IntArray, ranks: int, rows_per_rank: int) -> IntArray | None:
    """Return [documents] the rank of each whole document, with tokens as equal as possible.

    Longest first, each document goes to the rank with the fewest tokens. If that leaves no room for
    a document, each goes to the fullest rank that has room. If that fails too, ranks are filled one
    after another in the order of the documents: GlobalBatchSampler has packed them into a bin for
    each rank.

    Args:
        lengths: [documents] of at most rows_per_rank tokens each.

    Returns:
        None if the documents do not fit.
    """
    # 1. Equal tokens.
    order = largest_first(lengths)
    rank_of_document = place_evenly(lengths, order, ranks, rows_per_rank)
    if rank_of_document is not None:
        return rank_of_document
    # 2. As few ranks as possible.
    rank_of_document = place_tightly(lengths, order, rows_per_rank)
    if int(rank_of_document.max()) < ranks:
        return rank_of_document
    # 3. The bins in which the documents were drawn.
    numbered = zip(lengths.tolist(), range(len(lengths)), strict=True)
    documents_of_rank = list(pack_in_order(numbered, rows_per_rank, look_ahead=0))
    if len(documents_of_rank) > ranks:
        return None
    return np.repeat(np.arange(len(documents_of_rank)), [len(d) for d in documents_of_rank])


def whole_documents(lengths: IntArray, ranks: int, rows_per_rank: int) -> list[IntArray]:
    """Return the whole documents of each rank, with tokens as equal as `ranks_of_whole` can.

    Raises:
        ValueError: a document is longer than rows_per_rank, or the documents do not fit.
    """
    lengths = as_lengths(lengths)
    if len(lengths) and int(lengths.max()) > rows_per_rank:
        document = int(lengths.argmax())
        raise Capacity.DOCUMENT_BEYOND_RANK.error(
            document=document, tokens=lengths[document], rows=rows_per_rank
        )
    rank_of_document = ranks_of_whole(lengths, ranks, rows_per_rank)
    if rank_of_document is None:
        raise Capacity.ONLY_CUT.error(
            documents=counted(len(lengths), "document"),
            tokens=counted(int(lengths.sum()), "token"),
            ranks=counted(ranks, "rank"),
            rows=rows_per_rank,
        )
    # Two halves of about equal tokens, so that nano-batches can divide the rank's rows between two
    # documents.
    documents_of_ranks = []
    for rank in range(ranks):
        documents = np.flatnonzero(rank_of_document == rank)
        first_half, second_half = halves(lengths[documents])
        documents_of_ranks.append(documents[np.concatenate([first_half, second_half])])
    return documents_of_ranks
