"""Summary of a data set for its user: documents, tokens, lengths, and which documents are cut or shortened."""

import numpy as np
from numpy.typing import NDArray


def documents_summary(name: str, lengths: NDArray[np.int64], excerpts: NDArray[np.void]) -> str:
    """Return one line about the documents that a training packs.

    Args:
        name: name of the data set.
        lengths: [documents] int64 tokens of each document, at least one document.
        excerpts: [excerpts] of dtype EXCERPT, from `fit_documents`.
    """
    documents, tokens = _counted(len(lengths), "document"), _counted(int(lengths.sum()), "token")
    spread = f"median length {np.median(lengths):,.0f}, longest {lengths.max():,}"
    summary = f"{name}: {documents}, {tokens}; {spread}"
    sizes = excerpts["stop"] - excerpts["start"]
    limit = (
        sizes.max()
    )  # where a document is longer than its limit, the longest excerpt is as long as the limit
    count = int((lengths > limit).sum())
    if not count:
        return f"{summary}; no document is cut"
    long_documents = f"{_counted(count, 'document')} of more than {limit:,} tokens"
    if dropped := int(lengths.sum() - sizes.sum()):
        dropped_tokens = f"{_counted(dropped, 'token')} ({dropped / lengths.sum():.1%})"
        return f"{summary}; long_documents='truncate' drops {dropped_tokens} of {long_documents}"
    pieces = f"{len(excerpts) - len(lengths) + count:,} excerpts, which do not attend to each other"
    return f"{summary}; long_documents='split' cuts {long_documents} into {pieces}"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
