"""Divide rollouts into micro-batches so that those of one prompt meet, and share its rows.

TRL generates rollouts for several micro-batches. It shuffles the rollouts of each rank and divides
them, so that those of one prompt are spread over micro-batches. Here the rollouts of an optimizer
step are divided again: the step has the same rollouts, and a micro-batch of all ranks has few
prompts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Prompt(NamedTuple):
    """The part of a rollout's prompt that other rollouts can share."""

    key: bytes  # equal for equal tokens
    rows: int


def divided_by_prompts(
    prompts_of_ranks: Sequence[Sequence[Prompt]], parts: int
) -> list[NDArray[np.int64]]:
    """Divide the rollouts of each rank into equal parts, so that those of a prompt meet.

    Part n of all ranks together is a micro-batch. The prompt with the most rows to save comes
    first. It goes where most of its rollouts fit, and of such parts to the one that it fills best.

    Args:
        prompts_of_ranks: of each rank's rollouts, a multiple of `parts`.

    Returns:
        Of each rank, its rollouts in the order of the parts; inside a part, as they were given.
    """
    numbers: dict[Prompt, int] = {}
    ranks = len(prompts_of_ranks)
    numbers_of_ranks: list[NDArray[np.int64]] = []
    for prompts in prompts_of_ranks:
        rank_numbers = [numbers.setdefault(prompt, len(numbers)) for prompt in prompts]
        numbers_of_ranks.append(np.array(rank_numbers, np.int64))
    rollouts_of_ranks = [
        np.bincount(prompt_numbers, minlength=len(numbers)) for prompt_numbers in numbers_of_ranks
    ]
    rollouts = np.stack(rollouts_of_ranks, 1)
    rows_of_parts = [len(prompt_numbers) // parts for prompt_numbers in numbers_of_ranks]
    room = np.tile(rows_of_parts, (parts, 1))  # [parts, ranks]
    saved = rollouts.sum(1) * np.array([prompt.rows for prompt in numbers], np.int64)
    part_of_ranks = [np.empty(len(prompt_numbers), np.int64) for prompt_numbers in numbers_of_ranks]

    # The prompt that saves the most rows first: each part takes as many of its rollouts as fit.
    for number in np.argsort(-saved, kind="stable"):
        has_prompt = rollouts[number] > 0
        places: list[list[int]] = [[] for _ in range(ranks)]  # of each rank, a part of each rollout
        left = rollouts[number].copy()
        while left.any():
            fitting = np.minimum(left, room)
            room_after = ((room - fitting) * has_prompt).sum(1)
            part = int(np.lexsort((room_after, -fitting.sum(1)))[0])
            for rank in np.flatnonzero(fitting[part]).tolist():
                places[rank] += [part] * int(fitting[part, rank])
            left -= fitting[part]
            room[part] -= fitting[part]
        for rank, prompt_numbers in enumerate(numbers_of_ranks):
            part_of_ranks[rank][prompt_numbers == number] = places[rank]
    return [np.argsort(part, kind="stable") for part in part_of_ranks]
