import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_distca.planner.cost import pairs
from hf_distca.planner.flows import Price, Source, plan_flows


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


def source(stops, price, starts=None):
    starts = np.zeros(len(stops), np.int64) if starts is None else np.array(starts)
    return Source(np.arange(len(stops)), starts, np.array(stops), price)


def test_reach_is_where_rows_cost_least():
    price = Price(rows=16384, kv=4096, window=None)
    flow = 1e8
    ends = np.linspace((2 * flow) ** 0.5 + 1, 60000, 100001)
    costs = price.of(np.sqrt(ends**2 - 2 * flow), ends, np.zeros(1))
    assert ends[costs.argmin()] == pytest.approx(price.reach * (2 * flow) ** 0.5, rel=1e-3)


def test_a_small_amount_comes_from_one_task():
    assert source([1000, 30000, 900], Price(16384, 4096, None)).take(1e6, {}) == {1: 1e6}


def test_a_large_amount_comes_from_several_tasks_one_after_another():
    given = source([1000, 1000, 1000], Price(16384, 4096, None)).take(pairs(0, 1000) * 1.5, {})
    assert given == {0: 500500.0, 1: 250250.0}


def test_the_taker_that_has_the_keys_gets_them():
    near = source([5000, 5000], Price(16384, 4096, None)).take(1e5, {1: 5000})
    assert list(near) == [1]


def test_parts_of_rows_are_not_collected_from_several_tasks():
    assert source([1, 1, 1], Price(16384, 4096, 1)).take(0.7572, {}) == {0: 0.7572}
