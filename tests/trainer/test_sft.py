"""DistCASFTTrainer on two ranks beside TRL's SFTTrainer in one process."""

import sys
from typing import Any

import accelerate
import datasets
import peft
import pytest
import torch
import trl
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

import hf_distca
from tests.models import small_model
from tests.trainer.chats import chats, prompts, tokenizer

FOLLOWED = ("loss", "entropy", "mean_token_accuracy", "num_tokens", "grad_norm")


def make(folder: str, model: Any, data: Any, ours: bool = True, peft_config: Any = None, **arguments: Any) -> Any:
    """A trainer whose steps take all of the data.

    Args:
        folder: for its output.
        model: what is trained.
        data: to train on; also evaluated, as it is and as two data sets.
        ours: whether it is DistCASFTTrainer, or SFTTrainer with all of the data in a batch.
        peft_config: of adapters.
        arguments: of its config, and its data_collator.
    """
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    settings = {
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "dataloader_num_workers": 0,
        "logging_steps": 1,
        "max_steps": 2,
        "save_strategy": "no",
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "bf16": False,
        "seed": 1,
    }
    if ours:
        kinds: Any = hf_distca.DistCASFTTrainer, hf_distca.DistCASFTConfig
        settings |= {"tokens_per_rank": 220, "balance_block_size": 8, "gradient_accumulation_steps": 8}
    else:
        kinds = trl.SFTTrainer, trl.SFTConfig
        settings |= {"per_device_train_batch_size": 99, "per_device_eval_batch_size": 99, "max_length": None}
    collator = arguments.pop("data_collator", None)
    args = kinds[1](folder, **{**settings, **arguments})
    return kinds[0](
        model=model,
        args=args,
        train_dataset=data,
        data_collator=collator,
        processing_class=tokenizer(),
        peft_config=peft_config,
    )


def followed(trainer: Any, evaluated: Any) -> dict[str, list[float]]:
    """What the trainer logs of its steps, and of an evaluation afterwards."""
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    found = {name: [entry[name] for entry in steps] for name in FOLLOWED}
    metrics = trainer.evaluate(evaluated)
    return found | {name: [x] for name, x in metrics.items() if name.startswith("eval") and "_per_" not in name}


def lora() -> peft.LoraConfig:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "chats": (chats, None, {}),
    "assistant": (chats, lora, {"assistant_only_loss": True, "learning_rate": 10.0}),
    "completions": (prompts, None, {"gradient_checkpointing": False}),
    "dft": (prompts, None, {"loss_type": "dft", "completion_only_loss": False, "max_length": 60}),
    "bfloat16": (chats, lora, {"bf16": None, "learning_rate": 10.0}),
}


def run(folder: str, case: str, ours: bool = True) -> dict[str, list[float]]:
    data, adapters, arguments = CASES[case]
    model = small_model(implementation="distca" if ours else "sdpa")
    trainer = make(folder, model, data(), ours, adapters and adapters(), **arguments)
    return followed(trainer, {"few": data().select(range(5)), "all": data()})


@pytest.mark.parametrize("case", CASES)
def test_losses_and_metrics_are_those_of_one_process(rank_pools, tmp_path, case):
    expected = run(str(tmp_path), case, ours=False)
    for got in rank_pools[2].run(run, str(tmp_path), case):
        print(got, expected)
        assert got.keys() == expected.keys()
