"""Read document lengths of a data set and its fingerprint; cut or refuse documents that are too long."""

import hashlib
import logging
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from tqdm.auto import tqdm

from hf_distca.collator.documents import ANY_COLUMNS, Columns, token_document
from hf_distca.collator.refusals import Data

logger = logging.getLogger(__name__)

READ_BATCH = 1000
"""Number of documents read at once to compute lengths."""
FINGERPRINT_DOCUMENTS = 64
"""Number of documents whose tokens enter a fingerprint."""


def document_lengths(dataset: Any, columns: Columns = ANY_COLUMNS, progress: bool = True) -> NDArray[np.int64]:
    """Return the number of tokens of every document, [documents] int64.

    The length column of a `datasets.Dataset` is trusted here and checked when a document is read. Without that column,
    every document is read once and checked.

    Args:
        dataset: anything with a length that gives examples by index.

    Raises:
        ValueError: the data set has no document, or `token_document` refuses an example.
    """
    if len(dataset) == 0:
        raise Data.EMPTY.error()
    counts: dict[str, NDArray[Any]] = {}
    # With a transform, column_names lists the transform's inputs, not its outputs.
    if isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom":
        columns.used(dataset.column_names)
        tokens = [column for column in ("input_ids", "labels") if column in dataset.column_names]
        kinds = [field.type for field in dataset.features.arrow_schema if field.name in tokens]
        if columns.length in dataset.column_names:
            given = np.asarray(dataset.select_columns([columns.length]).with_format("numpy")[:][columns.length])
            if given.ndim != 1 or given.dtype.kind not in "iu":
                raise Data.LENGTH_COLUMN.error(column=columns.length, kind=dataset.features[columns.length])
            counts = {"input_ids": given}
        elif all(pa.types.is_list(kind) or pa.types.is_large_list(kind) for kind in kinds):  # not tensors
            # Arrow tables know the lengths of their lists, so tokens are not converted to Python objects.
            tables = dataset.select_columns(tokens).with_format("arrow").iter(batch_size=READ_BATCH)
            batches = [
                # A missing list counts as empty.
                [pc.fill_null(pc.list_value_length(table[column]), 0).to_numpy() for column in tokens]
                for table in tqdm(tables, "Document lengths", -(-len(dataset) // READ_BATCH), disable=not progress)
            ]
            counts = dict(zip(tokens, map(np.concatenate, zip(*batches, strict=True)), strict=True))
    if not counts:
        indices = tqdm(range(len(dataset)), "Document lengths", unit=" documents", disable=not progress)
        read = (token_document(dataset[index], f"document {index}", columns).shape[1] for index in indices)
        return np.fromiter(read, np.int64, len(dataset))
    lengths = counts["input_ids"]
    for index in np.flatnonzero(lengths <= 0)[:1]:
        raise Data.EMPTY_DOCUMENT.error(name=f"document {index}", stated=f" (length {lengths[index]})")
    labels = counts.get("labels", lengths)
    for index in np.flatnonzero(labels != lengths)[:1]:
        raise Data.LABELS.error(name=f"document {index}", labels=labels[index], length=lengths[index])
    return lengths.astype(np.int64)


def dataset_fingerprint(dataset: Any, lengths: NDArray[np.int64], columns: Columns = ANY_COLUMNS) -> str:
    """Return a hash that differs if the data sets of two ranks differ.

    The hash covers all document lengths, and the tokens and targets of 64 evenly spaced documents. A data set that
    draws its documents at random differs from itself.
    """
    digest = hashlib.sha256(np.ascontiguousarray(lengths, "<i8").tobytes())
    sample = np.unique(np.linspace(0, len(lengths) - 1, FINGERPRINT_DOCUMENTS, dtype=np.int64))
    # One at a time: 64 long documents at once may not fit in memory.
    for index in sample.tolist():
        digest.update(token_document(dataset[index], f"document {index}", columns).astype("<i8").tobytes())
    return digest.hexdigest()


EXCERPT = np.dtype(
    [
        ("document", np.int64),  # index into the data set
        ("start", np.int64),  # first token of the excerpt
        ("stop", np.int64),  # one past its last token
        ("end", np.int64),  # one past the last token of the document that may be a target
    ]
)
"""Tokens [start, stop) of a document in the data set, which form a document of a micro-batch."""


def fit_documents(lengths: NDArray[np.int64], limit: int, policy: str, limit_name: str) -> NDArray[np.void]:
    """Apply the policy for long documents; a document within the limit becomes one excerpt.

    "truncate" keeps the first tokens, and logs how many are dropped. "split" cuts a document into excerpts, which do
    not attend to each other; the last row of an excerpt still predicts the first token of the next one.

    Args:
        lengths: [documents] int64 tokens of each document.
        limit: maximum number of tokens of an excerpt; messages call it `limit_name`.

    Returns:
        [excerpts] of dtype EXCERPT, in the order of the data set.
    """
    if limit <= 0 or policy not in ("error", "truncate", "split"):
        raise ValueError(
            f"{limit_name} is {limit} and the policy for long documents {policy!r}, but an excerpt needs a token and "
            "a known policy; give a positive limit, and 'error', 'truncate' or 'split'"
        )
    too_long = np.flatnonzero(lengths > limit)
    if len(too_long) and policy == "error":
        longest = int(np.argmax(lengths))
        raise Data.LONG.error(
            count=len(too_long),
            documents=len(lengths),
            limit_name=limit_name,
            limit=limit,
            longest=longest,
            length=lengths[longest],
        )
    if len(too_long) and policy == "truncate":
        warn_truncated(len(too_long), int((lengths[too_long] - limit).sum()), limit, limit_name)
    return cut_documents(lengths, limit, policy)


def cut_documents(lengths: NDArray[np.int64], limit: int, policy: str) -> NDArray[np.void]:
    """Return the excerpts of documents under "truncate" or "split", as `fit_documents` does, without checks."""
    used = np.minimum(lengths, limit) if policy == "truncate" else lengths
    counts = -(-used // limit)
    excerpts = np.empty(int(counts.sum()), EXCERPT)
    excerpts["document"] = np.repeat(np.arange(len(lengths)), counts)
    # How many excerpts of the same document come before this one.
    before = np.arange(len(excerpts)) - np.repeat(np.cumsum(counts) - counts, counts)
    excerpts["end"] = np.repeat(used, counts)
    excerpts["start"] = before * limit
    excerpts["stop"] = np.minimum(excerpts["start"] + limit, excerpts["end"])
    return excerpts


def warn_truncated(documents: int, tokens: int, limit: int, limit_name: str) -> None:
    """Log how many documents and tokens the policy "truncate" drops."""
    text = "Truncated %d documents to %s = %d tokens; %d tokens are dropped."
    logger.warning(text, documents, limit_name, limit, tokens)
