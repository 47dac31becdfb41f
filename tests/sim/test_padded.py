"""Padded batches of strategies, counted by hand: a query-key pair takes a second forward and two
backward.
"""

from dataclasses import replace

import pytest

from hf_distca.dispatch.padded import plan_sequences
from hf_distca.predict.seconds import LinkCost, Links
from hf_distca.sim.padded import PaddedFigures, padded_advice, padded_columns, simulate_padded
from tests.sim.test_simulate import PROFILE, SETTINGS, SETUP

LAYERS = 3
BATCH = [[4, 1], [2, 2]]
"""Lengths of the sequences of two ranks: 10 and 1 pairs on the first, 3 and 3 on the second."""


def simulated(batches, setup=SETUP, settings=SETTINGS):
    found = simulate_padded(
        batches, setup, settings, lambda batch, _: plan_sequences(batch, settings)
    )
    return {figures.name: figures for figures in found}


def test_seconds_and_rows_of_a_batch():
    settings = replace(SETTINGS, document_layout="whole")
    found = simulated([BATCH], settings=settings)
    pairs = {  # of the busiest rank, and of both
        "padded to the longest": (10 + 10, 20 + 6),
        "packed on each rank": (10 + 1, 11 + 6),
        "whole sequences balanced": (10, 10 + 7),  # 4 alone; 2, 2 and 1
        "hf_distca": (9, 10 + 7),  # core attention moves too
    }
    assert list(found) == list(pairs)
    for name, (busiest, total) in pairs.items():
        figures = found[name]
        assert (figures.forward_seconds, figures.step_seconds) == (
            LAYERS * busiest,
            LAYERS * 3 * busiest,
        ), name
        assert figures.imbalance == pytest.approx(busiest / (total / 2)), name
        assert figures.tokens_per_second == pytest.approx(9 / (LAYERS * 3 * busiest)), name
    assert [figures.rows for figures in found.values()] == [4 + 4 + 2 + 2, 9, 9, 9]


def test_more_tokens_than_ranks_hold_run_as_micro_batches_and_long_sequences_are_divided():
    found = simulated([[[8], [8]], [[8, 8], [8, 8]]])
    assert (
        found["hf_distca"].step_seconds == LAYERS * 3 * (36 + 2 * 36) / 2
    )  # one micro-batch, then two
    found = simulated(
        [[[16], [1]]],
        setup=replace(SETUP, tokens_per_rank=9),
        settings=replace(SETTINGS, tokens_per_rank=9),
    )
    assert found["whole sequences balanced"].step_seconds == LAYERS * 3 * 136
    assert found["hf_distca"].step_seconds == pytest.approx(LAYERS * 3 * (136 + 1) / 2, rel=0.06)


def test_tokens_and_hidden_states_travel_and_gradients_of_these_only_in_training():
    # A byte takes a second. One sequence of 4 tokens leaves the first rank, and at least one of 1
    # token comes.
    slow = Links(LinkCost(0.0, 1.0), LinkCost(0.0, 1.0))
    setup = replace(SETUP, profile=replace(PROFILE, exchange=slow))
    settings = replace(SETTINGS, document_layout="whole")
    moved, free = (
        simulated([[[4, 4], [1, 1]]], setup=each, settings=settings)["hf_distca"]
        for each in (setup, SETUP)
    )
    hidden_bytes = 8 * 4
    assert moved.forward_seconds - free.forward_seconds == 4 * (16 + hidden_bytes)
    assert moved.step_seconds - free.step_seconds == 4 * (16 + 2 * hidden_bytes)


def test_columns_and_advice():
    found = [
        PaddedFigures(name, 1.0, seconds, 1.25, 1200.0, 3000.0)
        for name, seconds in zip(simulated([BATCH]), (4.0, 2.0, 1.5, 1.0), strict=True)
    ]
    assert list(padded_columns(found[1], found[0]).values()) == [
        "packed on each rank", "1.000", "2.000", "1,200", "1.25", "3,000", "2.00",
    ]  # fmt: skip
    assert (
        padded_advice(found)
        == "Padded batches: hf_distca has 4.00× the speed of padding, 2.00× the speed of packing"
        " each rank's own rows, 1.50× the speed of balancing whole sequences."
    )
