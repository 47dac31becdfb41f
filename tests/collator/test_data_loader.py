"""Sampler, data set and collator together, in the loaders that training uses."""

import datasets
import numpy as np
import pytest
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader

from hf_distca.collator.collation import DistCACollator
from hf_distca.collator.documents import RankDocuments
from hf_distca.collator.lengths import document_lengths, fit_documents
from hf_distca.collator.sampler import GlobalBatchSampler
from hf_distca.planner.settings import PlanSettings

RANKS, TOKENS = 2, 100


@pytest.fixture(scope="module")
def dataset():
    lengths = np.random.default_rng(0).integers(1, 150, 40)
    return datasets.Dataset.from_dict(
        {"input_ids": [[1000 * document + p for p in range(n)] for document, n in enumerate(lengths)]}
    )


def loader_of(dataset, rank, workers=0):
    lengths = document_lengths(dataset, progress=False)
    excerpts = fit_documents(lengths, RANKS * TOKENS, "error", "ranks · tokens_per_rank")
    return DataLoader(
        RankDocuments(dataset, lengths, PlanSettings(RANKS, TOKENS, balance_block_size=8), rank),
        batch_sampler=GlobalBatchSampler(excerpts, RANKS * TOKENS),
        collate_fn=DistCACollator(rank),
        num_workers=workers,
    )


def tokens(loader):
    return [batch["input_ids"][0].tolist() for batch in loader]


def test_accelerate_passes_every_batch_and_the_epoch(dataset):
    loader = prepare_data_loader(
        loader_of(dataset, 0, workers=2), num_processes=1, process_index=0, put_on_device=False
    )
    first, other = tokens(loader), tokens(loader_of(dataset, 1))
    assert first == tokens(loader_of(dataset, 0))
    assert all(len(batch) <= TOKENS for batch in first + other)
    everything = sorted(token for batch in first + other for token in batch)
    assert everything == sorted(token for document in dataset["input_ids"] for token in document)
    assert len(first) == len(loader)
    second = tokens(loader)
    assert second != first
    loader.set_epoch(0)
    assert tokens(loader) == first
    loader.set_epoch(1)
    assert tokens(loader) == second
