"""Figures of a training by a clock that the test turns, predictions, and warnings with remedies."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from hf_distca import DistCAConfig
from hf_distca.kernels.speed import peak_flops
from hf_distca.plan import ExchangeFigures, PlanChoice, PlanSummary
from hf_distca.planner.micro_batch import PlanSettings, plan_micro_batch
from hf_distca.trainer import metrics
from hf_distca.trainer.metrics import (
    Remedies,
    StepMeter,
    attention_as_chosen,
    attention_as_shared,
    of_all_pods,
)
from tests.models_and_batches import SMALL_KIND, small_model
from tests.trainer.small_trainers import LENGTHS, make_trainer


class Clock(TrainerCallback):
    """A step takes 2 s, 1 s of them in waits and 0.5 s in kernel calls; a batch of an evaluation
    100 s in waits.
    """

    now = waited = 0.0

    def perf_counter(self) -> float:
        return self.now

    def seconds(self, kind: str) -> float:
        return {"wait": self.waited, "kernel": self.waited / 2}[kind]

    def add(self, seconds: float, waited: float) -> None:
        self.now += seconds
        self.waited += waited

    def on_step_begin(self, *args, **kwargs) -> None:
        self.add(2.0, 1.0)

    def on_prediction_step(self, *args, **kwargs) -> None:
        self.add(100.0, 100.0)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(metrics, "time", clock)
    return clock


def test_only_training_counts(tmp_path, monkeypatch, clock):
    evaluations = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
    trainer = make_trainer(
        str(tmp_path),
        max_steps=3,
        logging_steps=2,
        gradient_accumulation_steps=8,
        save_strategy="no",
        **evaluations,
    )
    monkeypatch.setattr(trainer.dispatcher.recorder, "seconds", clock.seconds)
    trainer.add_callback(clock)
    for _ in range(2):
        # Neither what is done before training nor the last step of the one before, which was not
        # logged.
        clock.add(1000.0, 1000.0)
        trainer.train()
        (figures,) = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert figures["distca/tokens_per_second"] == pytest.approx(sum(LENGTHS) / 2.0)
        assert figures["distca/exchange_wait_seconds"] == 2.0
        # One rank: what it takes is the speed that it is predicted by.
        assert (
            figures["distca/attention_ms"]
            == pytest.approx(figures["distca/attention_ms_predicted"])
            == 500.0
        )


# Bytes in all, the busiest worker's, and inside nodes three times; then between nodes.
MOVED = [
    [0] * 9,
    [7, 7, 7, 7, 7, 0, 0, 0, 0],
    [7, 7, 4, 4, 4, 3, 3, 3, 0],
    [7, 7, 4, 4, 4, 3, 3, 3, 0],
]
CHOICE = PlanChoice(1, 1, 0.01, 0.25, (0.1, 0.1), packed_seconds=0.3)


@pytest.fixture
def figures_of(clock):
    """Figures of two steps with two micro-batches of 24 tokens on two processes.

    Micro-batches may come from padded batches of a shape; steps then also compute what is not in
    the plans.
    """

    def figures_of(
        moved=(range(9), range(1, 10)),
        nodes: Any = None,
        choice: Any = None,
        servers: Any = None,
        other_rank: Any = None,
        padded: Any = None,
        shared: int = 0,
    ) -> dict[str, float]:
        """Figures of a meter.

        Args:
            moved: bytes that the plan of a micro-batch moves.
            other_rank: seconds in waits, seconds in kernel calls and rows of padded batches there.
            padded: the shape of padded batches.
            shared: rows of each padded batch that are shared.
        """

        def of_ranks(own: Any) -> list[Any]:
            return [own] if other_rank is None else [own, (*other_rank, *own[3:])]

        dispatcher = SimpleNamespace(
            settings=SimpleNamespace(nodes=nodes),
            recorder=SimpleNamespace(seconds=clock.seconds),
            groups=SimpleNamespace(all_gather=of_ranks, rank=0, ranks=2),
            device=torch.device("cpu"),
            remote=None,
        )
        if servers is not None:
            figures_of_servers = {"attention_servers": servers}
            dispatcher.remote = SimpleNamespace(figures=lambda: figures_of_servers, present=servers)
        meter: Any = StepMeter(dispatcher, small_model(), 2)
        if padded is None:
            meter.compare_with(SimpleNamespace(besides=0.5))
        for exchange in moved:
            bound = bound_plan(exchange, choice, shared)
            if padded is None:
                meter.count(bound)
            else:
                travel = SimpleNamespace(shape=padded)
                packed = SimpleNamespace(micro_batches=[({}, bound)], travel=travel)
                meter.count_padded(packed)
        for _ in range(2):
            clock.on_step_begin()
            meter.on_step_end()
        figures = meter.figures()
        assert meter.steps == 0
        assert meter.figures() == {}
        return figures

    return figures_of


def bound_plan(exchange: list[int], choice: PlanChoice | None, shared: int) -> Any:
    """A micro-batch of 24 rows, of whose two layers one ran in turns."""
    plan = SimpleNamespace(
        document_tokens=24 + shared,
        shared_rows=shared,
        summary=PlanSummary(1.5, 1.0, ExchangeFigures(*exchange)),
        choice=choice,
        first_rank=0,
        nano_batches=(),
    )
    return SimpleNamespace(plan=plan, ran=SimpleNamespace(layers_in_turns=1, layers=2), stages=1)


def test_figures_of_one_node(figures_of):
    figures = figures_of()
    assert figures["exchange_bytes"] == 1.5
    assert figures["ping_pong_share"] == 0.5
    assert [name for name in figures if "node" in name] == []
    assert figures.keys() & {"mfu", "step_ms", "attention_servers", "padding_share"} == set()


def test_figures_of_nodes(figures_of):
    figures = figures_of(nodes=(0, 0, 1))
    assert {name: value for name, value in figures.items() if "node" in name} == {
        "exchange_bytes_within_nodes": 3.5,
        "exchange_bytes_between_nodes": 6.5,
        "busiest_node_bytes_within": 4.5,
        "busiest_node_bytes_between": 7.5,
    }


def test_figures_of_chosen_plans(figures_of):
    figures = figures_of(MOVED, choice=CHOICE)
    assert figures["step_ms"] == 2000.0
    assert figures["step_ms_predicted"] == 1000.0
    assert figures["gain_predicted"] == pytest.approx(1.2)
    assert figures["plans_without_exchange"] == 0.25
    assert figures["plans_within_nodes"] == 0.25
    assert figures["attention_ms_predicted"] == pytest.approx(4 * 100.0 / 2)


@pytest.mark.parametrize(
    ("waited_there", "computed_there", "waited", "computed"),
    [(9.0, 0.1, 9.0, 1.0), (0.1, 7.0, 2.0, 7.0)],
    ids=["the other rank waits", "the other rank computes"],
)
def test_the_slowest_rank_counts(figures_of, waited_there, computed_there, waited, computed):
    figures = figures_of(other_rank=[waited_there, computed_there, 0])
    assert figures["exchange_wait_seconds"] == waited
    assert figures["attention_ms"] == computed * 1e3 / 2
    assert figures["exposed_exchange_share"] == waited / 4.0


def test_figures_of_padded_batches(figures_of):
    # Of 2 * 24 tokens in two batches of 4 * 10 rows on this rank and 40 rows on the other.
    figures = figures_of(MOVED, choice=CHOICE, padded=(4, 10))
    assert figures["padding_share"] == pytest.approx(1 - 4 * 24 / (4 * 40))
    assert figures.keys() & {"step_ms", "step_ms_predicted", "mfu"} == set()
    assert figures["gain_predicted"] == pytest.approx(1.2)
    figures = figures_of(other_rank=[0.1, 0.1, 40], padded=(4, 5))
    assert figures["padding_share"] == pytest.approx(1 - 48 / (40 + 40))


def test_shared_rows_are_tokens_that_are_not_computed(figures_of):
    # Two steps of two padded batches of 40 rows each: 24 rows are computed, 10 shared, 6 padding.
    figures = figures_of(MOVED, padded=(4, 10), shared=10)
    assert figures["computed_rows"] == 4 * 24 / 2
    assert figures["shared_rows"] == 4 * 10 / 2
    assert figures["padding_share"] == pytest.approx(6 / 40)
    assert figures["tokens_per_second"] == 4 * 34 / 4.0
    assert figures_of().keys() & {"computed_rows", "shared_rows"} == set()


def test_figures_of_devices_and_servers(figures_of, monkeypatch):
    monkeypatch.setattr(metrics, "peak_flops", lambda name: 100.0)
    monkeypatch.setattr(
        metrics, "flops_counter", lambda model, processes_per_rank: lambda plan: 50.0
    )
    figures = figures_of(servers=1)
    assert figures["tokens_per_second"] == 12.0
    assert figures["tokens_per_second_per_device"] == 4.0
    assert figures["exposed_exchange_share"] == 0.5
    assert figures["imbalance_degree_packed"] == 1.5
    assert figures["attention_servers"] == 1
    assert figures["attention_ms"] == 500.0
    assert figures["mfu"] == 2 * 50.0 / (4.0 * 3 * 100.0)


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce RTX 4090", None),
        ("", None),
    ],
)
def test_peaks_of_devices(device, peak):
    assert peak_flops(device) == peak


def test_predicted_attention_time():
    # Two micro-batches stay on the two ranks; pairs of such short documents can be counted by hand.
    settings = PlanSettings(2, 4, (SMALL_KIND,), document_layout="whole", balance_tolerance=100.0)
    plans = [plan_micro_batch([4, 2, 2], settings), plan_micro_batch([3], settings)]
    busiest = 10 + 6
    other = 3 + 3
    expected = (7.0 + 4.0) * busiest / (busiest + other)
    assert attention_as_shared({SMALL_KIND: 2}, plans, [7.0, 4.0]) == pytest.approx(expected)
    assert attention_as_chosen(plans, 0) is None
    # Plans that were chosen carry the prediction of each rank, all micro-batches together.
    choices = [PlanChoice(1, 1, 0.01, 9.0, attention) for attention in ((5.0, 1.0), (1.0, 6.0))]
    chosen = [replace(plan, choice=choice) for plan, choice in zip(plans, choices, strict=True)]
    assert [attention_as_chosen(chosen, rank) for rank in range(2)] == [6.0, 7.0]
    # The ranks of a plan are those of a pod.
    assert attention_as_chosen([replace(plan, first_rank=2) for plan in chosen], 3) == 7.0


def test_figures_of_pods_are_those_of_the_slowest_and_shares_are_means():
    of_ranks = [
        {"imbalance_degree": 1.5, "plans_without_exchange": 0.0, "exchange_bytes": 8.0},
        {"imbalance_degree": 1.25, "plans_without_exchange": 0.5, "exchange_bytes": 9.0},
    ]
    assert of_all_pods(of_ranks) == {
        "imbalance_degree": 1.5,
        "plans_without_exchange": 0.25,
        "exchange_bytes": 9.0,
    }
    assert of_all_pods(of_ranks[:1] * 3) == of_ranks[0]


def test_what_the_planner_chose_or_few_steps_had_is_no_problem(caplog):
    fine = {"imbalance_degree": 1.01, "exposed_exchange_share": 0.02, "ping_pong_share": 1.0}
    # What the planner chooses, or the user did not ask for; and means over all steps since: most
    # were fine.
    caplog.clear()
    for ping_pong in ("auto", False):
        config = DistCAConfig(planning={"ping_pong": ping_pong})
        remedies = Remedies(config, ping_pong=ping_pong is not False)
        remedies.see({**fine, "imbalance_degree": 1.3, "ping_pong_share": 0.0}, 50)
        remedies.see({**fine, "exposed_exchange_share": 0.25}, 49)
        remedies.see({}, 1)
        remedies.see(fine, 1000)
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("imbalance_degree", 1.3, "(it is 0.3)"),
        ("exposed_exchange_share", 0.25, "hf-distca doctor"),
        ("ping_pong_share", 0.01, "raise tokens_per_rank"),
    ],
    ids=["imbalance", "exchange", "ping-pong"],
)
def test_each_problem_is_logged_once_with_the_remedy(caplog, name, value, remedy):
    fine = {"imbalance_degree": 1.01, "exposed_exchange_share": 0.02, "ping_pong_share": 1.0}
    config = DistCAConfig(planning={"balance_tolerance": 0.3, "ping_pong": True})
    remedies = Remedies(config, ping_pong=True)
    remedies.see({**fine, name: value}, 49)  # few steps
    assert not caplog.records
    for _ in range(30):
        remedies.see({**fine, name: value}, 10)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"distca/{name} is {value:.2f}" in record.message
    assert remedy in record.message
