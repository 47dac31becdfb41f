from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def as_for_a_script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def test_documents_begin_where_positions_do():
    from peer_trainers import document_lengths

    assert document_lengths(torch.tensor([0, 1, 2, 0, 0, 1])) == (3, 1, 2)


def test_pairs_are_those_that_are_computed():
    from peer_trainers import Computed

    computed = Computed()
    examples = [{"input_ids": [5] * length} for length in (4, 2, 1)]
    assert computed.flattened(len)(examples) == 3
    assert computed.take() == 10 + 3 + 1
    assert computed.padded(len)(examples) == 3
    assert computed.take() == 3 * 10
    assert computed.take() == 0


def test_figures_of_ranks_are_put_together():
    from peers import together

    ranks = [
        {"mix": {"seconds": 2.0, "loss": 7.0, "pairs": 30.0}},
        {"mix": {"seconds": 2.0, "loss": 7.0, "pairs": 10.0}},
    ]
    assert together(ranks) == {"mix": {"seconds": 2.0, "loss": 7.0, "imbalance": 1.5}}
    assert together([{"mix": {"MiB": 3.0}}, {"mix": {"MiB": 5.0}}]) == {"mix": {"MiB": 5.0}}


def test_losses_are_compared_step_by_step():
    from peers import largest_difference

    assert largest_difference([2.0, 3.0], [2.0, 4.0]) == 0.25


def test_mixes_have_the_tokens_and_suit_all_numbers_of_ranks():
    from peers import MIXES, RANKS, TOKENS

    for lengths in MIXES.values():
        assert sum(lengths) == TOKENS
        assert all(length % 32 == 0 for length in lengths)
        assert all(len(lengths) % ranks == 0 for ranks in RANKS)
