"""Predictions for documents so short that they can be counted by hand."""

from dataclasses import replace

import pytest
import torch

from hf_distca import DistCAConfig
from hf_distca.models.settings import plan_settings
from hf_distca.plan import PlanChoice
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.trainer.metrics import AttentionTime
from tests.models_and_batches import small_model


@pytest.fixture(scope="module")
def planned():
    """A model, and two micro-batches that stay on the two ranks they lie on."""
    model = small_model()
    config = DistCAConfig(tokens_per_rank=4, document_layout="whole", balance_tolerance=100.0, ping_pong=False)
    settings = plan_settings(model, config, ranks=2, device=torch.device("cpu"))
    return model, [plan_micro_batch([4, 2, 2], settings), plan_micro_batch([3], settings)]


PAIRS = (10 + 6, 3 + 3)
"""Of each rank in both micro-batches: documents of 4 and 3 tokens, and two of 2."""


def test_without_costs_the_busiest_rank_takes_its_share_of_what_all_take(planned):
    model, plans = planned
    found = AttentionTime(model).predicted(plans, [7.0, 4.0])
    assert found == pytest.approx((7.0 + 4.0) * PAIRS[0] / sum(PAIRS))


def test_plans_that_were_chosen_carry_their_prediction(planned):
    """The busiest rank is that of all micro-batches together."""
    model, plans = planned
    attention = ((5.0, 1.0), (1.0, 6.0))
    chosen = [
        replace(plan, choice=PlanChoice(1, 1, 0.01, 9.0, each)) for plan, each in zip(plans, attention, strict=True)
    ]
    assert AttentionTime(model).predicted(chosen, [100.0, 100.0]) == 7.0
