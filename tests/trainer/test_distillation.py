"""Distillation with packed students and teachers beside TRL's, on the same ranks and rollouts."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from hf_distca.dispatch import padded_rows
from tests.ranks import RankPool
from tests.trainer.preferences import Case, compare_with_stock, train

WITHIN = 1e-4
"""Largest relative difference of a logged figure or of what a weight has learned, in float32."""
STEPS = {"max_steps": 2, "temperature": 0.9}
LONG = {"tokens_per_rank": 512}
CASES = {
    "reverse KL": Case("distillation", arguments={**STEPS, "beta": 1.0}),
    "forward KL": Case("distillation", arguments={**STEPS, "beta": 0.0}),
    "JSD": Case("distillation", arguments={**STEPS, "beta": 0.3, "gradient_accumulation_steps": 2}),
    "fsdp2": Case("distillation", "fsdp2", {**STEPS, "beta": 0.3}),
    "zero3": Case("distillation", "zero3", {**STEPS, "beta": 0.3}),
    # Rollouts of the student, and answers of the data.
    "GKD": Case("gkd", arguments={**STEPS, "beta": 0.3, "lmbda": 0.5}, planned=LONG),
    "GKD, forward KL, fsdp2": Case(
        "gkd", "fsdp2", {**STEPS, "beta": 0.0, "lmbda": 0.0}, planned=LONG
    ),
}
LAUNCHES = {
    "one rank": (1, ["reverse KL", "GKD"]),
    "two ranks": (2, ["forward KL", "JSD", "GKD"]),
    "three ranks": (3, ["reverse KL"]),
    "fsdp2": (2, ["fsdp2", "GKD, forward KL, fsdp2"]),
    "zero3": (2, ["zero3"]),
}
"""Ranks and trainings by launch."""
MEANS = "entropy"
"""Figure that TRL computes of each micro-batch, and then takes the mean."""


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.launches
def test_distillation_is_that_of_trl(launch, tmp_path, subtests):
    ranks, names = LAUNCHES[launch]
    pool = RankPool(ranks)  # trainers leave their state in a process
    try:
        for name in names:
            with subtests.test(name):
                (first, *_), *_ = pool.run(
                    compare_with_stock,
                    str(tmp_path / name),
                    CASES[name],
                    WITHIN,
                    MEANS if name == "JSD" else "",
                    keeps_groups=CASES[name].strategy == "zero3",
                )
                assert 0 < first["distca/padding_share"] < 1
                assert ranks == 1 or first["distca/exchange_bytes"] > 0
    finally:
        pool.close()


def plans_of_models(folder: str) -> list[tuple[bool, int, int]]:
    """Whether each plan of a training has a backward, the layers of its model, and the ranks that
    plan together at least.
    """
    made: list[tuple[bool, int, int]] = []
    planned = padded_rows.PaddedBatches._planned

    def noted(self: Any, *given: Any) -> Any:
        run = self.dispatcher.run
        made.append((torch.is_grad_enabled(), run.model.depth, run.plans.pod_ranks))
        return planned(self, *given)

    with patch.object(padded_rows.PaddedBatches, "_planned", noted):
        train(folder, CASES["JSD"], planned=True)
    return made


def test_teachers_have_plans_of_their_own_without_a_backward(rank_pools, tmp_path):
    by_rank = rank_pools[2].run(plans_of_models, str(tmp_path))
    for made in by_rank:
        assert set(made) == {(False, 3, 512), (True, 2, 512)}
    assert by_rank[0] == by_rank[1]
