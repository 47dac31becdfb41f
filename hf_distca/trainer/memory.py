"""What training will take of the device's memory, told once before it begins."""

import logging
from typing import Any, cast

import torch
from accelerate import Accelerator, DistributedType
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.memory.counter import MemoryCounter, Training, longest_documents
from hf_distca.memory.model_state import Strategy
from hf_distca.patches.model import base_model
from hf_distca.patches.tensor_parallel import is_divided_at_load
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.trainer.arguments import DistCAArguments

logger = logging.getLogger(__name__)

GB = 1e9
LEFT = 0.95
"""Share of a device's memory that tensors can have: CUDA, NCCL and gaps between tensors take the rest."""


def tell_memory(
    model: nn.Module, dispatcher: Dispatcher, args: DistCAArguments, accelerator: Accelerator, memory: int
) -> None:
    """Log what a rank takes when its rows are full, and warn if that does not fit.

    The micro-batch is one document that all ranks share, which exchanges the most.

    Args:
        model: as it will be trained, before it is wrapped for several ranks.
        dispatcher: of the training.
        args: of the trainer.
        accelerator: the trainer's.
        memory: bytes of the rank's device.
    """
    settings, trainer = dispatcher.settings, cast(Any, args)
    training = Training(
        strategy_of(accelerator, model),
        trainer.bf16 or trainer.fp16 or settings.bytes_per_value < base_model(model).dtype.itemsize,
        checkpointing_of(args, accelerator),
        shards_of(accelerator, model, dispatcher.groups.ranks),
    )
    plan = plan_micro_batch(longest_documents(settings), settings)
    counted = MemoryCounter(model, settings, args).count(plan, training, rank=dispatcher.groups.ranks - 1)
    parts: dict[str, int] = {**vars(counted.state), **{str(part): size for part, size in counted.parts.items()}}
    total = sum(parts.values())
    told = ", ".join(f"{name} {size / GB:.1f}" for name, size in parts.items() if size >= GB / 20)
    logger.info(
        "memory with %s tokens on each rank: %.1f of %.1f GB (%s)",
        args.tokens_per_rank,
        total / GB,
        memory / GB,
        told,
    )
    if total > LEFT * memory:
        logger.warning(
            "tokens_per_rank=%s will not fit: a document that fills all ranks needs %.1f GB on a device of %.1f GB "
            "(%s). Lower tokens_per_rank, set activation_checkpointing=True, or train under FSDP2 or ZeRO-3; "
            "`hf-distca plan --model` shows the most tokens that fit",
            args.tokens_per_rank,
            total / GB,
            memory / GB,
            told,
        )


def strategy_of(accelerator: Accelerator, model: nn.Module) -> Strategy:
    """How ranks share the model's state; one rank alone has it as under DDP."""
    if is_divided_at_load(model):
        return "fsdp2" if isinstance(base_model(model), FSDPModule) else "ddp"
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        stage = accelerator.state.deepspeed_plugin.zero_stage
        stages: dict[int, Strategy] = {1: "zero1", 2: "zero2", 3: "zero3"}
        return stages.get(stage, "ddp")
    return "fsdp2" if accelerator.distributed_type == DistributedType.FSDP else "ddp"


def shards_of(accelerator: Accelerator, model: nn.Module, ranks: int) -> int:
    """Into how many shards FSDP or ZeRO divides the model's state: under HSDP fewer than the ranks that train."""
    if is_divided_at_load(model):
        return int(base_model(model).config.distributed_config.fsdp_size)
    config = accelerator.parallelism_config
    return ranks if config is None or not config.dp_shard_enabled else int(config.dp_shard_size)


def checkpointing_of(args: DistCAArguments, accelerator: Accelerator) -> dict[str, Any] | None:
    """How decoder layers are checkpointed, by transformers or by FSDP; None if they are not."""
    trainer: Any = args
    if trainer.gradient_checkpointing:
        return dict(trainer.gradient_checkpointing_kwargs or {})
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    if fsdp is not None and fsdp.activation_checkpointing:
        return {"offload": getattr(fsdp, "activation_checkpointing_offload", False)}
    return None


def tell_memory_on_gpu(
    model: nn.Module, dispatcher: Dispatcher, args: DistCAArguments, accelerator: Accelerator
) -> None:
    """`tell_memory` on rank 0 of a training on CUDA; a model that cannot be counted trains all the same."""
    device = dispatcher.device
    if device.type != "cuda" or dispatcher.groups.rank != 0:
        return
    try:
        tell_memory(model, dispatcher, args, accelerator, torch.cuda.get_device_properties(device).total_memory)
    except Exception as error:  # whatever a model does that needs numbers
        logger.warning(
            ("cannot estimate the memory for training %s: %s; training continues without the estimate"),
            type(model).__name__,
            error,
        )
