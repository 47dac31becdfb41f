"""Least seconds of the plans of a layout."""

from dataclasses import replace

import numpy as np
import pytest

from hf_distca.plan import AttentionKind
from hf_distca.planner.choose import _Search
from hf_distca.planner.layout import fixed_layout
from hf_distca.planner.layout_bounds import work_of
from hf_distca.planner.settings import PlanSettings
from hf_distca.predict.seconds import KernelCost, KindCosts, LinkCost, Links, StepCosts
from hf_distca.units import AUTO

KIND = AttentionKind(None, 4, 2, 8, 8)
FREE = LinkCost(0.0, np.inf)
KERNEL = KernelCost(call=100.0, row=0.0, key=0.0, pair=1.0, task=1000.0)


def costs(kernel=KERNEL, between=FREE, token=0.0, kind=KIND, **changed):
    """A layer whose backward costs nothing, and a token of `token` seconds in its forward."""
    kinds = (KindCosts(kind, 1, kernel, kernel.scaled(0.0)),)
    return StepCosts(kinds, token, 0.0, 0.0, 0.0, Links(FREE, between), **changed)


def test_ranks_compute_what_they_hold():
    layout = fixed_layout([[4, 4]], ranks=2)
    work = work_of([layout], costs(), (0, 0), 2)
    assert work.attention[0].tolist() == [100 + 1000 + 10] * 2
    # A cut document: the second rank reads keys of the first one in a second call, as a second
    # task.
    layout = fixed_layout([[6, 2]], ranks=2)
    work = work_of([layout], costs(), (0, 0), 2)
    assert work.attention[0].tolist() == [1110, 2 * 100 + 3 * 1000 + 5 + 6 + 3]
    # With a window that a rank holds, it may need no keys of others.
    windowed = replace(KIND, window=2)
    work = work_of([layout], costs(kind=windowed), (0, 0), 2)
    assert work.attention[0].tolist() == [100 + 1000 + 7, 100 + 2 * 1000 + 4 + 3]


@pytest.mark.parametrize(
    ("tolerance", "seconds"),
    [
        pytest.param(0.0, 65 / 2, id="all finish together"),
        pytest.param(0.1, 65 / 2 * 1.09, id="the tolerance is used up"),
        pytest.param(9.0, 55, id="nothing moves"),
    ],
)
def test_balancing_moves_what_exceeds_the_tolerance(tolerance, seconds):
    layout = fixed_layout([[10], [4]])
    kernel = KernelCost(0.0, 0.0, 0.0, 1.0)
    work = work_of([layout], costs(kernel), (0, 0), 2)
    assert work.least_seconds((2,), np.array([tolerance]), costs(kernel)) == pytest.approx(seconds)
    # In groups of one rank nothing moves. All else is added.
    work = work_of([layout], costs(kernel, token=2.0), (0, 0), 2)
    of_ranks = work.least_seconds((1, 1), np.array([tolerance] * 2), costs(kernel))
    assert of_ranks == 55 + 2 * 10
    # A rank that is half as fast gets a third of the work.
    slow = costs(kernel, slowness=(1.0, 2.0))
    assert work_of([layout], slow, (0, 0), 2).least_seconds(
        (2,), np.array([0.0]), slow
    ) == pytest.approx(65 / 1.5)


def test_rows_cross_nodes_in_any_plan():
    # Of 12 rows each node has 6: the second one needs the first 6 rows, most of them in any plan.
    layout = fixed_layout([[12]], ranks=2)
    kernel = KernelCost(0.0, 0.0, 0.0, 1.0)
    of_ranks = costs(kernel, LinkCost(0.0, 1.0), token=10.0)
    row, crossing = PlanSettings(2, 12, (KIND,)).row_bytes(KIND).kv, 0.7 * 6
    work = work_of([layout], of_ranks, (0, 1), 2)
    # The forward sends K and V, the backward sends them again and returns their gradients.
    assert work.exchanged == pytest.approx((1 + 2) * crossing * row)
    # The rank with 57 pairs hides a part of the forward's exchange, and nothing of the backward's.
    assert work.exposed == pytest.approx(3 * crossing * row - 57)
    assert work.least_seconds((2,), np.zeros(1), of_ranks) == 78 / 2 + 60 + work.exposed
    # Two nano-batches hide exchanges behind all that they compute.
    two = work_of([layout, layout], of_ranks, (0, 1), 2)
    least = two.least_seconds((2,), np.zeros(1), of_ranks)
    assert least == pytest.approx(2 * 3 * crossing * row)
    # Inside a node rows travel fast, and a window needs few of them.
    assert work_of([layout], of_ranks, (0, 0), 2).exchanged == 0
    windowed = costs(kernel, LinkCost(0.0, 1.0), kind=replace(KIND, window=2))
    assert work_of([layout], windowed, (0, 1), 2).exchanged == 0


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([2000, 1150], id="two-long-documents"),
        pytest.param([600, *[100] * 30], id="one-long-document"),
        pytest.param([500] * 9, id="a-document-fits-in-no-group"),
    ],
)
@pytest.mark.parametrize("bandwidth", [np.inf, 2e4])
def test_no_plan_is_faster_than_its_layout_allows(lengths, bandwidth):
    """But for the rounding to rows, and for rows that balancing needs not send."""
    settings = PlanSettings(8, 640, (KIND,), ranks_per_node=2, balance_block_size=16)
    kernel = KernelCost(0.02, 1e-5, 1e-6, 1e-5, task=1e-4)
    of_ranks = costs(kernel, LinkCost(0.0, bandwidth), 1e-4)
    search = _Search(np.array(lengths), replace(settings, ping_pong=AUTO, costs=of_ranks), list)
    for listed in search.in_groups():
        for candidate in (listed, replace(listed, tolerance=0.1), replace(listed, nano_batches=2)):
            planned = search.planned(candidate)
            if planned is not None:
                assert search.bound_of_layout(candidate) <= 1.01 * planned.seconds
