"""Mixing layers walked with costs so simple that each second can be counted by hand."""

from dataclasses import replace

import numpy as np
import pytest

from hf_distca.plan import SEGMENT, AttentionKind, Branches, Layout
from hf_distca.planner.layout import assemble
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings
from hf_distca.predict.mixing_layers import MixingLayers, count_cuts
from hf_distca.predict.seconds import KernelCost, KindCosts, LinkCost, Links, MixingCosts, StepCosts
from hf_distca.predict.walk import document_seconds, predict_plan
from hf_distca.units import AUTO

LINKS = Links(LinkCost(1.0, 10.0), LinkCost(2.0, 5.0))
COSTS = MixingCosts(
    layers=1,
    before_mixing=1.0,
    mix=2.0,
    continued=3.0,
    after_mixing=4.0,
    run=0.5,
    halo=10.0,
    state=100.0,
)


def _predicted(plan, costs):
    return predict_plan(plan, costs, SETTINGS.node_of_ranks, SETTINGS.bytes_per_value)


def layout(lengths: list[int], *segments: tuple[int, int, int, int], ranks: int = 2) -> Layout:
    """Segments are (document, start, stop, rank)."""
    table = np.array([(*segment, 0) for segment in segments], SEGMENT)
    return assemble(np.array(lengths), table, ranks)


CUT = layout([4], (0, 0, 2, 0), (0, 2, 4, 1))
WHOLE = layout([30, 30], (0, 0, 30, 0), (1, 0, 30, 1))


def walk(
    *layouts: Layout,
    direction="forward",
    nodes=(0, 0, 0),
    layers: float = 1.0,
    launches=0.0,
    links=LINKS,
):
    ranks = layouts[0].ranks
    counted = [count_cuts(layout_of_nano_batch, nodes[:ranks]) for layout_of_nano_batch in layouts]
    factor = np.full(ranks, 1.0 if direction == "forward" else 2.0)
    mixing = MixingLayers(counted, COSTS, layers, launches, links, direction, factor)
    return mixing.walk(np.zeros(ranks)).tolist(), mixing.waited.tolist(), mixing.computed.tolist()


def test_segments_and_messages():
    # Document 0 on ranks 0, 1 and 0 again; document 1 whole.
    counted = count_cuts(
        layout([7, 3], (0, 0, 2, 0), (1, 0, 3, 0), (0, 2, 6, 1), (0, 6, 7, 0)), nodes=(0, 1)
    )
    assert (counted.rows.tolist(), counted.cut.tolist(), counted.continued.tolist()) == (
        [6, 4],
        [3, 4],
        [1, 4],
    )
    assert (counted.segments.tolist(), counted.uncut_documents.tolist(), counted.runs.tolist()) == (
        [2, 1],
        [1, 0],
        [3, 1],
    )
    # A halo and a state from 0 to 1 and back; the state of the first segment stays on rank 0 for
    # the last.
    assert counted.halos.tolist() == counted.states.tolist() == [[0, 0], [1, 1]]
    assert counted.bytes_moved(halo=10, state=100) == 110


def test_segments_and_messages_of_a_prefix_tree():
    """A prefix on rank 0 has a branch there, and two on rank 1."""
    segments = [(0, 0, 4, 0), (1, 4, 7, 0), (2, 4, 6, 1), (3, 4, 6, 1)]
    branches = Branches(np.array([-1, 0, 0, 0]), np.array([0, 4, 4, 4]))
    tree = replace(layout([4, 7, 6, 6], *segments), branches=branches)
    counted = count_cuts(tree, nodes=(0, 0))
    assert (counted.rows.tolist(), counted.cut.tolist()) == ([7, 4], [4, 4])
    assert counted.continued.tolist() == [0, 4]
    assert (counted.segments.tolist(), counted.uncut_documents.tolist()) == ([2, 2], [0, 0])
    # Two halos; the state goes to rank 1 once.
    assert (counted.halos.tolist(), counted.states.tolist()) == ([[2, 2], [0, 0]], [[1, 1], [0, 0]])


def test_a_cut_document_waits_for_halos_and_states():
    # 2 rows before the halos, which take 1 + 1 s; 2 · 2 + 0.5 s in the recurrence, and 2 · 3 s more
    # on rank 1, whose segment has an earlier one; states take 1 + 10 s; 2 · 4 s after.
    assert walk(CUT) == ([33.5, 33.5], [2 + 17, 2 + 11], [14.5, 20.5])
    # In reverse, twice as slow: 16, states 11, 9 or 21, halos 2, 4.
    assert walk(CUT, direction="backward") == ([54.0, 54.0], [11 + 14, 11 + 2], [29.0, 41.0])
    # Between nodes: 2 + 2 s and 2 + 20 s.
    assert walk(CUT, nodes=(0, 1))[0] == [33.5 + 2 + 11] * 2
    assert walk(CUT, layers=3)[:2] == ([100.5, 100.5], [57, 39])
    # Back and forth: two halos take 1 + 2 s, two states 1 + 20 s. The first state goes to rank 1
    # once, for two segments.
    four = layout([8], (0, 0, 2, 0), (0, 4, 6, 0), (0, 2, 4, 1), (0, 6, 8, 1))
    assert walk(four)[0] == [4 + 3 + (4 * 2 + 4 * 3 + 2 * 0.5) + 21 + 4 * 4] * 2


@pytest.mark.parametrize(
    ("layouts", "calls"),
    [([WHOLE], 1), ([WHOLE, WHOLE], 1), ([CUT], 1), ([CUT, CUT], 2), ([CUT, WHOLE], 2)],
    ids=["whole", "whole and whole", "cut", "cut and cut", "cut and whole"],
)
def test_launches_are_those_of_the_calls(layouts, calls):
    # A nano-batch has calls of its own where documents are cut; else one call has the rows of both.
    _, _, computed = walk(*layouts, launches=0.0)
    _, _, computed_with_launches = walk(*layouts, launches=8.0)
    assert np.subtract(computed_with_launches, computed).tolist() == [8.0 * calls] * 2


def test_whole_documents_of_a_rank_share_a_run():
    several = layout([10, 20, 30], (0, 0, 10, 0), (1, 0, 20, 0), (2, 0, 30, 1))
    assert walk(several)[2] == [30 * 7 + 0.5] * 2


def test_an_exchange_begins_when_the_host_has_started_it():
    # Halos and states leave a second later each.
    assert walk(CUT, links=replace(LINKS, start=1.0)) == (
        [33.5 + 2] * 2,
        [2 + 17 + 2, 2 + 11 + 2],
        [14.5, 20.5],
    )


@pytest.mark.parametrize("rows", [30, 1], ids=["late third rank", "early third rank"])
def test_a_rank_without_cut_documents_neither_waits_nor_is_waited_for(rows):
    cut_document = [(0, 0, 2, 0), (0, 2, 4, 1)]
    ends, waited, _ = walk(layout([4, rows], *cut_document, (1, 0, rows, 2), ranks=3))
    assert ends == [33.5, 33.5, rows * 7 + 0.5]
    assert waited == [2 + 17, 2 + 11, 0]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_exchanges_hide_behind_the_other_nano_batch(direction):
    ends, waited, computed = walk(CUT, WHOLE, direction=direction)
    assert waited == [0.0, 0.0]
    assert ends == computed


def test_exchanges_hide_behind_whole_documents():
    assert walk(WHOLE) == ([30 * 7 + 0.5] * 2, [0, 0], [30 * 7 + 0.5] * 2)
    # The second nano-batch's states leave when the first one's have arrived: 25 + 0.5 + 1 + 10 s,
    # then 2 · 4 s.
    assert walk(CUT, CUT)[0] == [44.5, 44.5]
    beside = layout([4, 20, 20], (0, 0, 2, 0), (1, 0, 20, 0), (0, 2, 4, 1), (2, 0, 20, 1))
    assert walk(beside)[1] == [2.0, 2.0]  # whole documents hide states, nothing hides halos


KIND = AttentionKind(None, 4, 2, 8, 8)
SETTINGS = PlanSettings(2, 4096, (KIND,), document_layout="auto")


def step_costs(**changed: float) -> StepCosts:
    """Costs of a step, where mixing layers may differ.

    A pair takes a nanosecond, and a row besides core attention a microsecond.
    """
    kernel, link = KernelCost(0.0, 0.0, 0.0, 1e-9), LinkCost(1e-5, 1e9)
    mixing = replace(MixingCosts(3, 1e-7, 1e-7, 1e-7, 1e-7, 0.0, 100.0, 1e4), **changed)
    return StepCosts(
        (KindCosts(KIND, 1, kernel, kernel),),
        5e-7,
        5e-7,
        1.0,
        0.0,
        Links(link, link),
        mixing=mixing,
    )


@pytest.mark.parametrize(
    ("changed_costs", "group"),
    [({}, 2), ({"state": 1e8}, 1), ({"continued": 1e-4}, 1)],
    ids=["cheap", "large states", "slow segments"],
)
def test_documents_are_cut_only_as_long_as_a_cut_is_cheap(changed_costs, group):
    costs = step_costs(**changed_costs)
    plan = plan_micro_batch([4000, 500, 500, 400], replace(SETTINGS, costs=costs, ping_pong=AUTO))
    assert plan.choice.group == group
    assert plan.choice.seconds == pytest.approx(_predicted(plan, costs).seconds, rel=1e-3)


def test_the_backward_takes_its_share():
    costs = replace(step_costs(), backward_factor=2.0)
    plan = plan_micro_batch([100, 100], replace(SETTINGS, document_layout="whole"))
    assert _predicted(plan, costs).mixing == pytest.approx(3 * 3e-7 * 100 * (1 + 2))


def test_equal_tokens_matter_more_the_more_layers_mix():
    few, many = (
        document_seconds(np.array([4000, 500]), step_costs(layers=layers)) for layers in (0, 60)
    )
    assert few[0] / few[1] > 15  # by pairs
    assert many[0] / many[1] < 10  # by tokens
    assert step_costs(layers=60).token == pytest.approx(2 * (1e-6 + 60 * 3e-7))
