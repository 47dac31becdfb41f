"""Training under `accelerate launch` with 2 processes against one process with "sdpa".

Each strategy has one launch, whose processes do the strategy's runs one after another. Most of a launch is imports:
all launches but DDP's start from processes that have imported everything.
"""

import copy
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import peft
import pytest
from transformers import AutoModelForCausalLM

from hf_distca.trainer.refusals import Resume, Run
from hf_distca.trainer.resuming import agreed_checkpoint
from tests.models_and_batches import small_model
from tests.refused import refused
from tests.trainer.launches import (
    FEW,
    FEW_LENGTHS,
    LAUNCHES,
    REPLICATED,
    RUNS,
    SAVED,
    SETS,
    Launched,
    evaluation_loss,
    reference_evaluations,
    reference_run,
)
from tests.trainer.train_script import VOCABULARY

BASE = small_model("llama", "sdpa", vocab_size=VOCABULARY)
STRATEGY_AND_RUN = [(strategy, name) for strategy, runs in LAUNCHES.items() for name in runs if name != "best"]


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> Callable[[str], Launched]:
    """The launch of a strategy, done when a test first asks for it."""
    return cache(lambda strategy: Launched(strategy, tmp_path_factory.mktemp(strategy)))


@pytest.fixture(scope="module")
def expected() -> Callable[[str], dict[str, Any]]:
    """The result of a run in one process."""
    return cache(lambda name: reference_run(RUNS[name]))


@pytest.mark.parametrize(("strategy", "name"), STRATEGY_AND_RUN)
def test_losses_are_those_of_one_process(strategy, name, launched, expected):
    result = launched(strategy)[name]
    if name == "evaluated":
        assert result["error"] == str(Run.EARLY_EVALUATION.error())
        return
    losses, evaluations = expected("whole" if name == "resumed" else name).values()
    if (strategy, name) == ("zero3", "twice"):
        assert result["error"] == str(Run.SECOND_TRAINING.error(trainer="DistCATrainer"))
        losses, evaluations = losses[: FEW["max_steps"]], []
    else:
        assert {"ddp": "MULTI_CPU", "fsdp2": "FSDP"}.get(strategy, "DEEPSPEED") in result["distributed_type"]
        assert result["world_size"] == 2
        assert max(entry.get("distca/ping_pong_share", 0.0) for entry in result["history"]) > 0.0
        assert result["whole_logits"] in (None, [])
        first, second = result["parameters"]
        assert strategy not in REPLICATED or first == second
    losses_within = evaluations_within = 2e-5
    if RUNS[name]["arguments"].get("bf16"):
        # FSDP2 gives losses in bfloat16, with steps of 1/128 and less; the evaluation's are averaged outside.
        losses_within, evaluations_within = (8e-3, 1e-3) if strategy == "fsdp2" else (2e-4, 2e-4)
        # What training changes is more than what bfloat16 does.
        untrained = evaluation_loss(BASE, RUNS[name].get("lengths", FEW_LENGTHS))
        assert expected(name)["evaluations"][-1] < 0.998 * untrained
    assert result["losses"] == pytest.approx(losses, rel=losses_within)
    assert result["evaluations"] == pytest.approx(evaluations, rel=evaluations_within)


@pytest.mark.parametrize("strategy", LAUNCHES)
def test_a_whole_training(strategy, launched, expected):
    """Evaluation before the first step, a saved model, and both numbers of nano-batches."""
    assert set(launched(strategy).codes) == {0}
    result = launched(strategy)["whole"]
    first, last = (entry["eval_loss"] for entry in result["history"] if "eval_loss" in entry)
    assert first == pytest.approx(evaluation_loss(BASE), rel=2e-5)
    model = AutoModelForCausalLM.from_pretrained(
        launched(strategy).folder / "whole" / "saved", attn_implementation="sdpa"
    )
    assert evaluation_loss(model) == pytest.approx(last, rel=2e-5)
    # Some micro-batches have a document of more than half of their tokens.
    shares = [entry["distca/ping_pong_share"] for entry in result["history"] if "distca/ping_pong_share" in entry]
    assert min(shares) < 1.0
    checkpoint = launched(strategy).folder / "whole" / f"checkpoint-{SAVED}"
    shards = {"fsdp2": "pytorch_model_fsdp_0", "zero3": f"global_step{SAVED}"}.get(strategy)
    if shards is not None:
        assert len(list((checkpoint / shards).iterdir())) >= 2
        assert not list(checkpoint.glob("*.safetensors"))


@pytest.mark.parametrize("strategy", [strategy for strategy, name in STRATEGY_AND_RUN if name == "resumed"])
def test_a_resumed_training_is_the_same_to_the_last_bit(strategy, launched):
    whole, resumed = launched(strategy)["whole"], launched(strategy)["resumed"]
    assert (resumed["losses"], resumed["evaluations"]) == (whole["losses"], whole["evaluations"])
    if strategy in REPLICATED:
        assert resumed["parameters"] == whole["parameters"]
    assert resumed["kernel_forwards"] < 0.85 * whole["kernel_forwards"]  # both evaluate twice


@pytest.mark.parametrize(
    ("strategy", "name"), [("ddp", "bf16 evaluated"), ("fsdp2", "bf16"), ("zero3", "bf16 evaluated")]
)
def test_saved_adapters_are_the_trained_ones(strategy, name, launched):
    model = peft.PeftModel.from_pretrained(copy.deepcopy(BASE), launched(strategy).folder / name / "saved")
    loss = evaluation_loss(model, RUNS[name].get("lengths", FEW_LENGTHS))
    assert loss == pytest.approx(launched(strategy)[name]["evaluations"][-1], rel=1e-3)


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_the_best_model_of_several_evaluations(strategy, launched):
    result, expected = launched(strategy)["best"], reference_evaluations(RUNS["best"], steps=3)
    for number, each in enumerate(SETS):
        losses = [entry[f"eval_{each}_loss"] for entry in result["history"] if f"eval_{each}_loss" in entry]
        # The last is of the evaluation after training, of the model that has been best.
        after_steps = [losses[number] for losses, _ in expected]
        assert losses == pytest.approx([*after_steps, after_steps[0]], rel=2e-5)
        assert after_steps[0] > after_steps[1] * (1 + 1e-4)
    assert result["generated"] == [tokens for _, tokens in expected]


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
@pytest.mark.parametrize("metric", ["entropy", "mean_token_accuracy"])
def test_logits_that_trl_reads_beside_the_loss(strategy, metric, launched):
    logged, of_ddp = (
        [entry[metric] for entry in launched(each)["sft"]["history"] if metric in entry] for each in (strategy, "ddp")
    )
    assert len(of_ddp) == FEW["max_steps"]
    assert logged == pytest.approx(of_ddp, rel=1e-4)


def test_core_attention_is_kept_through_checkpoints_of_fsdp(launched):
    kept, again = (launched("fsdp2")[name] for name in ("checkpointed by FSDP", "computed again"))
    assert again["kernel_forwards"] == 2 * kept["kernel_forwards"] > 0


def test_optimizer_shards_of_other_ranks_are_told(launched):
    checkpoint = str(launched("zero2").folder / "whole" / f"checkpoint-{SAVED}")
    plugin = SimpleNamespace(deepspeed_config={})
    accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
    groups = SimpleNamespace(
        ranks=2, all_gather=lambda value: [value] * groups.ranks, raise_together=lambda *_, **__: None
    )
    args = SimpleNamespace(output_dir="")
    assert agreed_checkpoint(checkpoint, args, accelerator, groups) == checkpoint
    groups.ranks = 3
    with refused(Resume.OTHER_SHARDS, checkpoint=checkpoint, saved_by=2, ranks=3):
        agreed_checkpoint(checkpoint, args, accelerator, groups)
    plugin.deepspeed_config = {"checkpoint": {"load_universal": True}}
    assert agreed_checkpoint(checkpoint, args, accelerator, groups) == checkpoint
