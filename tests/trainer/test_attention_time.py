"""Predictions for documents so short that they can be counted by hand."""

from dataclasses import replace

import pytest
import torch

from hf_distca import DistCAConfig
from hf_distca.patches.model import plan_settings
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.planner.seconds import KernelCost
from hf_distca.sim.costs import DeviceProfile
from hf_distca.trainer.attention_time import AttentionTime
from tests.models import small_model

LAYERS = 2


@pytest.fixture(scope="module")
def planned():
    """A model of two layers, its kind of attention, and two micro-batches that stay on the two ranks they lie on."""
    model = small_model(num_hidden_layers=LAYERS)
    config = DistCAConfig(tokens_per_rank=4, document_layout="whole", balance_tolerance=100.0, ping_pong=False)
    settings = plan_settings(model, config, ranks=2, device=torch.device("cpu"))
    plans = [plan_micro_batch([4, 2, 2], settings), plan_micro_batch([3], settings)]
    return model, settings.dominant_kind, plans


PAIRS = (10 + 6, 3 + 3)
"""Of each rank in both micro-batches: documents of 4 and 3 tokens, and two of 2."""


def test_without_a_profile_the_busiest_rank_takes_its_share_of_what_all_take(planned):
    model, _, plans = planned
    found = AttentionTime(model, None, forwards=1).predicted(plans, [1, 1], [7.0, 4.0])
    assert found == pytest.approx((7.0 + 4.0) * PAIRS[0] / sum(PAIRS))


@pytest.mark.parametrize("forwards", [1, 2])
def test_with_a_profile_the_run_does_not_matter(planned, forwards):
    model, kind, plans = planned
    profile = replace(
        DeviceProfile.load("h100"),
        measured=kind,
        forward=KernelCost(1.0, 0.0, 0.0, 0.5),
        backward=KernelCost(0.0, 0.0, 0.0, 2.0),
    )
    found = AttentionTime(model, profile, forwards=forwards).predicted(plans, [1, 1], [0.0, 0.0])
    calls = 2  # one in each micro-batch
    assert found == pytest.approx(LAYERS * (forwards * (calls + 0.5 * PAIRS[0]) + 2.0 * PAIRS[0]))


def test_tasks_on_keys_of_others_read_all_their_queries_in_each_stage(planned):
    model, kind, _ = planned
    config = DistCAConfig(
        tokens_per_rank=4, document_layout="joint", balance_tolerance=100.0, ping_pong=False, ranks_per_node=1
    )
    settings = plan_settings(model, config, ranks=2, device=torch.device("cpu"))
    plan = plan_micro_batch([8], settings)
    rows = KernelCost(0.0, 1.0, 0.0, 0.0)
    nothing = KernelCost(0.0, 0.0, 0.0, 0.0)
    profile = replace(DeviceProfile.load("h100"), measured=kind, forward=rows, backward=nothing)
    found = [AttentionTime(model, profile, forwards=1).predicted([plan], [stages], [0.0, 0.0]) for stages in (1, 3)]
    assert found == [LAYERS * (4 + 4), LAYERS * (4 + 3 * 4)]
