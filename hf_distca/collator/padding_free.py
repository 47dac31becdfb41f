"""Batches of padding-free collators: their documents, and filler batches for ranks without data."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hf_distca.collator.limits import VALUES, Extremes, Limits, least_and_greatest
from hf_distca.collator.refusals import Data

REPLACED_BY_PLAN = (
    *("attention_mask", "document_lengths", VALUES, "seq_idx"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
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
    input_ids, attention_mask = batch["input_ids"], batch.get("attention_mask")
    if input_ids.ndim != 2 or input_ids.shape[0] != 1:
        raise Data.ROWS.error(shape=tuple(input_ids.shape))
    if attention_mask is not None and not (
        attention_mask.shape == input_ids.shape and (attention_mask == 1).all()
    ):
        raise Data.BATCH_MASK.error()
    tokens = input_ids.shape[1]
    if (lengths := batch.get("document_lengths")) is not None:
        name = "document_lengths"
    elif (offsets := batch.get("cu_seq_lens_q")) is not None:
        name, lengths = "cu_seq_lens_q", offsets.diff().tolist()
    elif (position_ids := batch.get("position_ids")) is not None:
        if position_ids.shape != input_ids.shape:
            raise Data.POSITIONS.error(
                found=f"have the shape {tuple(position_ids.shape)} for {tokens} tokens"
            )
        positions_T = position_ids[0]
        if tokens == 0 or positions_T[0] != 0:
            raise Data.POSITIONS.error(found=f"begin with {positions_T[:5].tolist()}")
        jumps = (positions_T[1:] != positions_T[:-1] + 1) & (positions_T[1:] != 0)
        for at in jumps.nonzero().flatten()[:1].tolist():
            raise Data.POSITIONS.error(
                found=f"go from {positions_T[at]} to {positions_T[at + 1]} at row {at + 1}"
            )
        starts = (positions_T == 0).nonzero().flatten()
        name, lengths = (
            "position_ids",
            torch.cat([starts, starts.new_tensor([tokens])]).diff().tolist(),
        )
    else:
        raise Data.NO_BOUNDARIES.error(fields=sorted(batch))
    if sum(lengths) != tokens or any(length < 1 for length in lengths):
        shown = f"{tuple(lengths[:10])}{'…' if len(lengths) > 10 else ''}"
        raise Data.WRONG_BOUNDARIES.error(
            name=name, lengths=shown, total=sum(lengths), tokens=tokens
        )
    return tuple(lengths)


def checked_document_lengths(
    batch: Mapping[str, Any], limits: Limits, name: str
) -> tuple[int, ...]:
    """Return the lengths of a batch's documents.

    Raise ValueError if the batch is beyond the limits of the model.

    A batch that CollatorWithLengths or StreamPacker made was read on the host; reading another one
    waits for its GPU.

    Args:
        name: name of the batch in errors.
    """
    was_read = batch.get("document_lengths") is not None
    lengths = batch_document_lengths(batch)
    values: Mapping[str, Extremes] = batch.get(VALUES) or (
        {} if was_read else least_and_greatest(batch)
    )
    limits.check_batch(values, lengths, name)
    return lengths


class CollatorWithLengths:
    """Add what plans need to know of a padding-free collator's batches, and remove an `attention_mask` of ones.

    `document_lengths`, and the extremes of token ids and labels, are read on the host: no step
    waits for the device.

    Args:
        collator: A padding-free collator, such as transformers' `DataCollatorWithFlattening`.
    """

    def __init__(self, collator: Callable[[Any], dict[str, Any]]) -> None:
        self.collator = collator

    def __call__(self, examples: Any) -> dict[str, Any]:
        """Collate the examples and read the batch."""
        batch = self.collator(examples)
        try:
            lengths = batch_document_lengths(batch)
        except ValueError:  # planning the batch raises the error on every rank
            return batch
        kept = {name: x for name, x in batch.items() if name != "attention_mask"}
        return {**kept, "document_lengths": lengths, VALUES: least_and_greatest(batch)}


def filler_batch(device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Return a batch of one token without a target, for a rank whose data has ended: models cannot run on no rows."""
    values = {"input_ids": 0, "position_ids": 0, "labels": -100, "shift_labels": -100}
    return {
        name: torch.full((1, 1), value, dtype=torch.long, device=device)
        for name, value in values.items()
    }
