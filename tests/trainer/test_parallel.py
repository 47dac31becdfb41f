"""Ranks never train apart, on GPUs or CPUs; see `test_features.py` for whole trainings."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import DistributedType
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from hf_distca import DistCAConfig
from hf_distca.refusal import check
from hf_distca.trainer.assembly import make_dispatcher
from hf_distca.trainer.parallel import (
    dtype_of_computation,
    is_wrapped,
    join_on_cpu,
    share_on_cpu,
    trained_towers,
)
from hf_distca.trainer.refusals import LOSES_DEEPSPEED, NOT_CONNECTED, TRAINER, Run
from tests.models_and_batches import random_documents, small_model
from tests.refused import refused
from tests.trainer.features import with_frozen_tower, with_tower
from tests.trainer.small_trainers import make_trainer


def _step_of_a_bare_model(folder: str) -> bool:
    """Whether a step takes a gradient of a model that nothing has wrapped."""
    trainer = make_trainer(folder)
    with refused(Run.NOT_WRAPPED, model="LlamaForCausalLM", processes=2, strategy="DistributedType.MULTI_CPU"):
        trainer.training_step(trainer.model, next(iter(trainer.get_train_dataloader())))
    return any(parameter.grad is not None for parameter in trainer.model.parameters())


def test_ranks_do_not_train_apart(rank_pools, tmp_path):
    assert rank_pools[2].run(_step_of_a_bare_model, str(tmp_path)) == [False, False]


def test_compiling_by_the_launch(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "inductor")
    with refused(TRAINER[0]):
        make_trainer(str(tmp_path))


def test_towers_are_what_text_gives_no_gradient():
    model = with_tower("distca")
    tokens = random_documents([20])[0][None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert trained_towers(model) == ["model.vision_tower", "model.multi_modal_projector"]
    missing = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert missing == {name for name, _ in model.named_parameters() if name.startswith(tuple(trained_towers(model)))}
    assert trained_towers(with_frozen_tower("distca")) == trained_towers(small_model()) == []


@pytest.mark.parametrize(
    ("argument", "launch", "divided", "expected"),
    [
        ("bf16", "no", None, torch.bfloat16),
        ("", "bf16", None, torch.bfloat16),
        ("", "fp16", None, torch.float16),
        ("", "no", None, torch.float32),
        ("", "no", (2, True), torch.bfloat16),
        ("", "no", (1, True), torch.float32),
        ("fp16", "no", (2, True), torch.float16),
    ],
)
def test_the_dtype_of_computation(argument, launch, divided, expected):
    args: Any = SimpleNamespace(bf16=argument == "bf16", fp16=argument == "fp16")
    model: Any = SimpleNamespace(dtype=torch.float32, is_distributed_loading_by_transformers=divided is not None)
    if divided is not None:
        sizes = SimpleNamespace(dp_size=divided[0], fsdp_mixed_precision=divided[1])
        model.config = SimpleNamespace(distributed_config=sizes)
    accelerator: Any = SimpleNamespace(mixed_precision=launch)
    assert dtype_of_computation(model, args, accelerator) is expected


@pytest.mark.parametrize(
    ("kind", "cls", "engine", "expected"),
    [
        ("NO", nn.Module, None, True),
        ("MULTI_GPU", nn.Module, None, False),
        ("MULTI_GPU", DistributedDataParallel, None, True),
        ("FSDP", nn.Module, None, False),
        ("FSDP", FullyShardedDataParallel, None, True),
        ("DEEPSPEED", nn.Module, None, False),
        ("DEEPSPEED", nn.Module, object(), True),
    ],
)
def test_what_brings_gradients_together(kind, cls, engine, expected):
    model = cls.__new__(cls)  # without a group
    nn.Module.__init__(model)
    model._fsdp_wrapped_module = nn.Module()
    accelerator: Any = SimpleNamespace(distributed_type=DistributedType[kind], deepspeed_engine_wrapped=engine)
    assert is_wrapped(model, accelerator) is expected


def test_a_model_divided_at_load_is_wrapped_by_fsdp_or_trains_on_the_same_data():
    model: Any = nn.Module()
    model.is_distributed_loading_by_transformers = True
    for sizes, expected in ((None, True), (1, True), (2, False)):
        config = None if sizes is None else SimpleNamespace(data_parallel_size=sizes)
        accelerator: Any = SimpleNamespace(distributed_type=DistributedType.MULTI_GPU, parallelism_config=config)
        assert is_wrapped(model, accelerator) is expected


# Processes on CPUs


@pytest.fixture
def launched(monkeypatch):
    """Arguments of one of some processes that were launched with a strategy, here on a host with or without a GPU."""

    def arguments(processes=2, strategy="", gpu=False, **given):
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        for name in ("DEEPSPEED", "FSDP"):
            monkeypatch.setenv(f"ACCELERATE_USE_{name}", str(name == strategy).lower())
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: gpu)
        return SimpleNamespace(**{"use_cpu": False, "ddp_backend": None, "deepspeed": None, "fsdp": None, **given})

    return arguments


@pytest.mark.parametrize(
    ("launch", "use_cpu", "backend"),
    [
        ({}, True, None),
        ({"strategy": "FSDP"}, True, None),
        ({"strategy": "DEEPSPEED"}, False, "gloo"),
        ({"deepspeed": "config.json"}, False, "gloo"),
        ({"strategy": "DEEPSPEED", "ddp_backend": "mpi"}, False, "mpi"),
        ({"gpu": True}, False, None),
        ({"gpu": True, "strategy": "DEEPSPEED"}, False, None),
        ({"processes": 1}, False, None),
    ],
)
def test_processes_without_a_gpu_join(launched, launch, use_cpu, backend):
    args = launched(**launch)
    join_on_cpu(args)
    assert (args.use_cpu, args.ddp_backend) == (use_cpu, backend)


def test_fsdp_and_models_divided_at_load_are_shared_among_processes_on_cpus(launched):
    for strategy, divided, expected in [("FSDP", False, "GPU"), ("", True, "GPU"), ("", False, "CPU")]:
        args = launched(strategy=strategy)
        args.distributed_state = SimpleNamespace(distributed_type=DistributedType.MULTI_CPU, num_processes=2)
        share_on_cpu(args, SimpleNamespace(is_distributed_loading_by_transformers=divided))
        assert args.distributed_state.distributed_type == f"MULTI_{expected}"


def test_launches_that_would_train_alone_or_without_deepspeed(launched):
    args = launched(strategy="DEEPSPEED", use_cpu=True)
    with refused(LOSES_DEEPSPEED):
        check((LOSES_DEEPSPEED,), args)
    args.distributed_state = SimpleNamespace(distributed_type=DistributedType.NO, num_processes=1)
    with refused(NOT_CONNECTED):
        check((NOT_CONNECTED,), args)
    with refused(NOT_CONNECTED):  # in a custom loop
        make_dispatcher(small_model(), DistCAConfig(), torch.device("cpu"))
    check((LOSES_DEEPSPEED, NOT_CONNECTED), launched(strategy="DEEPSPEED", use_cpu=True, processes=1))
