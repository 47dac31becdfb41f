"""Trainings with features under each strategy: equal to one process, or refused on every rank."""

import re
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, TrainingArguments

from hf_distca.dispatch import host_copies
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.host_copies import Copies
from hf_distca.memory.fitting import log_memory
from hf_distca.memory.model_state import parameter_bytes
from hf_distca.models.decoder import base_model
from hf_distca.models.fake import model_of_config
from hf_distca.models.kinds import layers_by_kind
from hf_distca.models.tensor_parallel import config_on_a_rank
from hf_distca.trainer.parallel import sharing_of
from tests.late_streams import LateStreams
from tests.logged import Messages
from tests.models_and_batches import random_documents, reference_step
from tests.trainer import preferences
from tests.trainer.comparison import (
    AS_GPUS,
    CHECKPOINTING,
    LENGTHS,
    STRATEGIES,
    Result,
    Run,
    assert_equal,
    launched,
    model_of,
    plain,
    train_alone,
    train_planned,
)
from tests.trainer.features import BY_FSDP, FEATURES, SAVED, TOGETHER, together
from tests.trainer.small_trainers import LENGTHS as OF_TRAINERS
from tests.trainer.small_trainers import make_trainer

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "features.md"


def planned(folder: str, names: tuple[str, ...], strategy: str) -> Result:
    """A rank's training."""
    return train_planned(folder, together(*names), strategy, ", ".join(names))


@pytest.fixture(scope="module")
def run(rank_pools, zero_pools, tmp_path_factory) -> Callable[..., list[Result]]:
    """Trains under a strategy once, and gives what became of it on each rank."""
    folder = str(tmp_path_factory.mktemp("planned"))

    @cache
    def trains(strategy: str, *names: str) -> list[Result]:
        pool = zero_pools.get(strategy, rank_pools[STRATEGIES[strategy].ranks])
        return pool.run(planned, folder, names, strategy, keeps_groups=pool is not rank_pools[2])

    return trains


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Callable[..., Result]:
    """What one process makes of names, trained once."""
    folder = str(tmp_path_factory.mktemp("alone"))
    return cache(lambda names, exact=False: train_alone(folder, together(*names), exact))


HEADS = {"tp": (1, 1), "tp and fsdp": (2, 1), "tp and replicas": (2, 1)}
"""Query and key/value heads of a rank that has not all."""
SINGLE = [(strategy, (name,)) for name, feature in FEATURES.items() for strategy in feature.only]


def assert_losses_are_not_rounded(training: Run, results: list[Result]) -> None:
    """Models return losses in float32: early stopping would not see what is below a step of
    bfloat16.
    """
    for mode in ("train", "eval") if "evaluate" in training.calls else ("train",):
        losses = torch.tensor([loss for result in results for loss in result["losses"][mode]])
        assert (losses != losses.bfloat16()).any(), mode


@pytest.mark.features
@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        *TOGETHER,
        *(
            pytest.param(*single, marks=pytest.mark.further_strategy)
            for single in SINGLE
            if single not in TOGETHER
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else ", ".join(value),
)
def test_trainings(run, reference, strategy, names):
    training = together(*names)
    shares = STRATEGIES[strategy].shares
    pytest.importorskip(training.needs)
    results = run(strategy, *names)
    if strategy not in training.refused:
        assert_losses_are_not_rounded(training, results)
    for rank, result in enumerate(results):
        assert_equal(training, result, lambda exact=False: reference(names, exact), strategy)
        if strategy in training.refused:
            continue
        # Ranks have the same weights, and layers run in turns, but for hooks of the debugger.
        assert all(
            torch.equal(result["learned"][name], of_0)
            for name, of_0 in results[0]["learned"].items()
        )
        in_turns = max(entry.get("distca/ping_pong_share", 0.0) for entry in result["history"])
        assert (in_turns > 0) is (shares > 1 and "debug=underflow_overflow" not in names)
        # Rows are planned for the data and the heads of the rank, and ranks log the same figures.
        assert result["place"] == (rank // (len(results) // shares), shares)
        if len(results) == 4:
            assert result["heads"] == {HEADS.get(strategy, (4, 2))}
        assert logged(result, "loss") == logged(results[0], "loss")
        exchange_bytes = logged(result, "distca/exchange_bytes")
        assert exchange_bytes == logged(results[0], "distca/exchange_bytes")
        assert (exchange_bytes[0] == 0) is (shares == 1)


def logged(result: Result, name: str) -> list[float]:
    return [entry[name] for entry in result["history"] if name in entry]


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [("fsdp2", "torch.optim.Adafactor"), ("zero2", "adafactor"), ("zero3", "Muon")],
)
def test_optimizers_of_whole_weights_are_refused_on_every_rank(run, strategy, optimizer):
    results = run(strategy, optimizer)
    assert all(FEATURES[optimizer].refused[strategy] in result["error"] for result in results)


def test_each_feature_is_among_those_that_are_always_tried():
    assert set(FEATURES) <= {name for _, names in TOGETHER for name in names}
    refused_together = [
        (strategy, name)
        for strategy, names in TOGETHER
        for name in names
        if name in FEATURES and strategy in FEATURES[name].refused
    ]
    assert refused_together == []


@pytest.mark.parametrize(
    ("strategy", "names"),
    [(strategy, names) for strategy, names in TOGETHER if "saved" in " ".join(names)],
)
def test_what_is_saved_is_what_was_trained(run, reference, strategy, names):
    (result, *_) = run(strategy, *names)
    training = together(*names)
    if training.adapter is None:
        model = AutoModelForCausalLM.from_pretrained(
            result["after"], attn_implementation="sdpa", dtype=torch.float32
        )
    else:
        model = peft.PeftModel.from_pretrained(
            training.model("sdpa"), result["after"], is_trainable=True
        )
    loss, _ = reference_step(model, random_documents(LENGTHS))
    assert loss == pytest.approx(
        result["logged"]["eval_loss"][-1], rel=1e-3 if training.rounds else 2e-5
    )


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2", "zero3"])
def test_a_resumed_training_is_the_same_to_the_last_bit(run, strategy):
    for whole, resumed in zip(
        run(strategy, "evaluated and saved"), run(strategy, "resumed"), strict=True
    ):
        assert resumed["logged"]["loss"] == whole["logged"]["loss"]
        assert resumed["logged"]["eval_loss"][-1] == whole["logged"]["eval_loss"][-1]
        assert all(
            torch.equal(resumed["learned"][name], weight)
            for name, weight in whole["learned"].items()
        )
        assert resumed["kernel_forwards"] < 0.85 * whole["kernel_forwards"]  # both evaluate twice
    shards = {"fsdp2": "pytorch_model_fsdp_0", "zero3": f"global_step{SAVED}"}.get(strategy)
    if shards is not None:
        checkpoint = Path(whole["after"]).parent / f"checkpoint-{SAVED}"
        assert len(list((checkpoint / shards).iterdir())) >= 2
        assert not list(checkpoint.glob("*.safetensors"))


def test_core_attention_is_kept_through_checkpoints_of_fsdp(run):
    kept, plain = (run("fsdp2", name)[0] for name in ("checkpointed by FSDP", "no checkpoints"))
    assert kept["kernel_forwards"] == plain["kernel_forwards"] > 0


OFFLOADED = {
    "ddp": {"bf16": True, "adapter": FEATURES["LoRA on v_proj only"].adapter},  # autocast
    "fsdp2": {},
    "zero3": {},
    "checkpointed by FSDP": {"environment": BY_FSDP, "bf16": True},
}
"""Trainings by their strategy; by FSDP2 where it is none."""


def _training(folder: str, name: str, offloads: bool) -> tuple[Result, dict[str, int]]:
    """A rank's training, and the bytes that went to host and device."""
    how: dict[str, Any] = dict(OFFLOADED[name])
    strategy = name if name in STRATEGIES else "fsdp2"
    arguments = {CHECKPOINTING: name in STRATEGIES, "bf16": how.pop("bf16", False)}
    arguments["offload_activations"] = offloads
    training = Run(arguments, model=model_of(num_hidden_layers=4), **how)
    streams = LateStreams()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copies, "Copies", lambda device, _: Copies(device, streams))
        result = train_planned(folder, training, strategy, f"{name}, {offloads}")
    return result, streams.moved


def _both_trainings(folder: str, name: str) -> list[tuple[Result, dict[str, int]]]:
    """A rank's training without and with offload."""
    return [_training(folder, name, offloads) for offloads in (False, True)]


@pytest.mark.parametrize("name", OFFLOADED)
def test_trainings_with_offload_are_the_same_to_the_last_bit(
    rank_pools, zero_pools, tmp_path, name
):
    pool = zero_pools.get(name, rank_pools[2])
    for rank_results in pool.run(_both_trainings, str(tmp_path), name, keeps_groups=True):
        (expected, _), (got, moved) = rank_results
        assert got["losses"] == expected["losses"]
        for weight, learned in expected["learned"].items():
            assert torch.equal(got["learned"][weight], learned), weight
        assert moved["host"] == moved["device"] > 0


def _preference_training(folder: str, offloads: bool) -> tuple[dict[str, Any], dict[str, int]]:
    """A rank's training of DPO in several micro-batches, and the bytes that went to the host."""
    streams = LateStreams()
    case = preferences.Case(
        "dpo",
        model={"num_hidden_layers": 4},
        planned={"offload_activations": offloads, "tokens_per_rank": 40},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copies, "Copies", lambda device, _: Copies(device, streams))
        result = preferences.train(f"{folder}/{offloads}", case, planned=True)
    return result, streams.moved


def _both_preference_trainings(folder: str) -> list[tuple[dict[str, Any], dict[str, int]]]:
    """A rank's training of DPO without and with offload."""
    return [_preference_training(folder, offloads) for offloads in (False, True)]


def test_padded_batches_with_offload_are_the_same_to_the_last_bit(rank_pools, tmp_path):
    for rank_results in rank_pools[2].run(_both_preference_trainings, str(tmp_path)):
        (expected, _), (got, moved) = rank_results
        for weight, learned in expected["learned"].items():
            assert torch.equal(got["learned"][weight], learned), weight
        assert moved["host"] == moved["device"] > 0


# Models that ranks share


def test_ranks_on_two_nodes_exchange_in_stages(run):
    def largest(result, metric):
        return max(entry.get(f"distca/{metric}", 0.0) for entry in result["history"])

    for result in run("fsdp2 on four ranks", "two nodes", "bf16", "LoRA on v_proj only"):
        assert largest(result, "exchange_stages") > 1
        assert largest(result, "exchange_bytes_between_nodes") > 0


def test_ranks_train_in_pods_whose_size_changes(run):
    results = run("fsdp2 on four ranks", "two pods")
    pods = [result["after"][:2] for result in results]
    assert pods == [[range(0, 2), range(4)]] * 2 + [[range(2, 4), range(4)]] * 2


def _preferences_in_pods(folder: str) -> tuple[list[range], list[dict[str, Any]]]:
    """The ranks of each plan of DPO on a rank, which is compared with TRL's, and what was logged.

    The batches of a pod may need more micro-batches than those of the other one.
    """
    planned_ranks: list[range] = []
    bind = Dispatcher.bind

    def noted(dispatcher: Dispatcher, plan: Any) -> Any:
        planned_ranks.append(plan.ranks)
        return bind(dispatcher, plan)

    case = preferences.Case(
        "dpo",
        arguments={"max_steps": 2},
        planned={
            **{"tokens_per_rank": 64, "document_layout": "auto", "device_profile": "h100"},
            **{"ranks_per_node": 2, "pod_ranks": 2},
        },
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dispatcher, "bind", noted)
        return planned_ranks, preferences.compare_with_stock(folder, case, 2e-4)


def test_padded_batches_are_trained_in_pods(rank_pools, tmp_path):
    results = rank_pools[4].run(_preferences_in_pods, str(tmp_path), keeps_groups=True)
    ranks = [set(planned_ranks) for planned_ranks, _ in results]
    assert ranks == [{range(2)}] * 2 + [{range(2, 4)}] * 2
    # All pods run equally many micro-batches, and some batches need several.
    counts = {len(planned_ranks) for planned_ranks, _ in results}
    assert len(counts) == 1
    assert counts.pop() > 4  # two steps of the model and of its reference
    first = results[0][1][0]
    assert first["distca/computed_rows"] > 0
    assert 0 < first["distca/padding_share"] < 1


def _refusals_and_memory(folder: str) -> None:
    """Models, data and settings that cannot be trained are refused on this rank; its share of a
    model is counted.
    """
    rank = torch.distributed.get_rank()

    def made(
        name: str,
        sizes: Any = STRATEGIES["tp and fsdp"].divided,
        config: Any = None,
        **arguments: Any,
    ) -> Any:
        model = Run(model=model_of(**(config or {}))).make_model(
            "distca", sizes, f"{folder}/{name}"
        )
        return make_trainer(
            f"{folder}/out", model=model, environment=AS_GPUS, save_strategy="no", **arguments
        )

    cases: dict[str, dict[str, Any]] = {
        r"layers\.0\.self_attn has 1 key/value heads, but tensor parallelism cannot divide": {
            "config": {"num_key_value_heads": 1}
        },
        r"\(pp_size=4\) gives ranks different layers": {"sizes": {"pp_size": 4}},
        (
            r"different data sets \(rank 0: 12 documents, 621 tokens; .*"
            r"rank 3: 11 documents, 590 tokens"
        ): {"lengths": OF_TRAINERS[: 11 if rank == 3 else 12]},
        # Ranks 1 and 3 have the same heads, and agree with each other.
        r"tokens_per_rank differs between ranks \(160 on rank 0": {
            "tokens_per_rank": 96 if rank % 2 else 160
        },
    }
    with launched("tp and fsdp", {}):
        for number, (error, case) in enumerate(cases.items()):
            with pytest.raises(ValueError, match=error):
                made(f"refused-{number}", **case).get_train_dataloader()
        trainer = made("memory")
        messages = Messages("hf_distca.memory.fitting")
        if rank == 0:  # alone, as in a training
            log_memory(trainer.model, trainer.dispatcher.run, 10**10)
            assert messages.lines[0].startswith("INFO memory with ")
        messages.end()
        base = base_model(trainer.model)
        alone = model_of_config(config_on_a_rank(base), torch.float32)
        (kind,) = layers_by_kind(alone)
        assert kind.q_heads == 2
        assert kind.kv_heads == 1
        assert alone.config.intermediate_size == 24
        whole = sum(parameter.numel() for parameter in plain("sdpa").parameters())
        norms = 5 * 32
        assert parameter_bytes(base, 1) == (whole - norms) // 2 + norms
        assert sharing_of(trainer.accelerator, trainer.model)[1] == 2


def test_refusals_and_memory_of_a_divided_model(run, rank_pools, tmp_path):
    rank_pools[4].run(_refusals_and_memory, str(tmp_path), keeps_groups=True)


# The page


def parts_of_page() -> tuple[str, str]:
    """The table of features, and that of arguments."""
    features, arguments = PAGE.read_text().split("## Arguments of Trainer")
    return features, arguments


def rows_of_features() -> dict[str, list[str]]:
    """The cells of a feature by its name."""
    cells = [line.strip("| ").split(" | ") for line in parts_of_page()[0].splitlines()]
    return {row[0]: row[1:] for row in cells if len(row) > 4}


def outcome(feature: Any, strategy: str) -> str:
    if strategy in feature.refused:
        return "refused"
    return "equal" if strategy in feature.only else "–"


@pytest.mark.parametrize("name", FEATURES)
def test_the_page_has_the_outcome_of_each_feature(name):
    feature = FEATURES[name]
    row = rows_of_features()[name]
    strategies = ("ddp", "fsdp2", "zero2", "zero3")
    assert row[:4] == [outcome(feature, strategy) for strategy in strategies]
    assert [text for text in feature.refused.values() if text not in row[4]] == []


def test_the_page_has_each_feature_and_argument_once():
    assert len(rows_of_features()) == 2 + len(FEATURES)
    lines = parts_of_page()[1].splitlines()
    cells = [line.split(" | ")[0] for line in lines if line.startswith("| `")]
    named = re.findall(r"`(\w+)`", " ".join(cells))
    assert len(named) == len(set(named))
    assert {field.name for field in fields(TrainingArguments)} <= set(named)
