"""Packing of documents into bins of a fixed capacity: micro-batches, or ranks that hold documents whole."""

import heapq
import itertools
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan.cost import as_lengths
from hf_distca.planner.layout import halves
from hf_distca.refusal import RefusedError

Item = TypeVar("Item")

LOOK_AHEAD = 16
"""Maximum number of documents that wait for the next micro-batch before the current one is closed.
"""


def pack_in_order(documents: Iterable[tuple[int, Item]], capacity: int) -> Iterator[list[Item]]:
    """Fill one bin after another, as nearly as possible in the given order, and yield the items of each.

    A document that does not fit waits for the next bin, while shorter ones behind it may still go
    in. A bin is closed when it is full or more than 16 documents wait. Only the documents needed
    are read from `documents`: pairs of tokens, at most `capacity`, and an item.
    """
    source = iter(documents)
    waiting: list[tuple[int, Item]] = []
    while True:
        chosen: list[Item] = []
        passed: list[tuple[int, Item]] = []
        room, first = capacity, iter(waiting)
        for length, item in itertools.chain(first, source):
            if length <= room:
                chosen.append(item)
                room -= length
            else:
                passed.append((length, item))
            if room == 0 or len(passed) > LOOK_AHEAD:
                break
        if not chosen:
            return
        yield chosen
        waiting = [*passed, *first]


def place_evenly(lengths: Sequence[int], bins: int, capacity: int) -> list[int] | None:
    """Return the bin with the fewest tokens for each document, in the given order.

    None if a document does not fit.
    """
    # An entry is load · bins + bin: one integer, so that the heap compares quickly.
    loads = list(range(bins))
    chosen = []
    for length in lengths:
        load, emptiest = divmod(loads[0], bins)
        if load + length > capacity:
            return None
        heapq.heapreplace(loads, loads[0] + length * bins)
        chosen.append(emptiest)
    return chosen


def place_tightly(lengths: Sequence[int], capacity: int) -> list[int]:
    """Return the bin of each document: in the given order, the fullest bin with room, or a new bin.

    With the longest first this is best-fit decreasing. It needs at most 11/9 of the fewest possible
    bins, and usually exactly the fewest. No document may be longer than `capacity`.
    """
    bins_of: dict[int, list[int]] = {}  # room -> bins with exactly this room
    rooms: list[int] = []  # its keys, smallest first
    chosen = []
    opened = 0
    for length in lengths:
        at = bisect_left(rooms, length)
        if at == len(rooms):
            room, fullest = capacity, opened
            opened += 1
        else:
            room = rooms[at]
            fullest = bins_of[room].pop()
            if not bins_of[room]:
                del bins_of[room], rooms[at]
        if room - length not in bins_of:
            bins_of[room - length] = []
            insort(rooms, room - length)
        bins_of[room - length].append(fullest)
        chosen.append(fullest)
    return chosen


def ranks_of_whole(
    lengths: NDArray[np.int64], ranks: int, tokens_per_rank: int
) -> NDArray[np.int64] | None:
    """Return the rank of each whole document, with tokens as equal as possible.

    None if they do not fit.

    Longest first, each document goes to the rank with the fewest tokens. If that leaves no room for
    a document, each goes to the fullest rank that has room. If that fails too, ranks are filled one
    after another in the order of the documents: GlobalBatchSampler has packed them into a bin for
    each rank.

    Args:
        lengths: [documents] of at most tokens_per_rank tokens each.
    """
    order = np.argsort(-lengths, kind="stable")
    longest_first = lengths[order].tolist()
    chosen = place_evenly(longest_first, ranks, tokens_per_rank)
    if chosen is None:
        chosen = place_tightly(longest_first, tokens_per_rank)
    if max(chosen, default=0) >= ranks:
        order = np.arange(len(lengths))
        chosen, rank, load = [], 0, 0
        for length in lengths.tolist():
            if load + length > tokens_per_rank:
                rank, load = rank + 1, 0
            load += length
            chosen.append(rank)
        if rank >= ranks:
            return None
    rank_of = np.empty(len(lengths), np.int64)
    rank_of[order] = chosen
    return rank_of


def whole_documents(
    lengths: NDArray[np.int64], ranks: int, tokens_per_rank: int
) -> list[NDArray[np.int64]]:
    """Return the documents of each rank, with tokens as equal as whole documents allow: see `ranks_of_whole`.

    Raises:
        ValueError: a document is longer than tokens_per_rank, or the documents do not fit.
    """
    lengths = as_lengths(lengths)
    if len(lengths) and int(lengths.max()) > tokens_per_rank:
        document = int(lengths.argmax())
        raise RefusedError(
            f"document {document} has {int(lengths[document])} tokens, but with "
            "document_layout='whole' a document stays on one rank, which holds "
            f"{tokens_per_rank}; raise tokens_per_rank, or set long_documents to 'truncate' or "
            "'split'"
        )
    rank_of = ranks_of_whole(lengths, ranks, tokens_per_rank)
    if rank_of is None:
        raise RefusedError(
            f"{len(lengths)} documents of {int(lengths.sum())} tokens do not fit on {ranks} ranks "
            f"of {tokens_per_rank} without cutting a document; use fewer documents, more ranks or "
            "more tokens_per_rank"
        )
    # Two halves of about equal tokens, so that nano-batches can divide the rank's rows between two
    # documents.
    ordered = (np.flatnonzero(rank_of == rank) for rank in range(ranks))
    return [
        np.concatenate([documents[half] for half in halves(lengths[documents])])
        for documents in ordered
    ]
