"""Training under `accelerate launch` with 2 processes against one process with "sdpa".

There is one launch for each way to train in parallel; its processes do all runs of RUNS one after another. Most of a
launch is imports.
"""

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import peft
import pytest
from transformers import AutoModelForCausalLM

from hf_distca.trainer.resuming import agreed_checkpoint
from tests.models_and_batches import small_model
from tests.trainer.launches import (
    FEW_STEPS,
    LAUNCHES,
    REPLICATED,
    RUNS,
    SETS,
    STEPS,
    Launched,
    evaluation_loss,
    reference_evaluations,
    reference_run,
)
from tests.trainer.train_script import VOCABULARY

REFUSES_TO_EVALUATE_FIRST = ("fsdp2", "zero1", "zero2")


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> Callable[[str], Launched]:
    """The launch of a strategy, done when a test first asks for it."""
    return cache(lambda strategy: Launched(strategy, tmp_path_factory.mktemp(strategy)))


@pytest.fixture(scope="module")
def expected() -> Callable[[str], dict[str, Any]]:
    """What one process makes of a run."""
    return cache(lambda name: reference_run(RUNS[name]))


def pairs(*names: str) -> list[tuple[str, str]]:
    """Each strategy with those of the runs that its launch does."""
    return [(strategy, name) for strategy, runs in LAUNCHES.items() for name in runs if name in names]


@pytest.mark.parametrize("strategy", LAUNCHES)
def test_the_launch_comes_to_its_end(strategy, launched):
    launched(strategy).check_end()


@pytest.mark.parametrize("strategy", LAUNCHES)
def test_loss_curve_is_that_of_one_process(strategy, launched, expected):
    result = launched(strategy)["whole"]
    assert {"ddp": "MULTI_CPU", "fsdp2": "FSDP"}.get(strategy, "DEEPSPEED") in result["distributed_type"]
    assert result["world_size"] == 2
    # Some micro-batches have a document of more than half of their tokens: both kinds in one run.
    shares = [entry["distca/ping_pong_share"] for entry in result["history"] if "distca/ping_pong_share" in entry]
    assert min(shares) < 1.0
    assert max(shares) > 0.0
    assert result["losses"] == pytest.approx(expected("whole")["losses"], rel=2e-5)


@pytest.mark.parametrize("strategy", LAUNCHES)
def test_evaluation_before_the_first_step(strategy, launched, expected):
    history = launched(strategy)["whole"]["history"]
    losses = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    assert losses == pytest.approx(
        expected("evaluated")["evaluations"][:1] + expected("whole")["evaluations"], rel=2e-5
    )


@pytest.mark.parametrize(("strategy", "name"), pairs("resumed"))
def test_resuming(strategy, name, launched):
    whole, resumed = launched(strategy)["whole"], launched(strategy)[name]
    assert resumed["losses"] == whole["losses"]  # to the last bit
    assert resumed["evaluations"] == whole["evaluations"]
    if strategy in REPLICATED:
        assert resumed["parameters"] == whole["parameters"]
    # Both evaluate twice.
    assert resumed["kernel_forwards"] < 0.75 * whole["kernel_forwards"]


@pytest.mark.parametrize(
    ("strategy", "name"),
    pairs(
        "lora",
        "lora without checkpoints",
        "frozen",
        "frozen without checkpoints",
        "mistral",
        "gemma2",
        "mixtral",
        "hybrid",
        "anew",
        "head with adapters",
        "head trained whole",
        "tied",
        "MLP in chunks",
        "sft",
    ),
)
def test_few_steps(strategy, name, launched, expected):
    result = launched(strategy)[name]
    assert max(entry.get("distca/ping_pong_share", 0.0) for entry in result["history"]) > 0.0
    assert max(entry.get("distca/exchange_stages", 0.0) for entry in result["history"]) > 1.0
    assert result["losses"] == pytest.approx(expected(name)["losses"], rel=2e-5)
    assert result["evaluations"] == pytest.approx(expected(name)["evaluations"], rel=2e-5)


@pytest.mark.parametrize(("strategy", "name"), pairs("bf16", "head with adapters", "head trained whole", "tied"))
def test_no_tensor_of_tokens_and_vocabulary_is_made(strategy, name, launched):
    assert launched(strategy)[name]["whole_logits"] == []


@pytest.mark.parametrize(("strategy", "name"), pairs("best"))
def test_the_best_model_of_several_evaluations(strategy, name, launched):
    result = launched(strategy)[name]
    expected = reference_evaluations(RUNS[name], steps=3)
    for number, _set in enumerate(SETS):
        losses = [entry[f"eval_{_set}_loss"] for entry in result["history"] if f"eval_{_set}_loss" in entry]
        # The last is of the evaluation after training, of the model that has been best.
        after_steps = [losses[number] for losses, _ in expected]
        assert losses == pytest.approx([*after_steps, after_steps[0]], rel=2e-5)
        assert after_steps[0] > after_steps[1] * (1 + 1e-4)
    assert result["generated"] == [tokens for _, tokens in expected]


@pytest.mark.parametrize(("strategy", "name"), pairs("metrics"))
def test_logits_that_a_trainer_reads_beside_the_loss(strategy, name, launched, expected):
    result = launched(strategy)[name]
    assert result["losses"] == pytest.approx(expected(name)["losses"], rel=2e-5)
    assert len(result["read"]) == FEW_STEPS * 2
    for entropies_and_accuracies in zip(result["read"], launched("ddp")[name]["read"], strict=True):
        assert entropies_and_accuracies[0] == pytest.approx(entropies_and_accuracies[1], rel=1e-4)


def test_core_attention_is_kept_through_checkpoints_of_fsdp(launched, expected):
    kept, again = (launched("fsdp2")[name] for name in ("checkpointed by FSDP", "computed again"))
    for result in (kept, again):
        assert result["losses"] == pytest.approx(expected("checkpointed by FSDP")["losses"], rel=2e-5)
    assert again["kernel_forwards"] == 2 * kept["kernel_forwards"] > 0


@pytest.mark.parametrize(("strategy", "name"), pairs("bf16", "bf16 evaluated"))
def test_few_steps_in_bfloat16(strategy, name, launched, expected):
    result = launched(strategy)[name]
    # FSDP2 gives losses in bfloat16, with steps of 1/128 and less; the evaluation's are averaged outside.
    losses_within, evaluations_within = (8e-3, 1e-3) if strategy == "fsdp2" else (2e-4, 2e-4)
    assert result["losses"] == pytest.approx(expected(name)["losses"], rel=losses_within)
    assert result["evaluations"] == pytest.approx(expected(name)["evaluations"], rel=evaluations_within)
    # What training changes is more than what bfloat16 does.
    assert expected(name)["evaluations"][-1] < 0.998 * expected("evaluated")["evaluations"][0]


@pytest.mark.parametrize("strategy", LAUNCHES)
def test_evaluating_before_training(strategy, launched, expected):
    result = launched(strategy)["evaluated"]
    if strategy in REFUSES_TO_EVALUATE_FIRST:
        assert result["error"].startswith("evaluate() was called before train(), but FSDP, ZeRO-1 and ZeRO-2 prepare")
        assert "set eval_on_start=True" in result["error"]
    else:
        assert result["losses"] == pytest.approx(expected("evaluated")["losses"], rel=2e-5)
        assert result["evaluations"] == pytest.approx(expected("evaluated")["evaluations"], rel=2e-5)


@pytest.mark.parametrize("strategy", LAUNCHES)
def test_training_twice(strategy, launched, expected):
    result = launched(strategy)["twice"]
    if "zero" in strategy:
        assert "called a second time under DeepSpeed" in result["error"]
        assert result["losses"] == pytest.approx(expected("twice")["losses"][:FEW_STEPS], rel=2e-5)
    else:
        assert result["losses"] == pytest.approx(expected("twice")["losses"], rel=2e-5)


@pytest.mark.parametrize("strategy", REPLICATED)
def test_ranks_hold_the_same_parameters(strategy, launched):
    for name in LAUNCHES[strategy]:
        result = launched(strategy)[name]
        if "error" not in result:
            first, second = result["parameters"]
            assert first == second, name


@pytest.mark.parametrize("strategy", LAUNCHES)
def test_saved_model_is_the_trained_one(strategy, launched):
    model = AutoModelForCausalLM.from_pretrained(launched(strategy).saved("whole"), attn_implementation="sdpa")
    assert evaluation_loss(model) == pytest.approx(launched(strategy)["whole"]["evaluations"][0], rel=2e-5)


@pytest.mark.parametrize("strategy", LAUNCHES)
def test_saved_adapters_are_the_trained_ones(strategy, launched):
    base = small_model("llama", "sdpa", vocab_size=VOCABULARY)
    model = peft.PeftModel.from_pretrained(base, launched(strategy).saved("lora"))
    assert evaluation_loss(model) == pytest.approx(launched(strategy)["lora"]["evaluations"][0], rel=2e-5)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_optimizer_shards_of_other_ranks_are_told(strategy, launched):
    checkpoint = str(launched(strategy).folder / "whole" / f"checkpoint-{STEPS // 2}")
    plugin = SimpleNamespace(deepspeed_config={})
    accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
    groups = SimpleNamespace(
        ranks=2, all_gather=lambda value: [value] * groups.ranks, raise_together=lambda *_, **__: None
    )
    args = SimpleNamespace(output_dir="")
    assert agreed_checkpoint(checkpoint, args, accelerator, groups) == checkpoint
    groups.ranks = 3
    with pytest.raises(
        ValueError, match=r"optimizer state in .* on 2 ranks and 3 ranks train now, .* train on 2 ranks; or"
    ):
        agreed_checkpoint(checkpoint, args, accelerator, groups)
    plugin.deepspeed_config = {"checkpoint": {"load_universal": True}}
    assert agreed_checkpoint(checkpoint, args, accelerator, groups) == checkpoint


@pytest.mark.parametrize(
    ("strategy", "shards"), [("fsdp2", "pytorch_model_fsdp_0"), ("zero3", f"global_step{STEPS // 2}")]
)
def test_checkpoints_stay_in_shards(strategy, shards, launched):
    checkpoint = launched(strategy).folder / "whole" / f"checkpoint-{STEPS // 2}"
    assert len(list((checkpoint / shards).iterdir())) >= 2
    assert not list(checkpoint.glob("*.safetensors"))
