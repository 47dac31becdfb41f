"""Costs by which plans are chosen: measured, kept, and corrected by steps whose times are made up."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

import hf_distca
from hf_distca.dispatch.recorder import Span, Work
from hf_distca.plan import AttentionKind
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.seconds import KernelCost, KindCosts, LinkCost, Links, MixingCosts, StepCosts
from hf_distca.planner.settings import PlanSettings
from hf_distca.sim.costs import DeviceProfile
from hf_distca.trainer.assembly import make_dispatcher
from hf_distca.trainer.costs import PROFILE_FILE, Corrections, Observed, Step, _kept, choices_of, observe
from tests.models_and_batches import exchanging, small_model
from tests.trainer.small_trainers import make_trainer

CPU = torch.device("cpu")


def choices(ranks: int = 4, **changes):
    """What may be chosen with the profile of an H100, and the settings of the plans."""
    config = hf_distca.DistCAConfig(**{"device_profile": "h100", **changes})
    model = small_model(implementation="distca")
    settings = hf_distca.plan_settings(model, config, ranks=ranks, device=CPU)
    dispatcher = SimpleNamespace(settings=settings)
    return choices_of(model, dispatcher, config, checkpointing=False), settings


def set_by_hand() -> dict:
    return {"device_profile": None, **exchanging(small_model())}


@pytest.mark.parametrize("changes", [set_by_hand(), {"attention_servers": "external"}, {"ranks": 1}])
def test_nothing_is_chosen_where_all_is_set_with_servers_or_alone(changes):
    assert choices(**changes)[0] is None


def test_costs_are_those_of_the_profile_and_the_model():
    found, settings = choices()
    profile = DeviceProfile.load("h100")
    assert found.groups
    assert found.tolerances == (0.01, 0.1, 0.3)
    assert found.nano_batches == (1, 2)
    assert found.costs.exchange == profile.exchange
    ((kind, layers, forward, _),) = [tuple(vars(each).values()) for each in found.costs.kinds]
    assert (kind, layers) == (settings.kinds[0], small_model().config.num_hidden_layers)
    assert forward == profile.kernel(kind, "forward")
    assert found.costs.backward_factor == 2.0


def test_what_is_set_is_kept():
    assert not choices(document_layout="joint")[0].groups
    assert choices(balance_tolerance=0.2)[0].tolerances == (0.2,)
    assert choices(ping_pong=False)[0].nano_batches == (1,)
    assert choices(ping_pong=True)[0].nano_batches == (2,)
    with pytest.raises(ValueError, match="no device profile at 'h900'"):
        choices(device_profile="h900")


def test_core_attention_that_is_computed_again_counts_in_the_backward():
    model = small_model(implementation="distca")
    backward = []
    for kept in (True, False):
        config = hf_distca.DistCAConfig(device_profile="h100", keep_core_attention=kept)
        dispatcher = SimpleNamespace(settings=hf_distca.plan_settings(model, config, ranks=2, device=CPU))
        found = choices_of(model, dispatcher, config, checkpointing=True)
        backward.append(found.costs.kinds[0].backward)
        forward = found.costs.kinds[0].forward
    assert backward[1] == backward[0].plus(forward)


def _measured(folder) -> list:
    """Choices of two dispatchers of a run on this rank; the second takes the costs that the first has kept."""
    found = []
    for _ in range(2):
        config = hf_distca.DistCAConfig(tokens_per_rank=64)
        dispatcher = make_dispatcher(small_model(implementation="distca"), config, CPU, folder=folder)
        found.append(dispatcher.settings.choices)
        # Nothing to exchange for: documents that balance whole are not cut.
        plan = plan_micro_batch([30, 30, 30, 30], dispatcher.settings)
        assert plan.choice.group == 1
        assert plan.summary.exchange.bytes_total == 0
        placed = dispatcher.plan_lengths([[20, 5]])[0]
        assert placed.choice.seconds > 0
        assert placed.summary.exchange.bytes_total == 0
        dispatcher.close()
    return found


def test_a_profile_that_was_not_written_whole_is_measured_again(tmp_path):
    (tmp_path / PROFILE_FILE).write_text("{")
    assert _kept(tmp_path, "here") is None
    kept = replace(DeviceProfile.load("cpu"), source="here")
    kept.save(tmp_path / PROFILE_FILE)
    assert _kept(tmp_path, "here") == kept
    assert _kept(tmp_path, "elsewhere") is None


def test_costs_are_measured_once_agreed_on_and_kept(rank_pools, tmp_path):
    first, second = rank_pools[2].run(_measured, tmp_path / "run")
    assert first == second
    measured, kept = first
    assert measured == kept
    assert "at most 64 tokens a rank" in DeviceProfile.load(str(tmp_path / "run" / PROFILE_FILE)).source
    cost = measured.costs
    assert cost.kinds[0].forward.seconds is not None
    assert min(cost.before, cost.after, cost.launches, cost.exchange.start) > 0
    assert cost.exchange.within.bandwidth > 1e6


# Corrections

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
        Step((PLAN,), tuple(Observed(kernel * KERNEL, between * BETWEEN) for kernel, between in step))
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


def test_mixing_layers_count_as_other_work():
    costs = replace(COSTS, mixing=MixingCosts(6, 1.0, 1.0, 9.0, 1.0, 0.0, 1.0, 1.0))
    # Three layers with attention: two mixing layers of 3 s a token after each.
    other = (LAYERS - 1) * (4.0 * (4 + 2 * 3) + 1.0)
    watched = [Step((PLAN,), (Observed(KERNEL, 2 * other),) * 2)]
    found = NONE.after(costs, SETTINGS, watched)
    assert (found.attention, found.other) == pytest.approx((1.0, 2.0))
    assert found.applied(costs).mixing == MixingCosts(6, 2.0, 2.0, 18.0, 2.0, 0.0, 1.0, 1.0)


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
    assert observe(spans) == Observed(kernel=5.0, between=0.5 + 4.0)


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
