import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_distca.collator.long_documents import fit_documents

LENGTHS = np.array([3, 9, 4, 5])


def fit(policy, limit=4):
    return fit_documents(LENGTHS, limit, policy, "ranks · tokens_per_rank").tolist()


def test_documents_within_the_limit_stay_whole():
    whole = [(0, 0, 3, 3), (1, 0, 9, 9), (2, 0, 4, 4), (3, 0, 5, 5)]
    for policy in ("error", "truncate", "split"):
        assert fit(policy, limit=9) == whole


def test_error_says_what_and_what_to_do():
    with pytest.raises(ValueError, match="2 of 4 documents are longer") as error:
        fit("error")
    for part in ("ranks · tokens_per_rank = 4", "document 1, has 9", "'truncate'", "'split'"):
        assert part in str(error.value)


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
    with pytest.raises(ValueError, match="is 'drop'; expected 'error', 'truncate' or 'split'"):
        fit("drop")
    with pytest.raises(ValueError, match=r"ranks · tokens_per_rank is 0; expected at least one token"):
        fit("split", limit=0)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 20))
def test_pieces_cover_every_token_once(lengths, limit):
    excerpts = fit_documents(np.array(lengths), limit, "split", "limit")
    rows = [(p["document"], row) for p in excerpts for row in range(p["start"], p["stop"])]
    assert rows == [(document, row) for document, length in enumerate(lengths) for row in range(length)]
    assert (excerpts["stop"] - excerpts["start"]).max() <= limit
