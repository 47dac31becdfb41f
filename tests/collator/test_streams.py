import logging

import datasets
import pytest
from torch.utils.data import DataLoader, IterableDataset

from hf_distca.collator.refusals import Data
from hf_distca.collator.streams import StreamPacker
from tests.refused import refused

LENGTHS = [3, 2, 4, 1, 5, 2, 2, 6, 1, 3, 4, 2]
EXAMPLES: list[dict] = [{"input_ids": [100 * d + p for p in range(length)]} for d, length in enumerate(LENGTHS)]
EXAMPLES[2]["labels"] = [-100, *EXAMPLES[2]["input_ids"][1:]]  # the first token is no target anyway


class Stream(IterableDataset):
    def __iter__(self):
        return iter(EXAMPLES)


def hub_stream(num_shards):
    return datasets.Dataset.from_list(EXAMPLES).to_iterable_dataset(num_shards=num_shards)


def documents_of(batches):
    """The first token of every document; checks each batch on the way."""
    firsts = []
    for batch in batches:
        tokens = batch["input_ids"][0].tolist()
        assert sum(batch["document_lengths"]) == len(tokens) <= 6
        start = 0
        for length in batch["document_lengths"]:
            rows = slice(start, start + length)
            assert tokens[rows] == list(range(tokens[start], tokens[start] + length))
            assert batch["position_ids"][0, rows].tolist() == list(range(length))
            assert batch["labels"][0, rows].tolist() == [*tokens[rows][1:], -100]
            assert batch["shift_labels"][0, rows].tolist() == [*tokens[rows][1:], -100]
            firsts.append(tokens[start])
            start += length
    return firsts


@pytest.mark.parametrize("make", [Stream, lambda: hub_stream(1), lambda: hub_stream(4)])
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_and_workers_share_the_stream(make, workers):
    seen = []
    for rank in range(2):
        loader = DataLoader(StreamPacker(make(), 2, rank, 6), batch_size=None, num_workers=workers)
        seen.append(documents_of(loader))
    assert all(len(share) >= 4 for share in seen)
    assert sorted(seen[0] + seen[1]) == [100 * document for document in range(len(LENGTHS))]


def test_truncate_and_split(caplog):
    packer = StreamPacker([{"input_ids": list(range(8))}] * 5, 1, 0, 6, "truncate")
    with caplog.at_level(logging.WARNING):
        batches = list(packer)
    assert [batch["input_ids"].tolist() for batch in batches] == [[[0, 1, 2, 3, 4, 5]]] * 5
    assert batches[0]["labels"].tolist() == [[1, 2, 3, 4, 5, -100]]
    (first, second) = StreamPacker([{"input_ids": list(range(8))}], 1, 0, 6, "split")
    assert (first["labels"].tolist(), second["labels"].tolist()) == ([[1, 2, 3, 4, 5, 6]], [[7, -100]])
    # After 1, 2 and 4 documents.
    assert [message.split(";")[1] for message in caplog.messages] == [
        " 2 tokens are dropped.",
        " 4 tokens are dropped.",
        " 8 tokens are dropped.",
    ]


def test_faults():
    with refused(Data.LONG_IN_STREAM, name="document 1 of rank 0's stream", length=7, limit=6):
        list(StreamPacker([{"input_ids": [1]}, {"input_ids": [1] * 7}], 1, 0, 6))
    with refused(Data.EMPTY_DOCUMENT, name="document 1 of rank 0's stream"):
        list(StreamPacker([{"input_ids": [1]}, {"input_ids": []}], 1, 0, 6))
    with pytest.raises(ValueError, match="give one from 0 to 1"):
        StreamPacker(EXAMPLES, 2, 2, 6)
    with pytest.raises(ValueError, match="tokens_per_rank is 0"):  # before the first document is read
        StreamPacker(EXAMPLES, 2, 0, 0)
