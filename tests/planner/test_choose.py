"""The plan that is chosen, with costs of which the best way is known."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_distca.plan import AttentionKind
from hf_distca.planner.choose import candidates
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.routes.moves import any_key_crosses, any_query_crosses
from hf_distca.planner.seconds import KernelCost, KindCosts, LinkCost, Links, StepCosts
from hf_distca.planner.settings import Choices, PlanSettings

KIND = AttentionKind(None, 4, 2, 8, 8)
FREE, SLOW = LinkCost(0.0, np.inf), LinkCost(0.0, 1.0)


def costs(within: LinkCost, between: LinkCost) -> StepCosts:
    """A pair takes a millisecond in the forward and twice as long in the backward, a token a tenth of that."""
    forward, backward = KernelCost(0.0, 0.0, 0.0, 1e-3), KernelCost(0.0, 0.0, 0.0, 2e-3)
    return StepCosts((KindCosts(KIND, 1, forward, backward),), 5e-5, 5e-5, 2.0, 0.0, Links(within, between))


def chosen(lengths, within=FREE, between=FREE, tokens=64, ranks=4, ranks_per_node=2, **choices):
    of_plans = PlanSettings(ranks, tokens, (KIND,), balance_block_size=4, ranks_per_node=ranks_per_node)
    plan = plan_micro_batch(lengths, replace(of_plans, choices=Choices(costs(within, between), **choices)))
    return plan


def exchanges(plan) -> bool:
    plans = [of_kind for nano in plan.nano_batches for of_kind in nano.plans.values()]
    return any(any_key_crosses(each) or any_query_crosses(each) for each in plans)


def test_equal_documents_stay_whole():
    plan = chosen([32] * 8)
    assert plan.choice.group == 1
    assert len(plan.nano_batches) == 1
    assert not exchanges(plan)
    assert plan.choice.seconds == pytest.approx(2 * 3e-3 * 32 * 33 / 2 + 64 * 3e-4)


def test_one_long_document_is_shared_where_links_are_fast_and_not_where_they_are_slow():
    lengths = [60, *[10] * 12]
    assert exchanges(chosen(lengths))
    assert not exchanges(chosen(lengths, SLOW, SLOW))


def test_slow_links_between_nodes_are_not_used():
    plan = chosen([60, *[10] * 12], FREE, SLOW)
    assert plan.choice.group == 2
    assert exchanges(plan)
    for nano in plan.nano_batches:
        for of_kind in nano.plans.values():
            assert of_kind.nodes is None
            node_of = np.array([0, 0, 1, 1])
            at = {document: node_of[rank] for document, rank in of_kind.layout.segments[["document", "rank"]].tolist()}
            assert all(at[document] == node_of[worker] for document, _, _, worker in of_kind.tasks.tolist())


def test_a_document_too_long_for_a_node_crosses_all_the_same():
    plan = chosen([200, 20], FREE, SLOW)
    assert plan.choice.group == 4
    assert plan.tokens.max() <= 64


@pytest.mark.parametrize("count", [1, 2])
def test_numbers_of_nano_batches_that_are_given_are_kept(count):
    plan = chosen([60, 50, *[10] * 10], nano_batches=(count,))
    assert len(plan.nano_batches) == count


@pytest.mark.parametrize("layout", ["fixed", "whole", "joint"])
def test_layouts_that_are_given_are_kept(layout):
    of_plans = PlanSettings(4, 64, (KIND,), document_layout=layout, balance_block_size=4)
    lengths = [60, *[10] * 12]
    found = plan_micro_batch(lengths, replace(of_plans, choices=Choices(costs(FREE, FREE), groups=False)))
    (expected, *_) = plan_micro_batch(lengths, replace(of_plans, ping_pong=len(found.nano_batches) == 2)).nano_batches
    assert np.array_equal(found.nano_batches[0].layout.segments, expected.layout.segments)
    assert found.choice.group == 4


def test_the_choice_is_logged_with_its_figures():
    plan = chosen([60, *[10] * 12])
    assert plan.summary.max_over_mean >= 1
    assert plan.choice.nano_batches == len(plan.nano_batches)
    assert plan.choice.tolerance in Choices(costs(FREE, FREE)).tolerances


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 120), min_size=4, max_size=20),
    st.sampled_from([1e3, 1e4, 1e5, 1e7]),
    st.sampled_from([1e2, 1e4, 1e6]),
    st.sampled_from([1, 2, 4]),
)
def test_no_plan_that_was_possible_is_much_faster(lengths, within, between, per_node):
    while sum(lengths) > 4 * 64:
        lengths = lengths[1:]
    of_plans = PlanSettings(4, 64, (KIND,), balance_block_size=4, ranks_per_node=per_node)
    choices = Choices(costs(LinkCost(1e-3, within), LinkCost(1e-3, between)))
    if sum(lengths) < 4:
        return
    found = plan_micro_batch(lengths, replace(of_plans, choices=choices)).choice.seconds
    every = [each.choice.seconds for each in candidates(np.array(lengths), of_plans, choices)]
    assert min(every) <= found + 1e-12
    assert found <= 1.05 * min(every)
