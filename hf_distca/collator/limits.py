"""Limits of a model's tables: token ids, targets and positions that it has, and checks of data against them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hf_distca.collator.refusals import Data

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
    trained_positions: int | None = (
        None  # positions that rotary embeddings were made for; later ones can be computed
    )

    def check_document(self, document: NDArray[np.int64], name: str) -> None:
        """Raise ValueError if [2, L] tokens and targets of a document, called `name`, are beyond the tables."""
        tokens_L, targets_L = document
        if self.vocabulary is not None:
            for at in np.flatnonzero((tokens_L < 0) | (tokens_L >= self.vocabulary))[:1]:
                raise Data.TOKEN_ID.error(
                    name=name, token=tokens_L[at], at=at, last=self.vocabulary - 1
                )
        if self.classes is not None:
            beyond_L = (targets_L != IGNORED_TARGET) & (
                (targets_L < 0) | (targets_L >= self.classes)
            )
            for at in np.flatnonzero(beyond_L)[:1]:  # the target is the next label
                raise Data.TARGET_ID.error(
                    name=name, label=targets_L[at], at=at + 1, last=self.classes - 1
                )

    def check_length(self, length: int, name: str) -> None:
        """Raise ValueError if a document, called `name`, has tokens beyond the model's positions."""
        if self.positions is not None and length > self.positions:
            raise Data.BEYOND_POSITIONS.error(name=name, length=length, positions=self.positions)

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
                raise Data.TOKEN_ID.error(name=name, token=value, at=row, last=self.vocabulary - 1)
        for value, row in values.get("labels", ()):
            if self.classes is not None and not 0 <= value < self.classes:
                raise Data.TARGET_ID.error(name=name, label=value, at=row, last=self.classes - 1)
        self.check_length(max(lengths), f"a document of {name}")


NO_LIMITS = Limits()


def least_and_greatest(batch: Mapping[str, Any]) -> dict[str, Extremes]:
    """Return the extremes of a batch's `input_ids` and `labels`, apart from rows without loss.

    Waits for a GPU.
    """
    found: dict[str, Extremes] = {}
    for name in ("input_ids", "labels"):
        values = batch.get(name)
        if not isinstance(values, torch.Tensor) or values.numel() == 0:
            continue
        values_T = values.reshape(-1)
        rows_T = torch.arange(len(values_T), device=values_T.device)
        if name == "labels":
            counted_T = values_T != IGNORED_TARGET
            values_T, rows_T = values_T[counted_T], rows_T[counted_T]
        if len(values_T):
            ends = (values_T.argmin(), values_T.argmax())
            found[name] = tuple((int(values_T[end]), int(rows_T[end])) for end in ends)
    return found
