"""Padded batches of strategies, counted by hand: a query-key pair takes a second forward and two
backward.
"""

from dataclasses import replace

import numpy as np
import pytest

from hf_distca.planner import prefixes
from hf_distca.planner.padding import plan_padded
from hf_distca.predict.seconds import LinkCost, Links
from hf_distca.sim.padded_batches import (
    PaddedFigures,
    padded_advice,
    padded_columns,
    simulate_padded,
)
from hf_distca.sim.trees import TURNS, DrawnBatch, turn_lengths, turns_of_ranks
from tests.sim.test_compare import PROFILE, RUN, changed

LAYERS = 3
BATCH = [[4, 1], [2, 2]]
"""Lengths of the sequences of two ranks: 10 and 1 pairs on the first, 3 and 3 on the second."""


WHOLE = changed(document_layout="whole")


def simulated(batches, run=RUN):
    drawn = [batch if isinstance(batch, DrawnBatch) else DrawnBatch(batch) for batch in batches]
    figures_of_strategies = simulate_padded(
        drawn,
        run,
        lambda batch, _: plan_padded(batch.lengths, run.plans, batch.hashes),
    )
    return {figures.name: figures for figures in figures_of_strategies}


def test_seconds_and_rows_of_a_batch(subtests):
    figures_of_strategies = simulated([BATCH], WHOLE)
    pairs = {  # of the busiest rank, and of both
        "padded to the longest": (10 + 10, 20 + 6),
        "packed on each rank": (10 + 1, 11 + 6),
        "whole sequences balanced": (10, 10 + 7),  # 4 alone; 2, 2 and 1
        "hf_distca": (9, 10 + 7),  # core attention moves too
    }
    assert list(figures_of_strategies) == list(pairs)
    for name, (busiest, total) in pairs.items():
        figures = figures_of_strategies[name]
        with subtests.test(name):
            assert figures.forward_seconds == LAYERS * busiest
            assert figures.step_seconds == LAYERS * 3 * busiest
            assert figures.imbalance == pytest.approx(busiest / (total / 2))
            assert figures.tokens_per_second == pytest.approx(9 / (LAYERS * 3 * busiest))
    assert [figures.rows for figures in figures_of_strategies.values()] == [4 + 4 + 2 + 2, 9, 9, 9]


def test_more_tokens_than_ranks_hold_run_as_micro_batches_and_long_sequences_are_divided():
    figures_of_strategies = simulated([[[8], [8]], [[8, 8], [8, 8]]])
    assert (
        figures_of_strategies["hf_distca"].step_seconds == LAYERS * 3 * (36 + 2 * 36) / 2
    )  # one micro-batch, then two
    figures_of_strategies = simulated([[[16], [1]]], changed(rows_per_rank=9))
    assert figures_of_strategies["whole sequences balanced"].step_seconds == LAYERS * 3 * 136
    assert figures_of_strategies["hf_distca"].step_seconds == pytest.approx(
        LAYERS * 3 * (136 + 1) / 2, rel=0.06
    )


def test_tokens_and_hidden_states_travel_and_gradients_of_these_only_in_training():
    # A byte takes a second. One sequence of 4 tokens leaves the first rank, and at least one of 1
    # token comes.
    slow = Links(LinkCost(0.0, 1.0), LinkCost(0.0, 1.0))
    run = replace(WHOLE, profile=replace(PROFILE, exchange=slow))
    moved, free = (
        simulated([[[4, 4], [1, 1]]], run_of_links)["hf_distca"] for run_of_links in (run, WHOLE)
    )
    hidden_bytes = 8 * 4
    assert moved.forward_seconds - free.forward_seconds == 4 * (16 + hidden_bytes)
    assert moved.step_seconds - free.step_seconds == 4 * (16 + 2 * hidden_bytes)


def test_equal_prefixes_are_computed_once_and_go_back_to_every_sequence(monkeypatch):
    # Three sequences of 4 tokens, of which the first two tokens are equal: 8 rows are computed.
    monkeypatch.setattr(prefixes, "BLOCK", 2)
    lengths = [[4, 4], [4]]
    hashes = [[(b"0", b"1"), (b"0", b"2")], [(b"0", b"3")]]
    figures_of_strategies = simulated([DrawnBatch(lengths, hashes)], WHOLE)
    unshared = figures_of_strategies["hf_distca, no prefix sharing"]
    shared = figures_of_strategies["hf_distca"]
    assert [figures.rows for figures in figures_of_strategies.values()] == [12, 12, 12, 12, 8]
    # Without prefix sharing 10 pairs for each sequence. With it 3 pairs, 7 for the last two rows of
    # each sequence, and 1 for the filler of the rank without the tree.
    assert unshared.step_seconds == LAYERS * 3 * 15
    assert shared.step_seconds == LAYERS * 3 * 14
    assert shared.tokens_per_second == pytest.approx(12 / shared.step_seconds)
    expected = ", 1.07× the speed of planning without prefix sharing."
    assert padded_advice(list(figures_of_strategies.values())).endswith(expected)

    # A byte takes a second. Each rank has a tree of a sequence of each rank. Of its 6 rows it is
    # sent those that the last sequence has, at most 4; it sends 4 hidden states back.
    lengths = [[4, 4], [4, 4]]
    hashes = [[(b"0", b"1"), (b"2", b"3")], [(b"0", b"4"), (b"2", b"5")]]
    slow = Links(LinkCost(0.0, 1.0), LinkCost(0.0, 1.0))
    run = replace(WHOLE, profile=replace(PROFILE, exchange=slow))
    moved, free = (
        simulated([DrawnBatch(lengths, hashes)], run_of_links)["hf_distca"]
        for run_of_links in (run, WHOLE)
    )
    hidden_bytes = 8 * 4
    assert moved.rows == 12
    assert moved.forward_seconds - free.forward_seconds == 4 * (16 + hidden_bytes)
    assert moved.step_seconds - free.step_seconds == 4 * (16 + 2 * hidden_bytes)


def test_turns_of_a_session_begin_with_all_turns_before():
    batch = next(turns_of_ranks(seed=1, ranks=2, sequences=30))
    lengths = [length for of_rank in batch.lengths for length in of_rank]
    hashes = [of_sequence for of_rank in batch.hashes for of_sequence in of_rank]
    assert lengths[:TURNS] == sorted(lengths[:TURNS])
    assert lengths[TURNS] < lengths[TURNS - 1]  # the next session
    assert [len(of_sequence) for of_sequence in hashes] == [-(-length // 128) for length in lengths]
    whole = lengths[0] // 128
    assert hashes[1][:whole] == hashes[0][:whole]
    assert hashes[TURNS][0] != hashes[0][0]
    planned = plan_padded(batch.lengths, changed(rows_per_rank=1 << 20).plans, batch.hashes)
    sessions = [lengths[TURNS - 1], lengths[-1]]
    # A turn ends inside a block, which it shares with no other sequence.
    assert sum(sessions) <= planned.sequences.computed_rows <= sum(sessions) + 128 * 60
    drawn = turn_lengths()(np.random.default_rng(1), 60)
    assert drawn.tolist() == lengths


def test_columns_and_advice():
    figures_of_strategies = [
        PaddedFigures(name, 1.0, seconds, 1.25, 1200.0, 3000.0)
        for name, seconds in zip(simulated([BATCH]), (4.0, 2.0, 1.5, 1.0), strict=True)
    ]
    assert list(padded_columns(figures_of_strategies[1], figures_of_strategies[0]).values()) == [
        "packed on each rank", "1.000", "2.000", "1,200", "1.25", "3,000", "2.00",
    ]  # fmt: skip
    assert (
        padded_advice(figures_of_strategies)
        == "Padded batches: hf_distca has 4.00× the speed of padding, 2.00× the speed of packing"
        " each rank's own rows, 1.50× the speed of balancing whole sequences."
    )
