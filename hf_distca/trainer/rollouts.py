"""Rollouts of one prompt are kept in one micro-batch, so that the prompt is computed once.

TRL generates rollouts for several micro-batches. It shuffles the rollouts of each rank and divides
them, so that those of one prompt are spread over micro-batches. Here the rollouts of an optimizer
step are divided again: the step has the same rollouts, and a micro-batch of all ranks has few
prompts.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_distca.dispatch.process_groups import Groups
from hf_distca.planner import prefixes

LOSSES = ("grpo", "sapo", "dr_grpo", "luspo", "dapo", "cispo", "vespo")
"""Values of `loss_type` for which a loss is a sum over sequences or tokens, divided by a number
that is the same for all micro-batches of an optimizer step. "bnpo" divides by the tokens of a
micro-batch."""


class Prompt(NamedTuple):
    """The part of a rollout's prompt that other rollouts can share."""

    key: bytes  # equal for equal tokens
    rows: int


def prompts_of(rollouts: dict[str, Any]) -> list[Prompt]:
    """Return the prompt of each rollout, in whole blocks of tokens.

    Args:
        rollouts: `prompt_ids` and `prompt_mask` [rollouts, columns].
    """
    prompts = []
    tokens_BL, mask_BL = (rollouts[name].cpu().numpy() for name in ("prompt_ids", "prompt_mask"))
    for tokens_L, mask_L in zip(tokens_BL, mask_BL != 0, strict=True):
        hashes = prefixes.hashes_of(tokens_L[mask_L][:, None])
        blocks = int(mask_L.sum()) // prefixes.BLOCK
        key = hashes[blocks - 1] if blocks else b""
        prompts.append(Prompt(key, blocks * prefixes.BLOCK))
    return prompts


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


def rearranged(micro_batches: Sequence[dict[str, Any]], order: Tensor) -> list[dict[str, Any]]:
    """Return micro-batches of the same sizes, with their rollouts in another order.

    Args:
        micro_batches: values of each rollout by name, tensors or lists; None and numbers stay.
        order: [rollouts of all micro-batches] index of each rollout.
    """
    results: list[dict[str, Any]] = [{} for _ in micro_batches]
    for name, first in micro_batches[0].items():
        values = [micro_batch[name] for micro_batch in micro_batches]
        if isinstance(first, Tensor) and first.ndim > 0:
            values = list(torch.cat(values)[order.to(first.device)].split(len(first)))
        elif isinstance(first, list):
            joined = [value for part in values for value in part]
            ordered = [joined[index] for index in order.tolist()]
            values = [ordered[i * len(first) : (i + 1) * len(first)] for i in range(len(values))]
        for result, value in zip(results, values, strict=True):
            result[name] = value
    return results


def kept_together(
    micro_batches: list[dict[str, Any]], together: int, groups: Groups
) -> list[dict[str, Any]]:
    """Return micro-batches in which completions of a prompt meet. A collective call.

    Args:
        micro_batches: of this rank, as many as on every rank; values of each rollout by name.
        together: the number of successive micro-batches among which rollouts may change places.
    """
    prompts_of_ranks = groups.all_gather_checked(
        lambda: [prompts_of(micro_batch) for micro_batch in micro_batches],
        contents="prompts of rollouts",
    )
    results = []
    for first in range(0, len(micro_batches), together):
        part = slice(first, first + together)
        orders = divided_by_prompts(
            [list(chain(*prompts[part])) for prompts in prompts_of_ranks], together
        )
        results += rearranged(micro_batches[part], torch.from_numpy(orders[groups.rank]))
    return results


def why_shuffled(trainer: Any) -> str | None:
    """Return why rollouts of GRPO or RLOO stay in the micro-batches of TRL's shuffle.

    None if the loss does not depend on which rollouts share a micro-batch.
    """
    args = trainer.args
    loss_type = getattr(args, "loss_type", None)  # RLOO has none
    if not trainer._compute_loss.__module__.startswith("trl."):
        return "the trainer has a loss of its own"
    if loss_type is not None and loss_type not in LOSSES:
        return f"loss_type={loss_type!r} takes a mean over the tokens of a micro-batch"
    if getattr(args, "top_entropy_quantile", 1.0) < 1.0:
        return "top_entropy_quantile chooses among the tokens of a micro-batch"
    if getattr(trainer, "_entropy_bonus_enabled", False):
        return "the entropy bonus is a mean over the tokens of a micro-batch"
    if trainer.aux_loss_enabled:
        return "the router's auxiliary loss is computed from the tokens of a micro-batch"
    return None
