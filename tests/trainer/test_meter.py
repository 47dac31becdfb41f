"""Figures of a training run, by a clock that the test turns."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from hf_distca.plan import ExchangeFigures, PlanSummary
from hf_distca.trainer.meter import StepMeter
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


OF_NODES = {
    "exchange_bytes_within_nodes": 3.5,
    "exchange_bytes_between_nodes": 6.5,
    "busiest_node_bytes_within": 4.5,
    "busiest_node_bytes_between": 7.5,
}


@pytest.mark.parametrize(("nodes", "logged"), [(None, {}), ((0, 0, 1), OF_NODES)])
def test_bytes_of_nodes_are_logged_where_ranks_share_nodes(nodes, logged):
    dispatcher = SimpleNamespace(
        settings=SimpleNamespace(nodes=nodes),
        recorder=SimpleNamespace(seconds=lambda kind: 0.0),
        groups=SimpleNamespace(all_gather=lambda value: [value]),
        device=torch.device("cpu"),
    )
    meter = StepMeter(dispatcher, None)
    for first in (0, 1):
        exchange = ExchangeFigures(*range(first, first + 9))
        plan = SimpleNamespace(tokens=np.array([1]), summary=PlanSummary(1.0, 1.0, exchange))
        ran = SimpleNamespace(layers_in_turns=0, layers=1)
        meter.count(SimpleNamespace(plan=plan, ran=ran, stages=1))
    figures = meter.figures()
    assert figures["exchange_bytes"] == 1.5
    assert {name: value for name, value in figures.items() if "node" in name} == logged
