import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hf_distca.collator.sampler import GlobalBatchSampler, fit_documents
from hf_distca.plan import AttentionKind
from hf_distca.planner.bin_packing import (
    pack_in_order,
    place_evenly,
    place_tightly,
    whole_documents,
)
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings
from tests.planner.plan_checks import check_plan


def packed(lengths, capacity):
    return list(pack_in_order(zip(lengths, range(len(lengths)), strict=True), capacity))


def test_written_out():
    # In order a document waits for sixteen others at most, and no more are read than needed.
    assert packed([3, 4, 2, 1, 5], 6) == [[0, 2, 3], [1], [4]]
    assert packed([1] + [6] * 40, 6) == [[number] for number in range(41)]
    source = iter([(4, "a"), (2, "b"), (1, "c")])
    assert next(pack_in_order(source, 6)) == ["a", "b"]
    assert next(source) == (1, "c")
    # Evenly, each goes into the emptiest bin.
    assert place_evenly([5, 4, 3, 2], 2, 7) == [0, 1, 1, 0]
    assert place_evenly([5, 4, 3, 2], 2, 6) is None

    def on_ranks(lengths, tokens_per_rank):
        return [
            documents.tolist()
            for documents in whole_documents(np.array(lengths), 2, tokens_per_rank)
        ]

    # 7 | 5, then 4 to the second, 3 to the first, 1 to the second: 10 and 10; in halves 7 + 3 and 5
    # + (4, 1).
    assert on_ranks([3, 7, 1, 5, 4], 10) == [[1, 0], [3, 2, 4]]
    # 6 6 | 4 4 4: evenly 6 4 4 and 6 4 need 14; tightly 6 6 and 4 4 4.
    assert on_ranks([6, 4, 6, 4, 4], 12) == [[0, 2], [1, 4, 3]]
    # Longest first, 2 is left over both ways: evenly 5 3 | 3 3 2, tightly 5 3 | 3 3 2. So in their
    # order.
    assert on_ranks([5, 2, 2, 3, 3, 3], 9) == [[0, 1, 2], [3, 5, 4]]
    with pytest.raises(
        ValueError,
        match=r"document 1 has 11 tokens.*holds 10; raise tokens_per_rank.*long_documents",
    ):
        on_ranks([3, 11], 10)
    with pytest.raises(
        ValueError, match="3 documents of 18 tokens do not fit on 2 ranks of 10 without cutting"
    ):
        on_ranks([6, 6, 6], 10)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(100, 400))
def test_bins_hold_each_document_once_and_never_too_many_and_tightly_is_best_fit(lengths, capacity):
    bins = packed(lengths, capacity)
    assert sorted(item for bin_ in bins for item in bin_) == list(range(len(lengths)))
    assert all(0 < sum(lengths[item] for item in bin_) <= capacity for bin_ in bins)
    lengths = sorted(lengths, reverse=True)
    rooms = []
    for length, chosen in zip(lengths, place_tightly(lengths, capacity), strict=True):
        fitting = [room for room in rooms if room >= length]
        if chosen == len(rooms):
            assert not fitting
            rooms.append(capacity)
        else:
            assert rooms[chosen] == min(fitting)
        rooms[chosen] -= length
    assert np.min(rooms) >= 0


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=40),
    st.integers(1, 5),
    st.booleans(),
    st.integers(0, 3),
)
@example([9, 11, 13, 19, 21], 2, False, 0)  # balanced alone, a rank would have 41
def test_every_micro_batch_of_the_sampler_fits_and_none_is_cut(lengths, ranks, shuffle, epoch):
    settings = PlanSettings(
        ranks, 40, document_layout="whole", balance_block_size=4, ping_pong=True
    )
    excerpts = fit_documents(np.array(lengths), 40, "error", "tokens_per_rank")
    sampler = GlobalBatchSampler(excerpts, 40, shuffle=shuffle, seed=3, bins=ranks)
    sampler.set_epoch(epoch)
    batches = [batch.excerpts["document"].tolist() for (batch,) in sampler]
    assert len(batches) == len(sampler)
    assert sorted(np.concatenate(batches)) == list(range(len(lengths)))
    for batch in batches:
        assert batch
        plan = plan_micro_batch(
            [lengths[document] for document in batch] + [1] * (ranks - len(batch)), settings
        )
        assert plan.tokens.max() <= 40
        for nano in plan.nano_batches:
            assert not nano.layout.has_cuts
            assert (nano.layout.tokens > 0).all()
            check_plan(nano.plans[AttentionKind()])
