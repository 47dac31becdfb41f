"""Processes that were launched together on CPUs train together, as they were launched to.

Left to itself, accelerate lets each of them train alone, or by DDP where FSDP was asked for, and says nothing.
"""

import os
from typing import Any

import torch
from accelerate import DistributedType, PartialState
from accelerate.utils import parse_flag_from_env

from hf_distca.patches.tensor_parallel import is_divided_at_load


def join_on_cpu(args: Any) -> None:
    """Let the processes of a launch on CPUs find one another over gloo; elsewhere do nothing.

    Args:
        args: of a trainer, which has not looked at the world yet; `ddp_backend` or `use_cpu` is set.

    Raises:
        ValueError: DeepSpeed was asked for, and to train on the CPU by a setting that accelerate takes for "without
            DeepSpeed".
    """
    if _launched() == 1:
        return
    deepspeed = _asked_for("DEEPSPEED", args.deepspeed)
    if deepspeed and args.use_cpu:
        raise ValueError(
            "use_cpu (or ACCELERATE_USE_CPU) makes accelerate train without DeepSpeed, although DeepSpeed is "
            "configured; leave use_cpu out: processes that see no GPU (CUDA_VISIBLE_DEVICES=) train on the CPU "
            "without it"
        )
    if torch.accelerator.is_available():
        return
    if deepspeed:
        args.ddp_backend = args.ddp_backend or "gloo"
    else:
        args.use_cpu = True


def shard_on_cpu(args: Any) -> None:
    """Let accelerate shard a model with FSDP among CPU processes, for which it has no name of its own.

    Args:
        args: of a trainer, which has looked at the world; the type of its `distributed_state` is set.

    Raises:
        ValueError: several processes were launched, and this one has not found the others.
    """
    state: PartialState = args.distributed_state
    if _launched() > 1 and state.num_processes == 1:
        raise ValueError(
            f"{_launched()} processes were launched (WORLD_SIZE), but they are not connected, and each would train "
            "alone: LOCAL_RANK is not set, or no backend connects processes on CPUs. Launch with accelerate launch or "
            "torchrun; on CPUs also set use_cpu=True or ddp_backend='gloo'"
        )
    if _asked_for("FSDP", args.fsdp):
        _count_as_gpus(state)


def share_on_cpu(args: Any, model: Any) -> None:
    """Let accelerate take in a model that transformers has divided among CPU processes as it loaded it.

    Args:
        args: of a trainer that is to train the model.
        model: as the trainer is given it; nothing is done unless a DistributedConfig has divided it.
    """
    if is_divided_at_load(model):
        _count_as_gpus(args.distributed_state)


def _count_as_gpus(state: PartialState) -> None:
    on_cpu = state.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU)
    if on_cpu and state.num_processes > 1:
        state.distributed_type = DistributedType.MULTI_GPU


def _launched() -> int:
    """How many processes train, as the launcher says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _asked_for(name: str, argument: Any) -> bool:
    """Whether a strategy was asked for, of accelerate or by an argument of the trainer."""
    return bool(argument) or bool(parse_flag_from_env(f"ACCELERATE_USE_{name}"))
