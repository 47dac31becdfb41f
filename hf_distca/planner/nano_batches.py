"""Dividing a micro-batch into two nano-batches of about equal tokens, no document in both."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import Layout

SMALLEST_SHARE = 0.25
"""A nano-batch with a smaller share of a rank's tokens would hide next to nothing and still cost its exchanges."""


def split_documents(lengths: NDArray[np.int64], ranks: int) -> list[NDArray[np.int64]] | None:
    """Two groups of documents with about equal tokens: longest first, each to the smaller group.

    Args:
        lengths: [documents] tokens of each document.
        ranks: ranks that each group is laid out over.

    Returns:
        The documents of each group in their order, or None where that is not possible: a document of more
        than half of the tokens fits in no group, and every rank needs a row of each. A group has at least a quarter
        of the tokens, since groups differ by one document at most.
    """
    total = int(lengths.sum())
    if len(lengths) < 2 or 2 * int(lengths.max()) > total:
        return None
    group = np.zeros(len(lengths), bool)
    tokens = [0, 0]
    for document in np.argsort(-lengths, kind="stable").tolist():
        smaller = int(tokens[1] < tokens[0])
        group[document] = smaller
        tokens[smaller] += int(lengths[document])
    if min(tokens) < ranks:
        return None
    return [np.flatnonzero(~group), np.flatnonzero(group)]


def split_placed(placed: Sequence[Sequence[int]]) -> list[int] | None:
    """Where to divide the documents of every rank so that both parts have about equal tokens.

    Args:
        placed: lengths of the documents of each rank, in the order of its rows.

    Returns:
        For each rank, how many of its documents are in the first part, or None where on some rank no cut between
        two documents leaves either part SMALLEST_SHARE of its tokens.
    """
    cuts = []
    for lengths in placed:
        before = np.cumsum(lengths)
        total = int(before[-1]) if len(lengths) else 0
        if len(lengths) < 2:
            return None
        cut = int(np.argmin(np.abs(2 * before[:-1] - total))) + 1
        if min(int(before[cut - 1]), total - int(before[cut - 1])) < SMALLEST_SHARE * total:
            return None
        cuts.append(cut)
    return cuts


def mirrored(layout: Layout) -> Layout:
    """The layout with its ranks in the reverse order."""
    segments = layout.segments.copy()
    segments["rank"] = layout.ranks - 1 - segments["rank"]
    return Layout(layout.lengths, segments[np.lexsort((segments["offset"], segments["rank"]))], layout.ranks)
