"""Figures of a training run, by a clock that the test turns."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from hf_distca import DistCAConfig
from hf_distca.models.settings import plan_settings
from hf_distca.plan import ExchangeFigures, PlanChoice, PlanSummary
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.trainer.metrics import ModelFlops, StepMeter
from tests.models_and_batches import small_model
from tests.trainer.small_trainers import LENGTHS, make_trainer


class Clock(TrainerCallback):
    """A step takes 2 seconds, one of them in waits and half of one in kernel calls; a batch of an evaluation 100
    seconds, all in waits and kernel calls."""

    now = waited = 0.0

    def perf_counter(self) -> float:
        return self.now

    def seconds(self, kind: str) -> float:
        return {"wait": self.waited, "kernel": self.waited / 2}[kind]

    def on_step_begin(self, *args, **kwargs) -> None:
        self.now += 2.0
        self.waited += 1.0

    def on_prediction_step(self, *args, **kwargs) -> None:
        self.now += 100.0
        self.waited += 100.0


def test_only_training_counts(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("hf_distca.trainer.metrics.time", clock)
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
        assert [entry["distca/tokens_per_second"] for entry in figures] == pytest.approx([sum(LENGTHS) / 2.0] * 2)
        assert [entry["distca/exchange_wait_seconds"] for entry in figures] == [2.0] * 2
        # One rank: what it takes is the speed that it is predicted by.
        assert [entry["distca/attention_ms"] for entry in figures] == [500.0] * 2
        assert [entry["distca/attention_ms_predicted"] for entry in figures] == pytest.approx([500.0] * 2)


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
    meter = StepMeter(dispatcher, None, None, processes=1)
    for first in (0, 1):
        exchange = ExchangeFigures(*range(first, first + 9))
        plan = SimpleNamespace(tokens=np.array([1]), summary=PlanSummary(1.0, 1.0, exchange))
        ran = SimpleNamespace(layers_in_turns=0, layers=1)
        meter.count(SimpleNamespace(plan=plan, ran=ran, stages=1))
    figures = meter.figures()
    assert figures["exchange_bytes"] == 1.5
    assert {name: value for name, value in figures.items() if "node" in name} == logged


def test_model_flops_are_those_of_weights_and_pairs():
    model = small_model()
    for parameter in model.model.layers[0].parameters():
        parameter.requires_grad_(False)
    config, rows = model.config, [5, 3]
    settings = plan_settings(model, DistCAConfig(tokens_per_rank=8), ranks=1, device=torch.device("cpu"))
    plan = plan_micro_batch(rows, settings)
    of_layers = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    rest = model.model.norm.weight.numel() + model.lm_head.weight.numel()
    weights = 4 * of_layers[0] + 6 * (sum(of_layers[1:]) + rest)
    heads = config.num_attention_heads * (config.hidden_size // config.num_attention_heads)
    attention = config.num_hidden_layers * 3 * 4 * heads * (15 + 6)
    assert ModelFlops(model, shared_by=1).of(plan) == pytest.approx(8 * weights + attention)


@pytest.mark.parametrize(("peak", "mfu"), [(None, None), (100.0, 2 * 50.0 / (4.0 * 3 * 100.0))])
def test_figures_of_devices(monkeypatch, peak, mfu):
    monkeypatch.setattr("hf_distca.trainer.metrics.peak_flops", lambda name: peak)
    monkeypatch.setattr("hf_distca.trainer.metrics.time", clock := Clock())
    dispatcher = SimpleNamespace(
        settings=SimpleNamespace(nodes=None),
        recorder=SimpleNamespace(seconds=clock.seconds),
        groups=SimpleNamespace(all_gather=lambda value: [value]),
        device=torch.device("cpu"),
    )
    pool = SimpleNamespace(servers=[7])
    attention = SimpleNamespace(predicted=lambda plans, seen: 1e-3 * len(plans) + sum(seen))
    meter = StepMeter(dispatcher, pool, attention, processes=2, flops=SimpleNamespace(of=lambda plan: 50.0))
    for _ in range(2):
        clock.on_step_begin()
        summary = PlanSummary(1.5, 1.0, ExchangeFigures(*[0] * 9))
        plan = SimpleNamespace(tokens=np.array([20, 4]), summary=summary, choice=None)
        ran = SimpleNamespace(layers_in_turns=0, layers=1)
        meter.count(SimpleNamespace(plan=plan, ran=ran, stages=1))
        meter.on_step_end()
    assert meter.steps == 2
    figures = meter.figures()
    assert meter.steps == 0
    assert (figures["tokens_per_second"], figures["tokens_per_second_per_device"]) == (12.0, 4.0)
    assert figures["exposed_exchange_share"] == 0.5
    assert figures["imbalance_degree_packed"] == 1.5
    assert figures.get("mfu") == mfu
    assert (figures["attention_ms"], figures["attention_ms_predicted"]) == (500.0, (0.002 + 1) * 1e3 / 2)


def test_figures_of_plans_that_were_chosen(monkeypatch):
    monkeypatch.setattr("hf_distca.trainer.metrics.time", clock := Clock())
    dispatcher = SimpleNamespace(
        settings=SimpleNamespace(nodes=None),
        recorder=SimpleNamespace(seconds=lambda kind: 0.0),
        groups=SimpleNamespace(all_gather=lambda value: [value]),
        device=torch.device("cpu"),
    )
    attention = SimpleNamespace(predicted=lambda plans, seen: 0.0)
    meter = StepMeter(dispatcher, None, attention, processes=2, costs=SimpleNamespace(besides=0.5))
    # Bytes in all, the busiest worker's, and inside nodes three times; then between nodes.
    for moved in ([0] * 9, [7, 7, 7, 7, 7, 0, 0, 0, 0], [7, 7, 4, 4, 4, 3, 3, 3, 0], [7, 7, 4, 4, 4, 3, 3, 3, 0]):
        choice = PlanChoice(1, 1, 0.01, 0.25, (0.1, 0.1), packed_seconds=0.3)
        plan = SimpleNamespace(
            tokens=np.array([20, 4]), summary=PlanSummary(1.5, 1.0, ExchangeFigures(*moved)), choice=choice
        )
        meter.count(SimpleNamespace(plan=plan, ran=SimpleNamespace(layers_in_turns=0, layers=1), stages=1))
    for _ in range(2):
        clock.on_step_begin()
        meter.on_step_end()
    figures = meter.figures()
    assert (figures["step_ms"], figures["step_ms_predicted"]) == (2000.0, 1000.0)
    assert figures["gain_predicted"] == pytest.approx(1.2)
    assert (figures["plans_without_exchange"], figures["plans_within_nodes"]) == (0.25, 0.25)
