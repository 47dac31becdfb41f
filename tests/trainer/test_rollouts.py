"""Rollouts divided by their prompts, in small examples and by properties."""

from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trl import GRPOTrainer, RLOOTrainer

from hf_distca.planner.prefixes import BLOCK
from hf_distca.trainer.rollouts import (
    Prompt,
    divided_by_prompts,
    prompts_of,
    rearranged,
    why_shuffled,
)

A, B, C = (Prompt(name, 128) for name in (b"a", b"b", b"c"))
LONG = Prompt(b"long", 1024)


def micro_batches_of(prompts_of_ranks: list[list[Prompt]], parts: int) -> list[list[list[Prompt]]]:
    """The prompts of each micro-batch, by rank."""
    orders = divided_by_prompts(prompts_of_ranks, parts)
    return [
        [
            [prompts[index] for index in np.split(order, parts)[part]]
            for prompts, order in zip(prompts_of_ranks, orders, strict=True)
        ]
        for part in range(parts)
    ]


def test_completions_of_a_prompt_meet_in_one_micro_batch():
    assert micro_batches_of([[A, B, A, B]], 2) == [[[A, A]], [[B, B]]]


def test_those_of_a_prompt_on_two_ranks_meet_too():
    ranks = [[A, A, A, B], [B, C, C, C]]
    assert micro_batches_of(ranks, 2) == [[[A, A], [C, C]], [[A, B], [B, C]]]


def test_the_prompt_with_most_rows_to_save_is_not_divided():
    assert micro_batches_of([[A, C, A, C, A, C, LONG, LONG]], 2) == [
        [[C, C, LONG, LONG]],
        [[A, A, A, C]],
    ]


def test_a_prompt_goes_where_it_leaves_least_room():
    none = Prompt(b"", 0)
    assert micro_batches_of([[LONG, LONG, B, B, B, C, none, none]], 2) == [
        [[LONG, LONG, none, none]],
        [[B, B, B, C]],
    ]


def test_rollouts_keep_their_order_inside_a_part():
    (order,) = divided_by_prompts([[A, B, A, B, B, A]], 2)
    assert order.tolist() == [0, 2, 5, 1, 3, 4]


@st.composite
def prompts_of_some_ranks(draw) -> tuple[int, list[list[Prompt]]]:
    """A number of parts, and the prompts of the rollouts of one to three ranks."""
    parts, ranks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    sizes = [parts * draw(st.integers(0, 3)) for _ in range(ranks)]
    prompt = st.sampled_from([A, B, C, LONG])
    return parts, [draw(st.lists(prompt, min_size=size, max_size=size)) for size in sizes]


@given(prompts_of_some_ranks())
def test_each_rank_keeps_its_rollouts_and_few_prompts_are_divided(case):
    parts, prompts_of_ranks = case
    orders = divided_by_prompts(prompts_of_ranks, parts)
    for prompts, order in zip(prompts_of_ranks, orders, strict=True):
        assert sorted(order.tolist()) == list(range(len(prompts)))
    pieces = sum(
        len(set(chain(*of_ranks))) for of_ranks in micro_batches_of(prompts_of_ranks, parts)
    )
    # A prompt is divided only where it fills a part of a rank.
    assert pieces <= len(set(chain(*prompts_of_ranks))) + parts * len(prompts_of_ranks)


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
