import logging

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hf_distca.collator.long_documents import fit_documents
from hf_distca.collator.refusals import Data
from tests.refused import refused

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
