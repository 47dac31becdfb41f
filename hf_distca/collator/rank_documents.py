"""Plan each global micro-batch and read the documents that one rank needs."""

import logging
from dataclasses import dataclass, replace
from typing import Any

import datasets
import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from hf_distca.collator.documents import ANY_COLUMNS, Columns, TokenDocument, fetch_documents
from hf_distca.collator.sampler import GlobalMicroBatch
from hf_distca.plan import MicroBatchPlan
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class PlannedDocuments:
    """A planned global micro-batch with the documents of which one rank holds rows.

    Attributes:
        plan: plan of all ranks. Its documents are the excerpts in order, then one-token fillers until every rank holds
            a row: a rank without rows would be missing in every exchange.
        excerpts: [excerpts] of dtype EXCERPT, the tokens of the data set behind each document of the plan.
        documents: whole documents of which this rank holds rows, by their index in the data set.
    """

    plan: MicroBatchPlan
    excerpts: NDArray[np.void]
    documents: dict[int, TokenDocument]


class RankDocuments(Dataset[PlannedDocuments]):
    """Data set of a DataLoader whose `batch_sampler` is a GlobalBatchSampler.

    Indexed by a GlobalMicroBatch, it plans the micro-batch, the same on every rank. It reads only documents of which
    this rank holds rows. With DataLoader workers, planning and reading happen there, ahead of the training step.

    Args:
        dataset: gives examples by index, as `token_document` expects them.
        lengths: [documents] int64, from `document_lengths`.
        settings: the same on every rank.

    Raises:
        ValueError: the data set has columns that packing would drop. On indexing: `token_document` refuses a document,
            or its length differs from `lengths`.
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
                logger.info("columns %s are not used: neither the model nor a packed batch takes them", left_out)
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
        plan = self._plan(micro_batch)
        held = {document for document, _, _ in plan.held_by(self.rank) if document < len(excerpts)}  # else a filler
        indices = np.unique(excerpts["document"][sorted(held)]).tolist()
        documents = fetch_documents(self.dataset, indices, self.columns)
        for index, document in zip(indices, documents, strict=True):
            if len(document.input_ids) != self.lengths[index]:
                raise ValueError(
                    f"document {index} has {len(document.input_ids)} tokens, but {self.lengths[index]} when "
                    "lengths were taken. Expected a data set that gives the same tokens each time; tokenize "
                    f"it beforehand, and recompute or remove the column '{self.columns.length}'."
                )
        return PlannedDocuments(plan, excerpts, dict(zip(indices, documents, strict=True)))

    def _plan(self, micro_batch: GlobalMicroBatch) -> MicroBatchPlan:
        lengths = micro_batch.lengths.tolist()
        # Every rank holds a row once there are as many tokens as ranks; whole documents: as many documents as ranks.
        held = len(lengths) if self.settings.document_layout == "whole" else sum(lengths)
        fillers = [1] * (self.settings.ranks - held)
        settings = self.settings
        if micro_batch.choices is not None:
            settings = replace(settings, choices=micro_batch.choices)
        return replace(plan_micro_batch(lengths + fillers, settings), fillers=len(fillers))
