import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_distca.planner.flows import plan_flows


def test_a_surplus_goes_to_the_tightest_room_that_takes_all():
    assert plan_flows([5.0, -9.0, -6.0, -2.0], {}) == {0: [(2, 5.0)]}


def test_a_surplus_beyond_every_room_goes_to_the_largest_first():
    assert plan_flows([12.0, -9.0, -6.0, -2.0], {}) == {0: [(1, 9.0), (2, 3.0)]}


def test_a_partner_that_takes_all_goes_first():
    assert plan_flows([5.0, -9.0, -6.0, -2.0], {0: {0, 1, 3}}) == {0: [(1, 5.0)]}


def test_partners_share_takers():
    partners = {0: {0, 1}, 1: {0, 1}}
    assert plan_flows([5.0, 4.0, -5.0, -9.0, -4.0], partners) == {0: [(3, 5.0)], 1: [(3, 4.0)]}


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=12), st.sets(st.integers(0, 11)))
def test_flows_end_every_surplus_that_there_is_room_for(surplus, near):
    near = near & set(range(len(surplus)))
    flows = plan_flows([float(extra) for extra in surplus], dict.fromkeys(range(12), near))
    left = list(surplus)
    for giver, given_ in flows.items():
        for taker, amount in given_:
            assert amount > 0
            left[giver] -= amount
            left[taker] += amount
    room = -sum(extra for extra in surplus if extra < 0)
    wanted = sum(extra for extra in surplus if extra > 0)
    assert sum(extra for extra in left if extra > 0) == pytest.approx(max(wanted - room, 0))
