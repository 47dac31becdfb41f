"""Collators of a user: padding-free ones report document lengths, others may be left out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import IterableDataset
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    DefaultDataCollator,
    default_data_collator,
)

from hf_distca.batches.limits import VALUES, least_and_greatest
from hf_distca.batches.packed import batch_document_lengths

ROW_COLLATORS = (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    DefaultDataCollator,
)
"""Collators of transformers that give each document a row."""


def gives_rows(collator: Any) -> bool:
    """Return whether a collator only gives each document a row, which packing does without.

    A collator that hides tokens changes the documents, and a subclass may do anything.
    """
    is_known = type(collator) in ROW_COLLATORS or collator is default_data_collator
    return is_known and not getattr(collator, "mlm", False)


class CollatorWithLengths:
    """Collator that adds to a padding-free collator's batches what plans need to know.

    `document_lengths`, and the extremes of token ids and labels, are read on the host: no step
    waits for the device. An `attention_mask` of ones is removed.

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
        fields = {name: value for name, value in batch.items() if name != "attention_mask"}
        return {**fields, "document_lengths": lengths, VALUES: least_and_greatest(batch)}


@contextmanager
def lengths_read_on_host(trainer: Any, dataset: Any) -> Iterator[None]:
    """Let the loaders that a trainer makes inside the block report document lengths.

    The lengths are read on the host, before a batch goes to the device. The trainer has a
    padding-free collator.
    """
    collator = trainer.data_collator
    config: Any = trainer.args.accelerator_config
    rank_0_reads = config.dispatch_batches
    if rank_0_reads is None:  # as accelerate decides
        rank_0_reads = isinstance(dataset, IterableDataset)
    # Where rank 0 reads for all ranks, it can send tensors only, and not the lengths.
    if not rank_0_reads:
        trainer.data_collator = CollatorWithLengths(collator)
    try:
        yield
    finally:
        trainer.data_collator = collator
