"""Batches of padding-free collators: their documents, and filler batches for ranks without data."""

from collections.abc import Callable, Mapping
from typing import Any

import torch


def batch_document_lengths(batch: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the lengths of the documents in a batch of a padding-free collator.

    The lengths come from `document_lengths` (StreamPacker), else from `cu_seq_lens_q`, else from `position_ids` that
    restart at 0 with each document. transformers' DataCollatorWithFlattening gives the latter two. Call it before the
    batch goes to a GPU: reading from a GPU waits for it.

    Args:
        batch: `input_ids` [1, T] and one of the above; any `attention_mask` must be all ones.

    Returns:
        Tokens of each document in row order, T in all.

    Raises:
        ValueError: the batch has several rows, padding, a mask of its own or no document boundaries, or its lengths or
            positions do not fit its tokens.
    """
    input_ids = batch["input_ids"]
    if input_ids.ndim != 2 or input_ids.shape[0] != 1:
        raise ValueError(
            f"input_ids has the shape {tuple(input_ids.shape)}; expected [1, tokens], all documents one "
            "after another in one row. Use transformers' DataCollatorWithFlattening, or the collator of "
            "hf_distca."
        )
    attention_mask = batch.get("attention_mask")
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has the shape {tuple(attention_mask.shape)} for input_ids of {tuple(input_ids.shape)}. "
            "Documents attend to themselves, causally, and a mask cannot say otherwise: leave it out."
        )
    if attention_mask is not None and not bool((attention_mask == 1).all()):
        raise ValueError(
            "The batch has an attention_mask with zeros; expected no padding. Use a padding-free collator "
            "such as transformers' DataCollatorWithFlattening."
        )
    tokens = input_ids.shape[1]
    if batch.get("document_lengths") is not None:
        return _checked(tuple(batch["document_lengths"]), tokens, "document_lengths")
    if batch.get("cu_seq_lens_q") is not None:
        return _checked(tuple(batch["cu_seq_lens_q"].diff().tolist()), tokens, "cu_seq_lens_q")
    if batch.get("position_ids") is not None:
        return _lengths_by_position(batch["position_ids"], tokens)
    raise ValueError(
        f"The batch has only {sorted(batch)}: nothing says where its documents begin. Expected position_ids "
        "that restart at 0 with each document, or cu_seq_lens_q; "
        "DataCollatorWithFlattening(return_position_ids=True) gives the former."
    )


class CollatorWithLengths:
    """Add document lengths to the batches of a padding-free collator.

    Lengths are read on the host, so that no step waits for the device. Batches get `document_lengths`; an
    `attention_mask` of ones is removed.

    Args:
        collator: A padding-free collator, such as transformers' `DataCollatorWithFlattening`.
    """

    def __init__(self, collator: Callable[[Any], dict[str, Any]]) -> None:
        self.collator = collator

    def __call__(self, examples: Any) -> dict[str, Any]:
        """Collate the examples and add `document_lengths`."""
        batch = self.collator(examples)
        try:
            lengths = batch_document_lengths(batch)
        except ValueError:  # planning the batch raises the error on every rank
            return batch
        return {**{name: x for name, x in batch.items() if name != "attention_mask"}, "document_lengths": lengths}


TOLD_BY_PLAN = (
    *("attention_mask", "document_lengths", "seq_idx"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
)
"""Fields of a batch that only describe documents, which a plan replaces."""
FILLER_LENGTHS = (1,)
"""Document lengths of a filler."""


def filler_batch(device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Return a batch of one token without a target, for a rank whose data has ended.

    A rank takes part in every exchange, and models cannot run on zero rows.
    """
    token_11 = torch.zeros((1, 1), dtype=torch.long, device=device)
    no_target_11 = torch.full_like(token_11, -100)
    return {
        "input_ids": token_11,
        "position_ids": token_11.clone(),
        "labels": no_target_11,
        "shift_labels": no_target_11.clone(),
    }


def _checked(lengths: tuple[int, ...], tokens: int, name: str) -> tuple[int, ...]:
    if sum(lengths) != tokens or any(length < 1 for length in lengths):
        raise ValueError(
            f"{name} gives document lengths {lengths[:10]}{'…' if len(lengths) > 10 else ''} with a sum of "
            f"{sum(lengths)} for {tokens} tokens; expected positive lengths that sum to the tokens of the "
            "batch."
        )
    return lengths


def _lengths_by_position(position_ids: torch.Tensor, tokens: int) -> tuple[int, ...]:
    if position_ids.shape != (1, tokens):
        raise ValueError(
            f"position_ids has the shape {tuple(position_ids.shape)} for {tokens} tokens; expected [1, {tokens}]."
        )
    positions_T = position_ids[0]
    starts = (positions_T == 0).nonzero().flatten()
    if tokens == 0 or positions_T[0] != 0:
        raise ValueError(
            f"position_ids begin with {positions_T[:5].tolist()}; expected 0 at the first token of each "
            "document, the first one included (DataCollatorWithFlattening with position_ids_start=0)."
        )
    breaks = ((positions_T[1:] != positions_T[:-1] + 1) & (positions_T[1:] != 0)).nonzero().flatten()
    if len(breaks):
        at = int(breaks[0])
        raise ValueError(
            f"position_ids go from {int(positions_T[at])} to {int(positions_T[at + 1])} at row {at + 1}; "
            "expected the next integer inside a document and 0 at the start of one."
        )
    ends = torch.cat([starts[1:], starts.new_tensor([tokens])])
    return tuple((ends - starts).tolist())
