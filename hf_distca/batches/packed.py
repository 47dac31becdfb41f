"""Documents of batches that are packed without padding, and filler batches for ranks without data.

Shape suffixes: T rows of a batch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_distca.batches.limits import IGNORED_TARGET, VALUES, Extremes, Limits, least_and_greatest
from hf_distca.checks.batch_rules import Batch

REPLACED_BY_PLAN = (
    "attention_mask",
    "document_lengths",
    VALUES,
    "seq_idx",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
)
"""Fields of a batch that only describe documents, which a plan replaces."""


def batch_document_lengths(batch: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the lengths of the documents in a batch of a padding-free collator, in row order.

    The lengths come from `document_lengths` (StreamPacker), else from `cu_seq_lens_q`, else from
    `position_ids` that restart at 0 with each document. transformers' DataCollatorWithFlattening
    gives the latter two. Call it before the batch goes to a GPU: reading from a GPU waits for it.

    Raises:
        ValueError: the batch is not one row without padding, or its boundaries are missing or
            wrong.
    """
    input_ids = batch["input_ids"]
    if input_ids.ndim != 2 or input_ids.shape[0] != 1:
        raise Batch.ROWS.error(shape=tuple(input_ids.shape))
    tokens = input_ids.shape[1]
    attention_mask = batch.get("attention_mask")
    if attention_mask is not None:
        has_padding = attention_mask.shape != input_ids.shape or not (attention_mask == 1).all()
        if has_padding:
            raise Batch.BATCH_MASK.error()
    field, lengths = _stated_lengths(batch)
    if sum(lengths) != tokens or any(length < 1 for length in lengths):
        shown = f"{tuple(lengths[:10])}{'…' if len(lengths) > 10 else ''}"
        raise Batch.WRONG_BOUNDARIES.error(
            name=field, lengths=shown, total=sum(lengths), tokens=tokens
        )
    return tuple(lengths)


def _stated_lengths(batch: Mapping[str, Any]) -> tuple[str, Sequence[int]]:
    """Return the lengths of a batch's documents, and the field that states them."""
    lengths: Sequence[int] | None = batch.get("document_lengths")
    if lengths is not None:
        return "document_lengths", lengths
    offsets = batch.get("cu_seq_lens_q")
    if offsets is not None:
        return "cu_seq_lens_q", offsets.diff().tolist()
    position_ids = batch.get("position_ids")
    if position_ids is not None:
        return "position_ids", _lengths_by_positions(position_ids, batch["input_ids"])
    raise Batch.NO_BOUNDARIES.error(fields=sorted(batch))


def _lengths_by_positions(position_ids: torch.Tensor, input_ids: torch.Tensor) -> list[int]:
    """Return the lengths of documents, at each of which positions restart at 0.

    Raise ValueError if positions leave out a number.

    Args:
        position_ids, input_ids: [1, T].
    """
    tokens = input_ids.shape[1]
    if position_ids.shape != input_ids.shape:
        raise Batch.POSITIONS.error(
            found=f"have the shape {tuple(position_ids.shape)} for {tokens} tokens"
        )
    positions_T = position_ids[0]
    if tokens == 0 or positions_T[0] != 0:
        raise Batch.POSITIONS.error(found=f"begin with {positions_T[:5].tolist()}")
    previous_positions = positions_T[:-1]
    next_positions = positions_T[1:]
    jumps = (next_positions != previous_positions + 1) & (next_positions != 0)
    if jumps.any():
        row = int(jumps.nonzero()[0])
        raise Batch.POSITIONS.error(
            found=f"go from {positions_T[row]} to {positions_T[row + 1]} at row {row + 1}"
        )
    starts = (positions_T == 0).nonzero().flatten()
    boundaries = torch.cat([starts, starts.new_tensor([tokens])])
    lengths: list[int] = boundaries.diff().tolist()
    return lengths


def checked_document_lengths(
    batch: Mapping[str, Any], limits: Limits, name: str
) -> tuple[int, ...]:
    """Return the lengths of a batch's documents.

    Raise ValueError if the batch is beyond the limits of the model.

    Batches of CollatorWithLengths carry the extremes of their values, and documents of StreamPacker
    are checked already. Any other batch is read here, which waits for its GPU.

    Args:
        name: name of the batch in errors.
    """
    lengths = batch_document_lengths(batch)
    extremes: Mapping[str, Extremes] = batch.get(VALUES) or {}
    was_read_on_host = batch.get("document_lengths") is not None
    if not extremes and not was_read_on_host:
        extremes = least_and_greatest(batch)
    limits.check_batch(extremes, lengths, name)
    return lengths


def filler_batch(device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Return a batch of one token without a target, for a rank whose data has ended.

    Models cannot run on no rows.
    """
    values = {
        "input_ids": 0,
        "position_ids": 0,
        "labels": IGNORED_TARGET,
        "shift_labels": IGNORED_TARGET,
    }
    return {
        name: torch.full((1, 1), value, dtype=torch.long, device=device)
        for name, value in values.items()
    }
