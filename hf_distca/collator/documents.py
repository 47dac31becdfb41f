"""Read and check the documents of a user's data set: their lengths, tokens and targets, and their fingerprint."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from tqdm.auto import tqdm

from hf_distca.collator.refusals import Data

IGNORED_TARGET = -100
"""Target of a row without loss, as everywhere in Hugging Face."""
READ_BATCH = 1000
"""Number of documents read at once to compute lengths."""
FINGERPRINT_DOCUMENTS = 64
"""Number of documents whose tokens enter a fingerprint."""


@dataclass(frozen=True)
class Columns:
    """Columns of an example that are used: `input_ids`, `labels`, `attention_mask` and the document's length."""

    length: str = "length"
    model_inputs: frozenset[str] | None = None  # of the others, those to keep, and refuse; None: all

    def used(self, present: Iterable[str]) -> list[str]:
        """Return the present columns that are used; raise ValueError if a packed batch cannot carry them."""
        present = list(present)
        if "input_ids" not in present:
            raise Data.NO_TOKENS.error(columns=sorted(present))
        known = {"input_ids", "labels", "attention_mask", self.length}
        if self.model_inputs is not None:
            present = [column for column in present if column in known | self.model_inputs]
        if unknown := sorted(set(present) - known):
            raise Data.UNKNOWN_COLUMNS.error(unknown=unknown, length=self.length)
        return present


ANY_COLUMNS = Columns()


def token_document(example: Mapping[str, Any], name: str, columns: Columns) -> NDArray[np.int64]:
    """Check an example, called `name` in errors; return its tokens and their targets, the next labels, [2, L] int64.

    Args:
        example: `input_ids` [L]; optionally `labels` [L], `attention_mask` [L] of ones and the length column. Labels
            are unshifted, with -100 for no loss; without labels every token is a label.
    """
    if not isinstance(example, Mapping):
        raise Data.NOT_A_ROW.error(name=name, kind=type(example).__name__)
    used = columns.used(example)
    tokens = {column: np.asarray(example[column]) for column in ("input_ids", "labels") if column in used}
    for column, values in tokens.items():
        if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
            raise Data.NOT_INTEGERS.error(name=name, column=column, shape=values.shape, kind=values.dtype)
    input_ids = tokens["input_ids"].astype(np.int64)
    labels = tokens.get("labels", input_ids).astype(np.int64)
    length = len(input_ids)
    if length == 0:
        raise Data.EMPTY_DOCUMENT.error(name=name, stated="")
    if len(labels) != length:
        raise Data.LABELS.error(name=name, labels=len(labels), length=length)
    if "attention_mask" in used:
        mask = np.asarray(example["attention_mask"])
        if mask.shape != (length,) or not np.all(mask == 1):
            raise Data.PADDED.error(name=name, length=length)
    if columns.length in used and (stated := int(example[columns.length])) != length:
        raise Data.WRONG_LENGTH.error(name=name, length=length, column=columns.length, stated=stated)
    return np.stack([input_ids, np.append(labels[1:], IGNORED_TARGET)])


def document_lengths(dataset: Any, columns: Columns = ANY_COLUMNS, progress: bool = True) -> NDArray[np.int64]:
    """Return the number of tokens of every document, [documents] int64, of a data set that gives examples by index.

    The length column of a `datasets.Dataset` is trusted here and checked when a document is read. Without that column,
    every document is read once and checked.
    """
    if len(dataset) == 0:
        raise Data.EMPTY.error()
    counts: list[NDArray[Any]] = []  # of input_ids, and of labels
    # With a transform, column_names lists the transform's inputs, not its outputs.
    if isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom":
        columns.used(dataset.column_names)
        tokens = [column for column in ("input_ids", "labels") if column in dataset.column_names]
        kinds = [field.type for field in dataset.features.arrow_schema if field.name in tokens]
        if columns.length in dataset.column_names:
            given = np.asarray(dataset.select_columns([columns.length]).with_format("numpy")[:][columns.length])
            if given.ndim != 1 or given.dtype.kind not in "iu":
                raise Data.LENGTH_COLUMN.error(column=columns.length, kind=dataset.features[columns.length])
            counts = [given]
        elif all(pa.types.is_list(kind) or pa.types.is_large_list(kind) for kind in kinds):  # not tensors
            # Arrow tables know the lengths of their lists, so tokens are not converted to Python objects.
            tables = dataset.select_columns(tokens).with_format("arrow").iter(batch_size=READ_BATCH)
            batches = [
                # A missing list counts as empty.
                [pc.fill_null(pc.list_value_length(table[column]), 0).to_numpy() for column in tokens]
                for table in tqdm(tables, "Document lengths", -(-len(dataset) // READ_BATCH), disable=not progress)
            ]
            counts = [np.concatenate(of_column) for of_column in zip(*batches, strict=True)]
    if not counts:
        indices = tqdm(range(len(dataset)), "Document lengths", unit=" documents", disable=not progress)
        read = (token_document(dataset[index], f"document {index}", columns).shape[1] for index in indices)
        return np.fromiter(read, np.int64, len(dataset))
    lengths, labels = counts[0], counts[-1]
    for index in np.flatnonzero(lengths <= 0)[:1]:
        raise Data.EMPTY_DOCUMENT.error(name=f"document {index}", stated=f" (length {lengths[index]})")
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
