"""Rollouts of one prompt come into one micro-batch."""

from itertools import chain

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hf_distca.planner.prompts import Prompt, divided_by_prompts

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
