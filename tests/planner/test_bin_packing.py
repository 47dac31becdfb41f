"""Packing of documents into bins."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hf_distca.collator.sampler import GlobalBatchSampler, fit_documents
from hf_distca.plan import AttentionKind
from hf_distca.planner import bin_packing
from hf_distca.planner.bin_packing import (
    NOWHERE,
    Bins,
    fits_evenly,
    halves,
    largest_first,
    pack_in_order,
    place_evenly,
    place_tightly,
    split_documents,
    whole_documents,
)
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings
from tests.planner.plan_checks import check_plan


def packed(lengths, capacity):
    return list(pack_in_order(zip(lengths, range(len(lengths)), strict=True), capacity))


def on_ranks(lengths, tokens_per_rank, ranks=2):
    documents_of_ranks = whole_documents(np.array(lengths), ranks, tokens_per_rank)
    return [documents.tolist() for documents in documents_of_ranks]


@pytest.mark.parametrize(
    ("lengths", "bins"),
    [
        ([3, 4, 2, 1, 5], [[0, 2, 3], [1], [4]]),
        # A document waits for sixteen others at most.
        ([1] + [6] * 40, [[number] for number in range(41)]),
    ],
)
def test_bins_are_filled_one_after_another(lengths, bins):
    assert packed(lengths, 6) == bins


def test_no_more_documents_are_read_than_needed():
    source = iter([(4, "a"), (2, "b"), (1, "c")])
    assert next(pack_in_order(source, 6)) == ["a", "b"]
    assert next(source) == (1, "c")


def test_without_looking_ahead_documents_keep_their_order():
    documents = zip([3, 4, 2, 1, 5], range(5), strict=True)
    assert list(pack_in_order(documents, 6, look_ahead=0)) == [[0], [1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("preference", "bins", "sizes", "costs", "bin_of_item"),
    [
        # The first one has no work yet, then bin 1 has less.
        ("least_work", Bins([9, 9]), [1, 1, 1], [5, 3, 1], [0, 1, 1]),
        ("least_work", Bins([9, 9]), [1, 1], [5, 5], [0, 1]),  # of equal bins the first one
        # A bin of twice the speed takes half as long.
        ("least_work", Bins([9, 9], speeds=[1, 2]), [1] * 4, [2] * 4, [0, 1, 1, 0]),
        # Work below 0 is what a bin should get.
        ("least_work", Bins([9, 9], work=[0, -5]), [1, 1], [4, 4], [1, 1]),
        # Bin 0 has too little room for the second item, but room for the third.
        ("least_work", Bins([3, 9]), [2, 2, 1], [1, 5, 1], [0, 1, 0]),
        ("least_work", Bins([3, 3]), [2, 2, 2], [1, 1, 1], [0, 1, NOWHERE]),
        ("most_room", Bins([3, 5]), [1, 1, 1, 1], [1] * 4, [1, 1, 0, 1]),
        ("least_room", Bins([5, 3]), [2, 1, 4], [1] * 3, [1, 1, 0]),
        # Of bins with equal room the one that got an item last.
        ("least_room", Bins([4, 5, 5]), [3, 4, 4, 1], [1] * 4, [0, 1, 2, 2]),
    ],
)
def test_each_item_goes_to_the_preferred_bin_with_room(preference, bins, sizes, costs, bin_of_item):
    order = np.arange(len(sizes))
    chosen = bins.pack(np.array(sizes), np.array(costs), order, getattr(bins, preference))
    assert chosen.tolist() == bin_of_item


def test_items_come_in_the_given_order_and_others_stay_out():
    bins = Bins([9, 9])
    chosen = bins.pack(np.ones(3, int), np.array([2, 4, 8]), np.array([2, 0]), bins.least_work)
    assert chosen.tolist() == [1, NOWHERE, 0]
    assert bins.room == [8, 8]
    assert bins.work == [8, 2]


def test_a_bin_may_be_overfilled():
    bins = Bins([4, 3])
    sizes = np.array([3, 3, 3, 1])
    order = np.arange(4)
    chosen = bins.pack(sizes, sizes, order, bins.least_work, when_full=bins.most_room)
    # Bin 0 has a row left, so it gets the third item too, and has no room for the last one.
    assert chosen.tolist() == [0, 1, 0, 1]
    assert bins.room == [-2, -1]


@pytest.mark.parametrize(
    ("costs", "limit", "bin_of_item"),
    [
        ([5, 4, 3, 2], 9, [0, 1, 0, 1]),  # 3 goes beside 5, which has more work than 4
        ([5, 4, 3, 2], 7, [0, 1, 1, 0]),
        ([5, 4, 4], 8, [0, 1, 1]),
        ([5, 4, 4], 7, [0, 1, 1]),  # beyond the limit both ways: to the least work
    ],
)
def test_bins_are_filled_up_to_a_limit(costs, limit, bin_of_item):
    bins = Bins([9, 9])
    costs = np.array(costs, float)
    chosen = bins.fill_up(np.ones(len(costs), int), costs, np.arange(len(costs)), limit)
    assert chosen.tolist() == bin_of_item


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=30),
    st.lists(st.integers(1, 30), min_size=1, max_size=6),
    st.sampled_from(["least_work", "most_room", "least_room"]),
    st.booleans(),
)
def test_the_packer_is_a_search_through_all_bins(items, rooms, preference, overfills):
    sizes, costs = np.array(items).T
    bins, expected = Bins(rooms), Bins(rooms)
    prefers, full = getattr(expected, preference), expected.most_room
    chosen = bins.pack(
        sizes,
        costs,
        np.arange(len(items)),
        getattr(bins, preference),
        when_full=bins.most_room if overfills else None,
    )
    for (size, cost), number in zip(items, chosen.tolist(), strict=True):
        with_room = [
            candidate for candidate in range(len(rooms)) if expected.room[candidate] >= size
        ]
        if with_room:
            assert number == min(with_room, key=prefers)
        elif overfills:
            assert number == min(range(len(rooms)), key=full)
        else:
            assert number == NOWHERE
            continue
        expected.put(number, size, cost)
    assert bins.room == expected.room
    assert bins.work == expected.work


@pytest.mark.parametrize(("capacity", "bin_of_document"), [(7, [0, 1, 1, 0]), (6, None)])
def test_evenly_each_document_goes_to_the_emptiest_bin(capacity, bin_of_document):
    bins = place_evenly(np.array([5, 4, 3, 2]), np.arange(4), 2, capacity)
    assert (bins if bins is None else bins.tolist()) == bin_of_document


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=40),
    st.integers(1, 6),
    st.integers(30, 120),
    st.booleans(),
)
def test_evenly_is_the_packer_with_the_least_work(lengths, bins, capacity, longest_first):
    lengths = np.array(lengths)
    order = largest_first(lengths) if longest_first else np.arange(len(lengths))
    packer = Bins([capacity] * bins)
    expected = packer.pack(lengths, lengths, order, packer.least_work)
    fits = NOWHERE not in expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bin_packing, "PLACED_AT_ONCE", 7)
        placed = place_evenly(lengths, order, bins, capacity)
        assert fits_evenly(lengths, order, bins, capacity) == fits
    assert (None if placed is None else placed.tolist()) == (expected.tolist() if fits else None)


@pytest.mark.parametrize(
    ("lengths", "tokens_per_rank", "documents_of_ranks"),
    [
        # 7 | 5, then 4 to the second, 3 to the first, 1 to the second: 10 and 10; in halves 7 + 3
        # and 5 + (4, 1).
        ([3, 7, 1, 5, 4], 10, [[1, 0], [3, 2, 4]]),
        # 6 6 | 4 4 4: evenly 6 4 4 and 6 4 need 14; tightly 6 6 and 4 4 4.
        ([6, 4, 6, 4, 4], 12, [[0, 2], [1, 4, 3]]),
        # Longest first, 2 is left over both ways: evenly 5 3 | 3 3 2, tightly 5 3 | 3 3 2. So in
        # their order.
        ([5, 2, 2, 3, 3, 3], 9, [[0, 1, 2], [3, 5, 4]]),
    ],
)
def test_whole_documents_of_ranks(lengths, tokens_per_rank, documents_of_ranks):
    assert on_ranks(lengths, tokens_per_rank) == documents_of_ranks


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (
            [3, 11],
            r"document 1 has 11 tokens.*holds 10; raise tokens_per_rank.*long_documents",
        ),
        (
            [6, 6, 6],
            "3 documents of 18 tokens that stay whole, but .* on 2 ranks of 10",
        ),
    ],
)
def test_whole_documents_that_do_not_fit(lengths, message):
    with pytest.raises(ValueError, match=message):
        on_ranks(lengths, 10)


@pytest.mark.parametrize(
    ("lengths", "groups"),
    [
        ([4, 4, 4], [[0, 2], [1]]),
        ([1, 9, 5, 5], [[1, 0], [2, 3]]),
        ([3], [[0], []]),
    ],
)
def test_halves_of_about_equal_tokens(lengths, groups):
    assert [sorted(group) for group in groups] == [
        documents.tolist() for documents in halves(np.array(lengths))
    ]


@pytest.mark.parametrize(
    ("lengths", "ranks", "nano_batches"),
    [
        ([4, 4], 4, [[0], [1]]),
        ([4, 4], 5, None),  # fewer tokens than ranks
        ([5, 4], 1, None),  # more than half of the tokens
        ([4], 1, None),
    ],
)
def test_documents_of_two_nano_batches(lengths, ranks, nano_batches):
    divided = split_documents(np.array(lengths), ranks)
    assert (divided and [documents.tolist() for documents in divided]) == nano_batches


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(100, 400))
def test_bins_hold_each_document_once_and_never_too_many(lengths, capacity):
    bins = packed(lengths, capacity)
    assert sorted(item for items in bins for item in items) == list(range(len(lengths)))
    for items in bins:
        assert 0 < sum(lengths[item] for item in items) <= capacity


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(100, 400))
def test_tightly_is_best_fit(lengths, capacity):
    chosen_bins = place_tightly(np.array(lengths), np.arange(len(lengths)), capacity).tolist()
    rooms = []
    for length, chosen in zip(lengths, chosen_bins, strict=True):
        fitting = [room for room in rooms if room >= length]
        if chosen == len(rooms):
            assert not fitting
            rooms.append(capacity)
        else:
            assert rooms[chosen] == min(fitting)
        rooms[chosen] -= length
    assert min(rooms) >= 0


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
    spans = fit_documents(np.array(lengths), 40, "error", "tokens_per_rank")
    sampler = GlobalBatchSampler(spans, 40, shuffle=shuffle, seed=3, bins=ranks)
    sampler.set_epoch(epoch)
    batches = [batch.spans["document"].tolist() for (batch,) in sampler]
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
