"""Costs corrected by steps whose times are made up."""

from dataclasses import replace

import numpy as np
import pytest

from hf_distca.dispatch.recorder import Span, Work
from hf_distca.plan import AttentionKind
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.seconds import KernelCost, KindCosts, LinkCost, Links, StepCosts
from hf_distca.planner.settings import PlanSettings
from hf_distca.trainer.learned_costs import Observed, corrected_costs, observe
from tests.trainer.small_trainers import make_trainer

KIND = AttentionKind(None, 4, 2, 8, 8)
LINK = LinkCost(0.0, 1e9)
LAYERS = 3
COSTS = StepCosts(
    (KindCosts(KIND, LAYERS, KernelCost(0.0, 0.0, 0.0, 1.0), KernelCost(0.0, 0.0, 0.0, 2.0)),),
    before=1.0,
    after=3.0,
    backward_factor=2.0,
    head=5.0,
    exchange=Links(LINK, LINK),
)
SETTINGS = PlanSettings(2, 4, (KIND,), document_layout="whole")
PLAN = plan_micro_batch([4, 4], SETTINGS)
KERNEL = LAYERS * 3.0 * 10  # of a rank: 10 pairs
BETWEEN = (LAYERS - 1) * 4.0 * 4


def corrected(*seen: tuple[float, float], costs: StepCosts = COSTS) -> StepCosts:
    every = [Observed(kernel * KERNEL, between * BETWEEN, 0.0) for kernel, between in seen]
    return corrected_costs(costs, SETTINGS, [PLAN], every)


def test_costs_that_are_about_right_stay():
    assert corrected((1.05, 0.95), (0.97, 1.0)) is COSTS


def test_costs_that_are_off_are_scaled():
    found = corrected((2.0, 0.5), (2.0, 0.5))
    assert found.kinds[0].forward.pair == pytest.approx(2.0)
    assert found.kinds[0].backward.pair == pytest.approx(4.0)
    assert (found.before, found.after, found.head) == pytest.approx((0.5, 1.5, 2.5))
    assert found.slowness == ()
    assert found.exchange == COSTS.exchange


def test_a_rank_that_is_slower_for_a_while():
    slow = corrected((1.0, 1.0), (2.0, 2.0))
    assert slow.slowness == pytest.approx((2 / 3, 4 / 3))
    assert slow.kinds[0].forward.pair == pytest.approx(1.5)
    # As expected now: nothing changes. When it has recovered, all are alike again.
    assert corrected((1.0, 1.0), (2.0, 2.0), costs=slow) is slow
    recovered = corrected((1.0, 1.0), (1.0, 1.0), costs=slow)
    assert recovered.slowness == ()
    assert recovered.kinds[0].forward.pair == pytest.approx(1.0)
    assert recovered.before == pytest.approx(1.0)


def test_what_a_rank_sees():
    """Two layers of two phases each, forward and backward; a kernel call lies within its phase."""
    forward, backward = Work(0, 0, "forward"), Work(0, 0, "backward")
    spans = [
        Span("kernel", "own", forward, 1.0, 3.0),
        Span("phase", "", forward, 0.5, 3.5),
        Span("wait", "", forward, 4.0, 5.0),
        Span("phase", "", forward, 4.0, 5.5),
        Span("phase", "", forward, 9.5, 10.0),
        Span("kernel", "own", backward, 21.0, 24.0),
        Span("phase", "", backward, 20.0, 25.0),
        Span("phase", "", forward, 30.0, 31.0),  # of the next micro-batch
    ]
    assert observe(spans, 40.0) == Observed(kernel=5.0, between=0.5 + 4.0, step=40.0)


def _trained(folder: str) -> tuple:
    settings = {"document_layout": "auto", "balance_tolerance": "auto", "ping_pong": "auto"}
    trainer = make_trainer(folder, max_steps=9, dataloader_num_workers=1, **settings)
    slow = replace(trainer.dispatcher.settings.choices.costs, before=1.0)
    trainer.dispatcher.choose_by(replace(trainer.dispatcher.settings.choices, costs=slow))
    trainer.train()
    costs = trainer.dispatcher.settings.choices.costs
    return slow, costs, [entry for entry in trainer.state.log_history if "loss" in entry]


def test_training_corrects_costs_on_all_ranks_alike(rank_pools, tmp_path):
    """Every rank's loader is ahead by some micro-batches when the costs change."""
    (slow, costs, logged), (_, other, _) = rank_pools[2].run(_trained, str(tmp_path))
    assert costs == other
    assert costs.before < slow.before / 2
    assert {"step_ms", "step_ms_predicted", "gain_predicted", "plans_without_exchange"} <= logged[-1].keys()
    first, last = logged[0], logged[-1]
    assert abs(np.log(last["step_ms_predicted"] / last["step_ms"])) < abs(
        np.log(first["step_ms_predicted"] / first["step_ms"])
    )
