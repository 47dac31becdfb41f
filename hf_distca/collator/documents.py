"""Read and check the documents of a user's data set.

They have lengths, tokens and targets. A fingerprint tells data sets apart.
"""

import hashlib
import inspect
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from torch.utils.data import Dataset, IterableDataset
from tqdm.auto import tqdm

from hf_distca.batches.limits import IGNORED_TARGET, NO_LIMITS, Limits
from hf_distca.checks.capacity_rules import Capacity
from hf_distca.checks.data_rules import Data
from hf_distca.checks.refusal import given_as
from hf_distca.plan.arrays import IntArray, Table

READ_BATCH = 1000
"""Number of documents read at once to compute lengths and to check documents."""
A_DATASET = "the data set"
"""Name of a data set in errors, where the caller gives none."""
FINGERPRINT_DOCUMENTS = 64
"""Number of documents whose tokens enter a fingerprint."""
TOKEN_TYPES = "mm_token_type_ids"
"""Column that processors make beside fields of images: which tokens are placeholders."""
TABLES = ("pandas", "polars", "pyarrow")
"""Packages of tables, which give columns where a data set gives documents."""


@dataclass(frozen=True)
class Columns:
    """Columns of an example that are used.

    They are `input_ids`, `labels`, `attention_mask` and the column with the document's length.
    Other columns that the model takes are refused, because a packed batch cannot carry them.

    Attributes:
        length: name of the length column.
        model_inputs: names of the columns that the model takes; None takes any column for one.
        images: names of the columns with fields of images.
    """

    length: str = "length"
    model_inputs: frozenset[str] | None = None
    images: frozenset[str] = frozenset()

    def used(self, present: Iterable[str], name: str = A_DATASET) -> list[str]:
        """Return the columns of a data set that are used.

        Raise ValueError if a packed batch cannot carry them.

        Args:
            present: all columns.
            name: name of the data set in errors.
        """
        columns = list(present)
        if "input_ids" not in columns:
            raise Data.NO_TOKENS.error(name=name, columns=sorted(columns))
        packed_columns = {"input_ids", "labels", "attention_mask", self.length, *self.images}
        if self.images:
            # Types of tokens follow from the tokens.
            columns = [column for column in columns if column != TOKEN_TYPES]
        if self.model_inputs is not None:
            taken_columns = packed_columns | self.model_inputs
            columns = [column for column in columns if column in taken_columns]
        unknown = sorted(set(columns) - packed_columns)
        if unknown:
            keeps_all = self.model_inputs is None  # the setting remove_unused_columns
            refusal = Data.UNKNOWN_COLUMNS if keeps_all else Data.INPUT_COLUMNS
            raise refusal.error(name=name, unknown=unknown, length=self.length)
        return columns


ANY_COLUMNS = Columns()


def token_document(example: Mapping[str, Any], name: str, columns: Columns) -> IntArray:
    """Return the tokens and targets of an example, [2, L] int64, or raise ValueError.

    The target of a token is the next label.

    Args:
        example: `input_ids` [L]; optionally `labels` [L], `attention_mask` [L] of ones and the
            length column. Labels are unshifted, with -100 for no loss; without labels every token
            is a label.
        name: name of the example in errors.
    """
    if not isinstance(example, Mapping):
        raise Data.NOT_A_ROW.error(name=name, kind=type(example).__name__)
    used_columns = columns.used(example, name)
    input_ids = _integers(example, "input_ids", name)
    labels = _integers(example, "labels", name) if "labels" in used_columns else input_ids
    length = len(input_ids)
    if length == 0:
        raise Data.EMPTY_DOCUMENT.error(name=name, stated="")
    if len(labels) != length:
        raise Data.LABELS.error(name=name, labels=len(labels), length=length)
    if "attention_mask" in used_columns:
        mask = np.asarray(example["attention_mask"])
        if mask.shape != (length,) or not np.all(mask == 1):
            raise Data.PADDED.error(name=name, length=length)
    if columns.length in used_columns:
        try:
            stated_length = int(example[columns.length])
        except (TypeError, ValueError) as error:
            given = given_as(example[columns.length])
            raise Data.NO_LENGTH.error(name=name, given=given, column=columns.length) from error
        if stated_length != length:
            raise Data.WRONG_LENGTH.error(
                name=name, length=length, column=columns.length, stated=stated_length
            )
    return np.stack([input_ids, np.append(labels[1:], IGNORED_TARGET)])


def _integers(example: Mapping[str, Any], column: str, name: str) -> IntArray:
    """Return a column [L] of an example as int64. Raise ValueError if it has no integers."""
    try:
        values = np.asarray(example[column])
    except ValueError as error:  # lists of different lengths
        raise Data.NESTED.error(name=name, column=column) from error
    if values.ndim > 1:
        raise Data.NESTED.error(name=name, column=column)
    if values.ndim == 0:
        is_class = column == "labels" and values.dtype.kind in "biuf"
        refusal = Data.ONE_LABEL if is_class else Data.NO_LIST
        raise refusal.error(name=name, column=column, given=given_as(values.item()))
    if values.size and values.dtype.kind not in "iu":
        at, found = next((i, x) for i, x in enumerate(values.tolist()) if type(x) is not int)
        raise Data.NOT_INTEGERS.error(name=name, column=column, at=at, given=given_as(found))
    return values.astype(np.int64)


def is_stream(dataset: Any) -> bool:
    """Return whether a data set has no length. Its documents are unknown before they come."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__")


def named_datasets(argument: Any, name: str) -> dict[str, Any]:
    """Return the data sets of a trainer's argument by their names in errors.

    Args:
        argument: a data set, a dictionary of several, or None.
        name: name of the argument.
    """
    if argument is None:
        return {}
    if isinstance(argument, dict):
        return {f"{name}[{key!r}]": dataset for key, dataset in argument.items()}
    return {name: argument}


def check_dataset(dataset: Any, name: str) -> None:
    """Raise ValueError if an object, called `name` in errors, can be no data set."""
    kind = type(dataset).__name__
    package = type(dataset).__module__.partition(".")[0]
    if inspect.isroutine(dataset):
        raise Data.FUNCTION.error(name=name, given=dataset.__name__)
    if isinstance(dataset, str | os.PathLike):
        raise Data.A_NAME.error(name=name, given=os.fspath(dataset))
    if isinstance(dataset, Mapping):
        has_splits = any(map(_is_dataset, dataset.values()))
        refusal = Data.SPLITS if has_splits else Data.COLUMNS
        first_key = next(iter(dataset), None)
        keys = ", ".join(map(repr, dataset))
        raise refusal.error(name=name, kind=kind, keys=keys, first=first_key)
    if package in TABLES:
        raise Data.TABLE.error(name=name, kind=kind, package=package)
    # Without a length, documents are read in order. With a length, they are read by number; a
    # DataLoader and a set have a length and no numbers.
    is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__")
    gives_in_order = is_stream and hasattr(dataset, "__iter__")
    gives_by_number = hasattr(dataset, "__getitem__")
    if isinstance(dataset, type) or not (gives_by_number or gives_in_order):
        raise Data.NOT_A_DATASET.error(name=name, given=given_as(dataset))


def _is_dataset(value: Any) -> bool:
    """Return whether a dictionary's value is a data set: a split, not a column."""
    if isinstance(value, datasets.Dataset | datasets.IterableDataset | Dataset):
        return True
    return isinstance(value, list) and len(value) > 0 and isinstance(value[0], Mapping)


def document_lengths(
    dataset: Any,
    columns: Columns = ANY_COLUMNS,
    progress: bool = True,
    *,
    name: str = A_DATASET,
    limits: Limits = NO_LIMITS,
) -> IntArray:
    """Return the number of tokens of every document of a data set, [documents] int64.

    - Of a stored `datasets.Dataset` only lengths are read. Its length column is trusted here.
      `check_stored_documents` reads the rest.
    - Of any other data set every document is read once and checked.

    Args:
        dataset: gives examples by index.
        progress: whether to show a bar.
        name: name of the data set in errors.
    """
    check_dataset(dataset, name)
    if len(dataset) == 0:
        raise Data.EMPTY.error(name=name)
    lengths = _stored_lengths(dataset, columns, progress, name)
    if lengths is None:
        indices = tqdm(
            range(len(dataset)), "Document lengths", unit=" documents", disable=not progress
        )
        documents = (_checked_document(dataset, index, columns, name, limits) for index in indices)
        return np.fromiter((document.shape[1] for document in documents), np.int64, len(dataset))
    empty_documents = np.flatnonzero(lengths <= 0)
    if len(empty_documents):
        index = empty_documents[0]
        raise Data.EMPTY_DOCUMENT.error(
            name=f"document {index} of {name}", stated=f" (length {lengths[index]})"
        )
    return lengths


def _checked_document(
    dataset: Any, index: int, columns: Columns, name: str, limits: Limits
) -> IntArray:
    """Return a document from `token_document`; raise ValueError if it is beyond the limits."""
    document_name = f"document {index} of {name}"
    document = token_document(dataset[index], document_name, columns)
    limits.check_document(document, document_name)
    return document


def is_stored(dataset: Any) -> bool:
    """Return whether the columns of a data set are columns of Arrow tables.

    With a transform they would only be inputs of the transform.
    """
    return isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom"


def _stored_lengths(dataset: Any, columns: Columns, progress: bool, name: str) -> IntArray | None:
    """Return the lengths of a stored data set's documents without its tokens.

    None where tokens must be read.
    """
    if not is_stored(dataset):
        return None
    columns.used(dataset.column_names, name)
    if columns.length in dataset.column_names:
        length_column = dataset.select_columns([columns.length]).with_format("numpy")
        stated_lengths = np.asarray(length_column[:][columns.length])
        kind = dataset.features.arrow_schema.field(columns.length).type
        if pa.types.is_integer(kind) and stated_lengths.dtype.kind not in "iu":  # some are missing
            index = int(pc.is_null(pa.array(stated_lengths, from_pandas=True)).index(True).as_py())
            raise Data.NO_LENGTH.error(
                name=f"document {index} of {name}", given=None, column=columns.length
            )
        if stated_lengths.ndim != 1 or stated_lengths.dtype.kind not in "iu":
            raise Data.LENGTH_COLUMN.error(
                name=name, column=columns.length, kind=dataset.features[columns.length]
            )
        return stated_lengths.astype(np.int64)
    if not _has_lists(dataset.features.arrow_schema.field("input_ids").type):  # tensors
        return None
    # Arrow tables know the lengths of their lists, so tokens are not converted to Python objects.
    tables = dataset.select_columns(["input_ids"]).with_format("arrow").iter(batch_size=READ_BATCH)
    batches = math.ceil(len(dataset) / READ_BATCH)
    bar = tqdm(tables, "Document lengths", batches, disable=not progress)
    return np.concatenate([_list_lengths(table["input_ids"]) for table in bar])


def _has_lists(kind: pa.DataType) -> bool:
    """Return whether a type of Arrow columns is one of lists."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _list_lengths(column: pa.ChunkedArray) -> IntArray:
    """Return the lengths of a column's lists; a missing list counts as empty."""
    lengths: IntArray = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
    return lengths


def check_stored_documents(
    dataset: Any,
    lengths: IntArray,
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
    start = len(dataset) * part // parts
    stop = len(dataset) * (part + 1) // parts
    selected = dataset.select_columns(columns.used(dataset.column_names, name))
    tables = selected.select(range(start, stop)).with_format("arrow").iter(batch_size=READ_BATCH)
    batches = math.ceil((stop - start) / READ_BATCH)
    for number, table in enumerate(tqdm(tables, "Document checks", batches, disable=not progress)):
        begin = start + number * READ_BATCH
        end = begin + len(table)
        if _columns_are_sound(table, lengths[begin:end], columns, limits):
            continue
        rows = selected.with_format("numpy")
        for index in range(begin, end):
            document = _checked_document(rows, index, columns, name, limits)
            check_planned_length(document, lengths[index], index, name)


def check_planned_length(document: IntArray, planned: int, index: int, name: str) -> None:
    """Raise ValueError if a document from `token_document` has another length than was planned."""
    length = document.shape[1]
    if length != planned:
        raise Data.CHANGED_LENGTH.error(
            name=f"document {index} of {name}",
            length=length,
            planned=planned,
        )


def _columns_are_sound(
    table: pa.Table, lengths: IntArray, columns: Columns, limits: Limits
) -> bool:
    """Return whether columns of documents surely have no fault.

    If False, the documents have to be looked at.
    """
    for column in table.column_names:
        values = table[column]
        if column == columns.length:
            continue  # `lengths` come from it
        if not _has_lists(values.type):
            return False
        if values.null_count or not np.array_equal(_list_lengths(values), lengths):
            return False
        integers = pc.list_flatten(values)
        if integers.null_count or not pa.types.is_integer(integers.type):
            return False
        if not _values_are_sound(column, integers, limits):
            return False
    return True


def _values_are_sound(column: str, values: pa.ChunkedArray, limits: Limits) -> bool:
    """Return whether the integers of a column are surely within a model's tables."""
    extremes = pc.min_max(values)
    smallest: int = extremes["min"].as_py()
    greatest: int = extremes["max"].as_py()
    if column == "attention_mask":
        return smallest == 1 and greatest == 1
    if column == "input_ids":
        if limits.vocabulary is not None and not 0 <= smallest <= greatest < limits.vocabulary:
            return False
        # Tokens are targets unless there are labels.
        return limits.classes is None or greatest < limits.classes
    # The column is `labels`.
    if limits.classes is None or 0 <= smallest <= greatest < limits.classes:
        return True
    if greatest >= limits.classes or smallest < IGNORED_TARGET:
        return False
    return not _has_between(values, IGNORED_TARGET, 0)


def _has_between(values: pa.ChunkedArray, lower: int, upper: int) -> bool:
    """Return whether an integer lies between two others."""
    between = pc.and_(pc.greater(values, lower), pc.less(values, upper))
    return bool(pc.any(between).as_py())


def check_targets(
    dataset: Any,
    spans: Table,
    columns: Columns = ANY_COLUMNS,
    *,
    name: str = A_DATASET,
) -> None:
    """Raise ValueError if no token of any span is a target: a training would change nothing.

    Documents are read in order up to the first one with a target.

    Args:
        spans: [spans] of dtype SPAN, from `fit_documents`.
    """
    if is_stored(dataset):
        used_columns = columns.used(dataset.column_names, name)
        dataset = dataset.select_columns(used_columns).with_format("numpy")
    is_cut = False
    for span in spans:  # the first spans alone, as a rule: a list of all takes long
        index, start, stop, end = span.item()
        _, targets = token_document(dataset[index], f"document {index} of {name}", columns)
        is_cut |= end < len(targets)
        # The last token of a document predicts nothing, and a token that truncation dropped is no
        # target.
        targets_stop = min(stop, end - 1)
        if np.any(targets[start:targets_stop] != IGNORED_TARGET):
            return
    longest = int((spans["stop"] - spans["start"]).max(initial=0))
    refusal = Capacity.TARGETS_CUT if is_cut else Data.NO_TARGETS
    if longest == 1:
        refusal = Data.SINGLE_TOKENS
    documents = len(np.unique(spans["document"]))
    raise refusal.error(name=name, documents=documents, longest=longest)


def dataset_fingerprint(
    dataset: Any,
    lengths: IntArray,
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
