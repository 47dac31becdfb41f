"""Wrapper of padding-free collators, whose batches then carry what plans need to know."""

from collections.abc import Callable
from typing import Any

from hf_distca.batches.limits import VALUES, least_and_greatest
from hf_distca.batches.packed import batch_document_lengths


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
