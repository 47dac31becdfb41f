"""Plan a global micro-batch, and read and collate a rank's rows of it without padding."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from hf_distca.batches.limits import IGNORED_TARGET
from hf_distca.collator.documents import (
    A_DATASET,
    ANY_COLUMNS,
    Columns,
    check_planned_length,
    is_stored,
    token_document,
)
from hf_distca.collator.prefixes import SharedBeginnings
from hf_distca.collator.sampler import GlobalMicroBatch
from hf_distca.plan import PLAN_KEY, MicroBatchPlan
from hf_distca.plan.intervals import IntArray, Table, rounds_of
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.prefixes import SharedPrefixes
from hf_distca.planner.sequences import held_rows, plan_documents, rows_read, with_offsets
from hf_distca.planner.settings import PlanSettings

logger = logging.getLogger(__name__)

TARGET_ROWS = "target_rows"
"""Key of a batch whose rows may have several targets: the rows of the labels, as a list of tensors
in each of which a row comes once."""


@dataclass(frozen=True, eq=False)
class SharedRows:
    """Rows that a rank holds for several excerpts.

    Attributes:
        owners: [documents] an excerpt that has all rows of each document of the plan.
        source_rows: [entries] of dtype HELD: rows [start, stop) of an excerpt, held by
            the rank.
        excerpts: [entries] excerpt of each entry.
    """

    owners: IntArray
    source_rows: Table
    excerpts: IntArray

    @classmethod
    def of(
        cls, plan: MicroBatchPlan, shared: SharedPrefixes, lengths: IntArray, rank: int
    ) -> "SharedRows":
        """Return the rows of one rank.

        Args:
            lengths: [excerpts] tokens of each.
        """
        rows_of_ranks = with_offsets(held_rows(plan, 0, np.arange(len(shared.lengths))))
        source_rows, excerpts = rows_read(rows_of_ranks, shared, lengths)
        is_here = source_rows["rank"] == rank
        return cls(shared.owners, source_rows.compress(is_here), excerpts[is_here])


@dataclass(frozen=True, eq=False)
class PlannedDocuments:
    """A planned global micro-batch with the documents of which one rank holds rows.

    The plan's documents are the excerpts in order, or what they are divided into where they share
    rows. One-token fillers follow until every rank holds a row: a rank without rows would be
    missing in every exchange.
    """

    plan: MicroBatchPlan
    excerpts: NDArray[np.void]  # [excerpts] of dtype EXCERPT
    # Whole documents from `token_document`, by index in the data set.
    documents: dict[int, NDArray[np.int64]]
    shared: SharedRows | None = None  # None if excerpts share no rows

    def rows(self, excerpt: int) -> NDArray[np.int64]:
        """Return [2, rows] tokens and targets of an excerpt."""
        index, *bounds = self.excerpts[excerpt].item()
        return excerpt_rows(self.documents[index], *bounds)


@dataclass(eq=False)
class RankDocuments(Dataset[PlannedDocuments]):
    """Data set of a DataLoader whose `batch_sampler` is a GlobalBatchSampler.

    Indexed by a GlobalMicroBatch, it plans the micro-batch, the same on every rank, and reads the
    documents of which this rank holds rows.
    """

    dataset: Any  # gives examples by index, as `token_document` expects them
    lengths: NDArray[np.int64]  # [documents], from `document_lengths`
    settings: PlanSettings
    rank: int
    columns: Columns = ANY_COLUMNS
    name: str = A_DATASET  # in errors
    beginnings: SharedBeginnings | None = None  # None: each document is computed alone

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
        # 1. Plan the micro-batch, with fillers until every rank holds a row. There are enough as
        # soon as there are as many tokens as ranks, or as many documents that stay whole.
        excerpts = micro_batch.excerpts
        lengths = excerpts["stop"] - excerpts["start"]
        shared_prefixes = self._shared_prefixes(micro_batch)
        stay_whole = self.settings.document_layout == "whole"
        trees = len(lengths) if shared_prefixes is None else shared_prefixes.trees
        rows = int(lengths.sum()) if shared_prefixes is None else shared_prefixes.rows
        fillers = max(self.settings.ranks - (trees if stay_whole else rows), 0)
        choices = self.settings.choices if micro_batch.choices is None else micro_batch.choices
        settings = replace(self.settings, choices=choices)
        shared: SharedRows | None = None
        if shared_prefixes is None:
            plan = plan_micro_batch(lengths.tolist() + [1] * fillers, settings)
            plan = replace(plan, fillers=fillers)
        else:
            plan = plan_documents(
                shared_prefixes, np.arange(len(shared_prefixes.lengths)), fillers, settings
            )
            plan = replace(plan, shared_rows=int(lengths.sum()) - rows)
            shared = SharedRows.of(plan, shared_prefixes, lengths, self.rank)
        # 2. Read the documents of which this rank holds rows. Fillers come after all others.
        used = {document for document, _, _ in plan.held_by(self.rank)}
        if shared is not None:
            held_documents = [document for document in used if document < len(shared.owners)]
            used = {*shared.owners[held_documents].tolist(), *shared.excerpts.tolist()}
        excerpts_on_rank = sorted(index for index in used if index < len(excerpts))
        indices = np.unique(excerpts["document"][excerpts_on_rank]).tolist()
        if hasattr(self.dataset, "__getitems__"):  # one batched read
            examples = self.dataset.__getitems__(indices)
        else:
            examples = [self.dataset[index] for index in indices]
        documents: dict[int, NDArray[np.int64]] = {}
        for index, example in zip(indices, examples, strict=True):
            document = token_document(example, f"document {index} of {self.name}", self.columns)
            check_planned_length(document, self.lengths[index], index, self.name)
            documents[index] = document
        return PlannedDocuments(plan, excerpts, documents, shared)

    def _shared_prefixes(self, micro_batch: GlobalMicroBatch) -> SharedPrefixes | None:
        """Return what the excerpts of a micro-batch share; None if nothing."""
        if self.beginnings is None or micro_batch.groups is None:
            return None
        # Groups that fit into one rank each may not fit together.
        may_join = self.settings.document_layout != "whole"
        most_rows = self.settings.tokens_per_rank * (self.settings.ranks if may_join else 1)
        return self.beginnings.shared(
            micro_batch.excerpts, micro_batch.groups, most_rows, joins=may_join
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
        >>> settings = PlanSettings(ranks=2, tokens_per_rank=3, document_layout="fixed")
        >>> lengths = document_lengths(dataset, progress=False)
        >>> excerpts = fit_documents(lengths, 6, "error", "ranks · tokens_per_rank")
        >>> for rank in range(2):
        ...     loader = DataLoader(
        ...         RankDocuments(dataset, lengths, settings, rank),
        ...         batch_sampler=GlobalBatchSampler(excerpts, capacity=6, shuffle=False),
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
            raise ValueError(
                f"DistCACollator got {len(features)} items of type {type(features[0]).__name__}, "
                "but it collates one PlannedDocuments; give the DataLoader RankDocuments as its "
                "data set and GlobalBatchSampler as its batch_sampler"
            )
        (planned,) = features
        shared = planned.shared
        documents = len(planned.excerpts) if shared is None else len(shared.owners)
        parts: list[tuple[int, NDArray[np.int64]]] = []
        for document, start, stop in planned.plan.held_by(self.rank):
            if document >= documents:
                rows = np.array([[self.filler_token_id], [IGNORED_TARGET]])
            else:
                excerpt = document if shared is None else int(shared.owners[document])
                rows = planned.rows(excerpt)[:, start:stop]
            parts.append((start, rows))
        batch: dict[str, Any] = rows_batch(parts)
        if shared is not None:
            batch |= shared_targets(planned, shared)
        return {**batch, PLAN_KEY: planned.plan}


def shared_targets(planned: PlannedDocuments, shared: SharedRows) -> dict[str, Any]:
    """Return the targets of a rank's rows for all excerpts that have them, and the targets' rows.

    Rows without a target are left out. Without any target there is one label that does not count.

    Returns:
        `labels` and `shift_labels` [1, targets], and under TARGET_ROWS their rows.
    """
    targets: list[NDArray[np.int64]] = []
    rows: list[NDArray[np.int64]] = []
    for entry, excerpt in zip(shared.source_rows, shared.excerpts.tolist(), strict=True):
        entry_targets = planned.rows(excerpt)[1, entry["start"] : entry["stop"]]
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


def excerpt_rows(document: NDArray[np.int64], start: int, stop: int, end: int) -> NDArray[np.int64]:
    """Return [2, rows] tokens and targets of an EXCERPT of a document from `token_document`."""
    rows = document[:, start:stop]
    if stop == end:  # a token that truncation dropped is no target
        rows = rows.copy()
        rows[1, -1] = IGNORED_TARGET
    return rows


def rows_batch(parts: Sequence[tuple[int, NDArray[np.int64]]]) -> dict[str, torch.Tensor]:
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
