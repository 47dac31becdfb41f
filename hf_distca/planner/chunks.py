"""Chunked attention: a row attends to the rows before it in its chunk, so that each chunk is a document of its own."""

import numpy as np
from numpy.typing import NDArray

from hf_distca.plan import AttentionKind, Layout


def chunk_counts(lengths: NDArray[np.int64], chunk: int) -> NDArray[np.int64]:
    """[documents] in how many chunks each document is; its chunks count from its first row."""
    counts: NDArray[np.int64] = -(-lengths // chunk)
    return counts


def layout_of_kind(layout: Layout, kind: AttentionKind) -> Layout:
    """The layout as the core attention of one kind of layer sees it: the same rows at the same places.

    Args:
        layout: of the documents.
        kind: of the layer.

    Returns:
        The layout itself, or with chunked attention one whose documents are the chunks.
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
