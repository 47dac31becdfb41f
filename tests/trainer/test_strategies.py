"""Whole trainings under each strategy, evaluated, saved, resumed and repeated: two ranks beside one process."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import hf_distca
from hf_distca.trainer.refusals import Resume, Run
from hf_distca.trainer.resuming import agreed_checkpoint
from tests.models_and_batches import exchanging, random_documents, reference_step, small_model
from tests.refused import refused
from tests.trainer.chats import tokenizer
from tests.trainer.comparison import (
    ALONE,
    COMMON,
    LENGTHS,
    PLANNED,
    ROUNDING,
    TARGETS,
    TYPES,
    dataset_of,
    launched,
)
from tests.trainer.features import Pad, adapted
from tests.trainer.launches import CHECKPOINTING
from tests.trainer.small_trainers import parameters_hash
from tests.whole_logits import WholeLogits

VOCABULARY = 67
"""A size that nothing else has, so that tensors of tokens × vocabulary stand out."""
SAVED = 2
ADAM = {"optim": "adamw_torch", "learning_rate": 1e-3, "max_steps": 3}
WHOLE = {**ADAM, "max_steps": 4, "eval_on_start": True, "save_strategy": "steps", "save_steps": SAVED}
BF16 = {
    **{"arguments": {**ADAM, "learning_rate": 5e-2, "max_steps": 8, "bf16": True}, "lora": True, "save": True},
    "repeats": 4,  # FSDP2 rounds each micro-batch's loss to bfloat16: the mean of many is closer
}
# The more a step has lowered the loss, the worse: the first is the best, and two later ones are waited for.
BEST = {
    **{**ADAM, "max_steps": 8, CHECKPOINTING: False, "eval_strategy": "steps", "eval_steps": 1},
    **{"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "load_best_model_at_end": True},
    **{"metric_for_best_model": "eval_most_loss", "greater_is_better": True},
}
BY_FSDP = {"FSDP_ACTIVATION_CHECKPOINTING": "true"}  # --fsdp_activation_checkpointing true
CASES: dict[str, dict[str, Any]] = {
    "whole": {"arguments": WHOLE, "save": True},
    "resumed": {"arguments": WHOLE, "resume": f"whole/checkpoint-{SAVED}"},
    "bf16": BF16,
    "bf16 evaluated": {**BF16, "calls": ["evaluate", "train", "evaluate"]},
    "evaluated": {"calls": ["evaluate"]},
    "twice": {"calls": ["train", "train", "evaluate"]},
    "anew": {"calls": ["train", "new trainer", "train", "evaluate"]},
    "best": {"arguments": BEST, "evaluated": {"few": LENGTHS[:5], "most": LENGTHS[:10]}, "generates": 4},
    "checkpointed by FSDP": {"arguments": {CHECKPOINTING: False}, "environment": BY_FSDP, "calls": ["train"]},
    "computed again": {
        **{"arguments": {CHECKPOINTING: False}, "environment": BY_FSDP, "calls": ["train"]},
        "planned": {"keep_core_attention": False},
    },
    "sft": {"arguments": ADAM, "sft": True},
}
"""Cases: arguments, calls of the trainer, and what a case has besides."""
OF_STRATEGIES = {
    "ddp": ["whole", "resumed", "bf16 evaluated", "twice"],
    "fsdp2": ["whole", "resumed", "bf16", "evaluated", "twice", "checkpointed by FSDP", "computed again"],
    "zero2": ["whole", "resumed", "evaluated"],
    "zero3": ["whole", "resumed", "bf16 evaluated", "twice", "anew"],
}
REPLICATED = ("ddp", "zero2")
"""Strategies under which each rank holds all parameters."""


class Generates(TrainerCallback):
    """Generates from the model as it is after each step, on every rank."""

    def __init__(self, tokens: int, generated: list[list[int]]) -> None:
        self._tokens, self._generated = tokens, generated

    def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
        """Note the most probable continuation of a few words."""
        prompt = torch.tensor([[5, 9, 17, 33]])
        options = {"min_new_tokens": self._tokens, "max_new_tokens": self._tokens, "pad_token_id": 0}
        made = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **options)
        self._generated.append(made[0].tolist())


def plain(how: str) -> nn.Module:
    return small_model(implementation=how, vocab_size=VOCABULARY)


def make_trainer(folder: str, case: dict[str, Any], model: nn.Module, alone: bool, result: dict[str, Any]) -> Any:
    """The trainer of a case; forwards of its kernel are counted into the result."""
    sets = {
        name: datasets.concatenate_datasets([dataset_of(lengths)] * case.get("repeats", 1))
        for name, lengths in case.get("evaluated", {"": LENGTHS}).items()
    }
    given: dict[str, Any] = {
        "model": model,
        "train_dataset": dataset_of(LENGTHS),
        "eval_dataset": sets.get("", sets),
        "callbacks": [EarlyStoppingCallback(2)] if case.get("generates") else [],
    }
    arguments = {**COMMON, **case.get("arguments", {}), "output_dir": folder}
    if case.get("generates"):
        given["callbacks"].append(Generates(case["generates"], result["generated"]))
    if alone:
        return Trainer(args=TrainingArguments(**arguments, **ALONE), data_collator=Pad(), **given)
    arguments |= {**PLANNED, **exchanging(model), "dataloader_num_workers": 0, **case.get("planned", {})}
    if case.get("sft"):
        args = hf_distca.DistCASFTConfig(**arguments)
        return hf_distca.DistCASFTTrainer(args=args, processing_class=tokenizer(), **given)
    trainer = hf_distca.DistCATrainer(args=hf_distca.DistCATrainingArguments(**arguments), **given)
    kernel, forward = trainer.dispatcher.kernel, trainer.dispatcher.kernel.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        result["kernel_forwards"] += 1
        return forward(*args, **kwargs)

    kernel.forward = counted
    return trainer


def carry_out(folder: str, name: str, strategy: str = "") -> dict[str, Any]:
    """Make the calls of a case on this rank, or in one process with transformers' trainer; what it gave."""
    case, alone, output = CASES[name], not strategy, f"{folder}/{strategy}/{name}"
    result: dict[str, Any] = {"losses": [], "evaluations": [], "generated": [], "kernel_forwards": 0, "error": ""}
    unset_hf_deepspeed_config()
    model = plain("sdpa" if alone else "distca")
    if case.get("lora"):
        model = adapted(lambda how: model, target_modules=["q_proj", "v_proj"])("")
    resume = f"{folder}/{strategy}/{case['resume']}" if "resume" in case else None
    watched = nullcontext() if alone else WholeLogits(VOCABULARY, rows=48)
    with launched(strategy or "ddp", {} if alone else case.get("environment", {})):
        try:
            trainer = make_trainer(output, case, model, alone, result)
            for call in case.get("calls", ["train", "evaluate"]):
                if call == "train":
                    with watched:
                        trainer.train(resume_from_checkpoint=resume)
                    result["losses"] += [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
                elif call == "evaluate":
                    with watched:
                        metrics = trainer.evaluate()
                    result["evaluations"] += [value for key, value in metrics.items() if key.endswith("_loss")]
                else:
                    trainer = make_trainer(output, case, model, alone, result)
            if case.get("save") and not alone:
                trainer.save_model(f"{output}/saved")
        except ValueError as error:  # raised on all ranks together
            return {**result, "error": str(error)}
        result["history"] = trainer.state.log_history
        if not alone:
            result["type"] = str(trainer.accelerator.distributed_type)
            result["parameters"] = trainer.dispatcher.groups.all_gather(parameters_hash(model))
            result["whole_logits"] = watched.shapes
            trainer.close()
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Folder of all outputs, STRATEGY/CASE."""
    return tmp_path_factory.mktemp("strategies")


@pytest.fixture(scope="module")
def run(rank_pools, zero_pools, folder) -> Callable[[str, str], dict[str, Any]]:
    """What a case gives under a strategy on rank 0, carried out once."""

    def carried_out(strategy: str, name: str) -> dict[str, Any]:
        pool = zero_pools.get(strategy, rank_pools[2])
        return pool.run(carry_out, str(folder), name, strategy, keeps_groups=strategy in zero_pools)[0]

    return cache(carried_out)


@pytest.fixture(scope="module")
def one_process(folder) -> Callable[[str], dict[str, Any]]:
    """What a case gives in one process."""
    return cache(partial(carry_out, str(folder)))


@pytest.mark.parametrize(
    ("strategy", "name"), [(strategy, name) for strategy, names in OF_STRATEGIES.items() for name in names]
)
def test_losses_are_those_of_one_process(strategy, name, run, one_process):
    if name == "resumed":
        run(strategy, "whole")
    result = run(strategy, name)
    if name == "evaluated":
        assert result["error"] == str(Run.EARLY_EVALUATION.error())
        return
    expected = one_process({"resumed": "whole", "bf16": "bf16 evaluated"}.get(name, name))
    losses, evaluations = expected["losses"], expected["evaluations"]
    if (strategy, name) == ("zero3", "twice"):
        assert result["error"] == str(Run.SECOND_TRAINING.error(trainer="DistCATrainer"))
        losses, evaluations = losses[: COMMON["max_steps"]], []
    else:
        assert result["error"] == ""
        assert TYPES[strategy] in result["type"]
        assert max(entry.get("distca/ping_pong_share", 0.0) for entry in result["history"]) > 0.0
        assert result["whole_logits"] == []
        first, second = result["parameters"]
        assert strategy not in REPLICATED or first == second
    losses_within = evaluations_within = 2e-5
    if name.startswith("bf16"):
        losses_within = 2 * ROUNDING if strategy == "fsdp2" else ROUNDING / TARGETS**0.5
        evaluations_within = 1e-3 if strategy == "fsdp2" else ROUNDING / TARGETS**0.5
        evaluations = evaluations[-len(result["evaluations"]) :]
        # What training changes is more than what bfloat16 does.
        assert expected["evaluations"][1] < 0.998 * expected["evaluations"][0]
    assert result["losses"] == pytest.approx(losses, rel=losses_within)
    assert result["evaluations"] == pytest.approx(evaluations, rel=evaluations_within)


def loss_of(model: Any) -> float:
    return reference_step(model, random_documents(LENGTHS))[0]


@pytest.mark.parametrize("strategy", OF_STRATEGIES)
def test_a_whole_training(strategy, run, folder):
    """Evaluation before the first step, a saved model, and checkpoints in shards."""
    result, output = run(strategy, "whole"), folder / strategy / "whole"
    first, last = (entry["eval_loss"] for entry in result["history"] if "eval_loss" in entry)
    assert first == pytest.approx(loss_of(plain("sdpa")), rel=2e-5)
    model = AutoModelForCausalLM.from_pretrained(output / "saved", attn_implementation="sdpa")
    assert loss_of(model) == pytest.approx(last, rel=2e-5)
    shards = {"fsdp2": "pytorch_model_fsdp_0", "zero3": f"global_step{SAVED}"}.get(strategy)
    if shards is not None:
        checkpoint = output / f"checkpoint-{SAVED}"
        assert len(list((checkpoint / shards).iterdir())) >= 2
        assert not list(checkpoint.glob("*.safetensors"))


@pytest.mark.parametrize("strategy", OF_STRATEGIES)
def test_a_resumed_training_is_the_same_to_the_last_bit(strategy, run):
    whole, resumed = run(strategy, "whole"), run(strategy, "resumed")
    assert (resumed["losses"], resumed["evaluations"]) == (whole["losses"], whole["evaluations"])
    if strategy in REPLICATED:
        assert resumed["parameters"] == whole["parameters"]
    assert resumed["kernel_forwards"] < 0.85 * whole["kernel_forwards"]  # both evaluate twice


@pytest.mark.parametrize(
    ("strategy", "name"), [("ddp", "bf16 evaluated"), ("fsdp2", "bf16"), ("zero3", "bf16 evaluated")]
)
def test_saved_adapters_are_the_trained_ones(strategy, name, run, folder):
    evaluation = run(strategy, name)["evaluations"][-1]
    saved = folder / strategy / name / "saved"
    model = peft.PeftModel.from_pretrained(plain("sdpa"), saved, is_trainable=True)
    assert loss_of(model) == pytest.approx(evaluation, rel=1e-3)


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_the_best_model_of_several_evaluations(strategy, run, one_process):
    result, expected = run(strategy, "best"), one_process("best")
    for name in ("eval_few_loss", "eval_most_loss"):
        losses, wanted = ([entry[name] for entry in r["history"] if name in entry] for r in (result, expected))
        # The last is of the evaluation after training, of the model that has been best.
        assert len(losses) == 4
        assert losses == pytest.approx(wanted, rel=2e-5)
        assert losses[0] == pytest.approx(losses[-1], rel=1e-6)
        assert losses[0] > losses[1] * (1 + 1e-4)
    assert result["generated"] == expected["generated"]


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
@pytest.mark.parametrize("metric", ["entropy", "mean_token_accuracy"])
def test_logits_that_trl_reads_beside_the_loss(strategy, metric, run):
    logged, of_ddp = (
        [entry[metric] for entry in run(each, "sft")["history"] if metric in entry] for each in (strategy, "ddp")
    )
    assert len(of_ddp) == ADAM["max_steps"]
    assert logged == pytest.approx(of_ddp, rel=1e-4)


def test_core_attention_is_kept_through_checkpoints_of_fsdp(run):
    kept, again = (run("fsdp2", name) for name in ("checkpointed by FSDP", "computed again"))
    assert again["kernel_forwards"] == 2 * kept["kernel_forwards"] > 0


def test_optimizer_shards_of_another_number_of_ranks(run, folder):
    run("zero2", "whole")
    checkpoint = str(folder / "zero2" / "whole" / f"checkpoint-{SAVED}")
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
