"""Documents of a data set: their lengths, what is refused, and the fingerprint of all."""

from contextlib import nullcontext

import datasets
import numpy as np
import pytest

from hf_distca.batches.limits import NO_LIMITS, Limits
from hf_distca.checks.batch_rules import Batch
from hf_distca.checks.capacity_rules import Capacity
from hf_distca.checks.data_rules import Data
from hf_distca.collator.documents import (
    ANY_COLUMNS,
    Columns,
    check_stored_documents,
    check_targets,
    dataset_fingerprint,
    document_lengths,
)
from hf_distca.collator.sampler import fit_documents
from tests.refused import refused

TWO = {"input_ids": [[1, 2, 3], [4, 5]]}


as_dataset = datasets.Dataset.from_dict


def as_list(columns):
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


in_each_form = pytest.mark.parametrize("make", [as_dataset, as_list])


def lengths_of(dataset, columns=ANY_COLUMNS):
    return document_lengths(dataset, columns, progress=False)


def checked(dataset, columns=ANY_COLUMNS, limits=NO_LIMITS, share=(0, 1)):
    """Read the lengths and check all documents, as the trainer does."""
    lengths = document_lengths(dataset, columns, False, limits=limits)
    check_stored_documents(dataset, lengths, columns, False, limits=limits, share=share)
    return lengths


@in_each_form
def test_lengths_are_computed(make, capfd):
    lengths = lengths_of(make(TWO))
    assert lengths.dtype == np.int64
    assert lengths.tolist() == [3, 2]
    assert capfd.readouterr().err == ""
    document_lengths(make(TWO), progress=True)
    assert "Document lengths" in capfd.readouterr().err


def test_lengths_of_stored_documents():
    dataset = as_dataset({"input_ids": [[0] * (i % 7 + 1) for i in range(2500)]})
    assert lengths_of(dataset.select([2499, 7, 0, 1800])).tolist() == [1, 1, 1, 2]
    assert lengths_of(dataset.select(range(6, 2500))).tolist() == [
        i % 7 + 1 for i in range(6, 2500)
    ]
    # A column is trusted without reading tokens.
    assert lengths_of(as_dataset({**TWO, "length": [7, 2]}).select([1, 0])).tolist() == [2, 7]
    assert lengths_of(as_dataset({**TWO, "tokens": [7, 2]}), Columns("tokens")).tolist() == [7, 2]
    # One that tokenizes when it is read.
    dataset = as_dataset({"text": ["abc", "de"]})
    dataset.set_transform(
        lambda batch: {"input_ids": [list(text.encode()) for text in batch["text"]]}
    )
    assert lengths_of(dataset).tolist() == [3, 2]


MANY = [[1]] * 1500


@in_each_form
@pytest.mark.parametrize(
    ("columns", "entry", "values"),
    [
        ({"input_ids": []}, Data.EMPTY, {}),
        (
            {"input_ids": [*MANY, [], *MANY]},
            Data.EMPTY_DOCUMENT,
            {"name": "document 1500 of the data set"},
        ),
        (
            {"input_ids": [*MANY, [1, 2, 3]], "labels": [*MANY, [1, 2]]},
            Data.LABELS,
            {"name": "document 1500 of the data set", "labels": 2, "length": 3},
        ),
        ({"text": ["a"], "label": [1]}, Data.NO_TOKENS, {"columns": ["label", "text"]}),
        (
            {**TWO, "token_type_ids": [[0, 0, 0], [0, 0]]},
            Data.UNKNOWN_COLUMNS,
            {"unknown": ["token_type_ids"]},
        ),
    ],
)
def test_data_sets_that_are_refused(make, columns, entry, values):
    with refused(entry, **values):
        checked(make(columns))


def test_columns_that_are_refused():
    with refused(Data.EMPTY_DOCUMENT, name="document 1 of the data set", stated=" (length 0)"):
        lengths_of(as_dataset({**TWO, "length": [3, 0]}))
    with refused(Data.LENGTH_COLUMN, column="length"):
        lengths_of(as_dataset({**TWO, "length": ["three", "two"]}))
    with refused(Data.WRONG_LENGTH, name="document 1 of the data set", length=2, stated=9):
        lengths_of(as_list({**TWO, "length": [3, 9]}))
    for mask in ([1, 0], [1, 1, 1]):
        with refused(Data.PADDED, name="document 0 of the data set", length=2):
            lengths_of([{"input_ids": [1, 2], "attention_mask": mask}])
    for input_ids, entry, values in (
        ([[1, 2]], Data.NESTED, {}),
        ([[1, 2], [3]], Data.NESTED, {}),
        ([1, 0.5], Data.NOT_INTEGERS, {"given": 1.0, "at": 0}),
        ([1, None], Data.NOT_INTEGERS, {"given": None, "at": 1}),
        (["a"], Data.NOT_INTEGERS, {"given": "'a'", "at": 0}),
        (3, Data.NO_LIST, {"given": 3}),
        ("a", Data.NO_LIST, {"given": "'a'"}),
        (None, Data.NO_LIST, {"given": None}),
    ):
        with refused(entry, name="document 0 of the data set", column="input_ids", **values):
            lengths_of([{"input_ids": input_ids}])
    with refused(Data.ONE_LABEL, name="document 0 of the data set", given=1):
        lengths_of([{"input_ids": [1, 2], "labels": 1}])
    for length in ("x", None):
        given = {"name": "document 1 of the data set", "given": repr(length), "column": "length"}
        with refused(Data.NO_LENGTH, **given):
            lengths_of(as_list({**TWO, "length": [3, length]}))
    with refused(Data.NO_LENGTH, name="document 1 of the data set", given=None):
        lengths_of(as_dataset({**TWO, "length": [3, None]}))
    features = datasets.Features({"input_ids": datasets.Array2D((1, 3), "int64")})
    with refused(Data.NESTED, name="document 0 of the data set", column="input_ids"):
        lengths_of(as_dataset({"input_ids": [[[1, 2, 3]]]}, features=features))


@in_each_form
@pytest.mark.parametrize("column", [{"labels": TWO["input_ids"]}, {"length": [3, 2]}])
def test_columns_that_the_model_does_not_take_are_left_out(make, column):
    dataset = make({**TWO, "text": ["a b c", "d e"], **column})
    columns = Columns(model_inputs=frozenset(["input_ids", "position_ids"]))
    assert lengths_of(dataset, columns).tolist() == [3, 2]
    assert dataset_fingerprint(dataset, np.array([3, 2]), columns) == fingerprint(make(TWO))
    with refused(Data.INPUT_COLUMNS, unknown=["position_ids"]):
        lengths_of(make({**TWO, "text": ["a", "b"], "position_ids": [[0, 1, 2], [0, 1]]}), columns)


def fingerprint(dataset):
    return dataset_fingerprint(dataset, lengths_of(dataset))


@in_each_form
def test_other_data_has_another_fingerprint(make):
    others = [
        {"input_ids": [[1, 2], [3, 4, 5]]},
        {"input_ids": [[1, 2, 3], [4, 6]]},
        {"input_ids": [[4, 5], [1, 2, 3]]},
        {**TWO, "labels": [[-100, -100, 3], [4, 5]]},
    ]
    assert fingerprint(make(TWO)) == fingerprint(as_list(TWO))
    assert len({fingerprint(make(data)) for data in (TWO, *others)}) == len(others) + 1
    # Every length counts, and the last document.
    documents = [[7] * 3 for _ in range(500)]
    base = fingerprint(make({"input_ids": documents}))
    longer = [*documents[:333], [7] * 4, *documents[334:]]
    assert fingerprint(make({"input_ids": longer})) != base
    other_end = [*documents[:499], [7, 7, 8]]
    assert fingerprint(make({"input_ids": other_end})) != base


# Before training


# More classes than tokens, so that each fault is of one column alone.
LIMITS = Limits(vocabulary=10, classes=12)
LAST = "document 1500 of the data set"


@in_each_form
@pytest.mark.parametrize(
    ("tokens", "labels", "entry", "values"),
    [
        ([1, 9], [1, 11], None, {}),
        ([1, 9], [12, -100], None, {}),  # the first label is no target
        ([1, 10], [1, 7], Batch.TOKEN_ID, {"token": 10, "at": " at position 1", "last": 9}),
        ([-1, 9], [1, 7], Batch.NEGATIVE_TOKEN, {"token": -1, "at": " at position 0"}),
        ([1, 9], [1, 12], Batch.TARGET_ID, {"label": 12, "at": 1, "last": 11}),
        ([1, 9, 9], [1, -100, -1], Batch.TARGET_ID, {"label": -1, "at": 2}),
        ([1, 9], [1, -101], Batch.TARGET_ID, {"label": -101, "at": 1}),
    ],
)
def test_tokens_and_labels_beyond_the_tables_of_a_model(make, tokens, labels, entry, values):
    dataset = make({"input_ids": [*MANY, tokens], "labels": [*MANY, labels]})
    with refused(entry, name=LAST, **values) if entry else nullcontext():
        assert len(checked(dataset, limits=LIMITS)) == 1501
    checked(dataset)  # a model without known tables


@in_each_form
def test_tokens_are_targets_where_there_are_no_labels(make):
    limits = Limits(vocabulary=10, classes=8)
    checked(make({"input_ids": [[8, 7]]}), limits=limits)
    with refused(Batch.TARGET_ID, name="document 0 of the data set", label=8, at=1):
        checked(make({"input_ids": [[7, 8]]}), limits=limits)


@pytest.mark.parametrize(
    ("columns", "entry", "values"),
    [
        ({"input_ids": [*MANY, [1, None]]}, Data.NOT_INTEGERS, {"column": "input_ids"}),
        ({"input_ids": [[0.5], *MANY]}, Data.NOT_INTEGERS, {"name": "document 0 of the data set"}),
        (
            {"input_ids": [*MANY, [1]], "labels": [*MANY, None]},
            Data.NO_LIST,
            {"column": "labels"},
        ),
        ({"input_ids": [*MANY, [1, 2]], "attention_mask": [*MANY, [1, 0]]}, Data.PADDED, {}),
        ({"input_ids": [*MANY, [1, 2]], "attention_mask": [*MANY, [1]]}, Data.PADDED, {}),
        (
            {"input_ids": [*MANY, [1, 2]], "length": [1] * 1500 + [3]},
            Data.WRONG_LENGTH,
            {"length": 2, "stated": 3},
        ),
    ],
)
def test_every_stored_document_is_checked_by_one_rank(columns, entry, values):
    dataset = as_dataset(columns)
    with refused(entry, **{"name": LAST, **values}):
        checked(dataset)
    # Each of four ranks checks its part.
    shares = [
        values.get("name") == "document 0 of the data set",
        False,
        False,
        "name" not in values,
    ]
    for part, is_faulty in enumerate(shares):
        # All tokens of a column have one type.
        with refused(entry) if is_faulty or columns["input_ids"][0] == [0.5] else nullcontext():
            checked(dataset, share=(part, 4))


LATE_TARGETS = {
    "input_ids": [[1, 2, 3, 4], [1, 2]],
    "labels": [[-100, -100, -100, 4], [5, -100]],
}
ONE_TOKEN = {"input_ids": [[1], [2]]}


def check_targets_of(dataset, limit, policy):
    check_targets(dataset, fit_documents(lengths_of(dataset), limit, policy, "limit"))


@pytest.mark.parametrize(
    ("columns", "limit", "policy"),
    [(TWO, 4, "error"), (LATE_TARGETS, 4, "error"), (LATE_TARGETS, 3, "split")],
    ids=["no labels", "late targets", "late targets in the second part"],
)
@in_each_form
def test_data_sets_with_a_target(make, columns, limit, policy):
    check_targets_of(make(columns), limit, policy)


@pytest.mark.parametrize(
    ("columns", "limit", "policy", "entry"),
    [
        (ONE_TOKEN, 4, "error", Data.SINGLE_TOKENS),
        ({"input_ids": [[1, 2], [2]], "labels": [[1, -100], [2]]}, 4, "error", Data.NO_TARGETS),
        (LATE_TARGETS, 3, "truncate", Capacity.TARGETS_CUT),
    ],
    ids=["one token each", "first token alone", "late targets cut off"],
)
@in_each_form
def test_data_sets_without_a_target(make, columns, limit, policy, entry):
    with refused(entry, name="the data set", documents=2, longest=limit):
        check_targets_of(make(columns), limit, policy)
