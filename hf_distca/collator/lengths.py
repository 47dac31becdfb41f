"""Read document lengths of a data set and its fingerprint; cut or refuse documents that are too long."""

import hashlib
import logging
from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from tqdm.auto import tqdm

from hf_distca.collator.documents import ANY_COLUMNS, Columns, fetch_documents, token_document
from hf_distca.collator.refusals import Data

logger = logging.getLogger(__name__)

READ_BATCH = 1000
"""Number of documents read at once to compute lengths."""
FINGERPRINT_DOCUMENTS = 64
"""Number of documents whose tokens enter a fingerprint."""


def document_lengths(dataset: Any, columns: Columns = ANY_COLUMNS, progress: bool = True) -> NDArray[np.int64]:
    """Return the number of tokens of every document.

    The length column of a `datasets.Dataset` is trusted here and checked when a document is read. Without that column,
    every document is read once and checked.

    Args:
        dataset: anything with a length that gives examples by index.

    Returns:
        [documents] int64.

    Raises:
        ValueError: the data set has no length or no document, or `token_document` refuses an example.
    """
    if not hasattr(dataset, "__len__"):
        raise Data.NO_LENGTH.error(kind=type(dataset).__name__)
    if len(dataset) == 0:
        raise Data.EMPTY.error()
    # With a transform, column_names lists the transform's inputs, not its outputs.
    if isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom":
        columns.used(dataset.column_names)
        if columns.length in dataset.column_names:
            return _given_lengths(dataset, columns.length)
        if _stored_as_lists(dataset):
            return np.concatenate(list(_stored_lengths(dataset, progress)))
    indices = tqdm(range(len(dataset)), "Document lengths", unit=" documents", disable=not progress)
    return np.fromiter(
        (len(token_document(dataset[index], f"document {index}", columns).input_ids) for index in indices),
        np.int64,
        len(dataset),
    )


def dataset_fingerprint(dataset: Any, lengths: NDArray[np.int64], columns: Columns = ANY_COLUMNS) -> str:
    """Return a hash that differs if the data sets of two ranks differ.

    The hash covers all document lengths, and the tokens and targets of 64 evenly spaced documents. A data set that
    draws its documents at random differs from itself.

    Args:
        lengths: [documents] int64.

    Raises:
        ValueError: see `token_document`.
    """
    digest = hashlib.sha256(np.ascontiguousarray(lengths, "<i8").tobytes())
    sample = np.unique(np.linspace(0, len(lengths) - 1, FINGERPRINT_DOCUMENTS, dtype=np.int64))
    # One at a time: 64 long documents at once may not fit in memory.
    for index in sample.tolist():
        (document,) = fetch_documents(dataset, [index], columns)
        digest.update(document.input_ids.astype("<i8").tobytes())
        digest.update(document.targets.astype("<i8").tobytes())
    return digest.hexdigest()


def _given_lengths(dataset: datasets.Dataset, length_column: str) -> NDArray[np.int64]:
    lengths = np.asarray(dataset.select_columns([length_column]).with_format("numpy")[:][length_column])
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        raise Data.LENGTH_COLUMN.error(column=length_column, kind=dataset.features[length_column])
    _check_no_empty(lengths, 0)
    return lengths.astype(np.int64)


def _stored_lengths(dataset: datasets.Dataset, progress: bool) -> Iterator[NDArray[np.int64]]:
    """Yield lengths of stored lists batch by batch, without making Python objects of tokens."""
    columns = [column for column in ("input_ids", "labels") if column in dataset.column_names]
    first = 0
    with tqdm(total=len(dataset), desc="Document lengths", unit=" documents", disable=not progress) as bar:
        for table in dataset.select_columns(columns).with_format("arrow").iter(batch_size=READ_BATCH):
            # A missing list counts as empty.
            counts = [pc.fill_null(pc.list_value_length(table[column]), 0).to_numpy() for column in columns]
            lengths, labels = counts[0].astype(np.int64), counts[-1]
            _check_no_empty(lengths, first)
            for index in np.flatnonzero(labels != lengths)[:1]:
                name = f"document {first + index}"
                raise Data.LABELS.error(name=name, labels=labels[index], length=lengths[index])
            first += len(lengths)
            bar.update(len(lengths))
            yield lengths


def _check_no_empty(lengths: NDArray[Any], first: int) -> None:
    for index in np.flatnonzero(lengths <= 0)[:1]:
        raise Data.EMPTY_DOCUMENT.error(name=f"document {first + index}", stated=f" (length {lengths[index]})")


def _stored_as_lists(dataset: datasets.Dataset) -> bool:
    """Return whether tokens and labels are plain lists on disk, not tensors of an extension type."""
    stored = [field.type for field in dataset.features.arrow_schema if field.name in ("input_ids", "labels")]
    return all(pa.types.is_list(kind) or pa.types.is_large_list(kind) for kind in stored)


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
        limit: maximum number of tokens of an excerpt.
        limit_name: name of the limit in messages, such as "ranks · tokens_per_rank".

    Returns:
        [excerpts] of dtype EXCERPT, in the order of the data set.

    Raises:
        ValueError: a document is too long under the policy "error", or the limit or the policy is invalid.
    """
    if limit <= 0:
        raise Data.LIMIT.error(limit_name=limit_name, limit=limit)
    if policy not in ("error", "truncate", "split"):
        raise Data.POLICY.error(policy=policy)
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
