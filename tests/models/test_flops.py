"""FLOPs of a micro-batch, as model FLOPs utilization counts them."""

import pytest

from hf_distca.models.flops import flops_counter
from hf_distca.planner.micro_batch import PlanSettings, plan_micro_batch
from tests.models_and_batches import SMALL_KIND, small_model


def test_model_flops_are_those_of_weights_and_pairs():
    model = small_model()
    model.model.layers[0].requires_grad_(False)
    plan = plan_micro_batch([5, 3], PlanSettings(1, 8, (SMALL_KIND,)))
    frozen, *trained = (
        sum(p.numel() for p in layer.parameters()) for layer in (*model.model.layers, model.lm_head)
    )
    weights = 4 * frozen + 6 * (sum(trained) + model.model.norm.weight.numel())
    attention = (
        2 * 3 * 4 * 32 * (15 + 6)
    )  # layers; forward and backward; operations of a pair; width; pairs
    assert flops_counter(model, processes_per_rank=1)(plan) == pytest.approx(
        8 * weights + attention
    )
    assert flops_counter(model, processes_per_rank=2)(plan) == pytest.approx(
        8 * weights + 2 * attention
    )
