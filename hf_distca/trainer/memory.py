"""Log the device memory that training will take, once before training begins."""

import logging
from typing import Any, NamedTuple, cast

from accelerate import Accelerator, DistributedType
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_distca.checks.setting_names import CHECKPOINTING
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.memory import Strategy
from hf_distca.memory.counter import MemoryCounter, Training, longest_documents
from hf_distca.memory.launches import raised_in
from hf_distca.models.checkpointing import checkpointing_options
from hf_distca.models.decoder import base_model, decoder_layers
from hf_distca.models.tensor_parallel import is_divided_at_load
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.trainer.arguments import DistCAPaddedArguments

logger = logging.getLogger(__name__)

GB = 1e9
LEFT = 0.95
"""Fraction of a device's memory for tensors; CUDA, NCCL and gaps between tensors take the rest."""


class CountedMemory(NamedTuple):
    """Memory of training on a device, with all checkpoints on the device."""

    tokens_per_rank: int
    total: int  # bytes
    memory: int  # bytes of the device
    listed: str  # its parts

    @property
    def excess(self) -> int:
        """Bytes that do not fit."""
        return max(self.total - int(LEFT * self.memory), 0)


def log_memory(
    model: nn.Module,
    dispatcher: Dispatcher,
    args: DistCAPaddedArguments,
    accelerator: Accelerator,
    memory: int,
) -> CountedMemory | None:
    """Log and return what a document over all ranks takes of a device's `memory` in bytes.

    None if the model cannot be counted.
    """
    settings = dispatcher.settings
    ranks = dispatcher.groups.ranks
    trainer_args = cast(Any, args)  # the fields of transformers' arguments
    try:  # one document over all ranks exchanges the most
        strategy, shards = sharing_of(accelerator, model, ranks)
        mixed = (
            trainer_args.bf16
            or trainer_args.fp16
            or settings.bytes_per_value < base_model(model).dtype.itemsize
        )
        training = Training(
            strategy,
            mixed,
            checkpointing_of(args, accelerator),
            shards,
            # Transformers gives the model these kernels when training starts.
            liger=(trainer_args.liger_kernel_config or {})
            if trainer_args.use_liger_kernel
            else None,
            accumulates=trainer_args.gradient_accumulation_steps > 1,
        )
        plan = plan_micro_batch(longest_documents(settings), settings)
        counted = MemoryCounter(model, settings, args).count(plan, training, rank=ranks - 1)
    # A model may read values, which meta tensors do not have. It trains nevertheless.
    except Exception as error:
        text = "cannot estimate the memory for training %s: %s (in %s)"
        logger.warning(text, type(model).__name__, error, raised_in(error))
        return None
    parts: dict[str, int] = {
        **counted.state._asdict(),
        **{str(part): size for part, size in counted.parts.items()},
    }
    listed = ", ".join(f"{name} {size / GB:.1f}" for name, size in parts.items() if size >= GB / 20)
    total = CountedMemory(args.tokens_per_rank, sum(parts.values()), memory, listed)
    logger.info(
        "memory with %s tokens on each rank: %.1f of %.1f GB (%s)",
        total.tokens_per_rank,
        total.total / GB,
        memory / GB,
        listed,
    )
    return total


def warn_of_memory(counted: CountedMemory, offloaded: int) -> None:
    """Warn if training does not fit, with so many bytes of checkpoints on the host."""
    if counted.excess > offloaded:
        logger.warning(
            "tokens_per_rank=%s will not fit: a document that fills all ranks needs %.1f GB on a "
            f"device of %.1f GB (%s). Lower tokens_per_rank, set {CHECKPOINTING}=True, or train "
            "under FSDP2 or ZeRO-3; `hf-distca plan --model` shows the most tokens that fit",
            counted.tokens_per_rank,
            (counted.total - offloaded) / GB,
            counted.memory / GB,
            counted.listed,
        )


def sharing_of(accelerator: Accelerator, model: nn.Module, ranks: int) -> tuple[Strategy, int]:
    """Return how ranks share the model's state, and the number of shards under FSDP or ZeRO.

    With HSDP fewer.
    """
    if is_divided_at_load(model):
        strategy: Strategy = "fsdp2" if isinstance(base_model(model), FSDPModule) else "ddp"
        return strategy, int(base_model(model).config.distributed_config.fsdp_size)
    config = accelerator.parallelism_config
    shards = ranks if config is None or not config.dp_shard_enabled else int(config.dp_shard_size)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        stages: dict[int, Strategy] = {1: "zero1", 2: "zero2", 3: "zero3"}
        return stages.get(accelerator.state.deepspeed_plugin.zero_stage, "ddp"), shards
    return "fsdp2" if accelerator.distributed_type == DistributedType.FSDP else "ddp", shards


def checkpointing_of(args: Any, accelerator: Accelerator) -> dict[str, Any] | None:
    """Return how transformers or FSDP checkpoints decoder layers; None without checkpointing."""
    options = checkpointing_options(args)
    if options is not None:
        return options
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    if fsdp is not None and fsdp.activation_checkpointing:
        return {}
    return None


def layers_to_checkpoint(model: nn.Module, args: Any, accelerator: Accelerator) -> int:
    """Return how many decoder layers of a model transformers or FSDP will checkpoint."""
    options = checkpointing_of(args, accelerator)
    if options is None:
        return 0
    layers = len(decoder_layers(base_model(model)))
    return -(-layers // int(options.get("every_n_layers", 1)))
