"""Read and check the documents of a user's data set: their lengths, tokens and targets, and their fingerprint."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from torch.utils.data import Dataset, IterableDataset
from tqdm.auto import tqdm

from hf_distca.collator.limits import IGNORED_TARGET, NO_LIMITS, Limits
from hf_distca.collator.refusals import Data
from hf_distca.refusal import given_as

READ_BATCH = 1000
"""Number of documents read at once to compute lengths and to check documents."""
A_DATASET = "the data set"
"""Name of a data set in errors, where the caller gives none."""
FINGERPRINT_DOCUMENTS = 64
"""Number of documents whose tokens enter a fingerprint."""
TABLES = ("pandas", "polars", "pyarrow")
"""Packages of tables, which give columns where a data set gives documents."""


@dataclass(frozen=True)
class Columns:
    """Columns of an example that are used: `input_ids`, `labels`, `attention_mask` and the document's length."""

    length: str = "length"
    model_inputs: frozenset[str] | None = (
        None  # of the others, those to keep, and refuse; None: all
    )

    def used(self, present: Iterable[str], name: str = A_DATASET) -> list[str]:
        """Return the used ones of the columns of `name`.

        Raise ValueError if a packed batch cannot carry them.
        """
        present = list(present)
        if "input_ids" not in present:
            raise Data.NO_TOKENS.error(name=name, columns=sorted(present))
        known = {"input_ids", "labels", "attention_mask", self.length}
        if self.model_inputs is not None:
            present = [column for column in present if column in known | self.model_inputs]
        if unknown := sorted(set(present) - known):
            raise Data.UNKNOWN_COLUMNS.error(name=name, unknown=unknown, length=self.length)
        return present


ANY_COLUMNS = Columns()


def token_document(example: Mapping[str, Any], name: str, columns: Columns) -> NDArray[np.int64]:
    """Check an example, called `name` in errors.

    Return its tokens and their targets, the next labels, [2, L] int64.

    Args:
        example: `input_ids` [L]; optionally `labels` [L], `attention_mask` [L] of ones and the
            length column. Labels are unshifted, with -100 for no loss; without labels every token
            is a label.
    """
    if not isinstance(example, Mapping):
        raise Data.NOT_A_ROW.error(name=name, kind=type(example).__name__)
    used = columns.used(example, name)
    tokens = {
        column: np.asarray(example[column]) for column in ("input_ids", "labels") if column in used
    }
    for column, values in tokens.items():
        if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
            raise Data.NOT_INTEGERS.error(
                name=name, column=column, shape=values.shape, kind=values.dtype
            )
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
        raise Data.WRONG_LENGTH.error(
            name=name, length=length, column=columns.length, stated=stated
        )
    return np.stack([input_ids, np.append(labels[1:], IGNORED_TARGET)])


def check_dataset(dataset: Any, name: str) -> None:
    """Raise ValueError if an object, called `name` in errors, can be no data set."""
    kind = type(dataset).__name__
    package = type(dataset).__module__.partition(".")[0]
    if isinstance(dataset, str | os.PathLike):
        raise Data.A_NAME.error(name=name, given=os.fspath(dataset))
    if isinstance(dataset, Mapping):
        first, is_split = next(iter(dataset), None), any(map(_is_dataset, dataset.values()))
        refusal = Data.SPLITS if is_split else Data.COLUMNS
        raise refusal.error(name=name, kind=kind, keys=", ".join(map(repr, dataset)), first=first)
    if package in TABLES:
        raise Data.TABLE.error(name=name, kind=kind, package=package)
    # With a length, documents are read by number; a DataLoader and a set have a length and no
    # numbers.
    in_order = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__")
    gives_documents = hasattr(dataset, "__getitem__") or (in_order and hasattr(dataset, "__iter__"))
    if isinstance(dataset, type) or not gives_documents:
        raise Data.NOT_A_DATASET.error(name=name, given=given_as(dataset))


def _is_dataset(value: Any) -> bool:
    """Return whether a dictionary's value is a data set: a split, not a column."""
    kinds = (datasets.Dataset, datasets.IterableDataset, Dataset)
    return isinstance(value, kinds) or (
        isinstance(value, list) and any(isinstance(row, Mapping) for row in value[:1])
    )


def document_lengths(
    dataset: Any,
    columns: Columns = ANY_COLUMNS,
    progress: bool = True,
    *,
    name: str = A_DATASET,
    limits: Limits = NO_LIMITS,
) -> NDArray[np.int64]:
    """Return the number of tokens of every document, [documents] int64, of a data set that gives examples by index.

    Of a stored `datasets.Dataset` only lengths are read; `check_stored_documents` reads the rest.
    Its length column is trusted here. Of any other data set every document is read once and
    checked.
    """
    check_dataset(dataset, name)
    if len(dataset) == 0:
        raise Data.EMPTY.error(name=name)
    lengths = _stored_lengths(dataset, columns, progress, name)
    if lengths is None:
        indices = tqdm(
            range(len(dataset)), "Document lengths", unit=" documents", disable=not progress
        )
        read = (
            _checked_document(dataset, index, columns, name, limits).shape[1] for index in indices
        )
        return np.fromiter(read, np.int64, len(dataset))
    for index in np.flatnonzero(lengths <= 0)[:1]:
        raise Data.EMPTY_DOCUMENT.error(
            name=f"document {index} of {name}", stated=f" (length {lengths[index]})"
        )
    return lengths


def _checked_document(
    dataset: Any, index: int, columns: Columns, name: str, limits: Limits
) -> NDArray[np.int64]:
    """Return a document from `token_document`; raise ValueError if it is beyond the limits."""
    document_name = f"document {index} of {name}"
    document = token_document(dataset[index], document_name, columns)
    limits.check_document(document, document_name)
    return document


def is_stored(dataset: Any) -> bool:
    """Return whether a data set is of Arrow tables: with a transform, its columns are inputs of the transform."""
    return isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom"


def _stored_lengths(
    dataset: Any, columns: Columns, progress: bool, name: str
) -> NDArray[np.int64] | None:
    """Return the lengths of a stored data set's documents without its tokens.

    None where tokens must be read.
    """
    if not is_stored(dataset):
        return None
    columns.used(dataset.column_names, name)
    if columns.length in dataset.column_names:
        given = np.asarray(
            dataset.select_columns([columns.length]).with_format("numpy")[:][columns.length]
        )
        if given.ndim != 1 or given.dtype.kind not in "iu":
            raise Data.LENGTH_COLUMN.error(
                name=name, column=columns.length, kind=dataset.features[columns.length]
            )
        return given.astype(np.int64)
    kind = dataset.features.arrow_schema.field("input_ids").type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):  # tensors
        return None
    # Arrow tables know the lengths of their lists, so tokens are not converted to Python objects.
    tables = dataset.select_columns(["input_ids"]).with_format("arrow").iter(batch_size=READ_BATCH)
    batches = -(-len(dataset) // READ_BATCH)
    return np.concatenate(
        [
            _list_lengths(table["input_ids"])
            for table in tqdm(tables, "Document lengths", batches, disable=not progress)
        ]
    )


def _list_lengths(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """Return the lengths of a column's lists; a missing list counts as empty."""
    lengths: NDArray[np.int64] = (
        pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
    )
    return lengths


def check_stored_documents(
    dataset: Any,
    lengths: NDArray[np.int64],
    columns: Columns = ANY_COLUMNS,
    progress: bool = True,
    *,
    name: str = A_DATASET,
    limits: Limits = NO_LIMITS,
    share: tuple[int, int] = (0, 1),
) -> None:
    """Raise ValueError if a document of a stored data set cannot be trained on.

    Columns are checked as wholes, a thousand documents at once. Documents are read one by one only
    where a column looks wrong. Data sets that are not stored were checked when their lengths were
    read.

    Args:
        lengths: [documents] from `document_lengths`.
        share: Part of the documents to check, and the number of parts: each rank checks one.
    """
    if not is_stored(dataset):
        return
    part, parts = share
    first, last = len(dataset) * part // parts, len(dataset) * (part + 1) // parts
    used = columns.used(dataset.column_names, name)
    selected = dataset.select_columns(used)
    tables = selected.select(range(first, last)).with_format("arrow").iter(batch_size=READ_BATCH)
    batches = -(-(last - first) // READ_BATCH)
    for number, table in enumerate(tqdm(tables, "Document checks", batches, disable=not progress)):
        begin = first + number * READ_BATCH
        if _columns_are_sound(table, lengths[begin : begin + len(table)], columns, limits):
            continue
        rows = selected.with_format("numpy")
        for index in range(begin, begin + len(table)):
            document = _checked_document(rows, index, columns, name, limits)
            if document.shape[1] != lengths[index]:
                raise Data.CHANGED_LENGTH.error(
                    name=f"document {index} of {name}",
                    length=document.shape[1],
                    planned=lengths[index],
                    column=columns.length,
                )


def _columns_are_sound(
    table: pa.Table, lengths: NDArray[np.int64], columns: Columns, limits: Limits
) -> bool:
    """Return whether columns of documents surely have no fault.

    If False, the documents have to be looked at.
    """
    for column in table.column_names:
        values = table[column]
        if column == columns.length:
            continue  # `lengths` come from it
        if not (pa.types.is_list(values.type) or pa.types.is_large_list(values.type)):
            return False
        if values.null_count or not np.array_equal(_list_lengths(values), lengths):
            return False
        flat = pc.list_flatten(values)
        if flat.null_count or not pa.types.is_integer(flat.type):
            return False
        extremes = pc.min_max(flat)
        least, greatest = extremes["min"].as_py(), extremes["max"].as_py()
        if column == "attention_mask" and (least, greatest) != (1, 1):
            return False
        if (
            column == "input_ids"
            and limits.vocabulary is not None
            and not 0 <= least <= greatest < limits.vocabulary
        ):
            return False
        if column == "input_ids" and limits.classes is not None and greatest >= limits.classes:
            return False  # tokens are targets unless there are labels
        if column == "labels" and limits.classes is not None:
            if greatest >= limits.classes:
                return False
            if least < 0 and (least < IGNORED_TARGET or _has_between(flat, IGNORED_TARGET, 0)):
                return False
    return True


def _has_between(values: pa.ChunkedArray, above: int, below: int) -> bool:
    """Return whether an integer lies between two others."""
    between = pc.and_(pc.greater(values, above), pc.less(values, below))
    return bool(pc.any(between).as_py())


def check_targets(
    dataset: Any,
    excerpts: NDArray[np.void],
    columns: Columns = ANY_COLUMNS,
    *,
    name: str = A_DATASET,
) -> None:
    """Raise ValueError if no token of any excerpt is a target: a training would change nothing.

    Documents are read in order up to the first one with a target.

    Args:
        excerpts: [excerpts] of dtype EXCERPT, from `fit_documents`.
    """
    if is_stored(dataset):
        dataset = dataset.select_columns(columns.used(dataset.column_names, name)).with_format(
            "numpy"
        )
    for index, start, stop, end in excerpts.tolist():
        targets = token_document(dataset[index], f"document {index} of {name}", columns)[1]
        # The last token of a document predicts nothing, and a token that truncation dropped is no
        # target.
        if np.any(targets[start : min(stop, end - 1)] != IGNORED_TARGET):
            return
    longest = int((excerpts["stop"] - excerpts["start"]).max(initial=0))
    raise Data.NO_TARGETS.error(
        name=name, documents=len(np.unique(excerpts["document"])), longest=longest
    )


def dataset_fingerprint(
    dataset: Any,
    lengths: NDArray[np.int64],
    columns: Columns = ANY_COLUMNS,
    *,
    name: str = A_DATASET,
) -> str:
    """Return a hash that differs if the data sets of two ranks differ.

    The hash covers all document lengths, and the tokens and targets of 64 evenly spaced documents.
    A data set that draws its documents at random differs from itself.
    """
    digest = hashlib.sha256(np.ascontiguousarray(lengths, "<i8").tobytes())
    sample = np.unique(np.linspace(0, len(lengths) - 1, FINGERPRINT_DOCUMENTS, dtype=np.int64))
    # One at a time: 64 long documents at once may not fit in memory.
    for index in sample.tolist():
        document = token_document(dataset[index], f"document {index} of {name}", columns)
        digest.update(document.astype("<i8").tobytes())
    return digest.hexdigest()
