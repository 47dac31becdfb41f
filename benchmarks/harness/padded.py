"""Padded batches of rollouts, and the forward and backward of a model that is called with them, as
TRL's trainers do.

Shape suffixes: B sequences, L columns, N tokens with a target, H width of a hidden state.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

MEDIAN, SIGMA, LONGEST = 300.0, 1.0, 4096
"""Tokens of a rollout: lognormal, the deviation of the logarithm, and the most tokens."""
AT_ONCE = 8
"""Sequences in a call of the model."""
LOGIT_ROWS = 2048
"""Rows whose logits are made at once."""


def rollout_lengths(count: int, scale: int = 1, seed: int = 0) -> list[int]:
    """Lengths of rollouts, the same every time for a seed; `scale` divides them.

    Each has a target.
    """
    drawn = np.random.default_rng(seed).lognormal(np.log(MEDIAN), SIGMA, count)
    lengths: list[int] = (np.clip(drawn, 2 * scale, LONGEST) / scale).astype(int).tolist()
    return lengths


def lengths_that_add_up(count: int, tokens: int, seed: int) -> list[int]:
    """Lengths of rollouts, which have `tokens` tokens in all."""
    drawn = np.array(rollout_lengths(count, seed=seed), float)
    ends = np.round(np.cumsum(drawn) * ((tokens - count) / drawn.sum())).astype(int)
    lengths: list[int] = (np.diff(ends, prepend=0) + 1).tolist()
    return lengths


@dataclass(frozen=True)
class Batch:
    """A padded batch [B, L] of token ids with its mask; padding follows the tokens."""

    input_ids: Tensor
    attention_mask: Tensor
    is_target: Tensor  # [B, L] whether a token is predicted from those before it


def padded_batches(
    lengths: Sequence[int],
    vocabulary: int,
    device: torch.device,
    *,
    to_all: bool = False,
    at_once: int = AT_ONCE,
) -> list[Batch]:
    """Batches of `at_once` sequences, the same tokens every time.

    Args:
        to_all: whether a batch is padded to the longest of all sequences, as GRPO pads a generation
            batch; else to its own longest.
    """
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(3, vocabulary, (length,), generator=generator) for length in lengths]
    longest = max(lengths) if to_all else 0
    return [
        batch_of(documents[first : first + at_once], device, columns=longest)
        for first in range(0, len(documents), at_once)
    ]


def batch_of(
    documents: Sequence[Tensor],
    device: torch.device,
    *,
    columns: int = 0,
    given: Sequence[int] | None = None,
) -> Batch:
    """A batch of sequences, padded to the longest of them, and to `columns` at least.

    Args:
        given: the number of tokens at the beginning of each sequence that are no targets; None: the
            first token alone.
    """
    columns = max(columns, *(len(document) for document in documents))
    ids_BL = torch.zeros(len(documents), columns, dtype=torch.int64)
    mask_BL, is_target_BL = torch.zeros_like(ids_BL), torch.zeros_like(ids_BL, dtype=torch.bool)
    for row, document in enumerate(documents):
        ids_BL[row, : len(document)] = document
        mask_BL[row, : len(document)] = 1
        is_target_BL[row, 1 if given is None else given[row] : len(document)] = True
    return Batch(ids_BL.to(device), mask_BL.to(device), is_target_BL.to(device))


def keep_only_inputs_of_layers(model: nn.Module) -> None:
    """Turn gradient checkpointing on; older versions of transformers have another name for it."""
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable = next(getattr(model, name) for name in names if hasattr(model, name))
    enable({"use_reentrant": False})


def forward_backward(model: nn.Module, batches: Sequence[Batch], targets: int) -> float:
    """Run forward and backward of each batch; returns the loss of this rank's batches.

    As TRL does, only rows with a target get logits.

    Args:
        targets: of all ranks; the loss is their mean.
    """
    total = 0.0
    for batch in batches:
        hidden_BLH = model.base_model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False
        ).last_hidden_state
        is_target_BL = batch.is_target[:, 1:]
        rows_NH = hidden_BLH[:, :-1][is_target_BL]
        wanted_N = batch.input_ids[:, 1:][is_target_BL]
        loss = sum_of_losses(model.lm_head, rows_NH, wanted_N) / targets
        loss.backward()
        total += loss.item()
    return total


def norm_of_gradients(model: nn.Module) -> float:
    """Norm of the gradients added up over ranks; the model has none afterwards.

    A collective call.
    """
    total = 0.0
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        total += parameter.grad.square().sum().item()
    model.zero_grad()
    return total**0.5


def sum_of_losses(head: nn.Module, rows_NH: Tensor, wanted_N: Tensor) -> Tensor:
    """Sum of the losses of rows. Logits of a few rows are made at a time, and again in backward."""

    def loss_of(rows: Tensor, wanted: Tensor) -> Tensor:
        return cross_entropy(head(rows).float(), wanted, reduction="sum")

    parts = zip(rows_NH.split(LOGIT_ROWS), wanted_N.split(LOGIT_ROWS), strict=True)
    losses = [checkpoint(loss_of, rows, wanted, use_reentrant=False) for rows, wanted in parts]
    return torch.stack(losses).sum()
