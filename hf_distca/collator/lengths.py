"""Read document lengths of a data set, and a fingerprint by which ranks compare data sets."""

import hashlib
from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from tqdm.auto import tqdm

from hf_distca.collator.documents import ANY_COLUMNS, Columns, check_labels_length, fetch_documents, token_document
from hf_distca.collator.refusals import Data

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

    Returns:
        64 hexadecimal digits.

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
            counts = {
                # A missing list counts as empty.
                column: pc.fill_null(pc.list_value_length(table[column]), 0).to_numpy().astype(np.int64)
                for column in columns
            }
            lengths = counts["input_ids"]
            _check_no_empty(lengths, first)
            labels = counts.get("labels", lengths)
            for index in np.flatnonzero(labels != lengths)[:1]:
                check_labels_length(int(labels[index]), int(lengths[index]), f"document {first + index}")
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
