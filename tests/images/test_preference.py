"""TRL's trainers for preferences on questions about pictures, and hf_distca's on the same."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import datasets
import peft
import pytest
import torch
import torch.distributed as dist
import trl
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import hf_distca
from hf_distca.checks.setting_names import CHECKPOINTING
from hf_distca.planner import prefixes
from tests.images.families import tiny_model
from tests.images.pictures import judged, preferences, processor
from tests.trainer.comparison import QUIET, launched, whole

COUNTS = (2, 0, 1, 0, 0, 0, 3, 1, 0, 0, 0, 0)
"""Numbers of pictures of four examples a step: on both ranks, on rank 1 alone, and on none."""
PER_STEP = 4
ARGUMENTS: dict[str, Any] = {
    **QUIET,
    "max_steps": 3,
    "optim": "sgd",
    "learning_rate": 0.5,
    "bf16": False,
    "max_length": None,
    "train_sampling_strategy": "sequential",
    "eval_strategy": "steps",
    "eval_steps": 3,
}
FOLLOWED = ("loss", "grad_norm", "rewards/chosen", "rewards/rejected")


@dataclass(frozen=True)
class Case:
    """What is set in a training."""

    strategy: str = "ddp"
    kind: str = "DPO"
    data: Callable[[list[int]], datasets.Dataset] = preferences
    counts: tuple[int, ...] = COUNTS
    adapters: tuple[str, ...] = ()  # modules with LoRA
    ranks: int = 1  # of TRL's own training
    frozen: tuple[str, ...] = ()  # modules that are not trained
    checkpoints: bool = True
    planned: Mapping[str, Any] = field(default_factory=dict)  # settings of hf_distca


CASES = {
    "a reference model": Case(),
    "LoRA": Case(adapters=("q_proj", "up_proj", "qkv", "linear_fc1")),
    "several micro-batches": Case(planned={"tokens_per_rank": 60}),
    "nothing shared": Case(planned={"share_prefixes": False}),
    # Its loss has a mean over the examples of a rank.
    "KTO": Case(kind="KTO", data=judged, ranks=2),
    # TRL's gradient of the head is not that of all ranks.
    "fsdp2": Case("fsdp2", frozen=("lm_head",)),
    "zero3": Case("zero3"),
    # TRL's checkpoints would then be reentrant, and give adapters of the encoder no gradient.
    "zero3, LoRA": Case(
        "zero3", adapters=("q_proj", "up_proj", "qkv", "linear_fc1"), checkpoints=False
    ),
}


def train(folder: str, case: Case, planned: bool) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Logs and trained weights of a training."""
    # Questions have fewer than 128 tokens, but are to be shared.
    shares = patch.multiple(prefixes, BLOCK=4, LEAST_SAVED=0.0)
    with launched(case.strategy, {}), shares, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # TRL uses transformers' earlier names
        unset_hf_deepspeed_config()
        # Under ZeRO-3 arguments of training divide the weights of models that are made later.
        implementation = "distca" if planned else "sdpa"
        model, reference = (tiny_model("qwen3_vl", implementation) for _ in range(2))
        for name in case.frozen:
            model.get_submodule(name).requires_grad_(False)
        data = case.data(list(case.counts))
        arguments = {**ARGUMENTS, CHECKPOINTING: case.checkpoints}
        for name in ("train", "eval"):
            arguments[f"per_device_{name}_batch_size"] = PER_STEP // dist.get_world_size()
        if planned:
            settings = {"tokens_per_rank": 400, "document_layout": "fixed", **case.planned}
            arguments |= {"planning": {"balance_block_size": 8}, **settings}
        package, prefix = (hf_distca, "DistCA") if planned else (trl, "")
        args = getattr(package, f"{prefix}{case.kind}Config")(folder, **arguments)
        given: dict[str, Any] = {"ref_model": reference}
        if case.adapters:
            # B is not 0 at first, so that the model without the adapter is another one.
            torch.manual_seed(1)
            adapter = peft.LoraConfig(
                r=4, init_lora_weights=False, target_modules=list(case.adapters)
            )
            given = {"peft_config": adapter}
        trainer = getattr(package, f"{prefix}{case.kind}Trainer")(
            model,
            args=args,
            processing_class=processor(),
            train_dataset=data,
            eval_dataset=data,
            **given,
        )
        trainer.train()
        logs = trainer.state.log_history
        weights = {
            name.replace("_checkpoint_wrapped_module.", ""): whole(weight)
            for name, weight in trainer.model.named_parameters()
            if weight.requires_grad
        }
        if planned:
            trainer.close()
    return logs, weights


def refuse_rollouts(folder: str) -> None:
    """Give pictures to a trainer of rollouts."""
    with launched("ddp", {}), pytest.raises(ValueError, match="gets a data set with images"):
        hf_distca.DistCAGRPOTrainer(
            tiny_model("qwen3_vl", "distca"),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=hf_distca.DistCAGRPOConfig(folder, **QUIET, bf16=False, tokens_per_rank=400),
            processing_class=processor(),
            train_dataset=preferences([1, 1]).select_columns(["prompt", "images"]),
        )


def test_rollouts_with_pictures_are_refused(rank_pools, tmp_path):
    rank_pools[1].run(refuse_rollouts, str(tmp_path))


@pytest.mark.parametrize("name", CASES)
def test_as_trl_trains(rank_pools, tmp_path, name):
    case = CASES[name]
    stock = replace(case, strategy="ddp")
    expected, weights = rank_pools[case.ranks].run(train, str(tmp_path / "trl"), stock, False)[0]
    keeps = {
        "keeps_groups": case.strategy == "zero3"
    }  # DeepSpeed's are those of its first training
    for logs, found in rank_pools[2].run(train, str(tmp_path / "planned"), case, True, **keeps):
        for entry, expected_entry in zip(logs, expected, strict=True):
            followed = [key for key in expected_entry if key.removeprefix("eval_") in FOLLOWED]
            assert {key: entry[key] for key in followed} == pytest.approx(
                {key: expected_entry[key] for key in followed}, rel=1e-4, abs=1e-4
            )
        for weight_name, weight in weights.items():
            difference = (found[weight_name] - weight).abs().max()
            error = difference / weight.abs().max().clamp(min=0.05)
            assert error < 1e-5, (weight_name, error)
