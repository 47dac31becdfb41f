import pytest
import torch
from transformers import DataCollatorWithFlattening

from hf_distca.collator.padding_free import CollatorWithLengths, batch_document_lengths, filler_batch
from hf_distca.collator.refusals import Data
from tests.counting import Counting
from tests.refused import refused


def batch_of(positions, **more):
    tokens = torch.zeros(1, len(positions), dtype=torch.long)
    return {"input_ids": tokens, "position_ids": torch.tensor([positions]), **more}


@pytest.mark.parametrize("options", [{}, {"return_flash_attn_kwargs": True, "return_position_ids": False}])
def test_lengths_of_a_flattened_batch(options):
    """Once the collator has read them they ask no device."""
    collator = DataCollatorWithFlattening(**options)
    examples = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}, {"input_ids": [6]}]
    assert batch_document_lengths(collator(examples)) == (3, 2, 1)
    batch = CollatorWithLengths(collator)(examples)
    batch = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
    with Counting():
        assert batch_document_lengths(batch) == (3, 2, 1)
        with pytest.raises(AssertionError, match="makes the host wait"):
            batch_document_lengths({name: x for name, x in batch.items() if name != "document_lengths"})


def test_batches_that_the_collator_changes_and_leaves():
    with_mask = CollatorWithLengths(lambda batch: {**batch, "attention_mask": torch.ones(1, 3)})
    assert sorted(with_mask(batch_of([0, 1, 0]))) == ["document_lengths", "input_ids", "position_ids"]
    # A faulty batch is left to those who raise on all ranks.
    faulty = batch_of([0, 1, 3])
    assert CollatorWithLengths(lambda batch: batch)(faulty) is faulty


def test_the_filler_batch():
    batch = filler_batch()
    assert batch_document_lengths(batch) == (1,)
    labels = {"labels": -100, "shift_labels": -100}
    assert {name: value.item() for name, value in batch.items()} == {"input_ids": 0, "position_ids": 0, **labels}


TOKENS_13 = torch.zeros(1, 3, dtype=torch.long)
OFFSETS = torch.tensor([0, 2, 5])


@pytest.mark.parametrize(
    ("entry", "batch", "values"),
    [
        (Data.ROWS, {"input_ids": TOKENS_13.expand(2, 3)}, {"shape": (2, 3)}),
        (Data.BATCH_MASK, batch_of([0, 1, 2], attention_mask=torch.ones(1, 3, 3)), {}),
        (Data.BATCH_MASK, batch_of([0, 1, 2], attention_mask=torch.tensor([[1, 1, 0]])), {}),
        (Data.POSITIONS, batch_of([]), {"found": "begin with []"}),
        (Data.POSITIONS, batch_of([2, 3, 0]), {"found": "begin with [2, 3, 0]"}),
        (Data.POSITIONS, batch_of([0, 1, 3, 0]), {"found": "go from 1 to 3 at row 2"}),
        (
            Data.POSITIONS,
            {"input_ids": TOKENS_13, "position_ids": TOKENS_13.view(3, 1, 1)},
            {"found": "have the shape (3, 1, 1) for 3 tokens"},
        ),
        (
            Data.WRONG_BOUNDARIES,
            batch_of([0, 1, 0, 1], cu_seq_lens_q=OFFSETS),
            {"name": "cu_seq_lens_q", "lengths": "(2, 3)", "total": 5, "tokens": 4},
        ),
        (Data.WRONG_BOUNDARIES, batch_of([0, 1], document_lengths=(2, 0)), {"name": "document_lengths"}),
        (Data.NO_BOUNDARIES, {"input_ids": TOKENS_13}, {"fields": ["input_ids"]}),
    ],
)
def test_faulty_batches(entry, batch, values):
    with refused(entry, **values):
        batch_document_lengths(batch)
