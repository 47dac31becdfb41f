"""Figures of a training by a clock that the test turns, predictions, and warnings with remedies."""

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from hf_distca import DistCAConfig
from hf_distca.models.settings import plan_settings
from hf_distca.plan import ExchangeFigures, PlanChoice, PlanSummary
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.trainer.metrics import AttentionTime, EvaluationLoss, ModelFlops, Remedies, StepMeter
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


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("hf_distca.trainer.metrics.time", clock)
    return clock


def test_only_training_counts(tmp_path, monkeypatch, clock):
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


def meter_of(clock: Clock, steps: int, moved: list[list[int]], nodes: Any = None, choice: Any = None, **parts: Any):
    """A meter that has seen steps, and micro-batches of 24 tokens whose plans move these bytes."""
    dispatcher = SimpleNamespace(
        settings=SimpleNamespace(nodes=nodes),
        recorder=SimpleNamespace(seconds=clock.seconds),
        groups=SimpleNamespace(all_gather=lambda value: [value]),
        device=torch.device("cpu"),
    )
    attention = SimpleNamespace(predicted=lambda plans, seen: 1e-3 * len(plans) + sum(seen))
    meter = StepMeter(dispatcher, parts.pop("pool", None), attention, processes=2, **parts)
    for each in moved:
        summary = PlanSummary(1.5, 1.0, ExchangeFigures(*each))
        plan = SimpleNamespace(tokens=np.array([20, 4]), summary=summary, choice=choice)
        meter.count(SimpleNamespace(plan=plan, ran=SimpleNamespace(layers_in_turns=0, layers=1), stages=1))
    for _ in range(steps):
        clock.on_step_begin()
        meter.on_step_end()
    return meter


@pytest.mark.parametrize("nodes", [None, (0, 0, 1)])
def test_bytes_of_nodes_are_logged_where_ranks_share_nodes(clock, nodes):
    figures = meter_of(clock, 1, [[*range(9)], [*range(1, 10)]], nodes).figures()
    assert figures["exchange_bytes"] == 1.5
    assert {name: value for name, value in figures.items() if "node" in name} == (
        {}
        if nodes is None
        else {
            "exchange_bytes_within_nodes": 3.5,
            "exchange_bytes_between_nodes": 6.5,
            "busiest_node_bytes_within": 4.5,
            "busiest_node_bytes_between": 7.5,
        }
    )


@pytest.mark.parametrize(("peak", "mfu"), [(None, None), (100.0, 2 * 50.0 / (4.0 * 3 * 100.0))])
def test_figures_of_devices(monkeypatch, clock, peak, mfu):
    monkeypatch.setattr("hf_distca.trainer.metrics.peak_flops", lambda name: peak)
    flops = SimpleNamespace(of=lambda plan: 50.0)
    meter = meter_of(clock, 2, [[0] * 9] * 2, pool=SimpleNamespace(servers=[7]), flops=flops)
    assert meter.steps == 2
    figures = meter.figures()
    assert meter.steps == 0
    assert (figures["tokens_per_second"], figures["tokens_per_second_per_device"]) == (12.0, 4.0)
    assert (figures["exposed_exchange_share"], figures["imbalance_degree_packed"]) == (0.5, 1.5)
    assert figures.get("mfu") == mfu
    assert (figures["attention_ms"], figures["attention_ms_predicted"]) == (500.0, (0.002 + 1) * 1e3 / 2)


def test_figures_of_plans_that_were_chosen(clock):
    # Bytes in all, the busiest worker's, and inside nodes three times; then between nodes.
    moved = [[0] * 9, [7, 7, 7, 7, 7, 0, 0, 0, 0], *[[7, 7, 4, 4, 4, 3, 3, 3, 0]] * 2]
    choice = PlanChoice(1, 1, 0.01, 0.25, (0.1, 0.1), packed_seconds=0.3)
    figures = meter_of(clock, 2, moved, choice=choice, costs=SimpleNamespace(besides=0.5)).figures()
    assert (figures["step_ms"], figures["step_ms_predicted"]) == (2000.0, 1000.0)
    assert figures["gain_predicted"] == pytest.approx(1.2)
    assert (figures["plans_without_exchange"], figures["plans_within_nodes"]) == (0.25, 0.25)


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


def test_predicted_attention_time():
    """Two micro-batches stay on the two ranks; pairs of such short documents can be counted by hand."""
    model = small_model()
    config = DistCAConfig(tokens_per_rank=4, document_layout="whole", balance_tolerance=100.0, ping_pong=False)
    settings = plan_settings(model, config, ranks=2, device=torch.device("cpu"))
    plans = [plan_micro_batch([4, 2, 2], settings), plan_micro_batch([3], settings)]
    busiest, other = 10 + 6, 3 + 3
    predicted = AttentionTime(model).predicted
    assert predicted(plans, [7.0, 4.0]) == pytest.approx((7.0 + 4.0) * busiest / (busiest + other))
    # Plans that were chosen carry their prediction; the busiest rank is that of all micro-batches together.
    attention = ((5.0, 1.0), (1.0, 6.0))
    chosen = [
        replace(plan, choice=PlanChoice(1, 1, 0.01, 9.0, each)) for plan, each in zip(plans, attention, strict=True)
    ]
    assert predicted(chosen, [100.0, 100.0]) == 7.0


def test_the_loss_of_an_evaluation():
    groups: Any = SimpleNamespace(ranks=2, all_gather=lambda value: [value, value])
    loss = EvaluationLoss(groups)
    assert loss.mean() is None
    loss.add(torch.tensor(3.0), torch.tensor(4))
    loss.add(torch.tensor(1.0), torch.tensor(2))
    assert loss.mean() == (3 * 4 + 1 * 2) / 6


FINE = {"imbalance_degree": 1.01, "exposed_exchange_share": 0.02, "ping_pong_share": 1.0}
WRONG = {"imbalance_degree": 1.3, "exposed_exchange_share": 0.25, "ping_pong_share": 0.01}
REMEDY = {
    "imbalance_degree": "(it is 0.3)",
    "exposed_exchange_share": "hf-distca doctor",
    "ping_pong_share": "raise tokens_per_rank",
}


@pytest.mark.parametrize("name", WRONG)
def test_each_problem_is_told_once_with_the_remedy(caplog, name):
    remedies = Remedies(DistCAConfig(balance_tolerance=0.3, ping_pong=True), ping_pong=True)
    for _ in range(30):
        remedies.see({**FINE, name: WRONG[name]}, 10)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"distca/{name} is {WRONG[name]:.2f}" in record.message
    assert REMEDY[name] in record.message


def test_what_needs_no_remedy(caplog):
    remedies = Remedies(DistCAConfig(), ping_pong=True)
    remedies.see(WRONG, 49)  # few steps
    remedies.see({}, 1)
    remedies.see(FINE, 1000)  # means over all steps since: most were fine
    remedies.see({**FINE, "imbalance_degree": 1.3, "ping_pong_share": 0.0}, 50)  # chosen by the planner
    Remedies(DistCAConfig(ping_pong=False), ping_pong=False).see({**FINE, "ping_pong_share": 0.0}, 50)
    assert not caplog.records
