"""Summary of a data set for its user: documents, tokens, lengths, and which documents are cut or shortened."""

import numpy as np
from numpy.typing import NDArray


def documents_summary(name: str, lengths: NDArray[np.int64], excerpts: NDArray[np.void]) -> str:
    """Return one line about the documents that a training packs.

    Args:
        name: name of the data set.
        lengths: [documents] int64 tokens of each document, at least one document.
        excerpts: [excerpts] of dtype EXCERPT, what `fit_documents` made of these documents.
    """
    of_lengths = f"median length {np.median(lengths):,.0f}, longest {lengths.max():,}"
    found = f"{name}: {_counted(len(lengths), 'document')}, {_counted(int(lengths.sum()), 'token')}; {of_lengths}"
    sizes = excerpts["stop"] - excerpts["start"]
    limit = sizes.max()  # where a document is longer than its limit, the longest excerpt is as long as the limit
    count = int((lengths > limit).sum())
    if not count:
        return f"{found}; no document is cut"
    long_documents = f"{_counted(count, 'document')} of more than {limit:,} tokens"
    if dropped := int(lengths.sum() - sizes.sum()):
        tokens = f"{_counted(dropped, 'token')} ({dropped / lengths.sum():.1%})"
        return f"{found}; long_documents='truncate' drops {tokens} of {long_documents}"
    pieces = f"{len(excerpts) - len(lengths) + count:,} excerpts, which do not attend to each other"
    return f"{found}; long_documents='split' cuts {long_documents} into {pieces}"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
