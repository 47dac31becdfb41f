"""Division of a micro-batch into two nano-batches of about equal tokens, with no document in both."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import Layout

SMALLEST_SHARE = 0.25
"""Least share of a rank's tokens in a nano-batch; a smaller nano-batch hides almost nothing and still costs
exchanges."""


def split_documents(lengths: NDArray[np.int64], ranks: int) -> list[NDArray[np.int64]] | None:
    """Divide documents into two groups of about equal tokens: longest first, each to the smaller group.

    Args:
        lengths: [documents] tokens of each document.

    Returns:
        The documents of each group in order. Groups differ by one document at most, so each has at least a quarter of
        the tokens. None if a document has more than half of the tokens, or a group has fewer tokens than ranks.
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
    """Find where to divide the documents of every rank into two parts of about equal tokens.

    Args:
        placed: for each rank, lengths of its documents in the order of its rows.

    Returns:
        For each rank, the number of documents in the first part. None if on some rank every cut between documents
        leaves a part with less than SMALLEST_SHARE of the tokens.
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
    """Return the layout with its ranks in reverse order."""
    segments = layout.segments.copy()
    segments["rank"] = layout.ranks - 1 - segments["rank"]
    return Layout(layout.lengths, segments[np.lexsort((segments["offset"], segments["rank"]))], layout.ranks)
