"""Chunked attention: each chunk of a document is planned as a document of its own."""

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import AttentionKind, Layout


def chunk_counts(lengths: NDArray[np.int64], chunk: int) -> NDArray[np.int64]:
    """Return [documents] the number of chunks of each document, counted from its first row."""
    counts: NDArray[np.int64] = -(-lengths // chunk)
    return counts


def layout_of_kind(layout: Layout, kind: AttentionKind) -> Layout:
    """Return the layout as one kind of layer sees it: the same rows at the same places.

    With chunked attention the documents of the returned layout are the chunks.
    """
    if kind.chunk is None:
        return layout
    counts = chunk_counts(layout.lengths, kind.chunk)
    before = np.cumsum(counts) - counts  # chunks of earlier documents
    lengths = np.full(counts.sum(), kind.chunk, np.int64)
    lengths[before + counts - 1] = layout.lengths - (counts - 1) * kind.chunk

    segments = layout.segments
    first = segments["start"] // kind.chunk
    pieces = chunk_counts(segments["stop"], kind.chunk) - first
    nth = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    cut = np.repeat(segments, pieces)
    chunk = np.repeat(first, pieces) + nth
    start = np.maximum(cut["start"], chunk * kind.chunk)
    stop = np.minimum(cut["stop"], (chunk + 1) * kind.chunk)
    cut["offset"] += start - cut["start"]
    cut["start"], cut["stop"] = start - chunk * kind.chunk, stop - chunk * kind.chunk
    cut["document"] = before[cut["document"]] + chunk
    return Layout(lengths, cut, layout.ranks)
