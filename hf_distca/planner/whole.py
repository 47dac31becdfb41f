"""Documents of each rank if none may be cut, since layers that mix along the row need whole documents."""

import numpy as np
from numpy.typing import NDArray

from hf_distca.planner.bin_packing import place_evenly, place_in_order, place_tightly
from hf_distca.planner.cost import as_lengths


def whole_documents(lengths: NDArray[np.int64], ranks: int, tokens_per_rank: int) -> list[NDArray[np.int64]]:
    """Return the documents of each rank, with tokens as equal as whole documents allow.

    Longest first, each document goes to the rank with the fewest tokens. If that leaves no room for a document, each
    goes to the fullest rank that has room. If that fails too, ranks are filled one after another in the order of the
    documents. The last order always fits documents that GlobalBatchSampler has packed into a bin for each rank.

    Args:
        lengths: [documents] tokens of each document.

    Returns:
        For each rank the indices of its documents, ordered so that its rows can be halved between two documents.

    Raises:
        ValueError: a document is longer than tokens_per_rank, or the documents do not fit.
    """
    lengths = as_lengths(lengths)
    if len(lengths) and int(lengths.max()) > tokens_per_rank:
        document = int(lengths.argmax())
        raise ValueError(
            f"document {document} has {int(lengths[document])} tokens, but with document_layout='whole' a document "
            f"stays on one rank, which holds {tokens_per_rank}; raise tokens_per_rank, or set long_documents to "
            "'truncate' or 'split'"
        )
    order = np.argsort(-lengths, kind="stable")
    longest_first = lengths[order].tolist()
    chosen = place_evenly(longest_first, ranks, tokens_per_rank)
    if chosen is None:
        chosen = place_tightly(longest_first, tokens_per_rank)
    if max(chosen, default=0) >= ranks:
        order = np.arange(len(lengths))
        in_order = place_in_order(lengths.tolist(), ranks, tokens_per_rank)
        if in_order is None:
            raise ValueError(
                f"{len(lengths)} documents of {int(lengths.sum())} tokens do not fit on {ranks} ranks of "
                f"{tokens_per_rank} without cutting a document; use fewer documents, more ranks or more "
                "tokens_per_rank"
            )
        chosen = in_order
    placed: list[list[int]] = [[] for _ in range(ranks)]
    for document, rank in zip(order.tolist(), chosen, strict=True):
        placed[rank].append(document)
    return [_in_halves(documents, lengths) for documents in placed]


def _in_halves(documents: list[int], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Order documents in two halves of about equal tokens: longest first, each to the smaller half."""
    halves: tuple[list[int], list[int]] = ([], [])
    tokens = [0, 0]
    for document in sorted(documents, key=lambda document: -int(lengths[document])):
        smaller = int(tokens[1] < tokens[0])
        halves[smaller].append(document)
        tokens[smaller] += int(lengths[document])
    return np.array(sorted(halves[0]) + sorted(halves[1]), np.int64)
