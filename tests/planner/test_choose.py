"""The plan that is chosen, with costs of which the best way is known."""

from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np
import pytest

from hf_distca.plan import AttentionKind
from hf_distca.plan.cost import RowBytes
from hf_distca.plan.figures import bytes_moved, loads_of
from hf_distca.plan.stages import rows_by_stage
from hf_distca.planner import choose
from hf_distca.planner.build import packed_in_order
from hf_distca.planner.choose import (
    Candidate,
    PlannedCandidate,
    _Search,
    fastest_of,
)
from hf_distca.planner.micro_batch import plan_micro_batch, plan_placed
from hf_distca.planner.rank_groups import Placing
from hf_distca.planner.settings import UNBALANCED, PlanSettings
from hf_distca.predict.counts import count_plan
from hf_distca.predict.seconds import KernelCost, KindCosts, LinkCost, Links, StepCosts
from hf_distca.predict.walk import Walked
from hf_distca.units import AUTO
from tests.planner.exhaustive import every_plan, fewest_seconds_of_whole_documents, seconds_of

KIND = AttentionKind(None, 4, 2, 8, 8)
ROWS_OF_RANK = ["document", "start", "stop", "rank"]
FREE, SLOW = LinkCost(0.0, np.inf), LinkCost(0.0, 1.0)


def costs(within: LinkCost, between: LinkCost) -> StepCosts:
    """A pair takes a millisecond in the forward and twice as long in the backward, a token 0.4 in
    everything else.
    """
    forward, backward = KernelCost(0.0, 0.0, 0.0, 1e-3), KernelCost(0.0, 0.0, 0.0, 2e-3)
    return StepCosts(
        (KindCosts(KIND, 1, forward, backward),), 5e-5, 5e-5, 2.0, 1e-4, Links(within, between)
    )


def chosen(
    lengths,
    within=FREE,
    between=FREE,
    tokens=64,
    ranks=4,
    ranks_per_node=2,
    ranks_per_core=1.0,
    **settings,
):
    of_ranks = replace(costs(within, between), ranks_per_core=ranks_per_core)
    of_plans = PlanSettings(
        ranks,
        tokens,
        (KIND,),
        balance_block_size=4,
        ranks_per_node=ranks_per_node,
        costs=of_ranks,
        **{"ping_pong": AUTO, **settings},
    )
    return plan_micro_batch(lengths, of_plans)


def exchanges(plan) -> bool:
    plans = [of_kind for nano in plan.nano_batches for of_kind in nano.plans.values()]
    return any(bytes_moved(kind_plan, RowBytes()).any() for kind_plan in plans)


def test_documents_are_shared_where_links_are_fast_and_not_where_they_are_slow():
    plan = chosen([32] * 8)  # equal documents stay whole
    assert (plan.choice.group, len(plan.nano_batches), exchanges(plan)) == (1, 1, False)
    assert plan.choice.seconds == pytest.approx(2 * 3e-3 * 32 * 33 / 2 + 64 * 4e-4)
    lengths = [60, *[10] * 12]
    assert exchanges(chosen(lengths))
    assert not any(map(exchanges, (chosen(lengths, SLOW, SLOW), chosen([50, 50, 50, 40, 20]))))
    # Slow links between nodes are not used.
    plan = chosen(lengths, FREE, SLOW)
    assert plan.choice.group == 2
    assert exchanges(plan)
    for nano in plan.nano_batches:
        for of_kind in nano.plans.values():
            assert of_kind.nodes is None
            at = {document: rank // 2 for document, *_, rank, _ in of_kind.layout.segments.tolist()}
            assert all(
                at[document] == worker // 2 for document, _, _, worker in of_kind.tasks.tolist()
            )
    # A document too long for a node crosses all the same.
    plan = chosen([200, 20], FREE, SLOW)
    assert plan.choice.group == 4
    assert plan.tokens.max() <= 64


def plan_with_task_cost(task_s):
    """Plan two documents, which give two ranks 820 and 465 pairs.

    A cut saves the first rank some 177 pairs, 0.53 s.
    """
    step_costs = costs(FREE, FREE)
    (kind_costs,) = step_costs.kinds
    forward = replace(kind_costs.forward, task=task_s)
    backward = replace(kind_costs.backward, task=2 * task_s)
    step_costs = replace(step_costs, kinds=(KindCosts(KIND, 1, forward, backward),))
    settings = PlanSettings(2, 64, (KIND,), balance_block_size=4, costs=step_costs)
    return plan_micro_batch([40, 30], settings)


def test_a_document_is_cut_where_a_task_costs_little():
    plan = plan_with_task_cost(0.03)
    (nano,) = plan.nano_batches
    assert exchanges(plan)
    assert len(nano.plans[KIND].tasks) > 2


def test_a_document_is_not_cut_for_less_than_the_cut_costs():
    plan = plan_with_task_cost(0.3)
    (nano,) = plan.nano_batches
    assert not exchanges(plan)
    assert len(nano.plans[KIND].tasks) == 2
    assert plan.choice.seconds == pytest.approx(3e-3 * 820 + 3 * 0.3 + 40 * 4e-4)


def test_ranks_that_share_cores_need_no_balance():
    lengths = [60, *[10] * 12]
    plan = chosen(lengths, ranks_per_core=4.0)
    assert not exchanges(plan)
    seconds = 3e-3 * (60 * 61 / 2 + 12 * 10 * 11 / 2) + 180 * 4e-4
    assert plan.choice.seconds == pytest.approx(seconds / 4)
    assert plan.choice.packed_seconds < 1.3 * plan.choice.seconds
    # Two ranks a core: the rank with the long document would be done last all the same.
    assert exchanges(chosen(lengths, ranks_per_core=2.0))
    # As many ranks as there are cores are done last: the others get fewer documents, so that no
    # core idles.
    plan = chosen([60, *[30] * 6], SLOW, SLOW, tokens=128, ranks_per_core=2.0)
    assert (plan.choice.group, sorted(plan.tokens.tolist())) == (1, [30, 60, 60, 90])
    alone = chosen([60, *[30] * 6], SLOW, SLOW, tokens=128)
    assert sorted(alone.tokens.tolist()) == [60] * 4
    # Four ranks on two cores, with 4, 2, 1 and 1 seconds while all compute: one second of four
    # ranks, one of two at double speed, and two of one at double speed.
    shared = replace(costs(FREE, FREE), ranks_per_core=2.0)
    assert shared.until_done(np.array([4.0, 1, 2, 1]), 4.0) == 1 + 1 / 2 + 2 / 2
    assert shared.until_done(np.array([1.0] * 4), 6.0) == 3.0
    assert shared.until_done(2.0, 2.0) == 2.0
    assert costs(FREE, FREE).until_done(np.array([4.0, 1, 2, 1]), 4.0) == 4.0


def test_packed_documents_are_predicted_with_all_costs_of_the_kernel():
    kernel = KernelCost(0.3, 1e-3, 2e-3, 1e-3, 1e-4, task=0.5)

    def choice(lengths, kind=KIND, **changed):
        of_ranks = replace(
            costs(FREE, SLOW), kinds=(KindCosts(kind, 1, kernel, kernel.scaled(2)),), **changed
        )
        return plan_micro_batch(
            lengths, PlanSettings(2, 64, (kind,), costs=of_ranks, ping_pong=AUTO)
        ).choice

    def seconds(lengths, of_pairs):  # of a rank with these documents
        rows = sum(lengths)
        diagonal = sum(length**2 for length in lengths)
        call = 0.3 + 1e-3 * rows + 2e-3 * rows + 1e-3 * of_pairs + 1e-4 * diagonal
        return 3 * (call + 0.5 * len(lengths)) + rows * 4e-4

    even = choice([32] * 4)
    assert even.packed_seconds == pytest.approx(even.seconds)
    # The middle of the second document lies on the second rank's share.
    expected = seconds([48, 32], (48 * 49 + 32 * 33) / 2)
    assert choice([48, 48, 32]).packed_seconds == pytest.approx(expected)
    windowed = choice([48, 48, 32], replace(KIND, window=8), slowness=(1.0, 2.0))
    expected = 2 * seconds([48, 32], 80 * 8 - 2 * (7 * 8 / 2))
    assert windowed.packed_seconds == pytest.approx(expected)


def test_what_is_packed_in_order_holds_the_same_documents():
    def packed(lengths, **settings):
        settings = PlanSettings(2, 64, (KIND,), **settings)
        return packed_in_order(np.array(lengths), settings).layout.segments[ROWS_OF_RANK].tolist()

    # Whole documents, also on a rank that has no room for them.
    assert packed([20, 60, 40]) == [(0, 0, 20, 0), (1, 0, 60, 0), (2, 0, 40, 1)]
    assert packed([60, 2]) == [(0, 0, 60, 0), (1, 0, 2, 1)]
    assert packed([60]) == [(0, 0, 60, 1)]
    # A document of more than a rank's tokens: documents are cut, and rows travel as in any plan.
    assert packed([20, 80, 10]) == [(0, 0, 20, 0), (1, 0, 35, 0), (1, 35, 80, 1), (2, 0, 10, 1)]

    def choice(link, **settings):
        of_plans = PlanSettings(
            2, 64, (KIND,), balance_tolerance=UNBALANCED, costs=costs(link, link), **settings
        )
        return plan_micro_batch([20, 80, 10], of_plans).choice

    near, far = (choice(LinkCost(latency, np.inf)) for latency in (0.0, 9.0))
    as_laid_out = choice(LinkCost(9.0, np.inf), document_layout="fixed")
    assert far.packed_seconds == as_laid_out.seconds > near.packed_seconds
    # Documents that stay on their ranks are compared with what these compute themselves.
    placed = PlanSettings(2, 64, (KIND,), costs=costs(SLOW, SLOW), ping_pong=AUTO)
    plan = plan_placed([[40, 10], [10]], placed)
    assert plan.choice.packed_seconds == plan.choice.seconds
    as_set = plan_placed([[40, 10], [10]], replace(placed, costs=None))
    for either in (plan, as_set):
        assert either.summary.packed_max_over_mean == pytest.approx(875 / ((875 + 55) / 2))


def test_joined_nodes_are_tried_in_the_order_of_their_size():
    of_ranks = costs(FREE, SLOW)
    settings = PlanSettings(
        8, 64, (KIND,), ranks_per_node=2, balance_block_size=4, ping_pong=AUTO, costs=of_ranks
    )
    listed = _Search(np.array([200, 115]), settings, partial(tuple)).in_groups()
    groups = list(dict.fromkeys(max(candidate.placing.sizes) for candidate in listed))
    assert groups == [4, 6]  # eight ranks compute no more evenly


@pytest.mark.parametrize("count", [1, 2])
def test_a_given_number_of_nano_batches_is_kept(count):
    plan = chosen([60, 50, *[10] * 10], ping_pong=count == 2)
    assert len(plan.nano_batches) == count


def laid_out(layout):
    """[ranks] of lists of (document, start, stop)."""
    settings = PlanSettings(4, 64, (KIND,), document_layout=layout, costs=costs(FREE, FREE))
    (nano,) = plan_micro_batch([60, *[10] * 12], settings).nano_batches
    columns = ["document", "start", "stop"]
    return [nano.layout.of_rank(rank)[columns].tolist() for rank in range(4)]


def test_the_layout_in_order_is_kept():
    """45 tokens on each rank."""
    assert laid_out("fixed") == [
        [(0, 0, 45)],
        [(0, 45, 60), (1, 0, 10), (2, 0, 10), (3, 0, 10)],
        [(4, 0, 10), (5, 0, 10), (6, 0, 10), (7, 0, 10), (8, 0, 5)],
        [(8, 5, 10), (9, 0, 10), (10, 0, 10), (11, 0, 10), (12, 0, 10)],
    ]


def test_whole_documents_are_kept():
    """The long document is alone."""
    ranks = laid_out("whole")
    assert sorted(chain(*ranks)) == [(0, 0, 60), *((document, 0, 10) for document in range(1, 13))]
    assert sorted(map(len, ranks)) == [1, 4, 4, 4]


@pytest.mark.parametrize("link", [FREE, LinkCost(0, 2e4), LinkCost(0, 2e3), SLOW], ids=str)
@pytest.mark.parametrize(
    ("lengths", "ranks", "tokens"),
    [([24, 8], 2, 24), ([16, 8, 8], 2, 24), ([20, 4, 8], 2, 24), ([16, 6, 4], 3, 16)],
)
def test_no_plan_of_blocks_is_faster(lengths, ranks, tokens, link):
    """Of those that give each 8 rows to a rank that holds them, and to one that computes them.

    The plan that is chosen may also cut documents elsewhere.
    """
    step_costs = costs(link, link)
    settings = PlanSettings(
        ranks, tokens, (KIND,), balance_block_size=8, ping_pong=AUTO, costs=step_costs
    )
    plan = plan_micro_batch(lengths, settings)
    assert plan.choice.seconds == pytest.approx(seconds_of(plan, step_costs))
    plans = every_plan(lengths, 8, step_costs, ranks, tokens)
    assert plan.choice.seconds <= min(seconds_of(other, step_costs) for other in plans) * 1.0001


@pytest.mark.parametrize(
    ("lengths", "ranks"),
    [
        ([40, 30, 30, 20, 20, 10], 2),
        ([33, 30, 27, 21, 19, 17, 12], 3),
        ([60, 60, 40, 30, 9, 9], 3),
        ([25, 24, 23, 22, 21, 20, 5, 5], 4),
    ],
)
def test_whole_documents_are_as_even_as_they_can_be_where_links_are_slow(lengths, ranks):
    plan = chosen(lengths, SLOW, SLOW, 80, ranks, ranks_per_node=1)
    assert not exchanges(plan)
    fewest = fewest_seconds_of_whole_documents(lengths, ranks, 80, 3e-3, 4e-4)
    assert 1 - 1e-9 <= plan.choice.seconds / fewest <= 1.01


@pytest.mark.parametrize("layout", ["auto", "fixed"])
def test_a_slower_rank_gets_less_to_do(layout):
    """It takes twice as long for everything, and has equally many rows."""
    settings = PlanSettings(4, 64, (KIND,), balance_block_size=4, ranks_per_node=2)
    costs_of_plans = (
        replace(costs(FREE, FREE), slowness=slowness) for slowness in ((), (1.0, 1.0, 1.0, 2.0))
    )
    alike, uneven = (
        plan_micro_batch([240], replace(settings, document_layout=layout, costs=step_costs))
        for step_costs in costs_of_plans
    )
    loads = [
        sum(loads_of(nano.plans[KIND]) for nano in plan.nano_batches) for plan in (alike, uneven)
    ]
    assert loads[0].max() <= 1.02 * loads[0].mean()
    # Σ speed · T = pairs, with speeds 1, 1, 1 and 1/2; a row's other work is as much as 0.4 / 3
    # pairs.
    besides = 60 * 0.4 / 3
    level = (loads[1].sum() + 4 * besides) / 3.5
    assert loads[1][3] == pytest.approx(level / 2 - besides, rel=0.05)
    assert uneven.choice.seconds < 0.8 * 2 * alike.choice.seconds


def costs_of_one_document(link, call_s):
    """Each stage costs calls of the kernel, and hides the exchange of the next."""
    step_costs = costs(link, link)
    kernel = KernelCost(call_s, 0.0, 0.0, 1e-6)
    kind_costs = replace(step_costs.kinds[0], forward=kernel, backward=kernel)
    return replace(step_costs, kinds=(kind_costs,))


SLOW_FOR_ROWS = LinkCost(0.0, 2e4)


@pytest.mark.parametrize(
    ("link", "call_s", "buffers", "fewest", "most"),
    [
        (FREE, 1.0, 1.0, 1, 1),
        (FREE, 1.0, 2.9, 1, 1),  # all rows fit into three buffers
        (FREE, 1.0, 4.0, 2, 5),
        (SLOW_FOR_ROWS, 0.0, 1.0, 4, 99),
    ],
)
def test_stages_are_as_many_as_pay(link, call_s, buffers, fewest, most):
    of_ranks = costs_of_one_document(link, call_s)
    settings = PlanSettings(2, 16384, (KIND,), document_layout="fixed", costs=of_ranks)
    (nano,) = plan_micro_batch([32768], settings).nano_batches
    rows = int(rows_by_stage(replace(nano.plans[KIND], stage_rows=None)).max())
    buffer_bytes = int(rows / buffers) * settings.row_bytes(KIND).kv
    settings = replace(settings, exchange_buffer_bytes=buffer_bytes)
    (nano,) = plan_micro_batch([32768], settings).nano_batches
    assert fewest <= count_plan(nano.plans[KIND], KIND, 2).stages <= most


@pytest.mark.parametrize(("call_s", "stages"), [(1e3, 1), (0.0, None)])
def test_candidates_are_compared_with_few_stages_where_these_pay(call_s, stages):
    """Where calls are free, the usual number hides the exchange."""
    of_ranks = costs_of_one_document(SLOW_FOR_ROWS, call_s)
    planned = planned_in_groups([32768], PlanSettings(2, 16384, (KIND,)), of_ranks)
    assert {candidate.stages for candidate in planned} == {stages}


def planned_in_groups(lengths, settings, of_ranks):
    """All candidates that can be planned, however slow."""
    settings = replace(settings, ping_pong=AUTO, costs=of_ranks)
    search = _Search(np.array(lengths), settings, partial(tuple))
    planned = [search.planned(candidate) for candidate in search.in_groups()]
    found = [candidate for candidate in planned if candidate is not None]
    assert found
    return found


ONE_RANK = Placing.of_all(np.ones(1), np.ones(1))


def numbered(number, bound):
    """A candidate that is known by its number of nano-batches."""
    return Candidate(ONE_RANK, bound, "over all", 0.01, number)


def walked(seconds, attention=0.0, other=0.0):
    """A step of one rank."""
    nothing = np.zeros(1)
    return Walked(seconds, np.array([attention]), np.array([other]), nothing, nothing)


class Listed:
    """Candidates with these bounds and predicted seconds, by number; None stands for no plan.

    Layouts may raise bounds, and further candidates may follow from a plan or be tried over few.
    """

    def __init__(self, bounds_and_seconds, least=None, follows=None, few=None):
        self.listed = [numbered(n, bound) for n, (bound, _) in enumerate(bounds_and_seconds)]
        self.seconds = [seconds for _, seconds in bounds_and_seconds]
        self.least, self.follows, self.few = least or {}, follows or {}, few or {}
        self.laid_out, self.planned_in_order = [], []

    def least_seconds(self, candidate):
        self.laid_out.append(candidate.nano_batches)
        return self.least.get(candidate.nano_batches, 0.0)

    def planned(self, candidate):
        self.planned_in_order.append(candidate.nano_batches)
        seconds = self.seconds[candidate.nano_batches]
        if seconds is None:
            return None
        return PlannedCandidate(candidate, (), [], None, walked(seconds))

    def over_few(self, candidate, bound, seconds):
        further, most = self.few.get(candidate.nano_batches, (None, np.inf))
        return [self.listed[further]] if most < seconds < np.inf else []

    def waiting_less(self, planned):
        further = self.follows.get(planned.candidate.nano_batches)
        return [] if further is None else [self.listed[further]]

    def search(self, first=None):
        fastest = fastest_of(self.listed[:first], self)
        return fastest and fastest.candidate.nano_batches


def searched(*bounds_and_seconds):
    """Return the number of the fastest candidate, and those of planned ones in their order."""
    planner = Listed(bounds_and_seconds)
    return planner.search(), planner.planned_in_order


@pytest.mark.parametrize(
    ("bounds_and_seconds", "fastest", "in_order"),
    [
        pytest.param([(3, 9), (1, 8), (2, 7)], 2, [1, 2, 0], id="lowest bound first"),
        pytest.param([(2, 9), (1, 8), (2, 7)], 2, [1, 0, 2], id="equal bounds as listed"),
        pytest.param([(1, 8), (2, 8)], 0, [0, 1], id="the first of equal seconds"),
        pytest.param([(1, 4), (3.98, 9), (3.99, 3.99)], 0, [0, 1], id="stop if near enough"),
        pytest.param([(1, 5), (4, 4.1), (4.5, 4.6)], 1, [0, 1], id="stop by the fastest so far"),
        pytest.param([(1, None), (2, 6)], 1, [0, 1], id="no plan of the lowest bound"),
        pytest.param([(1, 4), (2, None), (3, 3.5)], 2, [0, 1, 2], id="no plan in between"),
        pytest.param([(1, None)], None, [0], id="no plan at all"),
        pytest.param([], None, [], id="no candidate"),
    ],
)
def test_candidates_are_planned_until_none_can_be_faster(bounds_and_seconds, fastest, in_order):
    assert searched(*bounds_and_seconds) == (fastest, in_order)


@pytest.mark.parametrize("slowness", [(), (1.0,) * 7 + (2.0,)], ids=["alike", "a-slow-rank"])
@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([200, 115], id="two-long-documents"),
        pytest.param([60, *[10] * 30], id="one-long-document"),
        pytest.param([50] * 9, id="a-document-fits-in-no-group"),
    ],
)
def test_no_plan_is_faster_than_its_bound(slowness, lengths):
    settings = PlanSettings(8, 64, (KIND,), ranks_per_node=2, balance_block_size=4)
    kinds = (KindCosts(KIND, 1, KernelCost(0.02, 0, 0, 1e-3), KernelCost(0.03, 0, 0, 2e-3)),)
    of_ranks = replace(costs(FREE, SLOW), kinds=kinds, launches=0.01, slowness=slowness)
    for planned in planned_in_groups(lengths, settings, of_ranks):
        assert planned.candidate.bound <= planned.seconds * (1 + 1e-9)


def test_whole_documents_that_are_nearly_even_are_planned_alone(monkeypatch):
    """A cut document would take a second kernel call in each layer."""
    settings = PlanSettings(2, 64, (KIND,), balance_block_size=4)
    kinds = (KindCosts(KIND, 1, KernelCost(0.2, 0, 0, 1e-3), KernelCost(0.2, 0, 0, 2e-3)),)
    of_ranks = replace(costs(FREE, FREE), kinds=kinds)
    planned = []
    plan_candidate = _Search.planned

    def noted(search, candidate):
        planned.append(candidate)
        return plan_candidate(search, candidate)

    monkeypatch.setattr(_Search, "planned", noted)
    plan_micro_batch([24, 18, 18, 18], replace(settings, ping_pong=AUTO, costs=of_ranks))
    assert [candidate.placing.sizes for candidate in planned] == [(1, 1)]


@pytest.mark.parametrize(
    ("most_moves", "expected"),
    [
        pytest.param(4096, [(4, 4)], id="groups of four are even"),
        pytest.param(0, [(4, 4), (8,)], id="groups of four are not divided evenly"),
    ],
)
def test_larger_groups_are_tried_where_smaller_ones_have_too_many_moves(
    monkeypatch, most_moves, expected
):
    monkeypatch.setattr(choose, "MOST_MOVES", most_moves)
    settings = PlanSettings(8, 64, (KIND,), ranks_per_node=2, balance_block_size=4)
    of_ranks = costs(FREE, SLOW)
    settings = replace(settings, costs=of_ranks)
    search = choose._Search(np.array([100, 100]), settings, partial(tuple))
    assert [placing.sizes for placing in search._even_placings()] == expected


def test_layouts_are_made_in_the_order_of_bounds_and_raise_them():
    planner = Listed([(1, 8), (2, 7), (3, 6)], least={0: 9, 1: 6.5, 2: 2})
    assert planner.search() == 2
    assert planner.laid_out == [0, 1, 2]
    assert planner.planned_in_order == [2]
    planner = Listed([(1, 2), (3, 1)])
    assert planner.search() == 0
    assert planner.laid_out == [0]


def test_candidates_follow_from_plans_and_from_layouts():
    assert Listed([(1, 8), (1, 5)], follows={0: 1}).search(first=1) == 1
    assert Listed([(1, 8), (8, 5)], follows={0: 1}).search(first=1) == 1  # has the layout's bound
    assert Listed([(1, 8), (1, 5)], few={0: (1, 7)}).search(first=1) == 1
    assert Listed([(1, 8), (1, 5)], few={0: (1, 9)}).search(first=1) == 0
    by_layout = Listed([(1, 8), (2, 7)], least={0: 7.5}, few={0: (1, 7.2)})
    assert by_layout.search(first=1) == 1
    assert by_layout.planned_in_order == [1]


@pytest.fixture
def search():
    """A search for eight ranks on two nodes that may take two nano-batches and 0.1."""
    settings = PlanSettings(8, 64, (KIND,), ranks_per_node=4, ping_pong=AUTO)
    settings = replace(settings, costs=costs(FREE, FREE))
    return _Search(np.array([100, 100]), settings, partial(list))


INSIDE, ACROSS = (
    Placing(sizes, tuple(np.array([n]) for n in range(len(sizes))), (), np.ones(len(sizes)))
    for sizes in ((4, 4), (8,))
)


@pytest.mark.parametrize(
    ("placing", "division", "nano_batches", "seconds", "expected"),
    [
        pytest.param(ACROSS, "over all", 1, 1.03, (0.1, 1), id="a coarser tolerance"),
        pytest.param(ACROSS, "over all", 1, 1.01, None, id="few waits"),
        pytest.param(ACROSS, "over few", 2, 1.2, (0.1, 1), id="one nano-batch across nodes"),
        pytest.param(ACROSS, "over few", 2, 1.09, None, id="two nano-batches hide exchanges"),
        pytest.param(ACROSS, "over few", 1, 1.09, None, id="one nano-batch was all"),
        pytest.param(INSIDE, "over few", 1, 1.0, (0.01, 2), id="two nano-batches inside nodes"),
        pytest.param(INSIDE, "over all", 1, 1.2, None, id="over all ranks of a node"),
    ],
)
def test_what_may_wait_less_than_a_plan(
    search, monkeypatch, placing, division, nano_batches, seconds, expected
):
    monkeypatch.setattr(PlannedCandidate, "is_balanced_by_moves", True)
    candidate = Candidate(placing, 0.5, division, 0.01, nano_batches)
    planned = PlannedCandidate(candidate, (), [], None, walked(seconds, 0.4, 0.6))
    found = [(each.tolerance, each.nano_batches) for each in search.waiting_less(planned)]
    assert found == ([] if expected is None else [expected])
    assert search.waiting_less(planned) == []  # they are listed once
    if division == "over all":  # where nothing moves, a coarser tolerance moves nothing less
        monkeypatch.setattr(PlannedCandidate, "is_balanced_by_moves", False)
        again = replace(planned, candidate=replace(candidate, placing=replace(placing)))
        assert search.waiting_less(again) == []


def test_one_nano_batch_is_tried_first_among_many_ranks(search, monkeypatch):
    monkeypatch.setattr(PlannedCandidate, "is_balanced_by_moves", True)
    monkeypatch.setattr(choose, "MOST_MOVES", 0)
    over_all = Candidate(ACROSS, 1.0, "over all", 0.01, 1)
    assert search.over_few(over_all, 1.0, np.inf) == []  # one placing is tried
    search._smallest_even = ACROSS
    search._has_many_ranks = True
    (few,) = search.over_few(over_all, 1.0, np.inf)
    assert (few.division, few.nano_batches) == ("over few", 1)
    found = []
    while few is not None:
        found.append((few.tolerance, few.nano_batches))
        planned = PlannedCandidate(few, (), [], None, walked(1.2, 0.4, 0.6))
        few = next(iter(search.waiting_less(planned)), None)
    assert found == [(0.01, 1), (0.01, 2), (0.1, 1)]


def test_among_many_ranks_smaller_groups_may_be_less_even(search, monkeypatch):
    """Two groups have 1.7 % more and less work than the mean."""
    monkeypatch.setattr(choose, "MOST_MOVES", 0)
    lengths = np.array([91, 89, 50, 50])
    for many, expected in ((False, 8), (True, 4)):
        search = _Search(lengths, search._settings, partial(list))
        search._has_many_ranks = many
        search.in_groups()
        assert max(search._smallest_even.sizes) == expected


@pytest.mark.parametrize(("too_uneven", "smallest"), [(2.0, 8), (9.0, 4)])
def test_groups_that_a_document_makes_too_uneven_are_left_out(monkeypatch, too_uneven, smallest):
    """A document with nearly all pairs keeps groups of four busy four times as long as 16 ranks."""
    monkeypatch.setattr(choose, "TOO_UNEVEN", too_uneven)
    settings = PlanSettings(16, 64, (KIND,), ranks_per_node=4, costs=costs(FREE, SLOW))
    search = _Search(np.array([240, *[8] * 30]), settings, partial(list))
    sizes = [placing.sizes for placing in search._placings()]
    assert min(map(max, sizes)) == smallest
    assert (16,) in sizes


def test_documents_are_tried_over_few_ranks_of_nodes_where_all_of_them_wait(search):
    over_all = Candidate(ACROSS, 1.0, "over all", 0.01, 1)
    assert search.over_few(over_all, 1.2, 1.23) == []  # near the bound of its layout
    (few,) = search.over_few(over_all, 1.2, 1.25)
    assert (few.division, few.nano_batches, few.bound) == ("over few", 2, 1.0)
    assert search.over_few(over_all, 1.2, 2.0) == []  # they are tried once
    assert search.over_few(replace(over_all, placing=INSIDE), 1.2, 2.0) == []
    # Where every rank is a node, a plan near its bound is no measure.
    search._node_sizes = (1,) * 8
    assert search.over_few(replace(over_all, placing=replace(ACROSS)), 1.2, 1.2) != []


def test_exchanges_between_nodes_raise_the_bound_of_a_layout(search):
    for placing, division, share in (
        (ACROSS, "over all", 0.007),
        (ACROSS, "over few", 0.012),
        (ACROSS, "as set", 0.0),
        (INSIDE, "over all", 0.0),
    ):
        candidate = Candidate(placing, 1.0, division, 0.01, 1)
        search._layouts[choose._layout_key(candidate)] = search._laid_out(
            Candidate(ACROSS, 1.0, "over all", 0.01, 1)
        )
        bound = search.bound_of_layout(candidate)
        assert search.least_seconds(candidate) == pytest.approx(bound * (1 + share))
    search = _Search(np.array([300, 60]), search._settings, partial(list))
    (listed,) = search.in_groups()
    assert max(listed.placing.sizes) == 8
    assert listed.bound == pytest.approx(search._bound(listed.placing) * 1.007)
    search._node_sizes = (1,) * 8  # no group lies inside a node
    assert search.least_seconds(listed) == search.bound_of_layout(listed)


@pytest.mark.parametrize(
    ("bandwidth", "ranks", "seconds"),
    [
        pytest.param(1e5, [4, 4, 4, 4], 6.7396, id="over all where rows travel fast"),
        pytest.param(1e4, [4, 2, 2, 2], 6.7966, id="over few where they travel slowly"),
    ],
)
def test_long_documents_are_divided_over_all_ranks_or_over_few(bandwidth, ranks, seconds):
    link = LinkCost(0.0, bandwidth)
    plan = chosen([110, 40, 40, 40, 26], link, link, ranks_per_node=4)
    segments = plan.nano_batches[0].layout.segments
    ranks_of = [set(segments["rank"][segments["document"] == document]) for document in range(4)]
    assert list(map(len, ranks_of)) == ranks
    assert plan.choice.seconds == pytest.approx(seconds)


def test_a_coarser_balance_moves_fewer_bytes_over_slow_links():
    between = LinkCost(0.0, 1e3)
    coarse = chosen([150, 60, 46], FREE, between, ping_pong=False)
    fine = chosen([150, 60, 46], FREE, between, ping_pong=False, balance_tolerance=0.01)
    assert coarse.choice.tolerance == 0.1
    assert coarse.summary.max_over_mean == pytest.approx(1.0936, abs=1e-4)
    assert fine.summary.max_over_mean == pytest.approx(1.0104, abs=1e-4)
    assert coarse.summary.exchange.bytes_between_nodes == 7552
    assert fine.summary.exchange.bytes_between_nodes == 8192


def test_too_many_tokens_are_refused():
    with pytest.raises(ValueError, match="257 tokens"):
        chosen([60] * 4 + [17])


@pytest.mark.parametrize("layout", ["whole", "auto"])
def test_the_costliest_document_comes_first_where_documents_stay_whole(layout):
    """30 alone, and the shorter ones together: 465 pairs beside 475."""
    settings = PlanSettings(2, 64, (KIND,), document_layout=layout, balance_block_size=4)
    settings = replace(settings, ping_pong=AUTO, costs=costs(SLOW, SLOW))
    plan = plan_micro_batch([30, 20, 20, 10], settings)
    assert not exchanges(plan)
    assert plan.choice.group == 1
    assert sorted(plan.tokens.tolist()) == [30, 50]
