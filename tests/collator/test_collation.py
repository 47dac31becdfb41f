"""Batches of planned micro-batches, of streams and of padding-free collators."""

import doctest
import logging
from contextlib import nullcontext

import datasets
import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening

from hf_distca.batches.limits import Limits
from hf_distca.batches.packed import batch_document_lengths, checked_document_lengths
from hf_distca.checks.batch_rules import Batch
from hf_distca.checks.capacity_rules import Capacity
from hf_distca.checks.data_rules import Data
from hf_distca.collator import collation
from hf_distca.collator.collation import DistCACollator, RankDocuments, span_rows
from hf_distca.collator.documents import document_lengths
from hf_distca.collator.padding_free import CollatorWithLengths
from hf_distca.collator.sampler import GlobalBatchSampler, GlobalMicroBatch, fit_documents
from hf_distca.collator.streams import StreamPacker
from hf_distca.plan import AttentionKind
from hf_distca.planner.settings import PlanSettings
from hf_distca.predict.seconds import KernelCost, KindCosts, LinkCost, Links, StepCosts
from tests.counting import Counting
from tests.refused import refused


def collate(examples, settings, long_documents="error", filler=0):
    """The batch of every rank, all examples being one global micro-batch."""
    lengths = document_lengths(examples, progress=False)
    limit = settings.ranks * settings.rows_per_rank
    micro_batch = GlobalMicroBatch(fit_documents(lengths, limit, long_documents, "limit"))
    return [
        DistCACollator(rank, filler)(
            [RankDocuments(examples, lengths, settings, rank)[micro_batch]]
        )
        for rank in range(settings.ranks)
    ]


def fixed(ranks, tokens_per_rank):
    return PlanSettings(ranks, tokens_per_rank, document_layout="fixed")


def values(batch):
    """Tokens, positions and labels of the rows."""
    names = ("input_ids", "position_ids", "labels", "shift_labels")
    assert set(batch) - {"distca_plan", "document_lengths"} == set(names)
    *rows, shift_labels = (batch[name].tolist() for name in names)
    assert rows[-1] == shift_labels
    return [row for (row,) in rows]


def examples_of(lengths):
    """Documents whose tokens say where they belong."""
    examples = []
    for document, length in enumerate(lengths):
        begin = 1000 * document
        examples.append({"input_ids": list(range(begin, begin + length))})
    return examples


def rows_of(lengths):
    """Token, position and label of every row of these documents."""
    return [
        (token, position, token + 1 if position + 1 < len(example["input_ids"]) else -100)
        for example in examples_of(lengths)
        for position, token in enumerate(example["input_ids"])
    ]


def test_the_example_in_the_docstring():
    outcome = doctest.testmod(collation)
    assert outcome.attempted > 5
    assert outcome.failed == 0


@pytest.mark.parametrize("form", ["list", "data set", "data set of tensors"])
def test_labels_of_the_user_are_shifted_before_cutting(form):
    examples = [
        {
            "input_ids": [11, 12, 13, 14],
            "labels": [-100, -100, 13, 14],
            "attention_mask": [1, 1, 1, 1],
        },
        {"input_ids": [21, 22], "labels": [21, 22], "attention_mask": [1, 1]},
    ]
    dataset = datasets.Dataset.from_list([{**e, "length": len(e["input_ids"])} for e in examples])
    forms = {
        "list": examples,
        "data set": dataset,
        "data set of tensors": dataset.with_format("torch"),
    }
    first, second = collate(forms[form], fixed(2, 3))
    assert values(first) == [[11, 12, 13], [0, 1, 2], [-100, 13, 14]]
    assert values(second) == [[14, 21, 22], [3, 0, 1], [-100, 22, -100]]
    assert first["input_ids"].dtype == torch.int64
    assert first["position_ids"].dtype == torch.int64
    assert first["labels"].dtype == torch.int64
    assert first["labels"].data_ptr() != first["shift_labels"].data_ptr()


FILLER = [[99], [0], [-100]]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (PlanSettings(4, 8), [[[5], [0], [6]], [[6], [1], [-100]], FILLER, FILLER]),
        (
            PlanSettings(3, 8, document_layout="whole"),
            [[[5, 6], [0, 1], [6, -100]], FILLER, FILLER],
        ),
    ],
    ids=["document that is cut", "whole document"],
)
def test_a_rank_without_rows_gets_a_filler(settings, expected):
    batches = collate([{"input_ids": [5, 6]}], settings, filler=99)
    assert sorted(values(batch) for batch in batches) == expected
    assert {batch["distca_plan"].fillers for batch in batches} == {2}


def test_long_documents_are_cut(caplog):
    """A cut keeps the target across it; truncation drops the target too."""
    examples = [{"input_ids": [1, 2, 3, 4, 5]}]
    lengths = np.array([5])
    spans = fit_documents(lengths, 3, "split", "limit")
    reader = RankDocuments(examples, lengths, fixed(1, 3), 0)
    split = [DistCACollator(0)([reader[GlobalMicroBatch(spans[[i]])]]) for i in range(2)]
    truncated = collate(examples, fixed(1, 3), "truncate")
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        streamed = StreamPacker(examples * 5, 1, 0, 3, "split")
        assert [values(batch) for batch in streamed] == [values(batch) for batch in split] * 5
        streamed = StreamPacker(examples * 5, 1, 0, 3, "truncate")
        assert [values(batch) for batch in streamed] == [values(batch) for batch in truncated] * 5
    assert [values(batch) for batch in split] == [
        [[1, 2, 3], [0, 1, 2], [2, 3, 4]],
        [[4, 5], [0, 1], [5, -100]],
    ]
    assert values(truncated[0]) == [[1, 2, 3], [0, 1, 2], [2, 3, -100]]
    # After 1, 2 and 4 documents of the stream.
    assert [message.split(" to ")[0] for message in caplog.messages] == [
        "Truncated 1 document",
        "Truncated 2 documents",
        "Truncated 4 documents",
    ]
    assert [message.split(";")[1].split()[0] for message in caplog.messages] == ["2", "4", "8"]


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.integers(1, 4),
    st.sampled_from(["auto", "fixed"]),
    st.sampled_from([1, 4, 128]),
)
def test_the_rows_of_all_ranks_are_the_documents(lengths, ranks, layout, balance_block_size):
    settings = PlanSettings(
        ranks, 500, document_layout=layout, balance_block_size=balance_block_size
    )
    batches = collate(examples_of(lengths), settings, filler=-1)
    tokens = batches[0]["distca_plan"].tokens
    assert [batch["input_ids"].numel() for batch in batches] == tokens.tolist()
    rows = [row for batch in batches for row in zip(*values(batch), strict=True)]
    assert sorted(row for row in rows if row[0] != -1) == rows_of(lengths)
    assert all(row == (-1, 0, -100) for row in rows if row[0] == -1)
    # Equal tokens: within the unit that fillers and rounding leave.
    assert 0 < tokens.min() <= tokens.max() <= -(-tokens.sum() // ranks)


def test_a_span_leaves_its_document_as_it_is():
    document = np.array([[1, 2, 3], [2, 3, -100]])
    assert span_rows(document, 0, 2, 2).tolist() == [[1, 2], [2, -100]]  # truncated
    assert span_rows(document, 1, 3, 4).tolist() == [[2, 3], [3, -100]]
    assert document.tolist() == [[1, 2, 3], [2, 3, -100]]


def test_the_choices_that_come_with_a_micro_batch_are_those_of_its_plan():
    """A token takes 2 s by the settings' costs, and 20 s by those that training has corrected
    since.
    """

    def costs(seconds):
        kernel = KernelCost(0.0, 0.0, 0.0, 0.0)
        link = LinkCost(0.0, np.inf)
        kinds = (KindCosts(AttentionKind(), 1, kernel, kernel),)
        return StepCosts(kinds, seconds, 0.0, 1.0, 0.0, Links(link, link))

    settings = PlanSettings(1, 8, costs=costs(1.0))
    reader = RankDocuments(examples_of([5]), np.array([5]), settings, 0)
    spans = fit_documents(np.array([5]), 8, "error", "limit")
    by_settings = reader[GlobalMicroBatch(spans, None)].plan
    assert by_settings.choice.seconds == pytest.approx(10.0)
    by_corrections = reader[GlobalMicroBatch(spans, costs(10.0))].plan
    assert by_corrections.choice.seconds == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("access", "expected"), [("one by one", [1]), ("several at once", [[1], 1])]
)
def test_only_documents_with_rows_here_are_read(access, expected):
    lengths = np.array([2, 2, 2])
    read = []

    class One:
        def __getitem__(self, index):
            read.append(index)
            return {"input_ids": [index, 4]}

    class Several(One):
        def __getitems__(self, indices):
            return [self[index] for index in read.append(indices) or indices]

    dataset = {"one by one": One, "several at once": Several}[access]()
    reader = RankDocuments(dataset, lengths, fixed(3, 2), rank=1)
    planned = reader[GlobalMicroBatch(fit_documents(lengths, 6, "error", "limit"))]
    assert {index: document.tolist() for index, document in planned.documents.items()} == {
        1: [[1, 4], [4, -100]]
    }
    assert read == expected


def test_documents_that_are_refused_when_they_are_read():
    with refused(Data.WRONG_LENGTH, name="document 0 of the data set", length=3, stated=2):
        collate(datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]], "length": [2]}), fixed(1, 4))
    reader = RankDocuments([{"input_ids": [1, 2, 3]}], np.array([2]), fixed(1, 4), 0)
    with refused(Data.CHANGED_LENGTH, name="document 0 of the data set", length=3, planned=2):
        reader[GlobalMicroBatch(fit_documents(np.array([2]), 4, "error", "limit"))]
    with pytest.raises(ValueError, match="DistCACollator got 2 items of type dict"):
        DistCACollator(0)([{"input_ids": [1]}, {"input_ids": [2]}])


def test_accelerate_passes_every_batch_and_the_epoch():
    lengths = np.random.default_rng(0).integers(1, 150, 40)
    dataset = datasets.Dataset.from_list(examples_of(lengths))

    def loader_of(workers):
        return DataLoader(
            RankDocuments(dataset, lengths, PlanSettings(2, 100, balance_block_size=8), 0),
            batch_sampler=GlobalBatchSampler(fit_documents(lengths, 200, "error", "limit"), 200),
            collate_fn=DistCACollator(0),
            num_workers=workers,
        )

    def tokens(loader):
        return [batch["input_ids"][0].tolist() for batch in loader]

    loader = prepare_data_loader(
        loader_of(2), num_processes=1, process_index=0, put_on_device=False
    )
    first = tokens(loader)
    second = tokens(loader)
    assert first == tokens(loader_of(0))
    assert len(first) == len(loader)
    assert second != first
    loader.set_epoch(0)
    assert tokens(loader) == first
    loader.set_epoch(1)
    assert tokens(loader) == second


# Streams


@pytest.mark.parametrize("shards", [None, 1, 4])
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_and_workers_share_the_stream(shards, workers):
    lengths = [3, 2, 4, 1, 5, 2, 2, 6, 1, 3, 4, 2]
    seen = []
    stream = examples_of(lengths)
    if shards is not None:
        stream = datasets.Dataset.from_list(stream).to_iterable_dataset(num_shards=shards)
    for rank in range(2):
        documents = 0
        packer = StreamPacker(stream, 2, rank, 6)
        processes = min(workers, packer.most_processes)
        for batch in DataLoader(packer, batch_size=None, num_workers=processes):
            rows = list(zip(*values(batch), strict=True))
            assert len(rows) <= 6
            assert [row[1] for row in rows] == [
                p for length in batch["document_lengths"] for p in range(length)
            ]
            documents += len(batch["document_lengths"])
            seen += rows
        assert documents >= 4
    assert sorted(seen) == rows_of(lengths)


def document_lengths_of(batches):
    return [length for batch in batches for length in batch["document_lengths"]]


def test_streams_beyond_the_tables_of_a_model():
    def packed(document, policy="error"):
        limits = Limits(vocabulary=10, classes=10, positions=4)
        stream = [{"input_ids": [1]}, {"labels": document, "input_ids": [0] * len(document)}]
        stream += [{"input_ids": document}] * (max(document) >= 10)
        return list(StreamPacker(stream, 1, 0, 6, policy, limits=limits))

    assert len(packed([9, 9, 9, 9])) == 1
    with refused(
        Batch.TARGET_ID, name="document 1 of rank 0's share of the stream", label=10, at=1, last=9
    ):
        packed([9, 10])
    with refused(
        Batch.TOKEN_ID,
        name="document 2 of rank 0's share of the stream",
        token=11,
        at=" at position 0",
        last=9,
    ):
        packed([11, 9])
    with refused(
        Batch.BEYOND_POSITIONS,
        name="document 1 of rank 0's share of the stream",
        length=5,
        positions=4,
    ):
        packed([9] * 5)
    assert document_lengths_of(packed([9] * 5, "truncate")) == [1, 4]
    assert document_lengths_of(packed([9] * 5, "split")) == [1, 4, 1]


def test_faulty_streams():
    with refused(
        Capacity.LONG_IN_STREAM,
        name="document 1 of rank 0's share of the stream",
        length=7,
        limit=6,
    ):
        list(StreamPacker([{"input_ids": [1]}, {"input_ids": [1] * 7}], 1, 0, 6))
    with refused(Data.EMPTY_DOCUMENT, name="document 1 of rank 0's share of the stream"):
        list(StreamPacker([{"input_ids": [1]}, {"input_ids": []}], 1, 0, 6))


# Padding-free collators


def batch_of(positions, **more):
    tokens = torch.zeros(1, len(positions), dtype=torch.long)
    return {"input_ids": tokens, "position_ids": torch.tensor([positions]), **more}


@pytest.mark.parametrize(
    "options", [{}, {"return_flash_attn_kwargs": True, "return_position_ids": False}]
)
def test_lengths_of_a_flattened_batch(options):
    """Once the collator has read them they ask no device."""
    collator = DataCollatorWithFlattening(**options)
    examples = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}, {"input_ids": [6]}]
    assert batch_document_lengths(collator(examples)) == (3, 2, 1)
    batch = CollatorWithLengths(collator)(examples)
    batch = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
    with Counting():
        assert checked_document_lengths(batch, Limits(7, 7, 3), "a batch") == (3, 2, 1)
        with refused(Batch.TOKEN_ID, name="a batch", token=6, at=" at position 5", last=5):
            checked_document_lengths(batch, Limits(6, 7, 3), "a batch")
        with refused(Batch.BEYOND_POSITIONS, name="a document of a batch", length=3, positions=2):
            checked_document_lengths(batch, Limits(7, 7, 2), "a batch")
        with pytest.raises(AssertionError, match="makes the host wait"):
            batch_document_lengths(
                {name: x for name, x in batch.items() if name != "document_lengths"}
            )


@pytest.mark.parametrize(
    ("ids", "labels", "entry", "words"),
    [
        ([0, 3, 9], [-100, 3, 9], None, {}),
        (
            [0, 10, 9],
            [-100, 3, 9],
            Batch.TOKEN_ID,
            {"token": 10, "at": " at position 1", "last": 9},
        ),
        ([0, -1, 9], [-100, 3, 9], Batch.NEGATIVE_TOKEN, {"token": -1, "at": " at position 1"}),
        ([0, 3, 9], [-100, 8, -1], Batch.TARGET_ID, {"label": -1, "at": 2, "last": 8}),
        ([0, 3, 9], [9, -100, -100], Batch.TARGET_ID, {"label": 9, "at": 0}),
        ([0, 3, 9], [-100, -100, -100], None, {}),
    ],
    ids=["fits", "large token", "negative token", "negative target", "large target", "no targets"],
)
@pytest.mark.parametrize(
    "form", [dict, CollatorWithLengths(lambda batch: batch)], ids=["batch", "with lengths"]
)
def test_batches_beyond_the_tables_of_a_model(ids, labels, entry, words, form):
    classes = 9 if entry is Batch.TARGET_ID else 10
    batch = batch_of([0, 1, 2]) | {
        "input_ids": torch.tensor([ids]),
        "labels": torch.tensor([labels]),
    }
    with refused(entry, name="a batch", **words) if entry else nullcontext():
        assert checked_document_lengths(form(batch), Limits(10, classes), "a batch") == (3,)


def test_batches_that_the_collator_changes_and_leaves():
    with_mask = CollatorWithLengths(lambda batch: {**batch, "attention_mask": torch.ones(1, 3)})
    assert sorted(with_mask(batch_of([0, 1, 0]))) == [
        *("document_lengths", "input_ids", "least_and_greatest", "position_ids")
    ]
    # A faulty batch is left to those who raise on all ranks.
    faulty = batch_of([0, 1, 3])
    assert CollatorWithLengths(lambda batch: batch)(faulty) is faulty


ROW = torch.zeros(1, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("entry", "batch", "values"),
    [
        (Batch.ROWS, {"input_ids": ROW.expand(2, 3)}, {"shape": (2, 3)}),
        (Batch.BATCH_MASK, batch_of([0, 1, 2], attention_mask=torch.ones(1, 3, 3)), {}),
        (Batch.BATCH_MASK, batch_of([0, 1, 2], attention_mask=torch.tensor([[1, 1, 0]])), {}),
        (Batch.POSITIONS, batch_of([]), {"found": "begin with []"}),
        (Batch.POSITIONS, batch_of([2, 3, 0]), {"found": "begin with [2, 3, 0]"}),
        (Batch.POSITIONS, batch_of([0, 1, 3, 0]), {"found": "go from 1 to 3 at row 2"}),
        (
            Batch.POSITIONS,
            {"input_ids": ROW, "position_ids": ROW.T},
            {"found": "have the shape (3, 1) for 3 tokens"},
        ),
        (
            Batch.WRONG_BOUNDARIES,
            batch_of([0, 1, 0, 1], cu_seq_lens_q=torch.tensor([0, 2, 5])),
            {"name": "cu_seq_lens_q", "lengths": "(2, 3)", "total": 5, "tokens": 4},
        ),
        (
            Batch.WRONG_BOUNDARIES,
            batch_of([0, 1], document_lengths=(2, 0)),
            {"name": "document_lengths"},
        ),
        (Batch.NO_BOUNDARIES, {"input_ids": ROW}, {"fields": ["input_ids"]}),
    ],
)
def test_faulty_batches(entry, batch, values):
    with refused(entry, **values):
        batch_document_lengths(batch)
