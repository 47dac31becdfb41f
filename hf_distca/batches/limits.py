"""Limits of a model's tables, and checks of token ids, targets and positions against them.

Shape suffixes: L tokens of a document, T rows of a batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hf_distca.checks.batch_rules import Batch

IGNORED_TARGET = -100
"""Target of a row without loss, as everywhere in Hugging Face."""
VALUES = "least_and_greatest"
"""Field of a batch with what `least_and_greatest` returns of its `input_ids` and `labels`."""
Extremes = tuple[tuple[int, int], ...]
"""The least value of a tensor and its greatest value, each with its row; empty for no values."""


@dataclass(frozen=True)
class Limits:
    """Sizes of a model's tables.

    None for a table that the model lacks, or whose size is unknown.
    """

    vocabulary: int | None = None  # rows of the token embedding
    classes: int | None = None  # logits of the output head
    positions: int | None = None  # rows of the smallest table of positions
    # Positions that rotary embeddings were made for. Later ones can be computed.
    trained_positions: int | None = None

    def check_document(self, document: NDArray[np.int64], name: str) -> None:
        """Raise ValueError if tokens or targets of a document are beyond the tables.

        Args:
            document: [2, L] tokens and targets.
            name: name of the document in errors.
        """
        tokens_L, targets_L = document
        if self.vocabulary is not None:
            index = _first_beyond(tokens_L, self.vocabulary)
            if index is not None:
                raise self._token_error(name, int(tokens_L[index]), int(index))
        if self.classes is not None:
            index = _first_beyond(targets_L, self.classes, ignored=IGNORED_TARGET)
            if index is not None:  # the target is the next label
                raise Batch.TARGET_ID.error(
                    name=name, label=targets_L[index], at=index + 1, last=self.classes - 1
                )

    def _token_error(self, name: str, token: int, at: int) -> ValueError:
        """Return the error of a token that is no row of the embedding."""
        place = f" at position {at}"
        if token < 0:
            return Batch.NEGATIVE_TOKEN.error(name=name, token=token, at=place)
        assert self.vocabulary is not None
        return Batch.TOKEN_ID.error(name=name, token=token, at=place, last=self.vocabulary - 1)

    def check_length(self, length: int, name: str) -> None:
        """Raise ValueError if a document has tokens beyond the model's positions.

        The error calls the document `name`.
        """
        if self.positions is not None and length > self.positions:
            raise Batch.BEYOND_POSITIONS.error(name=name, length=length, positions=self.positions)

    def check_batch(
        self, values: Mapping[str, Extremes], lengths: tuple[int, ...], name: str
    ) -> None:
        """Raise ValueError if a batch of a collator, called `name`, is beyond the tables.

        Args:
            values: What `least_and_greatest` returns of the batch.
            lengths: Lengths of the batch's documents.
        """
        for value, row in values.get("input_ids", ()):
            if self.vocabulary is not None and not 0 <= value < self.vocabulary:
                raise self._token_error(name, value, row)
        for value, row in values.get("labels", ()):
            if self.classes is not None and not 0 <= value < self.classes:
                raise Batch.TARGET_ID.error(name=name, label=value, at=row, last=self.classes - 1)
        self.check_length(max(lengths), f"a document of {name}")


def _first_beyond(
    values_L: NDArray[np.int64], size: int, ignored: int | None = None
) -> np.int64 | None:
    """Return the index of the first value that is no row of a table of this size; None if all are.

    Args:
        ignored: a value that does not count.
    """
    beyond_L = (values_L < 0) | (values_L >= size)
    if ignored is not None:
        beyond_L &= values_L != ignored
    indices = np.flatnonzero(beyond_L)
    return indices[0] if len(indices) else None


NO_LIMITS = Limits()


def least_and_greatest(batch: Mapping[str, Any]) -> dict[str, Extremes]:
    """Return the extremes of a batch's `input_ids` and `labels`, apart from rows without loss.

    Waits for a GPU.
    """
    extremes: dict[str, Extremes] = {}
    for name in ("input_ids", "labels"):
        values = batch.get(name)
        if not isinstance(values, torch.Tensor) or values.numel() == 0:
            continue
        values_T = values.reshape(-1)
        rows_T = torch.arange(len(values_T), device=values_T.device)
        if name == "labels":
            counts_T = values_T != IGNORED_TARGET
            values_T = values_T[counts_T]
            rows_T = rows_T[counts_T]
        if len(values_T):
            indices = (values_T.argmin(), values_T.argmax())
            extremes[name] = tuple((int(values_T[index]), int(rows_T[index])) for index in indices)
    return extremes
