"""Documents of a data set: their lengths and fingerprint, their targets, and those that are too long."""

import logging

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from hf_distca.collator import lengths as lengths_module
from hf_distca.collator.documents import ANY_COLUMNS, Columns, fetch_documents, token_document
from hf_distca.collator.lengths import dataset_fingerprint, document_lengths, fit_documents
from hf_distca.collator.refusals import Data
from tests.refused import refused

TWO = {"input_ids": [[1, 2, 3], [4, 5]]}


class ListDataset(Dataset):
    def __init__(self, examples):
        self.examples = examples

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        return self.examples[index]


def as_dataset(columns):
    return datasets.Dataset.from_dict(columns)


def as_list(columns):
    return ListDataset([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])


@pytest.fixture(params=[as_dataset, as_list])
def make(request):
    return request.param


def test_lengths_are_computed(make):
    lengths = document_lengths(make(TWO), progress=False)
    assert lengths.dtype == np.int64
    assert lengths.tolist() == [3, 2]


def test_lengths_come_from_the_column_without_reading_tokens(monkeypatch):
    monkeypatch.setattr(lengths_module, "_stored_lengths", None)
    assert document_lengths(as_dataset({**TWO, "length": [3, 2]})).tolist() == [3, 2]
    assert document_lengths(as_dataset({**TWO, "tokens": [3, 2]}), Columns("tokens")).tolist() == [3, 2]


def test_lengths_respect_an_indices_mapping():
    dataset = as_dataset({"input_ids": [[0] * (i + 1) for i in range(2500)]})
    chosen = dataset.select([2499, 7, 0, 1800])
    assert document_lengths(chosen, progress=False).tolist() == [2500, 8, 1, 1801]
    with_column = dataset.map(lambda e: {"length": len(e["input_ids"])}).select([2499, 7])
    assert document_lengths(with_column).tolist() == [2500, 8]


def test_lengths_of_a_data_set_that_tokenizes_when_read():
    dataset = datasets.Dataset.from_dict({"text": ["abc", "de"]})
    dataset.set_transform(lambda batch: {"input_ids": [[ord(c) for c in text] for text in batch["text"]]})
    assert document_lengths(dataset, progress=False).tolist() == [3, 2]


def test_lengths_of_tensor_columns():
    features = datasets.Features({"input_ids": datasets.Array2D((1, 3), "int64")})
    dataset = datasets.Dataset.from_dict({"input_ids": [[[1, 2, 3]]]}, features=features)
    with refused(Data.NOT_INTEGERS, name="document 0", column="input_ids", shape=(1, 3)):
        document_lengths(dataset, progress=False)


def test_progress_only_where_asked(make, capfd):
    document_lengths(make(TWO), progress=False)
    assert capfd.readouterr().err == ""
    document_lengths(make(TWO), progress=True)
    assert "Document lengths" in capfd.readouterr().err


def test_no_documents(make):
    with refused(Data.EMPTY):
        document_lengths(make({"input_ids": []}))


def test_no_length():
    with refused(Data.NO_LENGTH, kind="list_iterator"):
        document_lengths(iter([{"input_ids": [1]}]))


def test_an_empty_document(make):
    documents = [[1]] * 1500
    documents[1234] = []
    with refused(Data.EMPTY_DOCUMENT, name="document 1234"):
        document_lengths(make({"input_ids": documents}), progress=False)


def test_a_length_column_that_says_zero():
    with refused(Data.EMPTY_DOCUMENT, name="document 1", stated=" (length 0)"):
        document_lengths(as_dataset({**TWO, "length": [3, 0]}))


def test_a_length_column_that_is_no_integer():
    with refused(Data.LENGTH_COLUMN, column="length"):
        document_lengths(as_dataset({**TWO, "length": ["three", "two"]}))


def test_labels_of_another_length(make):
    columns = {"input_ids": [[1], [1, 2], [1, 2, 3]], "labels": [[1], [1, 2], [1, 2]]}
    with refused(Data.LABELS, name="document 2", labels=2, length=3):
        document_lengths(make(columns), progress=False)


def test_no_input_ids(make):
    with refused(Data.NO_TOKENS, columns=["label", "text"]):
        document_lengths(make({"text": ["a"], "label": [1]}), progress=False)


def test_columns_that_would_be_dropped(make):
    with refused(Data.UNKNOWN_COLUMNS, unknown=["token_type_ids"]):
        document_lengths(make({**TWO, "token_type_ids": [[0, 0, 0], [0, 0]]}), progress=False)


@pytest.mark.parametrize("column", ["labels", "length"])
def test_columns_that_the_model_does_not_take_are_left_out(make, column):
    dataset = make({**TWO, "text": ["a b c", "d e"], column: [[1, 2, 3], [4, 5]] if column == "labels" else [3, 2]})
    columns = Columns(model_inputs=frozenset(["input_ids", "position_ids"]))
    assert document_lengths(dataset, columns, progress=False).tolist() == [3, 2]
    assert dataset_fingerprint(dataset, np.array([3, 2]), columns) == fingerprint(make(TWO))


def test_columns_that_the_model_takes_are_not_left_out(make):
    dataset = make({**TWO, "text": ["a b c", "d e"], "position_ids": [[0, 1, 2], [0, 1]]})
    with refused(Data.UNKNOWN_COLUMNS, unknown=["position_ids"]):
        document_lengths(dataset, Columns(model_inputs=frozenset(["position_ids"])), progress=False)


def test_a_wrong_length_column_of_an_example():
    with refused(Data.WRONG_LENGTH, name="document 1", length=2, stated=9):
        document_lengths(as_list({**TWO, "length": [3, 9]}), progress=False)


def fingerprint(dataset):
    return dataset_fingerprint(dataset, document_lengths(dataset, progress=False))


def test_equal_data_has_equal_fingerprints():
    assert fingerprint(as_dataset(TWO)) == fingerprint(as_list(TWO))
    assert len(fingerprint(as_dataset(TWO))) == 64


@pytest.mark.parametrize(
    "other",
    [
        {"input_ids": [[1, 2], [3, 4, 5]]},
        {"input_ids": [[1, 2, 3], [4, 6]]},
        {"input_ids": [[4, 5], [1, 2, 3]]},
        {"input_ids": [[1, 2, 3], [4, 5], [6]]},
        {"input_ids": [[1, 2, 3], [4, 5]], "labels": [[-100, -100, 3], [4, 5]]},
    ],
)
def test_other_data_has_another_fingerprint(make, other):
    assert fingerprint(make(TWO)) != fingerprint(make(other))


def test_the_fingerprint_covers_every_length_and_the_last_document():
    documents = [[7] * 3 for _ in range(5000)]
    base = fingerprint(as_dataset({"input_ids": documents}))
    documents[3333] = [7] * 4
    assert fingerprint(as_dataset({"input_ids": documents})) != base
    documents[3333] = [7] * 3
    documents[4999] = [7, 7, 8]
    assert fingerprint(as_dataset({"input_ids": documents})) != base


# Documents


def test_targets_are_the_next_tokens():
    document = token_document({"input_ids": [5, 6, 7]}, "document 0", ANY_COLUMNS)
    assert document.input_ids.tolist() == [5, 6, 7]
    assert document.targets.tolist() == [6, 7, -100]
    assert document.input_ids.dtype == document.targets.dtype == np.int64
    document = token_document({"input_ids": [5, 6, 7], "labels": [-100, -100, 9]}, "document 0", ANY_COLUMNS)
    assert document.targets.tolist() == [-100, 9, -100]


@pytest.mark.parametrize("input_ids", [[[1, 2]], [0.5], ["a"], 3])
def test_input_ids_that_are_no_list_of_integers(input_ids):
    with refused(Data.NOT_INTEGERS, name="document 0", column="input_ids"):
        token_document({"input_ids": input_ids}, "document 0", ANY_COLUMNS)


def test_documents_are_fetched_together_where_the_data_set_offers_that():
    class Batched:
        def __getitems__(self, indices):
            return [{"input_ids": [index] * 2} for index in indices]

    assert [d.input_ids.tolist() for d in fetch_documents(Batched(), [4, 1], ANY_COLUMNS)] == [[4, 4], [1, 1]]


# Documents that are too long

LENGTHS = np.array([3, 9, 4, 5])


def fit(policy, limit=4):
    return fit_documents(LENGTHS, limit, policy, "ranks · tokens_per_rank").tolist()


def test_documents_within_the_limit_stay_whole():
    whole = [(0, 0, 3, 3), (1, 0, 9, 9), (2, 0, 4, 4), (3, 0, 5, 5)]
    for policy in ("error", "truncate", "split"):
        assert fit(policy, limit=9) == whole


def test_error_says_what_and_what_to_do():
    values = {"count": 2, "documents": 4, "limit_name": "ranks · tokens_per_rank", "limit": 4}
    with refused(Data.LONG, **values, longest=1, length=9):
        fit("error")


def test_truncate_keeps_the_first_tokens(caplog):
    with caplog.at_level(logging.WARNING):
        assert fit("truncate") == [(0, 0, 3, 3), (1, 0, 4, 4), (2, 0, 4, 4), (3, 0, 4, 4)]
    assert caplog.messages == ["Truncated 2 documents to ranks · tokens_per_rank = 4 tokens; 6 tokens are dropped."]


def test_split_cuts_into_consecutive_pieces(caplog):
    assert fit("split") == [
        (0, 0, 3, 3),
        (1, 0, 4, 9),
        (1, 4, 8, 9),
        (1, 8, 9, 9),
        (2, 0, 4, 4),
        (3, 0, 4, 5),
        (3, 4, 5, 5),
    ]
    assert not caplog.messages


def test_a_policy_or_limit_that_is_none():
    with refused(Data.POLICY, policy="drop"):
        fit("drop")
    with refused(Data.LIMIT, limit_name="ranks · tokens_per_rank", limit=0):
        fit("split", limit=0)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 20))
def test_pieces_cover_every_token_once(lengths, limit):
    excerpts = fit_documents(np.array(lengths), limit, "split", "limit")
    rows = [(p["document"], row) for p in excerpts for row in range(p["start"], p["stop"])]
    assert rows == [(document, row) for document, length in enumerate(lengths) for row in range(length)]
    assert (excerpts["stop"] - excerpts["start"]).max() <= limit
