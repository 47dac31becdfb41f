"""Loaders of data sets, micro-batches that are fetched and bound ahead, and what a closed trainer
leaves behind.
"""

import gc
import multiprocessing
import os
import subprocess
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset
from transformers import TrainerCallback

from hf_distca.batches.limits import NO_LIMITS
from hf_distca.batches.packed import batch_document_lengths
from hf_distca.checks.capacity_rules import Capacity
from hf_distca.collator.documents import is_stream
from hf_distca.collator.padding_free import CollatorWithLengths, lengths_read_on_host
from hf_distca.dispatch import dispatcher
from hf_distca.planner import sequences
from hf_distca.planner.micro_batch import PlanSettings
from hf_distca.trainer.loaders import PackedLoaders
from tests.models_and_batches import small_model
from tests.refused import refused
from tests.trainer.small_trainers import LENGTHS, make_trainer


class Stream(IterableDataset):
    """A stream that says how much it has, as some do."""

    def __iter__(self) -> Iterator[Any]:
        return iter([])

    def __len__(self) -> int:
        return 2


def test_loaders_are_made_as_the_arguments_say(tmp_path):
    trainer = make_trainer(
        str(tmp_path),
        dataloader_num_workers=1,
        dataloader_persistent_workers=True,
        dataloader_prefetch_factor=3,
        accelerator_config={"non_blocking": True},
    )
    trainer.args.dataloader_pin_memory = True
    loader = trainer.get_train_dataloader()
    assert loader.num_workers == 1
    assert loader.base_dataloader.timeout == trainer.args.exchange_timeout / 2
    assert loader.persistent_workers is True
    assert loader.prefetch_factor == 3
    assert loader.pin_memory is True
    assert loader._non_blocking is True
    assert loader.device == trainer.args.device
    # Also of evaluations, and by a custom collator.
    trainer = make_trainer(str(tmp_path), "flattened", dataloader_num_workers=1)
    loader = trainer.get_train_dataloader()
    assert loader.base_dataloader.timeout == trainer.args.exchange_timeout / 2
    trainer = make_trainer(
        str(tmp_path), "flattened", lengths=[40, 30], per_device_eval_batch_size=2
    )
    batch = next(iter(trainer.get_eval_dataloader()._loader))
    assert batch["document_lengths"] == batch_document_lengths(batch) == (40, 30)


@pytest.mark.parametrize(
    ("layout", "micro_batches", "limit_name", "limit"),
    [("whole", 2, "tokens_per_rank", 8), ("auto", 1, "ranks · tokens_per_rank", 16)],
    ids=["whole", "cut"],
)
def test_documents_that_stay_whole_fill_ranks_and_not_their_sum(
    tmp_path, layout, micro_batches, limit_name, limit
):
    trainer = make_trainer(str(tmp_path), tokens_per_rank=8)
    groups = SimpleNamespace(
        rank=0,
        ranks=2,
        raise_together=lambda *_, **__: None,
        all_gather=lambda value, **_: [value] * 2,
    )
    dispatcher: Any = SimpleNamespace(
        groups=groups,
        settings=PlanSettings(2, 8, document_layout=layout),
        device=trainer.args.device,
        costs=list,
        limits=NO_LIMITS,
        see_length=lambda longest: None,
    )
    loaders = PackedLoaders(trainer, dispatcher)
    documents = [{"input_ids": [0] * length} for length in (6, 5, 4)]
    # 15 tokens, but 4 more fit beside neither 6 nor 5 on a rank.
    assert len(loaders.loader(documents, shuffle=False)) == micro_batches
    assert len(loaders.loader(documents, shuffle=False, capacity=16, bins=1)) == 1
    assert len(loaders.loader(documents, shuffle=False, capacity=16, bins=2)) == 2
    entry = Capacity.LONG_WHOLE if layout == "whole" else Capacity.LONG
    with refused(entry, limit_name=limit_name, limit=limit, length=limit + 1):
        loaders.loader([{"input_ids": [0] * (limit + 1)}], shuffle=False)


def test_the_training_data_is_summarized_once_before_training(tmp_path, capsys):
    arguments = {
        "long_documents": "truncate",
        "tokens_per_rank": 100,
        "eval_strategy": "epoch",
        "disable_tqdm": False,
    }
    trainer = make_trainer(
        str(tmp_path), lengths=[150, 30, 20], max_steps=2, save_strategy="no", **arguments
    )
    trainer.train()
    trainer.train()
    printed = capsys.readouterr().out.splitlines()
    line = (
        "train_dataset: 3 documents, 200 tokens; median length 30, longest 150; "
        "long_documents='truncate' drops 50 tokens (25.0%) of 1 document of more than 100 tokens"
    )
    assert printed.index(line) < min(at for at, text in enumerate(printed) if "'loss'" in text)
    assert [text for text in printed if "documents" in text] == [line]
    trainer._loaders._args = SimpleNamespace(**{**vars(trainer.args), "process_index": 1})
    trainer._loaders.print_summary([{"input_ids": [1, 2]}])
    assert not capsys.readouterr().out


def test_whatever_a_data_set_raises_reaches_all_processes_of_the_world(tmp_path, monkeypatch):
    class Faulty(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            raise OSError("stale file handle")

    trainer = make_trainer(str(tmp_path))
    seen = []
    groups = trainer.dispatcher.groups
    monkeypatch.setattr(
        groups, "raise_together", lambda error, **options: seen.append((str(error), options))
    )
    trainer._loaders.lengths(Faulty([{"input_ids": [1]}]))
    assert seen == [("stale file handle", {"in_world": True})]


class Shuffled(IterableDataset):
    """A stream of documents that tell their epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter([{"input_ids": [self.epoch, 1]}])


@pytest.mark.parametrize("source", ["stream", "flattened"])
def test_the_epoch_reaches_processes_that_live_for_several_epochs(tmp_path, source):
    lasting = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "max_steps": 1}
    trainer = make_trainer(str(tmp_path), source, **lasting)
    trainer.train_dataset = Shuffled()
    loader = trainer.get_train_dataloader()
    read = []
    for epoch in (0, 1, 5):
        loader.set_epoch(epoch)
        read += [batch["input_ids"][0, 0].item() for batch in loader]
    assert read == [0, 1, 5]


def test_an_iterator_is_a_stream():
    assert is_stream(iter([]))


@pytest.mark.parametrize(
    ("dataset", "by_rank_0", "expected"),
    [
        ([], None, False),
        (Stream(), None, True),  # although it has a length
        (Stream(), False, False),
        ([], True, True),
    ],
    ids=["data set", "stream", "stream that each rank reads", "data set that rank 0 reads"],
)
def test_lengths_are_read_by_the_collator_unless_rank_0_reads_for_all(dataset, by_rank_0, expected):
    assert is_stream(dataset) == isinstance(dataset, Stream)
    args: Any = SimpleNamespace(accelerator_config=SimpleNamespace(dispatch_batches=by_rank_0))
    trainer: Any = SimpleNamespace(data_collator=list, args=args)
    with lengths_read_on_host(trainer, dataset):
        assert isinstance(trainer.data_collator, CollatorWithLengths) is not expected
    assert trainer.data_collator is list


# Ahead


class Notes(TrainerCallback):
    """Notes in a list when steps end, and the most processes that read data."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.readers = 0

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        self.events.append("optimizer")
        self.readers = max(self.readers, len(multiprocessing.active_children()))


@pytest.mark.parametrize("source", ["packed", "flattened"])
def test_training_plans_and_binds_ahead(tmp_path, monkeypatch, source):
    trainer = make_trainer(
        str(tmp_path),
        source,
        lengths=[150] * 6,
        gradient_accumulation_steps=2,
        max_steps=3,
        save_strategy="no",
    )
    events: list[str] = []
    trainer.add_callback(Notes(events))
    bind = trainer.dispatcher.bind
    compute_loss = trainer.compute_loss
    collator = trainer.data_collator
    for module, name in ((sequences, "plan_pod"), (dispatcher, "plan_placed")):
        plan = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, plan=plan: (events.append("plan"), plan(*a))[1]
        )
    monkeypatch.setattr(
        trainer.dispatcher, "bind", lambda plan: (events.append("bind"), bind(plan))[1]
    )
    # Trainer looks at the loss, and waits for it, before it counts these.
    monkeypatch.setattr(
        trainer, "floating_point_ops", lambda _inputs: (events.append("waited"), 0)[1]
    )
    monkeypatch.setattr(
        trainer,
        "compute_loss",
        lambda *a, **k: (events.append("forward"), compute_loss(*a, **k))[1],
    )
    trainer.train()
    # Only the first step waits for its plans. While a micro-batch runs, one of the next step is
    # planned, until the data ends. accelerate reads one micro-batch more than it gives.
    plans_first, last_planned = (["plan"] * 3, 3) if source == "packed" else (["plan"] * 2, 4)
    expected = [*plans_first, "bind"]
    for micro_batch in range(6):
        planned = ["plan"] if micro_batch < last_planned else []
        bound = ["bind"] if micro_batch < 5 else []
        expected += [
            "forward",
            *planned,
            *bound,
            "waited",
            *(["optimizer"] if micro_batch % 2 else []),
        ]
    assert events == expected
    assert trainer.data_collator is collator


def test_an_evaluation_plans_and_binds_ahead(tmp_path, monkeypatch):
    trainer = make_trainer(str(tmp_path), lengths=[150] * 3)
    events: list[str] = []
    plan = sequences.plan_pod
    bind = trainer.dispatcher.bind
    prediction_step = trainer.prediction_step
    monkeypatch.setattr(sequences, "plan_pod", lambda *a: (events.append("plan"), plan(*a))[1])
    monkeypatch.setattr(
        trainer.dispatcher, "bind", lambda plan: (events.append("bind"), bind(plan))[1]
    )

    def noted_step(*args: Any, **kwargs: Any) -> Any:
        events.append("begin")
        result = prediction_step(*args, **kwargs)
        events.append("end")
        return result

    monkeypatch.setattr(trainer, "prediction_step", noted_step)
    trainer.evaluate()
    first = ["plan", "plan", "begin", "bind", "plan", "bind", "end"]
    assert events == [*first, "begin", "bind", "end", "begin", "end"]


def test_ranks_are_not_asked_again_in_an_epoch_that_has_ended(tmp_path, monkeypatch):
    trainer = make_trainer(str(tmp_path), "stream", max_steps=1)
    asked = []
    plan_batches = trainer.dispatcher.plan_batches
    monkeypatch.setattr(
        trainer.dispatcher, "plan_batches", lambda *a, **k: asked.append(1) or plan_batches(*a, **k)
    )
    ended = trainer._epoch_iterator = iter([])
    assert [trainer.get_batch_samples(ended, 2, trainer.args.device)[0] for _ in range(3)] == [
        [],
        [],
        [],
    ]
    assert len(asked) == 1


@pytest.mark.parametrize("source", ["packed", "stream", "flattened"])
def test_by_default_no_process_starts(tmp_path, monkeypatch, source):
    forbidden = Mock(side_effect=AssertionError("a process was started"))
    arguments = {"num_train_epochs": 2, "eval_strategy": "epoch", "save_strategy": "epoch"}
    limited = {**arguments, "max_steps": 6} if source == "stream" else arguments
    trainer = make_trainer(str(tmp_path / source), source, lengths=[150] * 4, **limited)
    assert trainer.args.dataloader_num_workers == 0
    for owner, name in (
        (os, "fork"),
        (os, "posix_spawn"),
        (subprocess.Popen, "__init__"),
        (BaseProcess, "start"),
    ):
        monkeypatch.setattr(owner, name, forbidden)
    trainer.train()
    assert sum("eval_loss" in entry for entry in trainer.state.log_history) >= 2
    monkeypatch.undo()


# Behind


def _held() -> tuple[int, int, int]:
    """Groups, threads and child processes of this process."""
    gc.collect()
    threads = len(os.listdir("/proc/self/task"))
    return len(dist.distributed_c10d._world.pg_map), threads, len(multiprocessing.active_children())


def _trainers_one_after_another(folder: str) -> None:
    model = small_model()
    closed = []
    losses = []
    for workers in (1, 0):
        # One step of a pass, whose loader has more to give.
        options = {
            "max_steps": 1,
            "learning_rate": 3e-2,
            "save_strategy": "no",
            "dataloader_num_workers": workers,
        }
        trainer = make_trainer(folder, model=model, lengths=LENGTHS * 2, **options)
        notes = Notes([])
        trainer.add_callback(notes)
        trainer.train()
        assert notes.readers == workers
        assert len(multiprocessing.active_children()) == 0
        before = _held()
        groups = trainer.dispatcher.groups
        losses += [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        for _ in range(2):
            trainer.close()
        closed.append(_held())
    assert losses[0] > losses[1]  # it trained on from where the one before had come to
    assert closed == [(1, closed[0][1], 0)] * 2
    assert before[0] == 3
    assert before[1] > closed[0][1]
    with pytest.raises(
        RuntimeError,
        match=r"groups of this dispatcher are closed; make a new trainer or dispatcher",
    ):
        trainer.evaluate()
    with pytest.raises(RuntimeError, match="closed"):
        groups.any_of([True])
    with torch.no_grad():
        assert model(input_ids=torch.tensor([[3, 4, 5]])).logits.shape == (1, 3, 64)


def test_nothing_is_left_of_a_closed_trainer(rank_pools, tmp_path):
    rank_pools[2].run(_trainers_one_after_another, str(tmp_path))
