"""What a training lets the planner choose, and the costs that it measures and keeps."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import hf_distca
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.sim.costs import DeviceProfile
from hf_distca.trainer.assembly import make_dispatcher
from hf_distca.trainer.choices import PROFILE_FILE, _kept, choices_of
from tests.models_and_batches import exchanging, small_model

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
