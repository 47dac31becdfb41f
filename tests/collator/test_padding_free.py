import pytest
import torch
from transformers import DataCollatorWithFlattening

from hf_distca.collator.padding_free import CollatorWithLengths, batch_document_lengths, filler_batch
from hf_distca.collator.streams import StreamPacker
from tests.counting import Counting

TWO = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}, {"input_ids": [6]}]


def batch_of(positions, **more):
    tokens = torch.zeros(1, len(positions), dtype=torch.long)
    return {"input_ids": tokens, "position_ids": torch.tensor([positions]), **more}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_flash_attn_kwargs": True},
        {"return_flash_attn_kwargs": True, "return_position_ids": False},
    ],
)
def test_lengths_of_a_flattened_batch(options):
    assert batch_document_lengths(DataCollatorWithFlattening(**options)(TWO)) == (3, 2, 1)


@pytest.mark.parametrize("options", [{}, {"return_flash_attn_kwargs": True, "return_position_ids": False}])
def test_lengths_read_by_the_collator_ask_no_device(options):
    batch = CollatorWithLengths(DataCollatorWithFlattening(**options))(TWO)
    batch = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
    with Counting():
        assert batch_document_lengths(batch) == (3, 2, 1)
        with pytest.raises(AssertionError, match="makes the host wait"):
            batch_document_lengths({name: x for name, x in batch.items() if name != "document_lengths"})


def test_collator_leaves_out_a_mask_that_says_nothing():
    with_mask = CollatorWithLengths(lambda batch: {**batch, "attention_mask": torch.ones(1, 3)})
    assert sorted(with_mask(batch_of([0, 1, 0]))) == ["document_lengths", "input_ids", "position_ids"]


def test_collator_leaves_a_faulty_batch_to_those_who_tell_all_ranks():
    faulty = batch_of([0, 1, 3])
    assert CollatorWithLengths(lambda batch: batch)(faulty) is faulty


def test_lengths_of_a_streamed_batch():
    assert batch_document_lengths(next(iter(StreamPacker(TWO, 1, 0, 6)))) == (3, 2, 1)


def test_the_filler_batch():
    batch = filler_batch()
    assert batch_document_lengths(batch) == (1,)
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[0]],
        "position_ids": [[0]],
        "labels": [[-100]],
        "shift_labels": [[-100]],
    }


def test_two_rows():
    with pytest.raises(ValueError, match=r"shape \(2, 3\); expected \[1, tokens\].*DataCollatorWithFlattening"):
        batch_document_lengths({"input_ids": torch.zeros(2, 3, dtype=torch.long)})


def test_a_mask_of_another_shape():
    mask = torch.ones(1, 3, 3)
    with pytest.raises(ValueError, match=r"attention_mask has the shape \(1, 3, 3\) .*Leave attention_mask out"):
        batch_document_lengths(batch_of([0, 1, 2], attention_mask=mask))


def test_padding():
    mask = torch.tensor([[1, 1, 0]])
    with pytest.raises(ValueError, match="attention_mask with zeros; expected no padding"):
        batch_document_lengths(batch_of([0, 1, 2], attention_mask=mask))
    assert batch_document_lengths(batch_of([0, 1, 2], attention_mask=torch.ones(1, 3))) == (3,)


def test_positions_that_start_elsewhere():
    with pytest.raises(ValueError, match=r"begin with \[2, 3, 0\]; expected 0 at the first token"):
        batch_document_lengths(batch_of([2, 3, 0]))


def test_positions_with_a_gap():
    with pytest.raises(ValueError, match="go from 1 to 3 at row 2"):
        batch_document_lengths(batch_of([0, 1, 3, 0]))


def test_positions_of_another_shape():
    batch = {"input_ids": torch.zeros(1, 3, dtype=torch.long), "position_ids": torch.zeros(3, 1, 3)}
    with pytest.raises(ValueError, match=r"shape \(3, 1, 3\) for 3 tokens; expected \[1, 3\]"):
        batch_document_lengths(batch)


def test_no_tokens():
    with pytest.raises(ValueError, match="expected 0 at the first token"):
        batch_document_lengths(batch_of([]))


def test_boundaries_that_do_not_fit():
    with pytest.raises(ValueError, match=r"cu_seq_lens_q gives document lengths \(2, 3\) with a sum of 5 for 4"):
        batch_document_lengths(batch_of([0, 1, 0, 1], cu_seq_lens_q=torch.tensor([0, 2, 5])))
    with pytest.raises(ValueError, match="document_lengths gives"):
        batch_document_lengths(batch_of([0, 1], document_lengths=(2, 0)))


def test_nothing_says_where_documents_begin():
    with pytest.raises(ValueError, match=r"has only \['input_ids'\]"):
        batch_document_lengths({"input_ids": torch.zeros(1, 3, dtype=torch.long)})
