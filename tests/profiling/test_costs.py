"""Costs by which plans are chosen: measured, kept, and corrected by steps of invented times."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import hf_distca
from hf_distca.dispatch.recorder import Span, Work
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.settings import PlanSettings
from hf_distca.predict.corrections import Corrections, expected_seconds
from hf_distca.predict.device_profile import DeviceProfile
from hf_distca.predict.seconds import KernelCost, KindCosts, LinkCost, Links, MixingCosts, StepCosts
from hf_distca.profiling import costs as costs_module
from hf_distca.profiling.costs import PROFILE_FILE, LearnedCosts, observe, with_costs
from hf_distca.trainer.assembly import make_dispatcher
from tests.models_and_batches import SMALL_KIND, exchanging, small_model, with_planning
from tests.trainer.small_trainers import make_trainer

CPU = torch.device("cpu")


def planning(ranks: int = 4, checkpointing: bool = False, **changes: Any) -> Any:
    """Settings of plans with the profile of an H100."""
    config = hf_distca.DistCAConfig(**with_planning({"device_profile": "h100", **changes}))
    model = small_model(implementation="distca")
    run = hf_distca.describe_run(
        model, config, ranks=ranks, device=CPU, checkpointing={} if checkpointing else None
    )
    dispatcher: Any = SimpleNamespace(settings=run.plans)  # measures nothing
    return with_costs(run, dispatcher).plans


def test_what_may_be_chosen_and_by_which_costs():
    allowed = planning()
    profile = DeviceProfile.load("h100")
    assert allowed.document_layout == "auto"
    assert allowed.tolerances == (0.01, 0.1)
    assert allowed.nano_batches == (1, 2)
    assert allowed.costs.exchange == profile.exchange
    assert allowed.costs.backward_factor == 2.0
    (costs,) = allowed.costs.kinds
    assert costs.kind == SMALL_KIND
    assert costs.layers == 2
    assert costs.forward == profile.kernel(costs.kind, "forward")
    # Checkpoints keep core attention: its backward costs what it costs without them.
    assert planning(checkpointing=True).costs.kinds == allowed.costs.kinds
    # What is set is kept.
    assert planning(balance_tolerance=0.2).tolerances == (0.2,)
    assert [planning(ping_pong=on).nano_batches for on in (False, True)] == [(1,), (2,)]
    with pytest.raises(ValueError, match="no device profile at 'h900'"):
        planning(device_profile="h900")
    # Nothing is chosen where all is set, with servers, or alone.
    all_set = {"device_profile": None, **exchanging(small_model())}
    assert [
        planning(**changes).costs
        for changes in (all_set, {"attention_servers": "external"}, {"ranks": 1})
    ] == [None] * 3
    # A user may turn choosing off, also of a trainer.
    chosen: list[Any] = []
    groups = SimpleNamespace(all_gather=lambda value, **_: [value])
    dispatcher: Any = SimpleNamespace(settings=allowed, groups=groups, choose_by=chosen.append)
    learned = LearnedCosts(dispatcher)
    for costs_of_user in (allowed.costs, None):
        dispatcher.settings = replace(allowed, costs=costs_of_user)
        learned.resume(None)
    assert chosen == [allowed.costs]


def test_corrections_are_resumed_where_the_same_costs_were_measured(tmp_path):
    """Those of other devices or settings are not."""

    def learned(profile: str) -> tuple[LearnedCosts, Any]:
        groups = SimpleNamespace(all_gather=lambda value, **_: [value], members=[0], rank=0)
        dispatcher: Any = SimpleNamespace(
            settings=SimpleNamespace(costs=planning(device_profile=profile).costs)
        )
        dispatcher.groups = groups
        dispatcher.choose_by = lambda chosen: setattr(dispatcher.settings, "costs", chosen)
        return LearnedCosts(dispatcher), dispatcher

    corrections = Corrections(2.0, 0.5, (0.5, 1.5, 1.0, 1.0))
    saved, _ = learned("h100")
    saved._correct(corrections)
    saved.save(tmp_path)
    costs, same_device = learned("h100")
    costs.resume(tmp_path)
    expected = corrections.applied(planning(device_profile="h100").costs)
    assert same_device.settings.costs == expected
    costs, other_device = learned("h200")
    costs.resume(tmp_path)
    assert other_device.settings.costs == planning(device_profile="h200").costs


def _measured(folder: Path) -> list[tuple[Any, str]]:
    """Costs of dispatchers on this rank, one after another, and what is kept; the last one is of
    another run.
    """
    measured = []
    for tokens in (64, 64, 32):
        config = hf_distca.DistCAConfig(tokens_per_rank=tokens)
        dispatcher = make_dispatcher(
            small_model(implementation="distca"), config, CPU, folder=folder
        )
        measured.append(
            (
                dispatcher.settings.costs,
                DeviceProfile.load(str(folder / PROFILE_FILE)).source,
            )
        )
        placed = dispatcher.plan_lengths([[20, 5]])[0]
        assert placed.choice.seconds > 0
        assert placed.summary.exchange.bytes_total == 0  # nothing to exchange for
        dispatcher.close()
    return measured


def test_costs_are_measured_once_agreed_on_and_kept(rank_pools, tmp_path):
    (tmp_path / PROFILE_FILE).write_text("{")  # was not written whole
    first, second = rank_pools[2].run(_measured, tmp_path)
    assert first == second
    (costs, source), again, (other, source_of_other) = first
    assert again == (costs, source)
    assert source.endswith(
        "kernel costs call, row, key, pair, diagonal, task"
    )  # fewer of an earlier version
    assert other != costs
    assert source_of_other == source.replace("at most 64 tokens a rank", "at most 32 tokens a rank")
    assert (
        min(costs.before_attention, costs.after_attention, costs.launches, costs.exchange.start) > 0
    )
    assert costs.exchange.within.bandwidth > 1e6


def _kept_on_a_full_disk(folder: Path) -> str:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    profile = DeviceProfile.load("cpu")
    model, config = small_model(implementation="distca"), hf_distca.DistCAConfig(tokens_per_rank=64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs_module, "measured_profile", lambda *_, **__: profile)
        patch.setattr(costs_module, "with_links", lambda *_, **__: profile)
        patch.setattr(DeviceProfile, "save", fail)
        with pytest.raises(ValueError, match="No space left") as caught:
            make_dispatcher(model, config, CPU, folder=folder)
    return str(caught.value)


def test_a_full_disk_ends_all_ranks_before_training(rank_pools, tmp_path):
    (message,) = set(rank_pools[2].run(_kept_on_a_full_disk, tmp_path))
    assert message == "rank 0: OSError: [Errno 28] No space left on device"


LAYERS = 3
COSTS = StepCosts(
    (
        KindCosts(
            SMALL_KIND, LAYERS, KernelCost(0.0, 0.0, 0.0, 1.0), KernelCost(0.0, 0.0, 0.0, 2.0)
        ),
    ),
    before_attention=1.0,
    after_attention=3.0,
    backward_factor=2.0,
    head=5.0,
    exchange=Links(LinkCost(0.0, 1e9), LinkCost(0.0, 1e9)),
    launches=1.0,
)
NONE = Corrections()
SETTINGS = PlanSettings(2, 4, (SMALL_KIND,), document_layout="whole")
PLAN = plan_micro_batch([4, 4], SETTINGS)
KERNEL = LAYERS * 3.0 * 10  # of a rank: 10 pairs
BETWEEN = (LAYERS - 1) * (4.0 * 4 + 1.0)


def corrected(
    *steps: Any, known: Corrections = NONE, costs: Any = COSTS, between: float = BETWEEN
) -> Corrections:
    """After steps in which each rank's kernel calls, and other work, take so many times as long as
    measured.
    """
    seen = np.array(steps).transpose(0, 2, 1) * np.array([[KERNEL], [between]])
    settings = (SETTINGS.node_of_ranks, SETTINGS.bytes_per_value)
    of_ranks = [expected_seconds([PLAN], rank, costs, *settings) for rank in range(2)]
    expected = np.broadcast_to(np.transpose(of_ranks), seen.shape)
    return known.after(costs, expected, seen)


def test_a_rank_expects_the_seconds_of_its_pod():
    plan = plan_micro_batch([4, 2], SETTINGS)
    costs = replace(COSTS, slowness=(1.0, 1.0, 2.0, 3.0))
    expected = [
        expected_seconds([replace(plan, first_rank=2)], rank, costs, (0, 0, 0, 0), 4)
        for rank in (2, 3)
    ]
    # Of 13 pairs the ranks compute 7 and 6, the third and the fourth rank of all.
    kernel = [slowness * LAYERS * 3.0 * count for slowness, count in ((2.0, 7), (3.0, 6))]
    assert expected == [(kernel[0], BETWEEN), (kernel[1], (LAYERS - 1) * (4.0 * 2 + 1))]


def test_costs_that_are_off_are_scaled_by_the_median_of_the_steps():
    assert corrected([(1.05, 0.95), (0.97, 1.0)]) is NONE  # about right
    off = [(2.0, 0.5), (2.0, 0.5)]
    scaled = corrected(off, [(9.0, 9.0)] * 2, off)
    assert scaled == Corrections(2.0, 0.5)
    costs = scaled.applied(COSTS)
    assert costs.kinds[0].forward.pair == 2.0
    assert costs.kinds[0].backward.pair == 4.0
    assert costs.before_attention == 0.5
    assert costs.after_attention == 1.5
    assert costs.head == 2.5
    assert costs.launches == 0.5
    assert costs.exchange == COSTS.exchange
    # Of one layer only kernel calls are seen: there is no time between layers.
    one = replace(COSTS, kinds=(replace(COSTS.kinds[0], layers=1),))
    assert corrected([(2.0 / LAYERS, 9.0)] * 2, costs=one) == Corrections(2.0, 2.0)
    # Mixing layers count as other work: two of 3 s a token after each of three layers with
    # attention.
    mixing = replace(COSTS, mixing=MixingCosts(6, 1.0, 1.0, 9.0, 1.0, 0.0, 1.0, 1.0))
    scaled = corrected(
        [(1.0, 2.0)] * 2, costs=mixing, between=(LAYERS - 1) * (4.0 * (4 + 2 * 3) + 1.0)
    )
    assert (scaled.attention, scaled.other) == pytest.approx((1.0, 2.0))
    assert scaled.applied(mixing).mixing == MixingCosts(6, 2.0, 2.0, 18.0, 2.0, 0.0, 1.0, 1.0)


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
        [[(1.0, 1.0), (2.0, 1.0)]],
        [[(1.0, 1.0), (1.0, 2.0)]],
        [[(1.0, 1.0), (2.0, 2.0)], [(1.0, 1.0), (1.0, 1.0)]],
    ],
    ids=["slow attention alone", "slow other work alone", "one step that was disturbed"],
)
def test_a_rank_that_is_not_slow(steps):
    """Its tasks may be of shapes that costs say little of."""
    assert corrected(*steps).slowness == ()


def test_what_a_rank_sees():
    # Two layers of two phases each, forward and backward; a kernel call lies within its phase.
    forward = Work(0, 0, "forward")
    backward = Work(0, 0, "backward")
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
    assert observe(spans) == (5.0, 0.5 + 4.0)


def _trained(folder: Path) -> tuple[Any, ...]:
    """Costs before and after a training with costs that are far off, and of one that resumes from
    it; and its logs.
    """
    arguments = dict.fromkeys(("document_layout", "balance_tolerance", "ping_pong"), "auto")
    arguments |= {
        "device_profile": str(folder / "slow.json"),
        "max_steps": 9,
        "save_strategy": "no",
    }
    trainer = make_trainer(str(folder), dataloader_num_workers=1, **arguments)
    measured = trainer.dispatcher.settings.costs
    trainer.train()
    costs = trainer.dispatcher.settings.costs
    trainer._save_checkpoint(trainer.model, None)
    resumed = make_trainer(str(folder), **{**arguments, "max_steps": 10})
    resumed.train(resume_from_checkpoint=True)
    again = resumed.dispatcher.settings.costs
    return measured, costs, again, [entry for entry in trainer.state.log_history if "loss" in entry]


def test_training_corrects_costs_on_all_ranks_alike_and_resumes_with_them(rank_pools, tmp_path):
    """Every rank's loader is ahead by some micro-batches when the costs change."""
    replace(DeviceProfile.load("cpu"), bytes_per_second=1e3).save(tmp_path / "slow.json")
    (measured, costs, again, logged), (_, other, *_) = rank_pools[2].run(_trained, tmp_path)
    assert costs == other == again
    assert costs.before_attention < measured.before_attention / 2
    names = ("step_ms", "step_ms_predicted", "gain_predicted", "plans_without_exchange")
    assert {f"distca/{name}" for name in names} <= logged[-1].keys()
    measured_ms = np.array([entry["distca/step_ms"] for entry in logged])
    predicted_ms = np.array([entry["distca/step_ms_predicted"] for entry in logged])
    first, *_, last = np.abs(np.log(predicted_ms / measured_ms))
    assert last < first
