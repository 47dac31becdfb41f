"""Collate one rank's rows of a planned micro-batch into tensors, without padding."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hf_distca.collator.documents import IGNORED_TARGET, PlannedDocuments
from hf_distca.plan import PLAN_KEY


class DistCACollator:
    """Collator of planned micro-batches: `collate_fn` of a `DataLoader` over `RankDocuments`.

    The batch of a rank has `input_ids`, `position_ids` (in the token's document), `labels` and `shift_labels`, each
    [1, rows of this rank] int64. It also has the plan under `distca_plan`. `labels` and `shift_labels` are the same,
    shifted in the whole document: the row before a cut predicts the first token after the cut. The end of a document
    has -100. There is no `attention_mask`: the plan says which rows attend to which.

    The example has two documents of 4 and 2 tokens on two ranks of 3 tokens. The last token of the first document lies
    on rank 1, and is the target of rank 0's last row.

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
        ...     print(rank, *(batch[name].tolist() for name in ("input_ids", "position_ids", "labels")))
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
        """Collate one planned micro-batch of a `GlobalBatchSampler`; raise ValueError for anything else."""
        if len(features) != 1 or not isinstance(features[0], PlannedDocuments):
            raise ValueError(
                f"DistCACollator got {len(features)} items of type {type(features[0]).__name__}, but it collates one "
                "PlannedDocuments; give the DataLoader RankDocuments as its data set and GlobalBatchSampler as its "
                "batch_sampler"
            )
        (planned,) = features
        batch = []
        for document, start, stop in planned.plan.held_by(self.rank):
            if document < len(planned.excerpts):
                rows = excerpt_document(planned.excerpts[document], planned.documents)[:, start:stop]
            else:
                rows = np.array([[self.filler_token_id], [IGNORED_TARGET]])
            batch.append((start, rows))
        return {**rows_batch(batch), PLAN_KEY: planned.plan}


def excerpt_document(
    excerpt: np.void, documents: Sequence[NDArray[np.int64]] | dict[int, NDArray[np.int64]]
) -> NDArray[np.int64]:
    """Return [2, L] tokens and targets of an EXCERPT of documents from `token_document`, by index in the data set."""
    rows = documents[excerpt["document"]][:, excerpt["start"] : excerpt["stop"]]
    if excerpt["stop"] == excerpt["end"]:  # a token that truncation dropped is no target
        rows = rows.copy()
        rows[1, -1] = IGNORED_TARGET
    return rows


def rows_batch(parts: Sequence[tuple[int, NDArray[np.int64]]]) -> dict[str, torch.Tensor]:
    """Concatenate rows of documents into a model's inputs, each [1, all rows] int64; labels are already shifted.

    Args:
        parts: position of the first row in its document, and [2, L] tokens and targets.
    """
    rows = np.concatenate([rows for _, rows in parts], axis=1)
    columns = {
        "input_ids": rows[0],
        "position_ids": np.concatenate([start + np.arange(rows.shape[1]) for start, rows in parts]),
        "labels": rows[1],
        "shift_labels": rows[1].copy(),
    }
    return {name: torch.from_numpy(column).unsqueeze(0) for name, column in columns.items()}
