"""Read and check one document of a user's data set."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

IGNORED_TARGET = -100
"""Target of a row without loss, as everywhere in Hugging Face."""


@dataclass(frozen=True, eq=False)
class TokenDocument:
    """A document and the target of each of its rows.

    Targets are shifted in the whole document, so that cutting the document afterwards loses no target.

    Attributes:
        input_ids: [L] int64 tokens.
        targets: [L] int64 label of the token after each row; -100 without loss, as in the last row.
    """

    input_ids: NDArray[np.int64]
    targets: NDArray[np.int64]

    @classmethod
    def filler(cls, token_id: int) -> "TokenDocument":
        """Return a one-token document without a target, for a rank without rows."""
        return cls(np.array([token_id], np.int64), np.array([IGNORED_TARGET], np.int64))

    def rows(self, start: int, stop: int) -> "TokenDocument":
        """Return rows [start, stop) with their targets."""
        return TokenDocument(self.input_ids[start:stop], self.targets[start:stop])


@dataclass(frozen=True)
class Columns:
    """Columns of an example that are used.

    Attributes:
        length: name of the column that may hold the document's length.
        model_inputs: arguments of the model's forward; any other column is left out, as with `remove_unused_columns`
            of transformers. None leaves out nothing.
    """

    length: str = "length"
    model_inputs: frozenset[str] | None = None

    def used(self, present: Iterable[str]) -> list[str]:
        """Return the present columns that are used; raise ValueError if a packed batch cannot carry them."""
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
                f"The data set has columns that a packed batch does not carry: {unknown}. Expected 'input_ids', "
                f"optionally 'labels', an 'attention_mask' of ones and '{self.length}'. Remove the others with "
                f"dataset.remove_columns({unknown}); remove_unused_columns=True leaves out those that the model does "
                "not take."
            )
        return present


ANY_COLUMNS = Columns()
"""Columns of a data set that has only columns that a packed batch carries."""


def token_document(example: Mapping[str, Any], name: str, columns: Columns) -> TokenDocument:
    """Check one example and shift its labels.

    Args:
        example: `input_ids` [L]; optionally `labels` [L], `attention_mask` [L] of ones and the length column. Labels
            are unshifted, with -100 for no loss; without labels every token is a label.
        name: name of the example in error messages, such as "document 3".

    Raises:
        ValueError: a column is missing, unknown or malformed, or lengths disagree.
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
            f"{name} has an attention_mask of shape {np.shape(example['attention_mask'])} for {length} input_ids. A "
            "packed document attends to itself, causally, and a mask cannot say otherwise: remove the column, or give "
            "a one for each token."
        )
    if "attention_mask" in used and not np.all(np.asarray(example["attention_mask"]) == 1):
        raise ValueError(
            f"{name} has an attention_mask with zeros. Documents are packed without padding: tokenize with "
            "padding=False, and mask the loss of a prompt with labels of -100."
        )
    if columns.length in used and int(example[columns.length]) != length:
        raise ValueError(
            f"{name} has {length} input_ids, but its column '{columns.length}' says "
            f"{int(example[columns.length])}. Remove or recompute the column '{columns.length}'."
        )
    targets = np.append(labels[1:], IGNORED_TARGET)
    return TokenDocument(input_ids, targets)


def check_labels_length(labels: int, length: int, name: str) -> None:
    """Raise ValueError if `labels` and `input_ids` differ in length; `name` is the example's name."""
    if labels != length:
        raise ValueError(
            f"{name} has {labels} labels for {length} input_ids. Give one label per token, not shifted, with "
            "-100 where no loss is wanted, or no column 'labels' at all."
        )


def fetch_documents(dataset: Any, indices: Sequence[int], columns: Columns) -> list[TokenDocument]:
    """Return documents checked by `token_document`, in one batched read if the data set supports that."""
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
