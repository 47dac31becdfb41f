from types import SimpleNamespace

import pytest
import torch
from accelerate import DistributedType

from hf_distca.refusal import check
from hf_distca.trainer.parallel import join_on_cpu, shard_on_cpu, share_on_cpu
from hf_distca.trainer.refusals import LOSES_DEEPSPEED, NOT_CONNECTED
from tests.refused import refused


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


def test_deepspeed_that_accelerate_would_leave_out(launched):
    with refused(LOSES_DEEPSPEED):
        check((LOSES_DEEPSPEED,), launched(strategy="DEEPSPEED", use_cpu=True))
    check((LOSES_DEEPSPEED,), launched(strategy="DEEPSPEED", use_cpu=True, processes=1))


@pytest.mark.parametrize(
    ("strategy", "found", "kept"),
    [
        ("FSDP", DistributedType.MULTI_CPU, DistributedType.MULTI_GPU),
        ("", DistributedType.MULTI_CPU, DistributedType.MULTI_CPU),
        ("DEEPSPEED", DistributedType.DEEPSPEED, DistributedType.DEEPSPEED),
    ],
)
def test_fsdp_shards_among_processes_on_cpus(launched, strategy, found, kept):
    args = launched(strategy=strategy)
    args.distributed_state = SimpleNamespace(distributed_type=found, num_processes=2)
    shard_on_cpu(args)
    assert args.distributed_state.distributed_type == kept


@pytest.mark.parametrize("divided", [False, True])
def test_processes_on_cpus_share_a_model_that_was_divided_as_it_was_loaded(launched, divided):
    args = launched()
    args.distributed_state = SimpleNamespace(distributed_type=DistributedType.MULTI_CPU, num_processes=2)
    share_on_cpu(args, SimpleNamespace(is_distributed_loading_by_transformers=divided))
    kept = DistributedType.MULTI_GPU if divided else DistributedType.MULTI_CPU
    assert args.distributed_state.distributed_type == kept


def test_processes_that_would_each_train_alone(launched):
    args = launched()
    args.distributed_state = SimpleNamespace(distributed_type=DistributedType.NO, num_processes=1)
    with refused(NOT_CONNECTED):
        check((NOT_CONNECTED,), args)
