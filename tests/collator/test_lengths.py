"""Documents of a data set: their lengths and fingerprint, their targets, and those that are too long."""

import logging

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_distca.collator import lengths as lengths_module
from hf_distca.collator.documents import ANY_COLUMNS, Columns, fetch_documents, token_document
from hf_distca.collator.lengths import dataset_fingerprint, document_lengths, fit_documents
from hf_distca.collator.refusals import Data
from tests.refused import refused

TWO = {"input_ids": [[1, 2, 3], [4, 5]]}


def as_dataset(columns):
    return datasets.Dataset.from_dict(columns)


def as_list(columns):
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


@pytest.fixture(params=[as_dataset, as_list])
def make(request):
    return request.param


def lengths_of(dataset, columns=ANY_COLUMNS):
    return document_lengths(dataset, columns, progress=False)


def test_lengths_are_computed(make):
    lengths = lengths_of(make(TWO))
    assert (lengths.dtype, lengths.tolist()) == (np.int64, [3, 2])


def test_lengths_come_from_the_column_without_reading_tokens(monkeypatch):
    monkeypatch.setattr(lengths_module, "_stored_lengths", None)
    assert lengths_of(as_dataset({**TWO, "length": [3, 2]})).tolist() == [3, 2]
    assert lengths_of(as_dataset({**TWO, "tokens": [3, 2]}), Columns("tokens")).tolist() == [3, 2]


def test_lengths_respect_an_indices_mapping():
    dataset = as_dataset({"input_ids": [[0] * (i + 1) for i in range(2500)]})
    assert lengths_of(dataset.select([2499, 7, 0, 1800])).tolist() == [2500, 8, 1, 1801]
    with_column = dataset.map(lambda e: {"length": len(e["input_ids"])}).select([2499, 7])
    assert lengths_of(with_column).tolist() == [2500, 8]


def test_lengths_of_a_data_set_that_tokenizes_when_read():
    dataset = datasets.Dataset.from_dict({"text": ["abc", "de"]})
    dataset.set_transform(lambda batch: {"input_ids": [[ord(c) for c in text] for text in batch["text"]]})
    assert lengths_of(dataset).tolist() == [3, 2]


def test_progress_only_where_asked(make, capfd):
    lengths_of(make(TWO))
    assert capfd.readouterr().err == ""
    document_lengths(make(TWO), progress=True)
    assert "Document lengths" in capfd.readouterr().err


MANY = [[1]] * 1500


@pytest.mark.parametrize(
    ("columns", "entry", "values"),
    [
        ({"input_ids": []}, Data.EMPTY, {}),
        ({"input_ids": [*MANY, [], *MANY]}, Data.EMPTY_DOCUMENT, {"name": "document 1500"}),
        (
            {"input_ids": [*MANY, [1, 2, 3]], "labels": [*MANY, [1, 2]]},
            Data.LABELS,
            {"name": "document 1500", "labels": 2, "length": 3},
        ),
        ({"text": ["a"], "label": [1]}, Data.NO_TOKENS, {"columns": ["label", "text"]}),
        ({**TWO, "token_type_ids": [[0, 0, 0], [0, 0]]}, Data.UNKNOWN_COLUMNS, {"unknown": ["token_type_ids"]}),
    ],
)
def test_data_sets_that_are_refused(make, columns, entry, values):
    with refused(entry, **values):
        lengths_of(make(columns))


def test_length_columns_that_are_refused():
    with refused(Data.EMPTY_DOCUMENT, name="document 1", stated=" (length 0)"):
        lengths_of(as_dataset({**TWO, "length": [3, 0]}))
    with refused(Data.LENGTH_COLUMN, column="length"):
        lengths_of(as_dataset({**TWO, "length": ["three", "two"]}))
    with refused(Data.WRONG_LENGTH, name="document 1", length=2, stated=9):
        lengths_of(as_list({**TWO, "length": [3, 9]}))


@pytest.mark.parametrize("column", ["labels", "length"])
def test_columns_that_the_model_does_not_take_are_left_out(make, column):
    dataset = make({**TWO, "text": ["a b c", "d e"], column: [[1, 2, 3], [4, 5]] if column == "labels" else [3, 2]})
    columns = Columns(model_inputs=frozenset(["input_ids", "position_ids"]))
    assert lengths_of(dataset, columns).tolist() == [3, 2]
    assert dataset_fingerprint(dataset, np.array([3, 2]), columns) == fingerprint(make(TWO))
    with refused(Data.UNKNOWN_COLUMNS, unknown=["position_ids"]):
        lengths_of(make({**TWO, "text": ["a", "b"], "position_ids": [[0, 1, 2], [0, 1]]}), columns)


def fingerprint(dataset):
    return dataset_fingerprint(dataset, lengths_of(dataset))


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
    assert fingerprint(make(TWO)) == fingerprint(as_list(TWO)) != fingerprint(make(other))
    assert len(fingerprint(make(other))) == 64


def test_the_fingerprint_covers_every_length_and_the_last_document():
    documents = [[7] * 3 for _ in range(5000)]
    base = fingerprint(as_dataset({"input_ids": documents}))
    for at, changed in ((3333, [7] * 4), (4999, [7, 7, 8])):
        others = [*documents[:at], changed, *documents[at + 1 :]]
        assert fingerprint(as_dataset({"input_ids": others})) != base


# Documents


def test_targets_are_the_next_tokens():
    document = token_document({"input_ids": [5, 6, 7]}, "document 0", ANY_COLUMNS)
    assert (document.input_ids.tolist(), document.targets.tolist()) == ([5, 6, 7], [6, 7, -100])
    assert document.input_ids.dtype == document.targets.dtype == np.int64
    document = token_document({"input_ids": [5, 6, 7], "labels": [-100, -100, 9]}, "document 0", ANY_COLUMNS)
    assert document.targets.tolist() == [-100, 9, -100]


@pytest.mark.parametrize("input_ids", [[[1, 2]], [0.5], ["a"], 3])
def test_input_ids_that_are_no_list_of_integers(input_ids):
    with refused(Data.NOT_INTEGERS, name="document 0", column="input_ids"):
        token_document({"input_ids": input_ids}, "document 0", ANY_COLUMNS)


def test_tensor_columns_are_read_document_by_document():
    features = datasets.Features({"input_ids": datasets.Array2D((1, 3), "int64")})
    dataset = datasets.Dataset.from_dict({"input_ids": [[[1, 2, 3]]]}, features=features)
    with refused(Data.NOT_INTEGERS, name="document 0", column="input_ids", shape=(1, 3)):
        lengths_of(dataset)


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
    assert [fit(policy, limit=9) for policy in ("error", "truncate", "split")] == [whole] * 3


def test_policies_for_documents_beyond_the_limit(caplog):
    with refused(Data.LONG, count=2, documents=4, limit_name="ranks · tokens_per_rank", limit=4, longest=1, length=9):
        fit("error")
    with caplog.at_level(logging.WARNING):
        pieces = [(1, 0, 4, 9), (1, 4, 8, 9), (1, 8, 9, 9)]
        assert fit("split") == [(0, 0, 3, 3), *pieces, (2, 0, 4, 4), (3, 0, 4, 5), (3, 4, 5, 5)]
        assert not caplog.messages
        assert fit("truncate") == [(0, 0, 3, 3), (1, 0, 4, 4), (2, 0, 4, 4), (3, 0, 4, 4)]
    assert caplog.messages == ["Truncated 2 documents to ranks · tokens_per_rank = 4 tokens; 6 tokens are dropped."]


@pytest.mark.parametrize(("policy", "limit"), [("drop", 4), ("split", 0)])
def test_a_policy_or_limit_that_is_none(policy, limit):
    with pytest.raises(ValueError, match=f"tokens_per_rank is {limit} and the policy for long documents '{policy}'"):
        fit(policy, limit)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 20))
def test_pieces_cover_every_token_once(lengths, limit):
    excerpts = fit_documents(np.array(lengths), limit, "split", "limit")
    rows = [(p["document"], row) for p in excerpts for row in range(p["start"], p["stop"])]
    assert rows == [(document, row) for document, length in enumerate(lengths) for row in range(length)]
    assert (excerpts["stop"] - excerpts["start"]).max() <= limit
