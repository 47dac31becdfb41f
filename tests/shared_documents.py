"""Documents with equal prefixes, planned with prefix sharing and computed without."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import datasets
import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hf_distca.batches.limits import IGNORED_TARGET
from hf_distca.collator import dataset_prefixes
from hf_distca.collator.collation import TARGET_ROWS, DistCACollator, RankDocuments
from hf_distca.collator.dataset_prefixes import (
    DatasetPrefixes,
    block_hashes,
    first_hashes,
    repeated,
)
from hf_distca.collator.documents import ANY_COLUMNS
from hf_distca.collator.sampler import GlobalMicroBatch, fit_documents
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.plan import PLAN_KEY
from hf_distca.planner import prefixes as planner_prefixes
from tests.models_and_batches import Step, gradients_of

BLOCK = 4
"""Tokens of a block of `shared_batch`."""
Document = dict[str, list[int]]
"""`input_ids` and `labels`."""


@contextmanager
def in_blocks_of(tokens: int) -> Iterator[None]:
    """While inside, equal prefixes are found in blocks of so many tokens."""
    with (
        patch.object(dataset_prefixes, "BLOCK", tokens),
        patch.object(planner_prefixes, "BLOCK", tokens),
    ):
        yield


def with_equal_prefixes(lengths: Sequence[int]) -> list[Document]:
    """Documents that begin with a part of one of two texts; a fifth of the tokens has no label.

    One document in four is such a part, and has no tokens of its own.
    """
    generator = torch.Generator().manual_seed(3)

    def drawn(count: int) -> list[int]:
        tokens: list[int] = torch.randint(3, 64, (count,), generator=generator).tolist()
        return tokens

    texts = drawn(max(lengths)), drawn(max(lengths))
    documents = []
    for number, length in enumerate(lengths):
        shared = length * (1 + number // 2 % 4) // 4
        tokens = texts[number % 2][:shared] + drawn(length - shared)
        labels = [
            IGNORED_TARGET if (row + number) % 5 == 0 else token for row, token in enumerate(tokens)
        ]
        documents.append({"input_ids": tokens, "labels": labels})
    return documents


def targets_of(documents: Sequence[Document]) -> int:
    """Number of targets of documents."""
    return sum(label >= 0 for document in documents for label in document["labels"][1:])


def shared_batch(documents: Sequence[Document], dispatcher: Dispatcher) -> dict[str, Any]:
    """Batch of this rank, whose documents share rows; it is ready for `model(**batch)`."""
    dataset = datasets.Dataset.from_list(list(documents))
    lengths = np.array([len(document["input_ids"]) for document in documents])
    rank = dispatcher.groups.rank
    with in_blocks_of(BLOCK):
        likely = repeated(first_hashes(dataset, (0, 1)))
        hashes = block_hashes(dataset, likely, ANY_COLUMNS, "documents")
        found = DatasetPrefixes.of(lengths, likely, *hashes)
        rows = RankDocuments(dataset, lengths, dispatcher.settings, rank, prefixes=found)
        spans = fit_documents(lengths, int(lengths.max()), "error", "the longest")
        planned = rows[GlobalMicroBatch(spans, trees=np.zeros(len(documents), np.int64))]
    assert planned.plan.shared_rows > 0
    batch = dispatcher.prepare(DistCACollator(rank)([planned]))
    batch[PLAN_KEY].target_rows = batch.pop(TARGET_ROWS)
    return batch


def step_without_sharing(model: nn.Module, documents: Sequence[Document]) -> Step:
    """Loss over all targets and all gradients, document by document."""
    model.zero_grad()
    total = 0.0
    for document in documents:
        logits = model(input_ids=torch.tensor([document["input_ids"]])).logits[0, :-1]
        labels = torch.tensor(document["labels"][1:], dtype=torch.long)
        loss = cross_entropy(logits, labels, reduction="sum") / targets_of(documents)
        loss.backward()
        total += loss.item()
    return total, gradients_of(model)
