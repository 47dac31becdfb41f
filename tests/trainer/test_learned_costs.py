"""Costs corrected by steps whose times are made up."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from hf_distca.dispatch.recorder import Span, Work
from hf_distca.plan import AttentionKind
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.seconds import KernelCost, KindCosts, LinkCost, Links, StepCosts
from hf_distca.planner.settings import PlanSettings
from hf_distca.sim.costs import DeviceProfile
from hf_distca.trainer.learned_costs import Corrections, Observed, Step, observe
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
    launches=1.0,
)
NONE = Corrections()
SETTINGS = PlanSettings(2, 4, (KIND,), document_layout="whole")
PLAN = plan_micro_batch([4, 4], SETTINGS)
KERNEL = LAYERS * 3.0 * 10  # of a rank: 10 pairs
BETWEEN = (LAYERS - 1) * (4.0 * 4 + 1.0)


def corrected(*steps: Sequence[tuple[float, float]], known: Corrections = NONE) -> Corrections:
    """After steps in which each rank's kernel calls, and other work, take so many times as long as measured."""
    watched = [
        Step((PLAN,), tuple(Observed(kernel * KERNEL, between * BETWEEN, 0.0) for kernel, between in step))
        for step in steps
    ]
    return known.after(COSTS, SETTINGS, watched)


def test_costs_that_are_about_right_stay():
    assert corrected([(1.05, 0.95), (0.97, 1.0)]) is NONE


def test_costs_that_are_off_are_scaled_by_the_median_of_the_steps():
    off = [(2.0, 0.5), (2.0, 0.5)]
    found = corrected(off, [(9.0, 9.0)] * 2, off)
    assert found == Corrections(2.0, 0.5)
    costs = found.applied(COSTS)
    assert (costs.kinds[0].forward.pair, costs.kinds[0].backward.pair) == (2.0, 4.0)
    assert (costs.before, costs.after, costs.head, costs.launches) == (0.5, 1.5, 2.5, 0.5)
    assert costs.exchange == COSTS.exchange


def test_a_rank_that_is_slower_for_a_while():
    slower = [(1.0, 1.0), (2.0, 2.0)]
    slow = corrected(slower, slower)
    assert slow.slowness == pytest.approx((2 / 3, 4 / 3))
    assert (slow.attention, slow.other) == pytest.approx((1.5, 1.5))
    # As expected now: nothing changes. When it has recovered, all are alike again.
    assert corrected(slower, known=slow) is slow
    assert corrected([(1.0, 1.0), (1.0, 1.0)], known=slow) == NONE


@pytest.mark.parametrize(
    "steps",
    [
        [[(1.0, 1.0), (2.0, 1.0)]],  # its tasks are of shapes that costs tell little of
        [[(1.0, 1.0), (1.0, 2.0)]],
        [[(1.0, 1.0), (2.0, 2.0)], [(1.0, 1.0), (1.0, 1.0)]],  # something disturbed it in one step
    ],
)
def test_a_rank_is_not_slow_that_is_so_in_some_ways_only(steps):
    assert corrected(*steps).slowness == ()


def test_what_a_rank_sees():
    """Two layers of two phases each, forward and backward; a kernel call lies within its phase."""
    forward, backward = Work(0, 0, "forward"), Work(0, 0, "backward")
    spans = [
        Span("kernel", "local", forward, 1.0, 3.0),
        Span("phase", "", forward, 0.5, 3.5),
        Span("wait", "", forward, 4.0, 5.0),
        Span("phase", "", forward, 4.0, 5.5),
        Span("phase", "", forward, 9.5, 10.0),
        Span("kernel", "local", backward, 21.0, 24.0),
        Span("phase", "", backward, 20.0, 25.0),
        Span("phase", "", forward, 30.0, 31.0),  # of the next micro-batch
    ]
    assert observe(spans, 40.0) == Observed(kernel=5.0, between=0.5 + 4.0, step=40.0)


AUTO = {"document_layout": "auto", "balance_tolerance": "auto", "ping_pong": "auto"}


def _trained(folder: Path) -> tuple:
    """Of a training whose measured costs are far off: the costs before and after, and what it logged; then those of
    one that resumes from its checkpoint."""
    folder.mkdir(exist_ok=True)
    profile = replace(DeviceProfile.load("cpu"), bytes_per_second=1e3)
    if dist.get_rank() == 0:
        profile.save(folder / "slow.json")
    dist.barrier()
    arguments = {**AUTO, "device_profile": str(folder / "slow.json"), "max_steps": 9, "save_strategy": "no"}
    trainer = make_trainer(str(folder), dataloader_num_workers=1, **arguments)
    measured = trainer.dispatcher.settings.choices.costs
    trainer.train()
    costs = trainer.dispatcher.settings.choices.costs
    trainer._save_checkpoint(trainer.model, None)
    resumed = make_trainer(str(folder), **{**arguments, "max_steps": 10})
    resumed.train(resume_from_checkpoint=True)
    again = resumed.dispatcher.settings.choices.costs
    return measured, costs, again, [entry for entry in trainer.state.log_history if "loss" in entry]


def test_training_corrects_costs_on_all_ranks_alike_and_resumes_with_them(rank_pools, tmp_path):
    """Every rank's loader is ahead by some micro-batches when the costs change."""
    (measured, costs, again, logged), (_, other, *_) = rank_pools[2].run(_trained, tmp_path / "run")
    assert costs == other == again
    assert costs.before < measured.before / 2
    names = ("step_ms", "step_ms_predicted", "gain_predicted", "plans_without_exchange")
    assert {f"distca/{name}" for name in names} <= logged[-1].keys()
    measured_ms, predicted_ms = (np.array([entry[f"distca/{name}"] for entry in logged]) for name in names[:2])
    first, *_, last = np.abs(np.log(predicted_ms / measured_ms))
    assert last < first
