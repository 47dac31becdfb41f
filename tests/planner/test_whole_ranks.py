"""Micro-batches that are full, or whose documents fit into whole ranks: which of them pay."""

from dataclasses import replace

import numpy as np
import pytest

from hf_distca.planner import whole_ranks
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings
from hf_distca.planner.whole_ranks import fitting, whole_ranks_pay
from hf_distca.predict.seconds import LinkCost
from hf_distca.units import AUTO
from tests.planner.test_choose import FREE, KIND, SLOW, costs, exchanges

FULL = [np.array([280] * 9)]
FITTED = [np.array([280] * 8)]  # two documents of 280 on each of four ranks of 640


def settings(link: LinkCost, ranks: int = 4, tokens: int = 640, **changes: str) -> PlanSettings:
    return PlanSettings(
        ranks,
        tokens,
        (KIND,),
        balance_block_size=4,
        ping_pong=AUTO,
        costs=costs(link, link),
        **changes,
    )


@pytest.mark.parametrize(
    ("lengths", "tokens_per_rank", "fitted"),
    [
        # The fifth has no room on a rank, but all ranks together have 4 tokens left.
        ([3, 3, 3, 3, 3], 8, 4),
        ([6, 4, 6, 4, 4], 12, 5),  # only if 6 and 6 share a rank
        ([2, 2], 8, 2),
    ],
)
def test_the_first_documents_that_fit_into_ranks(lengths, tokens_per_rank, fitted):
    assert fitting(np.array(lengths), 2, tokens_per_rank).tolist() == lengths[:fitted]


# Whether micro-batches of whole ranks pay


def test_they_pay_where_exchanges_are_slow():
    assert whole_ranks_pay(FULL * 2, FITTED * 2, settings(SLOW))


@pytest.mark.parametrize(
    ("full", "fitted", "plan_settings"),
    [
        pytest.param(FULL * 2, FITTED * 2, settings(FREE), id="free-exchanges"),
        pytest.param(FITTED * 2, FITTED * 2, settings(SLOW), id="full-ones-fit-too"),
        # Ranks that are half empty take as long as full ones. The links are so fast that an
        # exchange costs less than that.
        pytest.param(
            [np.array([400] * 6)],
            [np.array([400] * 4)],
            settings(LinkCost(0.0, 1e6)),
            id="half-empty-ranks",
        ),
        pytest.param(
            [np.array([641, 280, 280])], FITTED * 2, settings(SLOW), id="longer-than-a-rank"
        ),
        pytest.param(
            FULL * 2, FITTED * 2, replace(settings(SLOW), costs=None), id="nothing-is-chosen"
        ),
        pytest.param(
            FULL * 2,
            FITTED * 2,
            replace(settings(SLOW), document_layout="whole"),
            id="layout-is-set",
        ),
    ],
)
def test_they_do_not_pay(full, fitted, plan_settings):
    assert not whole_ranks_pay(full, fitted, plan_settings)


def test_documents_are_not_fitted_where_that_could_not_be_faster():
    assert not whole_ranks_pay(FULL, iter([None]), settings(FREE))


@pytest.mark.parametrize(("slowness", "speeds"), [((), 4.0), ((2.0, 1.0, 1.0, 1.0), 3.5)])
@pytest.mark.parametrize(
    ("full_ratio", "fitted_ratio", "pays"),
    [(1.04, 0.5, False), (1.06, 1.0, True), (1.06, 1.02, False)],
)
def test_predicted_times_decide(monkeypatch, slowness, speeds, full_ratio, fitted_ratio, pays):
    """Ratios are predicted times over the time of full micro-batches whose ranks never wait."""
    plan_settings = settings(SLOW)
    slowed_costs = replace(plan_settings.costs, slowness=slowness)
    # A document of 280 has 39,340 pairs.
    computing_s = (3e-3 * 39_340 + 4e-4 * 280) / 280 / speeds
    seconds_by_documents = {9: full_ratio * computing_s, 8: fitted_ratio * computing_s}
    monkeypatch.setattr(
        whole_ranks,
        "_seconds_per_token",
        lambda micro_batches, _: seconds_by_documents[len(micro_batches[0])],
    )
    assert whole_ranks_pay(FULL, FITTED, replace(plan_settings, costs=slowed_costs)) == pays


# Plans of such micro-batches


def test_documents_that_fit_into_ranks_only_with_unequal_work_stay_whole_there():
    lengths = [6, 4, 6, 4, 4]
    plan = plan_micro_batch(lengths, settings(SLOW, ranks=2, tokens=12))
    assert not exchanges(plan)
    assert plan.choice.group == 1
    assert plan.choice.nano_batches == 1
    (nano_batch,) = plan.nano_batches
    segments = nano_batch.layout.segments
    documents_of_ranks = [
        np.unique(segments["document"][segments["rank"] == rank]).tolist() for rank in range(2)
    ]
    assert sorted(documents_of_ranks) == [[0, 2], [1, 3, 4]]


def test_documents_are_cut_where_exchanges_are_free():
    assert exchanges(plan_micro_batch([6, 4, 6, 4, 4], settings(FREE, ranks=2, tokens=12)))


def test_larger_groups_are_tried_where_a_document_fits_into_no_rank():
    # Two documents of 410 fit on two ranks of 640, and the third is cut: with free links all ranks
    # compute alike.
    plan = plan_micro_batch([410] * 3, settings(FREE, ranks=2))
    assert plan.choice.group == 2
    assert max(plan.choice.attention) == pytest.approx(sum(plan.choice.attention) / 2, rel=0.01)
