"""Make CPU processes of one launch train together, under the strategy of the launch.

By default, accelerate lets each process train alone, or uses DDP instead of FSDP, without a warning.
"""

import os
from typing import Any

import torch
from accelerate import DistributedType, PartialState
from accelerate.utils import parse_flag_from_env

from hf_distca.models.tensor_parallel import is_divided_at_load


def join_on_cpu(args: Any) -> None:
    """Connect the processes of a CPU launch over gloo; do nothing elsewhere.

    Args:
        args: trainer arguments that have not looked up the world yet; `ddp_backend` or `use_cpu` is set.

    Raises:
        ValueError: DeepSpeed is combined with a CPU setting for which accelerate drops DeepSpeed.
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
    """Let accelerate shard a model with FSDP among CPU processes, a case without a type of its own.

    Args:
        args: trainer arguments that have looked up the world; the type of `distributed_state` is set.

    Raises:
        ValueError: several processes were launched, but this process is not connected to the others.
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
    """Let accelerate accept a model that a DistributedConfig divided among CPU processes at load."""
    if is_divided_at_load(model):
        _count_as_gpus(args.distributed_state)


def _count_as_gpus(state: PartialState) -> None:
    on_cpu = state.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU)
    if on_cpu and state.num_processes > 1:
        state.distributed_type = DistributedType.MULTI_GPU


def _launched() -> int:
    """Return the number of launched processes, from the launcher's WORLD_SIZE."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _asked_for(name: str, argument: Any) -> bool:
    """Return whether a strategy was requested, from accelerate or by a trainer argument."""
    return bool(argument) or bool(parse_flag_from_env(f"ACCELERATE_USE_{name}"))
