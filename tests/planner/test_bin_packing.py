import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hf_distca.planner.bin_packing import pack_in_order, place_evenly, place_tightly

some_lengths = st.lists(st.integers(1, 100), min_size=1, max_size=60)


def packed(lengths, capacity):
    return list(pack_in_order(zip(lengths, range(len(lengths)), strict=True), capacity))


def test_in_order_a_document_that_does_not_fit_waits():
    assert packed([3, 4, 2, 1, 5], 6) == [[0, 2, 3], [1], [4]]


def test_in_order_takes_no_more_documents_than_it_needs():
    source = iter([(4, "a"), (2, "b"), (1, "c")])
    assert next(pack_in_order(source, 6)) == ["a", "b"]
    assert next(source) == (1, "c")


def test_in_order_a_document_waits_for_sixteen_others_at_most():
    bins = packed([1] + [6] * 40, 6)
    assert bins[0] == [0]
    assert [bin_[0] for bin_ in bins] == list(range(41))


def test_in_order_of_nothing():
    assert packed([], 6) == []


@given(some_lengths)
def test_in_order_gives_each_document_once_and_never_overfills(lengths):
    bins = packed(lengths, 100)
    assert sorted(item for bin_ in bins for item in bin_) == list(range(len(lengths)))
    assert all(0 < sum(lengths[item] for item in bin_) <= 100 for bin_ in bins)


def test_evenly_into_the_emptiest():
    assert place_evenly([5, 4, 3, 2], 2, 7) == [0, 1, 1, 0]
    assert place_evenly([5, 4, 3, 2], 2, 6) is None


def test_tightly_into_the_fullest_that_has_room():
    assert place_tightly([7, 6, 3, 3, 1], 10) == [0, 1, 0, 1, 1]
    assert place_tightly([10, 10], 10) == [0, 1]


@given(some_lengths, st.integers(100, 400))
def test_tightly_is_best_fit(lengths, capacity):
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
