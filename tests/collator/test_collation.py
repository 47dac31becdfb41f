"""Batches of planned micro-batches and of streams."""

import doctest
import logging

import datasets
import numpy as np
import pytest
from accelerate.data_loader import prepare_data_loader
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from hf_distca.collator import collation
from hf_distca.collator.collation import DistCACollator
from hf_distca.collator.documents import RankDocuments
from hf_distca.collator.lengths import document_lengths, fit_documents
from hf_distca.collator.refusals import Data
from hf_distca.collator.sampler import GlobalBatchSampler, GlobalMicroBatch
from hf_distca.collator.streams import StreamPacker
from hf_distca.planner.settings import PlanSettings
from tests.refused import refused

NAMES = ("input_ids", "position_ids", "labels", "shift_labels")


def collate(examples, settings, long_documents="error", filler=0):
    """The batch of every rank, all examples being one global micro-batch."""
    lengths = document_lengths(examples, progress=False)
    limit = settings.ranks * settings.tokens_per_rank
    micro_batch = GlobalMicroBatch(fit_documents(lengths, limit, long_documents, "limit"))
    return [
        DistCACollator(rank, filler)([RankDocuments(examples, lengths, settings, rank)[micro_batch]])
        for rank in range(settings.ranks)
    ]


def fixed(ranks, tokens_per_rank):
    return PlanSettings(ranks, tokens_per_rank, document_layout="fixed")


def values(batch):
    """Tokens, positions and labels of the rows."""
    assert set(batch) == {*NAMES, "distca_plan"}
    *rows, shift_labels = (batch[name].tolist() for name in NAMES)
    assert rows[-1] == shift_labels
    return [row for (row,) in rows]


def test_the_example_in_the_docstring():
    outcome = doctest.testmod(collation)
    assert outcome.attempted > 5
    assert outcome.failed == 0


def test_labels_of_the_user_are_shifted_before_cutting():
    examples = [
        {"input_ids": [11, 12, 13, 14], "labels": [-100, -100, 13, 14]},
        {"input_ids": [21, 22], "labels": [21, 22]},
    ]
    first, second = collate(examples, fixed(2, 3))
    assert values(first) == [[11, 12, 13], [0, 1, 2], [-100, 13, 14]]
    assert values(second) == [[14, 21, 22], [3, 0, 1], [-100, 22, -100]]
    assert first["labels"].data_ptr() != first["shift_labels"].data_ptr()


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        (PlanSettings(4, 8), [[5], [6], [99], [99]]),
        (PlanSettings(3, 8, document_layout="whole"), [[5, 6], [99], [99]]),
    ],
)
def test_a_rank_without_rows_gets_a_filler(settings, rows):
    batches = collate([{"input_ids": [5, 6]}], settings, filler=99)
    assert sorted(batch["input_ids"][0].tolist() for batch in batches) == rows
    for batch in batches:
        assert batch["distca_plan"].fillers == 2
        if batch["input_ids"].tolist() == [[99]]:
            assert values(batch) == [[99], [0], [-100]]


def test_long_documents_are_cut():
    """A cut keeps the target across it; truncation drops the target too."""
    lengths = np.array([5])
    excerpts = fit_documents(lengths, 3, "split", "limit")
    reader = RankDocuments([{"input_ids": [1, 2, 3, 4, 5]}], lengths, fixed(1, 3), 0)
    first, second = (DistCACollator(0)([reader[GlobalMicroBatch(excerpts[[i]])]]) for i in range(2))
    assert values(first) == [[1, 2, 3], [0, 1, 2], [2, 3, 4]]
    assert values(second) == [[4, 5], [0, 1], [5, -100]]
    (batch,) = collate([{"input_ids": [1, 2, 3, 4, 5]}], fixed(1, 3), "truncate")
    assert values(batch) == [[1, 2, 3], [0, 1, 2], [2, 3, -100]]


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.integers(1, 4),
    st.sampled_from(["joint", "fixed"]),
    st.sampled_from([1, 4, 128]),
)
def test_the_rows_of_all_ranks_are_the_documents(lengths, ranks, layout, balance_block_size):
    """Token = 1000 · document + position, so every row says where it belongs."""
    examples = [{"input_ids": [1000 * d + p for p in range(length)]} for d, length in enumerate(lengths)]
    settings = PlanSettings(ranks, 500, document_layout=layout, balance_block_size=balance_block_size)
    batches = collate(examples, settings, filler=-1)
    tokens = batches[0]["distca_plan"].tokens
    assert [batch["input_ids"].numel() for batch in batches] == tokens.tolist()
    rows = [row for batch in batches for row in zip(*values(batch), strict=True)]
    expected = [
        (1000 * d + p, p, 1000 * d + p + 1 if p + 1 < length else -100)
        for d, length in enumerate(lengths)
        for p in range(length)
    ]
    assert sorted(row for row in rows if row[0] != -1) == expected
    assert all(row == (-1, 0, -100) for row in rows if row[0] == -1)
    # Equal tokens: within the unit that fillers and rounding leave.
    assert 0 < tokens.min() <= tokens.max() <= -(-tokens.sum() // ranks)


@pytest.mark.parametrize("batched", [False, True])
def test_only_documents_with_rows_here_are_read(batched):
    class Reading(list):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    class Batched:
        def __getitems__(self, indices):
            return [examples[index] for index in indices]

    read, examples = [], Reading([{"input_ids": [1, 2]}, {"input_ids": [3, 4]}, {"input_ids": [5, 6]}])
    excerpts = fit_documents(np.array([2, 2, 2]), 6, "error", "limit")
    reader = RankDocuments(Batched() if batched else examples, np.array([2, 2, 2]), fixed(3, 2), rank=1)
    assert reader[GlobalMicroBatch(excerpts)].documents[1].tolist() == [[3, 4], [4, -100]]
    assert read == [1]


def test_a_datasets_dataset_gives_the_same():
    examples = [{"input_ids": [1, 2, 3], "labels": [1, -100, 3]}, {"input_ids": [4, 5], "labels": [4, 5]}]
    dataset = datasets.Dataset.from_list([{**e, "length": len(e["input_ids"])} for e in examples])
    for settings in (fixed(2, 3), PlanSettings(2, 3)):
        for ours, listed in zip(collate(dataset, settings), collate(examples, settings), strict=True):
            assert values(ours) == values(listed)
    dataset.set_format("torch")
    assert values(collate(dataset, fixed(1, 5))[0]) == values(collate(examples, fixed(1, 5))[0])


def test_faulty_examples():
    assert collate([{"input_ids": [1, 2], "attention_mask": [1, 1]}], fixed(1, 2))
    for mask in ([1, 0], [1, 1, 1]):
        with refused(Data.PADDED, name="document 0", length=2):
            collate([{"input_ids": [1, 2], "attention_mask": mask}], fixed(1, 2))
    with refused(Data.WRONG_LENGTH, name="document 0", length=3, stated=2):
        collate(datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]], "length": [2]}), fixed(1, 4))
    with refused(Data.LABELS, name="document 0", labels=2, length=3):
        collate(datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]], "labels": [[1, 2]], "length": [3]}), fixed(1, 4))
    with refused(Data.UNKNOWN_COLUMNS, unknown=["text"]):
        RankDocuments(datasets.Dataset.from_dict({"input_ids": [[1]], "text": ["a"]}), np.array([1]), fixed(1, 4), 0)
    reader = RankDocuments([{"input_ids": [1, 2, 3]}], np.array([2]), fixed(1, 4), 0)
    with refused(Data.CHANGED_LENGTH, index=0, length=3, planned=2):
        reader[GlobalMicroBatch(fit_documents(np.array([2]), 4, "error", "limit"))]
    with pytest.raises(ValueError, match="DistCACollator got 2 items of type dict"):
        DistCACollator(0)([{"input_ids": [1]}, {"input_ids": [2]}])


def test_accelerate_passes_every_batch_and_the_epoch():
    lengths = np.random.default_rng(0).integers(1, 150, 40)
    rows = [[1000 * document + p for p in range(n)] for document, n in enumerate(lengths)]
    dataset = datasets.Dataset.from_dict({"input_ids": rows})
    settings = PlanSettings(2, 100, balance_block_size=8)

    def loader_of(rank, workers=0):
        return DataLoader(
            RankDocuments(dataset, lengths, settings, rank),
            batch_sampler=GlobalBatchSampler(fit_documents(lengths, 200, "error", "limit"), 200),
            collate_fn=DistCACollator(rank),
            num_workers=workers,
        )

    def tokens(loader):
        return [batch["input_ids"][0].tolist() for batch in loader]

    loader = prepare_data_loader(loader_of(0, workers=2), num_processes=1, process_index=0, put_on_device=False)
    first, other = tokens(loader), tokens(loader_of(1))
    assert first == tokens(loader_of(0))
    assert all(len(batch) <= 100 for batch in first + other)
    assert sorted(token for batch in first + other for token in batch) == sorted(
        token for row in rows for token in row
    )
    assert len(first) == len(loader)
    second = tokens(loader)
    assert second != first
    for epoch, expected in enumerate((first, second)):
        loader.set_epoch(epoch)
        assert tokens(loader) == expected


# Streams

EXAMPLES: list[dict] = [
    {"input_ids": [100 * d + p for p in range(length)]}
    for d, length in enumerate([3, 2, 4, 1, 5, 2, 2, 6, 1, 3, 4, 2])
]
EXAMPLES[2]["labels"] = [-100, *EXAMPLES[2]["input_ids"][1:]]  # the first token is no target anyway


class Stream(IterableDataset):
    def __iter__(self):
        return iter(EXAMPLES)


def hub_stream(num_shards):
    return datasets.Dataset.from_list(EXAMPLES).to_iterable_dataset(num_shards=num_shards)


@pytest.mark.parametrize("make", [Stream, lambda: hub_stream(1), lambda: hub_stream(4)])
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_and_workers_share_the_stream(make, workers):
    seen = []
    for rank in range(2):
        documents = 0
        for batch in DataLoader(StreamPacker(make(), 2, rank, 6), batch_size=None, num_workers=workers):
            assert batch["input_ids"].numel() <= 6
            start = 0
            for length in batch["document_lengths"]:
                tokens, positions, labels, shifted = (
                    batch[name][0, start : start + length].tolist() for name in NAMES
                )
                assert tokens == EXAMPLES[tokens[0] // 100]["input_ids"]
                assert positions == list(range(length))
                assert labels == shifted == [*tokens[1:], -100]
                seen.append(tokens[0] // 100)
                start += length
                documents += 1
            assert start == batch["input_ids"].numel()
        assert documents >= 4
    assert sorted(seen) == list(range(len(EXAMPLES)))


def test_long_documents_of_a_stream_are_cut(caplog):
    examples = [{"input_ids": list(range(8))}] * 5
    with caplog.at_level(logging.WARNING):
        batches = list(StreamPacker(examples, 1, 0, 6, "truncate"))
    assert [batch["input_ids"].tolist() for batch in batches] == [[[0, 1, 2, 3, 4, 5]]] * 5
    assert batches[0]["labels"].tolist() == [[1, 2, 3, 4, 5, -100]]
    (first, second) = StreamPacker(examples[:1], 1, 0, 6, "split")
    assert (first["labels"].tolist(), second["labels"].tolist()) == ([[1, 2, 3, 4, 5, 6]], [[7, -100]])
    # After 1, 2 and 4 documents.
    assert [message.split(";")[1].split()[0] for message in caplog.messages] == ["2", "4", "8"]


def test_faulty_streams():
    with refused(Data.LONG_IN_STREAM, name="document 1 of rank 0's stream", length=7, limit=6):
        list(StreamPacker([{"input_ids": [1]}, {"input_ids": [1] * 7}], 1, 0, 6))
    with refused(Data.EMPTY_DOCUMENT, name="document 1 of rank 0's stream"):
        list(StreamPacker([{"input_ids": [1]}, {"input_ids": []}], 1, 0, 6))
    for rank, tokens, error in ((2, 6, "give one from 0 to 1"), (0, 0, "tokens_per_rank is 0")):
        with pytest.raises(ValueError, match=error):  # before the first document is read
            StreamPacker(EXAMPLES, 2, rank, tokens)
