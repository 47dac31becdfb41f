"""Micro-batches that are full, or whose documents fit into whole ranks: which of them pay."""

from dataclasses import replace

import numpy as np
import pytest

from hf_distca.planner import whole_ranks
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import Choices, PlanSettings
from hf_distca.planner.whole_ranks import fitting, whole_ranks_pay
from hf_distca.predict.seconds import LinkCost
from tests.planner.test_choose import FREE, KIND, SLOW, costs, exchanges


def settings(link: LinkCost, ranks: int = 4, tokens: int = 640, **choices: bool) -> PlanSettings:
    of_plans = PlanSettings(ranks, tokens, (KIND,), balance_block_size=4)
    return replace(of_plans, choices=Choices(costs(link, link), **choices))


@pytest.mark.parametrize(
    ("lengths", "fitted"),
    [
        (
            [3, 3, 3, 3, 3],
            4,
        ),  # the fifth has no room on a rank, but all ranks together have 4 tokens left
        ([6, 4, 6, 4, 4], 5),  # only if 6 and 6 share a rank of 12
        ([2, 2], 2),
    ],
)
def test_the_first_documents_that_fit_into_ranks(lengths, fitted):
    tokens_per_rank = 12 if max(lengths) == 6 else 8
    assert fitting(np.array(lengths), 2, tokens_per_rank).tolist() == lengths[:fitted]


def test_documents_are_drawn_for_whole_ranks_where_exchanges_are_slow():
    full, fitted = (
        [np.array([280] * 9)] * 2,
        [np.array([280] * 8)] * 2,
    )  # two of 280 fit on a rank of 640
    assert whole_ranks_pay(full, fitted, settings(SLOW))
    assert not whole_ranks_pay(full, fitted, settings(FREE))
    assert not whole_ranks_pay(fitted, fitted, settings(SLOW))
    # Ranks that are half empty take as long as full ones: links so fast that an exchange costs less
    # than that.
    assert not whole_ranks_pay(
        [np.array([400] * 6)], [np.array([400] * 4)], settings(LinkCost(0.0, 1e6))
    )
    # Documents longer than a rank have to be cut, and settings that are set stay.
    assert not whole_ranks_pay([np.array([641, 280, 280])], fitted, settings(SLOW))
    assert not whole_ranks_pay(full, fitted, settings(SLOW, groups=False))
    assert not whole_ranks_pay(full, fitted, replace(settings(SLOW), choices=None))
    assert not whole_ranks_pay(full, fitted, replace(settings(SLOW), document_layout="whole"))


def test_predicted_times_decide(monkeypatch):
    full, fitted = [np.array([280] * 9)], [np.array([280] * 8)]
    assert not whole_ranks_pay(full, full, settings(SLOW))  # waits for exchanges that are as long
    assert not whole_ranks_pay(
        full, iter([None]), settings(FREE)
    )  # none could be faster, so they are not read
    for slowness, speeds in (((), 4.0), ((2.0, 1.0, 1.0, 1.0), 3.5)):
        of_ranks = settings(SLOW)
        costs_of_ranks = replace(of_ranks.choices.costs, slowness=slowness)
        of_ranks = replace(of_ranks, choices=replace(of_ranks.choices, costs=costs_of_ranks))
        # A document of 280 has 39,340 pairs; if ranks never waited, a token of the full ones took
        # so long:
        computing_s = (3e-3 * 39_340 + 4e-4 * 280) / 280 / speeds
        for full_s, fitted_s, pays in ((1.04, 0.5, False), (1.06, 1.0, True), (1.06, 1.02, False)):
            seconds = {9: full_s * computing_s, 8: fitted_s * computing_s}
            monkeypatch.setattr(
                whole_ranks,
                "_seconds_per_token",
                lambda batches, _, of=seconds: of[len(batches[0])],
            )
            assert whole_ranks_pay(full, fitted, of_ranks) == pays, (slowness, full_s, fitted_s)


def test_documents_that_fit_into_ranks_only_with_unequal_work_stay_whole_there():
    of_ranks = settings(SLOW, ranks=2, tokens=12)
    plan = plan_micro_batch([6, 4, 6, 4, 4], of_ranks)
    assert not exchanges(plan)
    assert (plan.choice.group, plan.choice.nano_batches) == (1, 1)
    (nano,) = plan.nano_batches
    documents = {rank: set() for rank in range(2)}
    for document, *_, rank, _ in nano.layout.segments.tolist():
        documents[rank].add(document)
    assert sorted(map(sorted, documents.values())) == [[0, 2], [1, 3, 4]]
    assert exchanges(plan_micro_batch([6, 4, 6, 4, 4], settings(FREE, ranks=2, tokens=12)))


def test_larger_groups_are_tried_where_a_document_fits_into_no_rank():
    # Two documents of 410 fit on two ranks of 640, and the third is cut: with free links all ranks
    # compute alike.
    plan = plan_micro_batch([410] * 3, settings(FREE, ranks=2))
    assert plan.choice.group == 2
    assert max(plan.choice.attention) == pytest.approx(sum(plan.choice.attention) / 2, rel=0.01)
