import numpy as np
import pytest

from hf_distca.collator.documents import ANY_COLUMNS, TokenDocument, fetch_documents, token_document
from hf_distca.collator.refusals import Data
from tests.refused import refused


def test_targets_are_the_next_tokens():
    document = token_document({"input_ids": [5, 6, 7]}, "document 0", ANY_COLUMNS)
    assert document.input_ids.tolist() == [5, 6, 7]
    assert document.targets.tolist() == [6, 7, -100]
    assert document.input_ids.dtype == document.targets.dtype == np.int64


def test_targets_are_the_next_labels():
    document = token_document({"input_ids": [5, 6, 7], "labels": [-100, -100, 9]}, "document 0", ANY_COLUMNS)
    assert document.targets.tolist() == [-100, 9, -100]


def test_rows_keep_their_targets():
    rows = token_document({"input_ids": [5, 6, 7]}, "document 0", ANY_COLUMNS).rows(0, 2)
    assert (rows.input_ids.tolist(), rows.targets.tolist()) == ([5, 6], [6, 7])


def test_a_filler_has_no_target():
    filler = TokenDocument.filler(3)
    assert (filler.input_ids.tolist(), filler.targets.tolist()) == ([3], [-100])


@pytest.mark.parametrize("input_ids", [[[1, 2]], [0.5], ["a"], 3])
def test_input_ids_that_are_no_list_of_integers(input_ids):
    with refused(Data.NOT_INTEGERS, name="document 0", column="input_ids"):
        token_document({"input_ids": input_ids}, "document 0", ANY_COLUMNS)


def test_documents_are_fetched_together_where_the_data_set_offers_that():
    class Batched:
        def __getitems__(self, indices):
            return [{"input_ids": [index] * 2} for index in indices]

    assert [d.input_ids.tolist() for d in fetch_documents(Batched(), [4, 1], ANY_COLUMNS)] == [[4, 4], [1, 1]]
