"""Trainings with planned attention beside transformers' Trainer with "sdpa" in one process, on the same documents."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import accelerate
import datasets
import pytest
import torch
from transformers import training_args

from tests.models_and_batches import random_documents
from tests.trainer.features import SGD, Example, Feature
from tests.trainer.launches import CHECKPOINTING

LENGTHS = [90, 50, 33, 19, 120, 40, 31, 1, 64, 64, 37, 27]
PER_MICRO_BATCH, TOKENS_PER_RANK = 4, 96
"""Each four documents fill two ranks, so that micro-batches are the same for anybody who takes them in order."""
COMMON: dict[str, Any] = {
    "report_to": [],
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "logging_steps": 1,
    "logging_nan_inf_filter": False,
    "save_strategy": "no",
    "lr_scheduler_type": "constant",
    "train_sampling_strategy": "sequential",
    "max_steps": 2,
    "bf16": False,
    CHECKPOINTING: True,
    **SGD,
}
ALONE = {"use_cpu": True, "per_device_train_batch_size": PER_MICRO_BATCH, "per_device_eval_batch_size": 100}
PLANNED = {"tokens_per_rank": TOKENS_PER_RANK, "balance_block_size": 8, "loss_chunk_bytes": 4096}
ROUNDING = 2.0**-8
"""Relative error of rounding to bfloat16: of a loss under FSDP2, which rounds what a model returns; elsewhere of the
losses of single targets, whose roundings are independent of one another, so that their mean is off by the root of the
number of targets less."""
TARGETS = sum(LENGTHS[:PER_MICRO_BATCH]) - PER_MICRO_BATCH
LAUNCHED = {
    "ddp": {"ACCELERATE_USE_CPU": "true"},
    "fsdp2": {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
    },
    "zero2": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
    "zero3": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
}
"""Variables of `accelerate launch` that decide the strategy."""
TYPES = {"ddp": "MULTI_CPU", "fsdp2": "FSDP", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}


def examples(feature: Feature) -> list[Example]:
    """The documents as a feature changes them."""
    return [
        feature.example(index, {"input_ids": document.tolist()})
        for index, document in enumerate(random_documents(LENGTHS))
    ]


def dataset_of(lengths: list[int]) -> datasets.Dataset:
    """Documents of these lengths."""
    return datasets.Dataset.from_list([{"input_ids": document.tolist()} for document in random_documents(lengths)])


@contextmanager
def launched(strategy: str, environment: Mapping[str, str]) -> Iterator[pytest.MonkeyPatch]:
    """While inside, this process has been launched for a strategy, on a device with bfloat16."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ACCELERATE_USE_CPU", raising=False)
        for variable, value in {**LAUNCHED[strategy], **environment}.items():
            patch.setenv(variable, value)
        patch.setattr(training_args, "is_torch_bf16_gpu_available", lambda: True)
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        try:
            yield patch
        finally:
            torch.use_deterministic_algorithms(False)
            accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
