"""Collate one rank's rows of a planned micro-batch into tensors, without padding."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hf_distca.collator.documents import IGNORED_TARGET, PlannedDocuments, TokenDocument
from hf_distca.plan import PLAN_KEY


class DistCACollator:
    """Collator of planned micro-batches: `collate_fn` of a `DataLoader` over `RankDocuments`.

    The batch of a rank has `input_ids`, `position_ids` (in the token's document), `labels` and `shift_labels`, each
    [1, rows of this rank] int64. It also has the plan under `distca_plan`. `labels` and `shift_labels` are the same,
    shifted in the whole document: the row before a cut predicts the first token after the cut. The end of a document
    has -100. There is no `attention_mask`: the plan says which rows attend to which.

    The example has two documents of 4 and 2 tokens on two ranks of 3 tokens. The first document is cut: its last token
    lies on rank 1, at position 3, and is the target of rank 0's last row.

        >>> from torch.utils.data import DataLoader
        >>> from hf_distca.collator.lengths import document_lengths, fit_documents
        >>> from hf_distca.collator.documents import RankDocuments
        >>> from hf_distca.collator.sampler import GlobalBatchSampler
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
        ...     for name in ("input_ids", "position_ids", "labels", "shift_labels"):
        ...         print(rank, name, batch[name].tolist())
        ...     print(rank, "distca_plan", batch["distca_plan"].tokens.tolist())
        0 input_ids [[11, 12, 13]]
        0 position_ids [[0, 1, 2]]
        0 labels [[12, 13, 14]]
        0 shift_labels [[12, 13, 14]]
        0 distca_plan [3, 3]
        1 input_ids [[14, 21, 22]]
        1 position_ids [[3, 0, 1]]
        1 labels [[-100, 22, -100]]
        1 shift_labels [[-100, 22, -100]]
        1 distca_plan [3, 3]

    Args:
        rank: Rank whose rows to collate.
        filler_token_id: Token of the row, without a target, that a rank without documents gets.
    """

    def __init__(self, rank: int, filler_token_id: int = 0):
        self.rank = rank
        self.filler_token_id = filler_token_id

    def __call__(self, features: Sequence[PlannedDocuments]) -> dict[str, Any]:
        """Collate one planned micro-batch of a `GlobalBatchSampler`; raise ValueError for anything else."""
        if len(features) != 1 or not isinstance(features[0], PlannedDocuments):
            raise ValueError(
                f"DistCACollator got {len(features)} items of type {type(features[0]).__name__}, but it collates one "
                "PlannedDocuments; give the DataLoader RankDocuments as its data set and GlobalBatchSampler as its "
                "batch_sampler"
            )
        (planned,) = features
        filler = TokenDocument(np.array([self.filler_token_id]), np.array([IGNORED_TARGET]))
        held = list(planned.plan.held_by(self.rank))
        rows = [
            excerpt_document(planned.excerpts[document], planned.documents).rows(start, stop)
            if document < len(planned.excerpts)
            else filler
            for document, start, stop in held
        ]
        return {**rows_batch(rows, [start for _, start, _ in held]), PLAN_KEY: planned.plan}


def excerpt_document(excerpt: np.void, documents: Sequence[TokenDocument] | dict[int, TokenDocument]) -> TokenDocument:
    """Return the tokens and targets of one EXCERPT of whole documents, given by their index in the data set."""
    rows = documents[excerpt["document"]].rows(excerpt["start"], excerpt["stop"])
    if excerpt["stop"] == excerpt["end"]:
        # A token that truncation dropped is no target.
        rows = TokenDocument(rows.input_ids, np.append(rows.targets[:-1], IGNORED_TARGET))
    return rows


def rows_batch(rows: Sequence[TokenDocument], starts: Sequence[int]) -> dict[str, torch.Tensor]:
    """Concatenate rows of documents into a model's inputs, each [1, all rows] int64; labels are already shifted.

    Args:
        rows: consecutive rows of each document.
        starts: position of the first row of each in its document.
    """
    columns = {
        "input_ids": [part.input_ids for part in rows],
        "position_ids": [
            np.arange(start, start + len(part.input_ids)) for start, part in zip(starts, rows, strict=True)
        ],
        "labels": [part.targets for part in rows],
        "shift_labels": [part.targets for part in rows],
    }
    return {name: torch.from_numpy(np.concatenate(parts)).unsqueeze(0) for name, parts in columns.items()}
