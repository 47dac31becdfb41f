"""Reading one document out of a user's data set."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

IGNORED_TARGET = -100
"""The target of a row that counts in no loss, as everywhere in Hugging Face."""


@dataclass(frozen=True, eq=False)
class TokenDocument:
    """A document and what each of its rows is to predict.

    Attributes:
        input_ids: [L] int64, its tokens.
        targets: [L] int64, the label of the token after each row; -100 where none counts, as in the last row.
            Shifted here, in the whole document, so that cutting the document afterwards loses no target.
    """

    input_ids: NDArray[np.int64]
    targets: NDArray[np.int64]

    @classmethod
    def filler(cls, token_id: int) -> "TokenDocument":
        """The one-token document without a target that a rank holds where it would have no row at all."""
        return cls(np.array([token_id], np.int64), np.array([IGNORED_TARGET], np.int64))

    def rows(self, start: int, stop: int) -> "TokenDocument":
        """Rows [start, stop), with their targets."""
        return TokenDocument(self.input_ids[start:stop], self.targets[start:stop])


@dataclass(frozen=True)
class Columns:
    """Which columns of an example count.

    Attributes:
        length: the one that may hold the document's length.
        model_inputs: what the model's forward takes. Any other column is left out, as transformers'
            `remove_unused_columns` says; None leaves none out.
    """

    length: str = "length"
    model_inputs: frozenset[str] | None = None

    def used(self, present: Iterable[str]) -> list[str]:
        """The columns that count, of those that an example has.

        Raises:
            ValueError: `input_ids` is missing, or a column is there that no packed batch can carry.
        """
        present = list(present)
        if "input_ids" not in present:
            raise ValueError(
                f"The data set has no column 'input_ids'; its columns are {sorted(present)}. "
                "Tokenize it first, for example dataset.map(lambda e: tokenizer(e['text']), batched=True)."
            )
        known = {"input_ids", "labels", "attention_mask", self.length}
        if self.model_inputs is not None:
            present = [column for column in present if column in known | self.model_inputs]
        unknown = sorted(set(present) - known)
        if unknown:
            raise ValueError(
                f"The data set has columns that a packed batch cannot carry: {unknown}. Expected 'input_ids', "
                f"optionally 'labels', an 'attention_mask' of ones and '{self.length}'. Remove the others with "
                f"dataset.remove_columns({unknown}), or set remove_unused_columns=True to drop columns that the model "
                "does not take."
            )
        return present


ANY_COLUMNS = Columns()
"""Those of a data set that has no others than a packed batch carries."""


def token_document(example: Mapping[str, Any], name: str, columns: Columns) -> TokenDocument:
    """Check one example and shift its labels.

    Args:
        example: `input_ids` [L]; optionally `labels` [L] (unshifted, -100 where no loss is wanted; without
            them every token is a label), `attention_mask` [L] of ones and the length column.
        name: how error messages call the example, such as "document 3".
        columns: those that count.

    Raises:
        ValueError: a column is missing or unknown, `input_ids` is empty or not a list of integers, `labels`
            has another length, the mask has another shape or zeros, or the length column says something else.
    """
    used = columns.used(example)
    input_ids = _integers(example["input_ids"], name, "input_ids")
    length = len(input_ids)
    if length == 0:
        raise ValueError(f"{name} is empty. Remove empty documents: dataset.filter(lambda e: e['input_ids']).")
    labels = input_ids
    if "labels" in used:
        labels = _integers(example["labels"], name, "labels")
        check_labels_length(len(labels), length, name)
    if "attention_mask" in used and np.shape(example["attention_mask"]) != (length,):
        raise ValueError(
            f"{name} has an attention_mask of shape {np.shape(example['attention_mask'])} for {length} input_ids, "
            "but a packed document attends to itself, causally, and needs no other mask. Remove the column, or give "
            "a 1 for each token."
        )
    if "attention_mask" in used and not np.all(np.asarray(example["attention_mask"]) == 1):
        raise ValueError(
            f"{name} has an attention_mask with zeros, but documents are packed without padding. Tokenize with "
            "padding=False; to leave a prompt out of the loss set its labels to -100."
        )
    if columns.length in used and int(example[columns.length]) != length:
        raise ValueError(
            f"{name} has {length} input_ids, but its column '{columns.length}' says "
            f"{int(example[columns.length])}. Remove or recompute the column '{columns.length}'."
        )
    targets = np.append(labels[1:], IGNORED_TARGET)
    return TokenDocument(input_ids, targets)


def check_labels_length(labels: int, length: int, name: str) -> None:
    """Refuse `labels` of another length than `input_ids`.

    Args:
        labels: length of `labels`.
        length: length of `input_ids`.
        name: how the error message calls the example, such as "document 3".

    Raises:
        ValueError: they differ.
    """
    if labels != length:
        raise ValueError(
            f"{name} has {labels} labels for {length} input_ids. Give one label per token, not shifted, and -100 for "
            "tokens without a loss; or remove the column 'labels'."
        )


def fetch_documents(dataset: Any, indices: Sequence[int], columns: Columns) -> list[TokenDocument]:
    """The documents at these indices of a data set, checked, in one batched read where it offers that.

    Args:
        dataset: anything that gives an example by index.
        indices: which documents.
        columns: those that count.

    Raises:
        ValueError: see `token_document`.
    """
    if hasattr(dataset, "__getitems__"):
        examples = dataset.__getitems__(list(indices))
    else:
        examples = [dataset[index] for index in indices]
    return [
        token_document(example, f"document {index}", columns) for index, example in zip(indices, examples, strict=True)
    ]


def _integers(values: Any, name: str, column: str) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"{name} has '{column}' of shape {array.shape} and type {array.dtype}; expected one list of integers."
        )
    return array.astype(np.int64)
