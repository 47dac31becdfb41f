"""Read and check documents of a user's data set, and plan each global micro-batch of them."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import datasets
import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from hf_distca.collator.refusals import Data
from hf_distca.collator.sampler import GlobalMicroBatch
from hf_distca.plan import MicroBatchPlan
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings

logger = logging.getLogger(__name__)

IGNORED_TARGET = -100
"""Target of a row without loss, as everywhere in Hugging Face."""


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
    """Check one example, called `name` in errors, and shift its labels.

    Args:
        example: `input_ids` [L]; optionally `labels` [L], `attention_mask` [L] of ones and the length column. Labels
            are unshifted, with -100 for no loss; without labels every token is a label.

    Returns:
        [2, L] int64: tokens, and the target of each row, which is the next label or -100.

    Raises:
        ValueError: a column is missing, unknown or malformed, or lengths disagree.
    """
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


@dataclass(frozen=True, eq=False)
class PlannedDocuments:
    """A planned global micro-batch with the documents of which one rank holds rows.

    Attributes:
        plan: plan of all ranks. Its documents are the excerpts in order, then one-token fillers until every rank holds
            a row: a rank without rows would be missing in every exchange.
        excerpts: [excerpts] of dtype EXCERPT, the tokens of the data set behind each document of the plan.
        documents: whole documents of which this rank holds rows, from `token_document`, by index in the data set.
    """

    plan: MicroBatchPlan
    excerpts: NDArray[np.void]
    documents: dict[int, NDArray[np.int64]]


class RankDocuments(Dataset[PlannedDocuments]):
    """Data set of a DataLoader whose `batch_sampler` is a GlobalBatchSampler.

    Indexed by a GlobalMicroBatch, it plans the micro-batch, the same on every rank, and reads the documents of which
    this rank holds rows.

    Args:
        dataset: gives examples by index, as `token_document` expects them.
        lengths: [documents] int64, from `document_lengths`.
    """

    def __init__(
        self,
        dataset: Any,
        lengths: NDArray[np.int64],
        settings: PlanSettings,
        rank: int,
        columns: Columns = ANY_COLUMNS,
    ):
        if isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom":
            used = columns.used(dataset.column_names)
            if left_out := sorted(set(dataset.column_names) - set(used)):
                logger.info(
                    "columns %s are ignored, because neither the model nor a packed batch takes them", left_out
                )
            # A long document as a Python list costs 100 times its array.
            dataset = dataset.select_columns(used).with_format("numpy")
        self.dataset = dataset
        self.lengths = lengths
        self.settings = settings
        self.rank = rank
        self.columns = columns

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, micro_batch: GlobalMicroBatch) -> PlannedDocuments:
        excerpts = micro_batch.excerpts
        lengths = micro_batch.lengths.tolist()
        # Every rank holds a row once there are as many tokens as ranks; whole documents: as many documents as ranks.
        rows = len(lengths) if self.settings.document_layout == "whole" else sum(lengths)
        fillers = [1] * (self.settings.ranks - rows)
        choices = self.settings.choices if micro_batch.choices is None else micro_batch.choices
        plan = plan_micro_batch(lengths + fillers, replace(self.settings, choices=choices))
        plan = replace(plan, fillers=len(fillers))
        held = {document for document, _, _ in plan.held_by(self.rank) if document < len(excerpts)}  # else a filler
        indices = np.unique(excerpts["document"][sorted(held)]).tolist()
        if hasattr(self.dataset, "__getitems__"):  # one batched read
            examples = self.dataset.__getitems__(indices)
        else:
            examples = [self.dataset[index] for index in indices]
        documents = {}
        for index, example in zip(indices, examples, strict=True):
            documents[index] = token_document(example, f"document {index}", self.columns)
            length, planned = documents[index].shape[1], self.lengths[index]
            if length != planned:
                raise Data.CHANGED_LENGTH.error(
                    index=index, length=length, planned=planned, column=self.columns.length
                )
        return PlannedDocuments(plan, excerpts, documents)
