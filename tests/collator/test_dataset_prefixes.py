"""Equal prefixes of a data set's documents: their trees, micro-batches, rows and targets."""

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_distca.collator import dataset_prefixes
from hf_distca.collator.collation import TARGET_ROWS, DistCACollator, RankDocuments
from hf_distca.collator.dataset_prefixes import (
    DatasetPrefixes,
    block_hashes,
    first_hashes,
    repeated,
)
from hf_distca.collator.documents import ANY_COLUMNS
from hf_distca.collator.sampler import GlobalBatchSampler, GlobalMicroBatch, fit_documents
from hf_distca.planner import prefixes as planner_prefixes
from hf_distca.planner.settings import PlanSettings

MANY = 1 << 30
TREE = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 9], [7, 8], [7, 8], [5]]
"""Documents with equal prefixes in blocks of two, two equal documents, and one without a prefix."""


@pytest.fixture(autouse=True)
def blocks_of_two(monkeypatch):
    monkeypatch.setattr(planner_prefixes, "BLOCK", 2)
    monkeypatch.setattr(dataset_prefixes, "BLOCK", 2)


def dataset_of(documents, masked=False):
    """Documents whose tokens are all targets, or only the last one."""
    labels = [
        [-100] * (len(document) - 1) + document[-1:] if masked else document
        for document in documents
    ]
    return datasets.Dataset.from_dict({"input_ids": documents, "labels": labels})


def prefixes_of(documents, masked=False, ranks=2):
    """Equal prefixes of documents, as several ranks find them together."""
    dataset = dataset_of(documents, masked)
    lengths = np.array(list(map(len, documents)))
    candidates = repeated(b"".join(first_hashes(dataset, (rank, ranks)) for rank in range(ranks)))
    shares = np.array_split(candidates, ranks)
    read = [block_hashes(dataset, share, ANY_COLUMNS, "data") for share in shares]
    return DatasetPrefixes.of(lengths, candidates, *map(b"".join, zip(*read, strict=True)))


def whole(documents):
    return fit_documents(np.array(list(map(len, documents))), MANY, "error", "tokens")


def trees_of(documents, most_rows=MANY, masked=False):
    """The prefix tree of each document, and the rows of each tree."""
    trees, rows = prefixes_of(documents, masked).trees(whole(documents), most_rows)
    return trees.tolist(), rows.tolist()


def test_blocks_of_several_documents_are_shared():
    prefixes = prefixes_of(TREE)
    blocks = [prefixes._blocks(span) for span in whole(TREE)]
    assert list(map(len, blocks)) == [2, 2, 1, 1, 1, 0]
    assert blocks[0] == blocks[1]
    assert blocks[0][:1] == blocks[2]
    assert blocks[3] == blocks[4] != blocks[2]
    # The last token of a document has no target.
    assert prefixes.targets.tolist() == [4, 4, 2, 1, 1, 0]


def test_an_equal_block_after_another_prefix_is_another_block():
    prefixes = prefixes_of([[1, 2, 3, 4], [1, 2, 5, 6], [5, 6, 3, 4], [5, 6, 7, 8]])
    assert prefixes.targets.tolist() == [2, 2, 2, 2]


def test_documents_with_nothing_in_common():
    dataset = dataset_of([[1, 2, 3], [2, 2, 3], [3]])
    assert len(repeated(first_hashes(dataset, (0, 1)))) == 0


@pytest.mark.parametrize(
    ("most_rows", "expected"),
    [
        (MANY, ([0, 0, 0, 1, 1, 2], [7, 2, 1])),
        (6, ([0, 0, 1, 2, 2, 3], [6, 3, 2, 1])),  # the tree is divided at its root
        (5, ([0, 1, 2, 3, 3, 4], [5, 5, 3, 2, 1])),
    ],
)
def test_documents_that_share_rows_are_a_tree_if_they_fit(most_rows, expected):
    assert trees_of(TREE, most_rows) == expected


def test_documents_of_a_tree_that_does_not_fit_share_rows_as_far_as_they_fit():
    prompt = [1, 2, 3, 4, 5, 6]
    answers = [[*prompt, 10 + number, 10] for number in range(5)]
    # The prompt and two answers are 10 rows, which are 16 tokens.
    assert trees_of(answers, 10, masked=True) == ([0, 0, 1, 1, 2], [10, 10, 8])
    assert trees_of(answers, 13, masked=True) == ([0, 0, 0, 1, 1], [12, 10])


def test_rows_have_few_targets():
    equal = [[1, 2, 3, 4]] * 5
    assert trees_of(equal) == ([0, 0, 1, 1, 2], [4, 4, 4])
    assert trees_of(equal, masked=True) == ([0] * 5, [4])
    # Three times the targets of a row are too many; those of a run are neighbours in the tree.
    trees, rows = trees_of([[1, 2, 3, 4, 5], [1, 2, 6, 6, 5]] * 3)
    assert sorted(np.bincount(trees)) == [2, 4]
    assert sorted(rows) == [5, 8]


def test_cut_documents_share_whole_blocks():
    documents = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]]
    prefixes = prefixes_of(documents, masked=True)
    truncated = fit_documents(prefixes.lengths, 3, "truncate", "tokens")
    _, rows_of_trees = prefixes.trees(truncated, MANY)
    assert rows_of_trees.tolist() == [4]  # two of three tokens are a whole block
    split = fit_documents(prefixes.lengths, 4, "split", "tokens")
    trees, rows = prefixes.trees(split, MANY)
    assert trees.tolist() == [0, 1, 0, 2]  # the second span of a document shares no prefix
    assert rows.tolist() == [4, 2, 2]


@pytest.mark.parametrize(
    ("masked", "joins", "rows"), [(True, True, 6), (True, False, None), (False, True, 6)]
)
def test_trees_join_in_a_micro_batch(masked, joins, rows):
    documents = [[1, 2, 3, 4], [1, 2, 5, 6]]
    trees = np.array([0, 1])
    paths = prefixes_of(documents, masked).paths(whole(documents), trees, MANY, joins=joins)
    assert (None if paths is None else paths.trees.rows) == rows


def test_trees_join_in_a_micro_batch_where_rows_have_few_targets():
    equal = [[1, 2, 3, 4]] * 5
    trees = np.array([0, 0, 1, 1, 2])
    assert prefixes_of(equal).paths(whole(equal), trees, MANY, joins=True).trees.rows == 12
    assert prefixes_of(equal, True).paths(whole(equal), trees, MANY, joins=True).trees.rows == 4


DOCUMENTS = st.lists(
    st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=2, max_size=14
).filter(lambda documents: prefixes_of(documents) is not None)


@settings(max_examples=40)
@given(DOCUMENTS, st.integers(9, 30), st.booleans(), st.booleans(), st.integers(1, 3))
def test_micro_batches_hold_every_document_once_and_fit(documents, rows, masked, shuffle, ranks):
    prefixes = prefixes_of(documents, masked)
    spans = whole(documents)
    dataset = dataset_of(documents, masked)
    sampler = GlobalBatchSampler(spans, rows * ranks, shuffle, seed=3, prefixes=prefixes)
    of_plans = PlanSettings(ranks, rows, document_layout="fixed")
    read = []
    for (micro_batch,) in sampler:
        batches = []
        for rank in range(ranks):
            rank_documents = RankDocuments(
                dataset, prefixes.lengths, of_plans, rank, prefixes=prefixes
            )
            planned = rank_documents[micro_batch]
            batches.append(DistCACollator(rank)([planned]))
        plan = planned.plan
        assert plan.tokens.sum() <= rows * ranks
        read += micro_batch.spans["document"].tolist()
        of_batch = [documents[index] for index in micro_batch.spans["document"]]
        assert plan.document_tokens == sum(map(len, of_batch))
        labels = [dataset[int(index)]["labels"] for index in micro_batch.spans["document"]]
        assert sorted(targets_of(batches)) == sorted(
            (tuple(document[: row + 1]), targets[row + 1])
            for document, targets in zip(of_batch, labels, strict=True)
            for row in range(len(document) - 1)
            if targets[row + 1] >= 0
        )
    assert sorted(read) == list(range(len(documents)))


def targets_of(batches):
    """Targets of all ranks: the tokens up to a row, which its plan lets it see, and the target."""
    nano_batches = batches[0]["distca_plan"].nano_batches
    rows_of_ranks = [
        [
            (number, int(segment["document"]), row)
            for number, nano in enumerate(nano_batches)
            for segment in nano.layout.of_rank(rank)
            for row in range(segment["start"], segment["stop"])
        ]
        for rank in range(len(batches))
    ]
    tokens = {}
    for rows, batch in zip(rows_of_ranks, batches, strict=True):
        tokens.update(zip(rows, batch["input_ids"][0].tolist(), strict=True))
    targets = []
    for rows, batch in zip(rows_of_ranks, batches, strict=True):
        target_rows = batch.get(TARGET_ROWS, [torch.arange(len(rows))])
        labels = batch["labels"][0].tolist()
        for row, target in zip(torch.cat(target_rows).tolist(), labels, strict=True):
            if target >= 0:
                targets.append((path_of(tokens, nano_batches, *rows[row]), target))
        assert all(len(part) == len(part.unique()) for part in target_rows)
    return targets


def path_of(tokens, nano_batches, number, document, row):
    """The tokens that a row of a document sees."""
    branches = nano_batches[number].layout.branches
    first = 0 if branches is None else int(branches.starts[document])
    own = tuple(tokens[number, document, before] for before in range(first, row + 1))
    if first == 0:
        return own
    return path_of(tokens, nano_batches, number, int(branches.parents[document]), first - 1) + own


def test_rows_of_shared_documents_have_the_targets_of_each():
    documents = [[1, 2, 3, 4], [1, 2, 5], [1, 2, 5]]
    prefixes = prefixes_of(documents)
    micro_batch = GlobalMicroBatch(whole(documents), trees=np.zeros(3, int))
    settings = PlanSettings(1, 16, document_layout="fixed")
    rows = RankDocuments(dataset_of(documents), prefixes.lengths, settings, 0, prefixes=prefixes)
    batch = DistCACollator(0)([rows[micro_batch]])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 2]]
    pairs = list(
        zip(torch.cat(batch[TARGET_ROWS]).tolist(), batch["labels"][0].tolist(), strict=True)
    )
    assert sorted(pairs) == [(0, 2), (0, 2), (0, 2), (1, 3), (1, 5), (1, 5), (2, 4)]
    assert batch["shift_labels"].tolist() == batch["labels"].tolist()
    assert batch["distca_plan"].shared_rows == 5


def test_a_tree_comes_in_one_micro_batch_of_every_epoch():
    documents = [[first, first, *[second] * 2] for second in range(3) for first in range(20)]
    prefixes = prefixes_of(documents, masked=True)
    sampler = GlobalBatchSampler(whole(documents), 24, prefixes=prefixes)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = [batch.spans["document"].tolist() for (batch,) in sampler]
        for batch in batches:
            firsts = [document % 20 for document in batch]
            assert all(firsts.count(first) == 3 for first in firsts)
        epochs.append(batches)
    assert epochs[0] != epochs[1]
    assert len(sampler) == 7  # trees of eight rows, of which three fit
