"""Figures of a training run, by a clock that the test turns."""

import pytest
from transformers import TrainerCallback

from tests.trainer.small_trainers import LENGTHS, make_trainer


class Clock(TrainerCallback):
    """A step takes 2 seconds, one of them in waits; a batch of an evaluation 100 seconds, all in waits."""

    now = waited = 0.0

    def perf_counter(self) -> float:
        return self.now

    def seconds(self, kind: str) -> float:
        assert kind == "wait"
        return self.waited

    def on_step_begin(self, *args, **kwargs) -> None:
        self.now += 2.0
        self.waited += 1.0

    def on_prediction_step(self, *args, **kwargs) -> None:
        self.now += 100.0
        self.waited += 100.0


def test_only_training_counts(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("hf_distca.trainer.meter.time", clock)
    trainer = make_trainer(
        str(tmp_path),
        max_steps=5,
        logging_steps=2,
        gradient_accumulation_steps=8,
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=True,
        save_strategy="no",
    )
    monkeypatch.setattr(trainer.dispatcher.recorder, "seconds", clock.seconds)
    trainer.add_callback(clock)
    for _ in range(2):
        # Neither what is done before training nor the last step of the one before, which was not logged.
        clock.now += 1000.0
        clock.waited += 1000.0
        trainer.train()
        figures = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert [entry["tokens_per_second"] for entry in figures] == pytest.approx([sum(LENGTHS) / 2.0] * 2)
        assert [entry["exchange_wait_seconds"] for entry in figures] == [2.0] * 2
