import doctest

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_distca.collator import collation
from hf_distca.collator.collation import DistCACollator
from hf_distca.collator.documents import RankDocuments
from hf_distca.collator.lengths import document_lengths, fit_documents
from hf_distca.collator.refusals import Data
from hf_distca.collator.sampler import GlobalMicroBatch
from hf_distca.planner.settings import PlanSettings
from tests.refused import refused

NAMES = ("input_ids", "position_ids", "labels", "shift_labels")


def collate(examples, settings, long_documents="error", filler=0):
    """The batch of every rank, all examples being one global micro-batch."""
    lengths = document_lengths(examples, progress=False)
    limit = settings.ranks * settings.tokens_per_rank
    micro_batch = GlobalMicroBatch(fit_documents(lengths, limit, long_documents, "limit"))
    batches = []
    for rank in range(settings.ranks):
        planned = RankDocuments(examples, lengths, settings, rank)[micro_batch]
        batches.append(DistCACollator(rank, filler)([planned]))
    return batches


def fixed(ranks, tokens_per_rank):
    return PlanSettings(ranks, tokens_per_rank, document_layout="fixed")


def values(batch):
    assert set(batch) == {*NAMES, "distca_plan"}
    return {name: batch[name].tolist() for name in NAMES}


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
    assert list(values(first).values()) == [[[11, 12, 13]], [[0, 1, 2]], *[[[-100, 13, 14]]] * 2]
    assert list(values(second).values()) == [[[14, 21, 22]], [[3, 0, 1]], *[[[-100, 22, -100]]] * 2]
    assert first["labels"].data_ptr() != first["shift_labels"].data_ptr()


def test_a_rank_without_rows_gets_a_filler():
    batches = collate([{"input_ids": [5, 6]}], PlanSettings(4, 8), filler=99)
    assert sorted(batch["input_ids"].tolist() for batch in batches) == [[[5]], [[6]], [[99]], [[99]]]
    for batch in batches:
        assert batch["distca_plan"].tokens.tolist() == [1, 1, 1, 1]
        assert batch["distca_plan"].fillers == 2
        if batch["input_ids"].tolist() == [[99]]:
            assert values(batch)["labels"] == values(batch)["shift_labels"] == [[-100]]
            assert values(batch)["position_ids"] == [[0]]


def test_a_rank_without_a_whole_document_gets_a_filler():
    batches = collate([{"input_ids": [5, 6, 7]}], PlanSettings(2, 8, document_layout="whole"), filler=99)
    assert [batch["input_ids"].tolist() for batch in batches] == [[[5, 6, 7]], [[99]]]
    assert [batch["distca_plan"].fillers for batch in batches] == [1, 1]


def test_split_keeps_the_target_across_the_cut():
    lengths = np.array([5])
    excerpts = fit_documents(lengths, 3, "split", "limit")
    examples = [{"input_ids": [1, 2, 3, 4, 5]}]
    reader = RankDocuments(examples, lengths, fixed(1, 3), 0)
    first, second = (DistCACollator(0)([reader[GlobalMicroBatch(excerpts[[i]])]]) for i in range(2))
    assert values(first)["labels"] == [[2, 3, 4]]
    assert values(second)["input_ids"] == [[4, 5]]
    assert values(second)["position_ids"] == [[0, 1]]
    assert values(second)["labels"] == [[5, -100]]


def test_truncate_drops_targets_too():
    (batch,) = collate([{"input_ids": [1, 2, 3, 4, 5]}], fixed(1, 3), "truncate")
    assert values(batch)["input_ids"] == [[1, 2, 3]]
    assert values(batch)["labels"] == [[2, 3, -100]]


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
    rows = []
    for rank, batch in enumerate(batches):
        flat = {name: batch[name][0].tolist() for name in NAMES}
        assert flat["labels"] == flat["shift_labels"]
        assert len(flat["input_ids"]) == batch["distca_plan"].tokens[rank] > 0
        rows += zip(flat["input_ids"], flat["position_ids"], flat["labels"], strict=True)
    expected = [
        (1000 * d + p, p, 1000 * d + p + 1 if p + 1 < length else -100)
        for d, length in enumerate(lengths)
        for p in range(length)
    ]
    assert sorted(row for row in rows if row[0] != -1) == expected
    assert all(row == (-1, 0, -100) for row in rows if row[0] == -1)
    # Equal tokens: within the unit that fillers and rounding leave.
    tokens = batches[0]["distca_plan"].tokens
    assert tokens.max() <= -(-tokens.sum() // ranks)


def test_only_documents_with_rows_here_are_read():
    class Reading(list):
        read: list

        def __getitem__(self, index):
            self.read.append(index)
            return super().__getitem__(index)

    examples = Reading([{"input_ids": [1, 2]}, {"input_ids": [3, 4]}, {"input_ids": [5, 6]}])
    examples.read = []
    excerpts = fit_documents(np.array([2, 2, 2]), 6, "error", "limit")
    RankDocuments(examples, np.array([2, 2, 2]), fixed(3, 2), rank=1)[GlobalMicroBatch(excerpts)]
    assert examples.read == [1]


def test_a_datasets_dataset_gives_the_same():
    examples = [{"input_ids": [1, 2, 3], "labels": [1, -100, 3]}, {"input_ids": [4, 5], "labels": [4, 5]}]
    dataset = datasets.Dataset.from_list([{**e, "length": len(e["input_ids"])} for e in examples])
    for settings in (fixed(2, 3), fixed(1, 5), PlanSettings(2, 3)):
        for ours, listed in zip(collate(dataset, settings), collate(examples, settings), strict=True):
            assert values(ours) == values(listed)
    dataset.set_format("torch")
    assert values(collate(dataset, fixed(1, 5))[0]) == values(collate(examples, fixed(1, 5))[0])


def test_faulty_examples():
    good = [{"input_ids": [1, 2], "attention_mask": [1, 1]}]
    assert values(collate(good, fixed(1, 2))[0])["input_ids"] == [[1, 2]]
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
