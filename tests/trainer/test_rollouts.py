"""Prompts of rollouts, their new order, and the losses that allow it."""

from types import SimpleNamespace

import pytest
import torch
from trl import GRPOTrainer, RLOOTrainer

from hf_distca.planner.prefixes import BLOCK
from hf_distca.trainer.trl.preference import prompts_of, rearranged, why_shuffled


def test_prompts_are_equal_by_their_whole_blocks():
    tokens = torch.arange(3 * BLOCK)
    rows = [
        torch.cat([torch.zeros(9, dtype=torch.int64), tokens[: 2 * BLOCK]]),
        torch.cat([tokens[: 2 * BLOCK], torch.tensor([5] * 9)]),
        torch.cat([tokens[: 2 * BLOCK - 1], torch.tensor([5] * 10)]),
        torch.cat([tokens[: BLOCK - 1], torch.zeros(BLOCK + 10, dtype=torch.int64)]),
    ]
    mask = torch.ones(4, 2 * BLOCK + 9, dtype=torch.int64)
    mask[0, :9] = 0  # padding
    mask[3, BLOCK - 1 :] = 0
    one, other, shorter, shortest = prompts_of(
        {"prompt_ids": torch.stack(rows), "prompt_mask": mask}
    )
    assert one == other
    assert one.rows == 2 * BLOCK
    assert shorter.rows == 2 * BLOCK
    assert shorter != one
    assert shortest == (b"", 0)


def test_all_values_of_rollouts_are_rearranged():
    micro_batches = [
        {
            "ids": torch.tensor([[1], [2]]),
            "names": ["a", "b"],
            "count": torch.tensor(7),
            "none": None,
        },
        {
            "ids": torch.tensor([[3], [4]]),
            "names": ["c", "d"],
            "count": torch.tensor(7),
            "none": None,
        },
    ]
    first, second = rearranged(micro_batches, torch.tensor([3, 0, 2, 1]))
    assert first["ids"].tolist() == [[4], [1]]
    assert second["ids"].tolist() == [[3], [2]]
    assert [first["names"], second["names"]] == [["d", "a"], ["c", "b"]]
    assert first["count"] == second["count"] == 7
    assert first["none"] is second["none"] is None


def own_loss() -> None:
    """A loss that is not TRL's."""


@pytest.mark.parametrize(
    ("arguments", "trainer", "reason"),
    [
        ({"loss_type": "dapo", "top_entropy_quantile": 1.0}, {}, None),
        ({"loss_type": "grpo"}, {}, None),
        ({}, {"_compute_loss": RLOOTrainer._compute_loss}, None),
        ({"loss_type": "bnpo"}, {}, "loss_type='bnpo'"),
        ({"loss_type": "a new one"}, {}, "loss_type='a new one'"),
        ({"loss_type": "dapo", "top_entropy_quantile": 0.2}, {}, "top_entropy_quantile"),
        ({"loss_type": "dapo"}, {"_entropy_bonus_enabled": True}, "entropy bonus"),
        ({"loss_type": "dapo"}, {"aux_loss_enabled": True}, "router's auxiliary loss"),
        ({"loss_type": "dapo"}, {"_compute_loss": own_loss}, "loss of its own"),
    ],
)
def test_losses_that_depend_on_the_micro_batch(arguments, trainer, reason):
    stock = {"_compute_loss": GRPOTrainer._compute_loss, "aux_loss_enabled": False}
    text = why_shuffled(SimpleNamespace(args=SimpleNamespace(**arguments), **{**stock, **trainer}))
    assert (text is None) if reason is None else (reason in text)
