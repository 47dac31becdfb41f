"""A rank is killed: all end within seconds, and another launch goes on from what was saved, to the last bit.

Each set of ranks has processes of its own, since DeepSpeed leaves settings in those that it has been in.
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback

import hf_distca
from tests.models_and_batches import exchanging, random_documents
from tests.ranks import own_processes
from tests.trainer.features import adapted, plain
from tests.trainer.launches import CHECKPOINTING
from tests.trainer.small_trainers import LENGTHS
from tests.trainer.test_nodes import LAUNCHED
from tests.trainer.train_script import allow_bf16, parameters_hash

RANKS, STEPS, SAVED = 2, 3, 1  # the checkpoint is in the middle of the first of two passes
WITH_DROPOUT = adapted(target_modules="all-linear", lora_dropout=0.1)
ZERO = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_CONFIG_DS_FIELDS": "zero_stage"}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"model": WITH_DROPOUT, "environment": LAUNCHED["ddp"], "kind": "MULTI_CPU"},
    "fsdp2": {"model": plain, "environment": LAUNCHED["fsdp2"], "kind": "FSDP"},
    "zero2": {
        "model": plain,
        "environment": {**ZERO, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
        "kind": "DEEPSPEED",
    },
    "zero3": {
        "model": WITH_DROPOUT,
        "environment": {**ZERO, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
        "kind": "DEEPSPEED",
    },
}
"""What is trained under each, and what `accelerate launch` sets for it."""
ARGUMENTS: dict[str, Any] = {
    "report_to": [],
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "dataloader_num_workers": 0,
    "logging_steps": 1,
    "max_steps": STEPS,
    "save_strategy": "steps",
    "save_steps": SAVED,
    "gradient_accumulation_steps": 2,
    "tokens_per_rank": 96,
    "balance_block_size": 8,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "linear",
    "bf16": True,
    CHECKPOINTING: True,
}
ENDS_WITHIN_S = 20.0
"""After the kill, for the last rank; much less than the seconds after which an exchange fails by itself."""
WAIT_S = 200.0
"""For a set of ranks; DeepSpeed compiles an operator where nobody has used it before."""


class Killed(TrainerCallback):
    """Ends the process of rank 0 between two micro-batches of the first step after the checkpoint."""

    def __init__(self, note: Path) -> None:
        self._note = note

    def on_substep_end(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
        """Note when, and end."""
        if state.global_step == SAVED and dist.get_rank() == 0:
            self._note.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)


def _whole_and_killed(folder: Path, strategy: str) -> None:
    """A run that nothing ends, and one in the same processes that ends before its time."""
    os.environ.update(STRATEGIES[strategy]["environment"])
    # Before the first arguments: once those know of ZeRO-3, a model's parameters are drawn in another way.
    models = [STRATEGIES[strategy]["model"]("distca") for _ in range(2)]
    trainer = _trainer(models[0], folder / "whole")
    trainer.train()
    _note_result(trainer, folder / "whole")
    trainer = _trainer(models[1], folder / "killed")
    trainer.add_callback(Killed(folder / "killed at"))
    trainer.train()


def _resumed(folder: Path, strategy: str) -> None:
    os.environ.update(STRATEGIES[strategy]["environment"])
    trainer = _trainer(STRATEGIES[strategy]["model"]("distca"), folder / "killed")
    trainer.train(resume_from_checkpoint=True)
    _note_result(trainer, folder / "killed")
    dist.barrier()
    dist.destroy_process_group()


def _trainer(model: nn.Module, folder: Path) -> hf_distca.DistCATrainer:
    allow_bf16()
    documents = [{"input_ids": document.tolist()} for document in random_documents(LENGTHS)]
    return hf_distca.DistCATrainer(
        model=model,
        args=hf_distca.DistCATrainingArguments(output_dir=str(folder), **exchanging(model), **ARGUMENTS),
        train_dataset=datasets.Dataset.from_list(documents),
    )


def _note_result(trainer: hf_distca.DistCATrainer, folder: Path) -> None:
    """Write down what this rank logged, and has of the parameters."""
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    result = {
        "kind": str(trainer.accelerator.distributed_type),
        **{name: [entry[name] for entry in logs] for name in ("loss", "grad_norm", "learning_rate")},
        "parameters": parameters_hash(trainer.model),
    }
    (folder / f"result-{dist.get_rank()}").write_text(json.dumps(result))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_another_launch_goes_on_to_the_last_bit(tmp_path, strategy):
    for part in ("first", "second"):
        (tmp_path / part).mkdir()
    with own_processes(RANKS, _whole_and_killed, tmp_path, strategy, folder=tmp_path / "first") as ranks:
        for rank in ranks:
            rank.join(WAIT_S)
        ended = time.monotonic()
        assert [rank.exitcode for rank in ranks] == [-signal.SIGKILL, 1]
    assert ended - float((tmp_path / "killed at").read_text()) < ENDS_WITHIN_S
    assert [folder.name for folder in (tmp_path / "killed").glob("checkpoint-*")] == [f"checkpoint-{SAVED}"]
    with own_processes(RANKS, _resumed, tmp_path, strategy, folder=tmp_path / "second") as ranks:
        for rank in ranks:
            rank.join(WAIT_S)
        assert [rank.exitcode for rank in ranks] == [0, 0]
    for rank in range(RANKS):
        whole, resumed = (json.loads((tmp_path / run / f"result-{rank}").read_text()) for run in ("whole", "killed"))
        assert STRATEGIES[strategy]["kind"] in whole["kind"]
        assert len(whole["loss"]) == STEPS
        assert resumed == whole
