"""Summary of a data set for its user: its documents, and which of them are cut or shortened."""

import numpy as np

from hf_distca.plan.arrays import IntArray, Table
from hf_distca.units import counted


def documents_summary(name: str, lengths: IntArray, spans: Table) -> str:
    """Return one line about the documents that a training packs.

    Args:
        name: name of the data set.
        lengths: [documents] int64 tokens of each document, at least one document.
        spans: [spans] of dtype SPAN, from `fit_documents`.
    """
    total_tokens = int(lengths.sum())
    documents = counted(len(lengths), "document")
    tokens = counted(total_tokens, "token")
    spread = f"median length {np.median(lengths):,.0f}, longest {lengths.max():,}"
    summary = f"{name}: {documents}, {tokens}; {spread}"
    sizes = spans["stop"] - spans["start"]  # [spans]
    # If any document is longer than the limit, the longest span has as many tokens as the limit.
    limit = sizes.max()
    long_count = int((lengths > limit).sum())
    if long_count == 0:
        return f"{summary}; no document is cut"
    long_documents = f"{counted(long_count, 'document')} of more than {limit:,} tokens"
    dropped = total_tokens - int(sizes.sum())
    if dropped > 0:
        dropped_tokens = f"{counted(dropped, 'token')} ({dropped / total_tokens:.1%})"
        return f"{summary}; long_documents='truncate' drops {dropped_tokens} of {long_documents}"
    # Every other document is one span.
    spans_of_long = len(spans) - (len(lengths) - long_count)
    cut = f"{spans_of_long:,} spans, which do not attend to each other"
    return f"{summary}; long_documents='split' cuts {long_documents} into {cut}"
