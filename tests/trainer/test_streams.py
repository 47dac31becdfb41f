"""Streams that know nothing of ranks and processes, and streams that divide themselves by them."""

import random
from collections.abc import Callable, Iterator
from itertools import chain
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch.distributed as dist
from datasets.distributed import split_dataset_by_node
from torch.utils.data import IterableDataset, get_worker_info

from hf_distca.checks.data_rules import Data
from hf_distca.collator.streams import NOTHING_READ
from hf_distca.trainer.loaders import check_beginnings
from tests.models_and_batches import small_model
from tests.refused import refused
from tests.trainer.small_trainers import make_trainer

DOCUMENTS = 30
FIRST = 3
"""Token of the first document."""


class Stream(IterableDataset[Any]):
    """Documents of one token each, of which a process yields those of its ranks and workers."""

    def __init__(self, by_rank: bool = False, by_worker: bool = False, draws: bool = False) -> None:
        self.by_rank = by_rank
        self.by_worker = by_worker
        self.draws = draws

    def __iter__(self) -> Iterator[Any]:
        part, parts = 0, 1
        if self.by_rank:
            part, parts = dist.get_rank(), dist.get_world_size()
        worker = get_worker_info()
        if self.by_worker and worker is not None:
            part, parts = part * worker.num_workers + worker.id, parts * worker.num_workers
        numbers = list(range(DOCUMENTS))
        if self.draws:
            random.shuffle(numbers)
        for number in numbers[part::parts]:
            yield {"input_ids": [FIRST + number, 1]}


def sharded(shards: int = 1) -> Any:
    rows = datasets.Dataset.from_list(list(Stream()))
    return rows.to_iterable_dataset(num_shards=shards).shuffle(seed=3, buffer_size=4)


def split(shards: int) -> Any:
    return split_dataset_by_node(sharded(shards), dist.get_rank(), dist.get_world_size())


def generated() -> Any:
    return datasets.IterableDataset.from_generator(lambda: iter(Stream(by_worker=True)))


WHOLE: dict[str, Callable[[], Any]] = {
    "plain": Stream,
    "by worker": lambda: Stream(by_worker=True),
    "shuffled by random": lambda: Stream(draws=True),
    "of one shard": sharded,
    "of three shards": lambda: sharded(3),
    "of four shards": lambda: sharded(4),
    "generated, by worker": generated,
}
DIVIDED: dict[str, Callable[[], Any]] = {
    "by rank": lambda: Stream(by_rank=True),
    "by rank and worker": lambda: Stream(by_rank=True, by_worker=True),
    "split by node": lambda: split(4),
    "split by node, of one shard": lambda: split(1),
}


def recording(step: Callable[..., Any], read: list[int]) -> Callable[..., Any]:
    """A training step that notes the documents that it is given."""

    def recorded(model: Any, inputs: Any, *args: Any) -> Any:
        read.extend(token for token in inputs["input_ids"][0].tolist() if token >= FIRST)
        return step(model, inputs, *args)

    return recorded


def _read(folder: str) -> dict[str, list[int]]:
    """The documents that this rank trains on, by the number of processes and the stream."""
    read: dict[str, list[int]] = {}
    for processes in (0, 2):
        trainer = make_trainer(
            folder,
            given={"train_dataset": Stream()},
            model=small_model(),
            max_steps=1,
            gradient_accumulation_steps=4,  # enough for the batches of all processes
            save_strategy="no",
            dataloader_num_workers=processes,
        )
        step = trainer.training_step
        for name, make in (WHOLE | DIVIDED).items():
            trainer.args.divided_streams = name in DIVIDED
            trainer.train_dataset = make()
            tokens = read[f"{name}, {processes} processes"] = []
            trainer.training_step = recording(step, tokens)
            trainer.train()
        trainer.close()
    return read


def test_every_document_of_a_stream_is_read_once(rank_pools, tmp_path, subtests):
    read_by_rank = rank_pools[2].run(_read, str(tmp_path))
    for name in read_by_rank[0]:
        with subtests.test(name):
            parts = [read[name] for read in read_by_rank]
            assert all(parts)
            assert sorted(chain(*parts)) == list(range(FIRST, FIRST + DOCUMENTS))


def _refused(folder: str) -> None:
    stored = datasets.Dataset.from_list(list(Stream()))
    trainer = make_trainer(folder, model=small_model(), max_steps=1, save_strategy="no")
    for entry, train, evaluated in (
        (Data.STREAMS_DIFFER, Stream(by_rank=True), None),
        (Data.STREAMS_DIFFER, split(4), None),
        (Data.STREAMS_DIFFER, stored, split(4)),
        (Data.STREAMS_EQUAL, Stream(), None),
        (Data.STREAMS_EQUAL, stored, sharded(4)),
    ):
        trainer.args.divided_streams = entry is Data.STREAMS_EQUAL
        trainer.train_dataset, trainer.eval_dataset = train, evaluated
        name = "train_dataset" if evaluated is None else "eval_dataset"
        with refused(entry, name=name, first=0, other=1):
            trainer.train()
        assert trainer.state.global_step == 0
    # A torch stream may be read only once, so that it is known when it is read.
    trainer.args.divided_streams = False
    with refused(Data.STREAMS_DIFFER, name="the data set", first=0, other=1):
        trainer.evaluate(Stream(by_rank=True))


def test_ranks_that_read_other_streams_than_they_should_are_refused(rank_pools, tmp_path):
    rank_pools[2].run(_refused, str(tmp_path))


def test_processes_are_at_most_the_shards_of_a_stream(tmp_path, caplog):
    for stream, processes in ((Stream(), 1), (sharded(2), 2), (sharded(9), 3)):
        given = {"train_dataset": stream}
        trainer = make_trainer(str(tmp_path), given=given, max_steps=1, dataloader_num_workers=3)
        assert trainer.get_train_dataloader().num_workers == processes
    shown = [line for line in caplog.messages if "is read by" in line]
    assert [line.partition(" on each rank")[0] for line in shown] == [
        "train_dataset is read by 1 process(es)",
        "train_dataset is read by 2 process(es)",
    ]


@pytest.mark.parametrize(
    ("is_divided", "beginnings", "entry", "other"),
    [
        (False, [(0, 7), (0, 7), (1, 7), (1, 7)], None, 0),
        (False, [(0, 7), (0, 7), (1, 7), (1, 8)], Data.STREAMS_DIFFER, 3),
        (False, [(0, 7), (1, NOTHING_READ)], Data.STREAMS_DIFFER, 1),
        (True, [(0, 7), (0, 7), (1, 8), (1, 8)], None, 0),
        (True, [(0, NOTHING_READ), (1, NOTHING_READ)], None, 0),
        (True, [(0, 7), (0, 7), (1, 7), (1, 7)], Data.STREAMS_EQUAL, 2),
        (True, [(0, 7), (0, 8), (1, 9), (1, 10)], Data.SHARED_ROWS, 1),
    ],
)
def test_processes_that_share_a_model_read_the_same(is_divided, beginnings, entry, other):
    """Each process has its rank and the first document that it read."""
    packer: Any = SimpleNamespace(is_divided=is_divided, beginning=7, name="train_dataset")
    groups: Any = SimpleNamespace(rank=0, ranks=2, all_gather=lambda *_, **__: beginnings)
    if entry is None:
        check_beginnings(packer, groups)
    else:
        with refused(entry, name="train_dataset", first=0, other=other, ranks=2):
            check_beginnings(packer, groups)
