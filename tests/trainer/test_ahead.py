"""Micro-batches are fetched and bound while the device works on the one before."""

from types import SimpleNamespace

import pytest
from transformers import TrainerCallback

from hf_distca.collator.padding_free import batch_document_lengths
from hf_distca.plan import PLAN_KEY
from hf_distca.trainer.loaders import UpcomingBatches
from tests.trainer.small_trainers import make_trainer


class Binder:
    """A dispatcher that notes what it bound."""

    def __init__(self, remote: object = None) -> None:
        self.remote = remote
        self.bound: list[str] = []

    def bind(self, plan: str) -> str:
        self.bound.append(plan)
        return f"{plan} bound"


def loader_of(*plans: str):
    return iter([{PLAN_KEY: plan} for plan in plans])


def test_next_of_the_step_and_first_of_the_next_step():
    binder = Binder()
    upcoming, loader = UpcomingBatches(binder), loader_of("a", "b", "c", "d")
    batches = upcoming.fetch(loader, 2)
    upcoming.begin_step(batches)
    assert upcoming.bind("a") == "a bound"
    upcoming.bind_next()
    assert binder.bound == ["a", "b"]
    assert upcoming.bind("b") == "b bound"
    upcoming.bind_next()
    assert binder.bound == ["a", "b", "c"]
    batches = upcoming.fetch(loader, 1)
    assert batches == [{PLAN_KEY: "c"}]  # fetched before, and counted
    upcoming.begin_step(batches)
    assert upcoming.bind("evaluation") == "evaluation bound"
    assert upcoming.bind("c") == "c bound"
    upcoming.bind_next()
    batches = upcoming.fetch(loader, 2)
    assert batches == [{PLAN_KEY: "d"}]
    upcoming.begin_step(batches)
    assert upcoming.bind("d") == "d bound"
    upcoming.bind_next()
    assert upcoming.fetch(loader, 2) == []
    assert binder.bound == ["a", "b", "c", "evaluation", "d"]


def test_other_loaders_and_batches_without_a_loader():
    upcoming = UpcomingBatches(Binder())
    upcoming.begin_step(upcoming.fetch(loader_of("a", "b"), 1))
    upcoming.bind("a")
    upcoming.bind_next()
    assert upcoming.fetch(loader_of("c", "d"), 2) == [{PLAN_KEY: "c"}, {PLAN_KEY: "d"}]
    binder = Binder(remote=SimpleNamespace())  # a pool of servers is asked when it is time
    upcoming = UpcomingBatches(binder)
    upcoming.begin_step(upcoming.fetch(loader_of("a", "b"), 2))
    upcoming.bind("a")
    upcoming.bind_next()
    assert binder.bound == ["a"]


class Steps(TrainerCallback):
    def __init__(self, events: list[str]) -> None:
        self.events = events

    def on_step_end(self, *_args, **_kwargs) -> None:
        self.events.append("optimizer")


def watched(trainer, monkeypatch) -> list[str]:
    """What a trainer does, in order: binds plans, runs forwards, waits for the device, ends optimizer steps."""
    events: list[str] = []
    trainer.add_callback(Steps(events))
    bind, compute_loss = trainer.dispatcher.bind, trainer.compute_loss
    monkeypatch.setattr(trainer.dispatcher, "bind", lambda plan: (events.append("bind"), bind(plan))[1])
    # Trainer looks at the loss, and waits for it, before it counts these.
    monkeypatch.setattr(trainer, "floating_point_ops", lambda _inputs: (events.append("waited"), 0)[1])
    monkeypatch.setattr(trainer, "compute_loss", lambda *a, **k: (events.append("forward"), compute_loss(*a, **k))[1])
    return events


@pytest.mark.parametrize("source", ["packed", "flattened"])
def test_training_binds_ahead(tmp_path, monkeypatch, source):
    trainer = make_trainer(
        str(tmp_path),
        source,
        lengths=[150] * 4,
        gradient_accumulation_steps=2,
        max_steps=2,
        per_device_train_batch_size=1,
        save_strategy="no",
    )
    events = watched(trainer, monkeypatch)
    collator = trainer.data_collator
    trainer.train()
    step = ["bind", "forward", "bind", "waited", "forward", "waited", "optimizer"]
    expected = [*step, *step]
    if source == "packed":  # the loader plans: the first batch of the next step is known
        expected = [*step[:5], "bind", *step[5:], "forward", "bind", "waited", "forward", "waited", "optimizer"]
    assert events == expected
    assert trainer.data_collator is collator


def test_evaluation_data_tell_their_lengths_too(tmp_path):
    trainer = make_trainer(str(tmp_path), "flattened", lengths=[40, 30], per_device_eval_batch_size=2)
    batch = next(iter(trainer.get_eval_dataloader()._loader))
    assert batch["document_lengths"] == batch_document_lengths(batch) == (40, 30)


def test_ranks_are_not_asked_again_in_an_epoch_that_has_ended(tmp_path, monkeypatch):
    trainer, asked = make_trainer(str(tmp_path), "stream", max_steps=1), []
    plan_batches = trainer.dispatcher.plan_batches
    monkeypatch.setattr(trainer.dispatcher, "plan_batches", lambda *a, **k: asked.append(1) or plan_batches(*a, **k))
    ended = iter([])
    assert [trainer.get_batch_samples(ended, 2, trainer.args.device)[0] for _ in range(3)] == [[], [], []]
    assert len(asked) == 1
