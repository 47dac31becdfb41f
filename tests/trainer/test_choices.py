"""What a training lets the planner choose."""

from dataclasses import replace

import pytest
import torch

import hf_distca
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.sim.costs import DeviceProfile
from hf_distca.trainer.choices import choices_of
from tests.models import small_model

CPU = torch.device("cpu")


def choices(ranks: int = 4, **changes):
    config = hf_distca.DistCAConfig(**{"device_profile": "h100", **changes})
    model = small_model(implementation="distca")
    settings = hf_distca.plan_settings(model, config, ranks=ranks, device=CPU)
    return choices_of(model, settings, config, checkpointing=False), settings


@pytest.mark.parametrize("changes", [{"device_profile": None}, {"attention_servers": "external"}, {"ranks": 1}])
def test_nothing_is_chosen_without_costs_with_servers_or_alone(changes):
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
    found, _ = choices(document_layout="joint", balance_tolerance=0.2, ping_pong=False)
    assert not found.groups
    assert found.tolerances == (0.2, 0.3)
    assert found.nano_batches == (1,)


def test_a_profile_that_there_is_none_of():
    with pytest.raises(ValueError, match="no profile of a device at 'h900'"):
        choices(device_profile="h900")


def test_plans_of_a_training_are_chosen():
    """Ranks agree on settings with choices, and documents that balance whole are not cut."""
    model = small_model(implementation="distca")
    config = hf_distca.DistCAConfig(device_profile="h100", tokens_per_rank=64)
    settings = hf_distca.plan_settings(model, config, ranks=2, device=CPU)
    settings = replace(settings, choices=choices_of(model, settings, config, checkpointing=False))
    plan = plan_micro_batch([30, 30, 30, 30], settings)
    assert plan.choice.group == 1
