"""Plan a global micro-batch, and read and collate a rank's rows of it without padding."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from hf_distca.batches.limits import IGNORED_TARGET
from hf_distca.checks.step_rules import PlannedStep
from hf_distca.collator.dataset_prefixes import DatasetPrefixes
from hf_distca.collator.documents import (
    A_DATASET,
    ANY_COLUMNS,
    Columns,
    check_planned_length,
    is_stored,
    token_document,
)
from hf_distca.collator.images import DocumentImages, encoded_inputs
from hf_distca.collator.sampler import GlobalMicroBatch
from hf_distca.plan import PLAN_KEY, MicroBatchPlan
from hf_distca.plan.arrays import IntArray, Table
from hf_distca.plan.intervals import rounds_of
from hf_distca.planner.images import plan_images
from hf_distca.planner.prefixes import SequencePaths
from hf_distca.planner.sequences import NO_SEQUENCE, PlannedSequences, on_rank, plan_sequences
from hf_distca.planner.settings import PlanSettings

logger = logging.getLogger(__name__)

TARGET_ROWS = "target_rows"
"""Key of a batch whose rows may have several targets: the rows of the labels, as a list of tensors
in each of which a row comes once."""


@dataclass(frozen=True, eq=False)
class PlannedDocuments:
    """A planned global micro-batch with the documents of which one rank holds rows.

    The sequences of the micro-batch are its spans, in order.
    """

    sequences: PlannedSequences
    spans: Table  # [spans] of dtype SPAN
    # Whole documents from `token_document`, by index in the data set.
    documents: dict[int, IntArray]
    # [3, L] or [L] of whole documents by index; empty if positions are numbers of rows.
    positions: dict[int, IntArray] = field(default_factory=dict)
    encoded: dict[str, torch.Tensor] = field(default_factory=dict)  # inputs of this rank's encoders

    @property
    def plan(self) -> MicroBatchPlan:
        """Plan of the micro-batch."""
        (plan,) = self.sequences.plans
        return plan

    def rows(self, span: int) -> IntArray:
        """Return [2, rows] tokens and targets of a span."""
        index, *bounds = self.spans[span].item()
        return span_rows(self.documents[index], *bounds)


@dataclass(eq=False)
class RankDocuments(Dataset[PlannedDocuments]):
    """Data set of a DataLoader whose `batch_sampler` is a GlobalBatchSampler.

    Indexed by a GlobalMicroBatch, it plans the part of this rank's pod, the same on every rank of
    the pod, and reads the documents of which this rank holds rows.
    """

    dataset: Any  # gives examples by index, as `token_document` expects them
    lengths: IntArray  # [documents], from `document_lengths`
    settings: PlanSettings
    rank: int
    columns: Columns = ANY_COLUMNS
    name: str = A_DATASET  # in errors
    prefixes: DatasetPrefixes | None = None  # None: no prefix sharing
    images: DocumentImages | None = None  # of the data set; None if it has text alone

    def __post_init__(self) -> None:
        dataset = self.dataset
        if is_stored(dataset):
            used_columns = self.columns.used(dataset.column_names, self.name)
            ignored_columns = sorted(set(dataset.column_names) - set(used_columns))
            if ignored_columns:
                logger.info(
                    "columns %s are ignored, because neither the model nor a packed batch takes "
                    "them",
                    ignored_columns,
                )
            # A long document as a Python list costs 100 times its array.
            self.dataset = dataset.select_columns(used_columns).with_format("numpy")

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, micro_batch: GlobalMicroBatch) -> PlannedDocuments:
        # 1. Plan the micro-batch.
        spans = micro_batch.spans
        lengths = spans["stop"] - spans["start"]
        settings = self.settings
        if micro_batch.costs is not None:
            settings = replace(settings, costs=micro_batch.costs)
        paths = self._paths(micro_batch) or SequencePaths.unshared(lengths)
        sequences = plan_sequences(paths, lengths, settings, rank=self.rank)
        images = None
        if self.images is not None:
            sequences, images = self._with_images(self.images, sequences, spans["document"])
        # 2. Read the documents of which this rank holds rows, or encodes images.
        used = on_rank(sequences.rank_rows, self.rank)["sequence"]
        used = used[used != NO_SEQUENCE]
        if sequences.shared_rows:
            used = np.append(used, on_rank(sequences.sequence_tokens, self.rank)["sequence"])
        used_indices = np.unique(spans["document"][used]).tolist()
        encoded = np.zeros(0, np.int64)
        if images is not None:
            encoded = images.encoded_by(sequences.plans[0].images or {}, self.rank)
        indices = np.union1d(used_indices, spans["document"][encoded]).astype(int).tolist()
        examples = self._read(indices)
        documents: dict[int, IntArray] = {}
        for index in used_indices:
            name = f"document {index} of {self.name}"
            document = token_document(examples[index], name, self.columns)
            check_planned_length(document, self.lengths[index], index, self.name)
            documents[index] = document
        if images is None:
            return PlannedDocuments(sequences, spans, documents)
        # 3. Positions of its rows, and inputs of its encoders.
        return PlannedDocuments(
            sequences,
            spans,
            documents,
            {
                index: images.model.positions(tokens, examples[index])
                for index, (tokens, _) in documents.items()
            },
            encoded_inputs(
                images,
                sequences.plans[0].images or {},
                self.rank,
                {number: examples[spans["document"][number]] for number in encoded.tolist()},
            ),
        )

    def _read(self, indices: list[int]) -> dict[int, Any]:
        """Return the examples of some documents, by index."""
        if hasattr(self.dataset, "__getitems__"):  # one batched read
            return dict(zip(indices, self.dataset.__getitems__(indices), strict=True))
        return {index: self.dataset[index] for index in indices}

    def _with_images(
        self, images: DocumentImages, sequences: PlannedSequences, documents: IntArray
    ) -> tuple[PlannedSequences, DocumentImages]:
        """Return a planned micro-batch with the ranks that encode its images, and the images.

        With pods the images are those of the documents of the rank's pod.

        Args:
            documents: [spans] document of each span of the micro-batch.
        """
        (plan,) = sequences.plans
        always = images.always
        if len(plan.ranks) < self.settings.ranks:
            # Every rank runs the encoders that any rank runs.
            always |= images.of_documents(documents).modalities
        held = sequences.rank_rows["sequence"]
        own = images.of_documents(documents, np.unique(held[held != NO_SEQUENCE]))
        modalities = [modality.name for modality in images.model.modalities]
        planned = plan_images(
            own.images, own.placeholders, sequences.rank_rows, plan.ranks, modalities, always
        )
        return replace(sequences, plans=(replace(plan, images=planned),)), own

    def _paths(self, micro_batch: GlobalMicroBatch) -> SequencePaths | None:
        """Return the paths of a micro-batch's spans; None if the spans share no row."""
        if self.prefixes is None or micro_batch.trees is None:
            return None
        # Trees that each fit into one rank may not fit as one tree.
        return self.prefixes.paths(
            micro_batch.spans,
            micro_batch.trees,
            self.settings.document_capacity,
            joins=self.settings.document_layout != "whole",
        )


class DistCACollator:
    """Collator of planned micro-batches: `collate_fn` of a `DataLoader` over `RankDocuments`.

    The batch of a rank has `input_ids`, `position_ids` (in the token's document), `labels` and
    `shift_labels`, each [1, rows of this rank] int64. It also has the plan under `distca_plan`.
    `labels` and `shift_labels` are the same, shifted in the whole document: the row before a cut
    predicts the first token after the cut. The end of a document has -100. There is no
    `attention_mask`: the plan says which rows attend to which.

    The example has two documents of 4 and 2 tokens on two ranks of 3 tokens. The last token of the
    first document lies on rank 1, and is the target of rank 0's last row.

        >>> from torch.utils.data import DataLoader
        >>> from hf_distca.collator.collation import RankDocuments
        >>> from hf_distca.collator.documents import document_lengths
        >>> from hf_distca.collator.sampler import GlobalBatchSampler, fit_documents
        >>> from hf_distca.planner.settings import PlanSettings
        >>> dataset = [{"input_ids": [11, 12, 13, 14]}, {"input_ids": [21, 22]}]
        >>> settings = PlanSettings(ranks=2, rows_per_rank=3, document_layout="fixed")
        >>> lengths = document_lengths(dataset, progress=False)
        >>> spans = fit_documents(lengths, 6, "error", "all ranks")
        >>> for rank in range(2):
        ...     loader = DataLoader(
        ...         RankDocuments(dataset, lengths, settings, rank),
        ...         batch_sampler=GlobalBatchSampler(spans, capacity=6, shuffle=False),
        ...         collate_fn=DistCACollator(rank),
        ...     )
        ...     batch = next(iter(loader))
        ...     names = ("input_ids", "position_ids", "labels")
        ...     print(rank, *(batch[name].tolist() for name in names))
        0 [[11, 12, 13]] [[0, 1, 2]] [[12, 13, 14]]
        1 [[14, 21, 22]] [[3, 0, 1]] [[-100, 22, -100]]

    Args:
        rank: Rank whose rows to collate.
        filler_token_id: Token of the row, without a target, that a rank without documents gets.
    """

    def __init__(self, rank: int, filler_token_id: int = 0):
        self.rank = rank
        self.filler_token_id = filler_token_id

    def __call__(self, features: Sequence[PlannedDocuments]) -> dict[str, Any]:
        """Collate one planned micro-batch of a `GlobalBatchSampler`.

        Raise ValueError for anything else.
        """
        if len(features) != 1 or not isinstance(features[0], PlannedDocuments):
            raise PlannedStep.UNPLANNED_ITEMS.error_here(
                count=len(features), kind=type(features[0]).__name__
            )
        (planned,) = features
        parts: list[tuple[int, IntArray]] = []
        positions: list[IntArray] = []
        for entry in on_rank(planned.sequences.rank_rows, self.rank):
            start, stop, span = int(entry["start"]), int(entry["stop"]), int(entry["sequence"])
            if span == NO_SEQUENCE:
                rows = np.array([[self.filler_token_id], [IGNORED_TARGET]])
            else:
                rows = planned.rows(span)[:, start:stop]
                if planned.positions:
                    index = int(planned.spans["document"][span])
                    positions.append(planned.positions[index][..., start:stop])
            parts.append((start, rows))
        batch: dict[str, Any] = rows_batch(parts)
        if planned.sequences.shared_rows:
            batch |= shared_targets(planned, self.rank)
        if positions:
            batch["position_ids"] = _position_ids(positions, batch["input_ids"].shape[1])
        return {**batch, **planned.encoded, PLAN_KEY: planned.plan}


def _position_ids(parts: Sequence[IntArray], rows: int) -> torch.Tensor:
    """Return [1, rows] or [3, 1, rows] positions; those of a filler are 0."""
    positions = np.concatenate(parts, axis=-1)
    fillers = rows - positions.shape[-1]
    filled = np.pad(positions, [(0, 0)] * (positions.ndim - 1) + [(0, fillers)])
    return torch.from_numpy(np.ascontiguousarray(filled[..., None, :]))


def shared_targets(planned: PlannedDocuments, rank: int) -> dict[str, Any]:
    """Return the targets of a rank's rows for all spans that have them, and the targets' rows.

    Rows without a target are left out. Without any target there is one label that does not count.

    Returns:
        `labels` and `shift_labels` [1, targets], and under TARGET_ROWS their rows.
    """
    targets: list[IntArray] = []
    rows: list[IntArray] = []
    for entry in on_rank(planned.sequences.sequence_tokens, rank):
        entry_targets = planned.rows(int(entry["sequence"]))[1, entry["start"] : entry["stop"]]
        has_target = np.flatnonzero(entry_targets != IGNORED_TARGET)
        targets.append(entry_targets[has_target])
        rows.append(entry["offset"] + has_target)
    if not any(map(len, targets)):
        targets = [np.array([IGNORED_TARGET])]
        rows = [np.zeros(1, np.int64)]
    target, row = np.concatenate(targets), np.concatenate(rows)
    rounds = rounds_of(row)
    labels = torch.from_numpy(target[np.concatenate(rounds)]).unsqueeze(0)
    return {
        "labels": labels,
        "shift_labels": labels.clone(),
        TARGET_ROWS: [torch.from_numpy(row[entries]) for entries in rounds],
    }


def span_rows(document: IntArray, start: int, stop: int, end: int) -> IntArray:
    """Return [2, rows] tokens and targets of a SPAN of a document from `token_document`."""
    rows = document[:, start:stop]
    if stop == end:  # a token that truncation dropped is no target
        rows = rows.copy()
        rows[1, -1] = IGNORED_TARGET
    return rows


def rows_batch(parts: Sequence[tuple[int, IntArray]]) -> dict[str, torch.Tensor]:
    """Concatenate rows of documents into a model's inputs, each [1, all rows] int64.

    Labels are already shifted.

    Args:
        parts: position of the first row in its document, and [2, L] tokens and targets.
    """
    tokens, targets = np.concatenate([rows for _, rows in parts], axis=1)
    positions = [start + np.arange(rows.shape[1]) for start, rows in parts]
    columns = {
        "input_ids": tokens,
        "position_ids": np.concatenate(positions),
        "labels": targets,
        "shift_labels": targets.copy(),
    }
    return {name: torch.from_numpy(column).unsqueeze(0) for name, column in columns.items()}
