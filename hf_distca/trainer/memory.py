"""Log the device memory that training will take, once before training begins."""

import logging
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator, DistributedType
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_distca.checks.setting_names import CHECKPOINTING
from hf_distca.memory.counter import MemoryCounter, longest_documents
from hf_distca.models.checkpointing import checkpointing_options
from hf_distca.models.decoder import base_model, decoder_layers
from hf_distca.models.tensor_parallel import is_divided_at_load
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.run import RunSpec, Strategy

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


def log_memory(model: nn.Module, run: RunSpec, memory: int) -> CountedMemory | None:
    """Log and return what a document over all ranks takes of a device's `memory` in bytes.

    None if the model cannot be counted.
    """
    plans = run.plans
    try:  # one document over all ranks exchanges the most
        plan = plan_micro_batch(longest_documents(plans), plans)
        counted = MemoryCounter(model).count(plan, run, rank=plans.ranks - 1)
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
    total = CountedMemory(plans.tokens_per_rank, sum(parts.values()), memory, listed)
    logger.info(
        "memory with %s tokens on each rank: %.1f of %.1f GB (%s)",
        total.tokens_per_rank,
        total.total / GB,
        memory / GB,
        listed,
    )
    return total


def raised_in(error: BaseException) -> str:
    """Return the function in which a count ended.

    It is the last one outside of torch, such as a package's kernel.
    """
    torch_folder = str(Path(torch.__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    last = next(frame for frame in reversed(frames) if not frame.filename.startswith(torch_folder))
    return f"{last.name} of {'/'.join(Path(last.filename).parts[-3:])}"


def warn_of_memory(counted: CountedMemory, offloaded: int) -> None:
    """Warn if training does not fit, with so many bytes of checkpoints on the host."""
    if counted.excess > offloaded:
        logger.warning(
            "tokens_per_rank=%s will not fit: a document that fills all ranks needs %.1f GB on a "
            f"device of %.1f GB (%s). Lower tokens_per_rank, set {CHECKPOINTING}=True, or train "
            "under FSDP2 or ZeRO-3; `hf-distca plan --device-memory` shows the most tokens that "
            "fit",
            counted.tokens_per_rank,
            (counted.total - offloaded) / GB,
            counted.memory / GB,
            counted.listed,
        )


def facts_of_launch(
    model: nn.Module, args: Any, accelerator: Accelerator, dtype: torch.dtype
) -> dict[str, Any]:
    """Return what a trainer knows of its launch, as fields of RunSpec.

    Args:
        dtype: of computation.
    """
    strategy, shards = sharing_of(accelerator, model)
    return {
        "strategy": strategy,
        "shards": shards,
        "mixed": args.bf16 or args.fp16 or dtype.itemsize < base_model(model).dtype.itemsize,
        "checkpointing": checkpointing_of(args, accelerator),
        # Transformers gives the model these kernels when training starts.
        "liger": (args.liger_kernel_config or {}) if args.use_liger_kernel else None,
        "accumulates": args.gradient_accumulation_steps > 1,
    }


def sharing_of(accelerator: Accelerator, model: nn.Module) -> tuple[Strategy, int | None]:
    """Return how ranks share the model's state, and the number of shards under FSDP or ZeRO.

    None for one per rank. With HSDP there are fewer.
    """
    if is_divided_at_load(model):
        strategy: Strategy = "fsdp2" if isinstance(base_model(model), FSDPModule) else "ddp"
        return strategy, int(base_model(model).config.distributed_config.fsdp_size)
    config = accelerator.parallelism_config
    has_groups = config is not None and config.dp_shard_enabled
    shards = int(config.dp_shard_size) if has_groups else None
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


def checkpointed_layers(model: nn.Module, options: Mapping[str, Any] | None) -> int:
    """Return how many decoder layers have checkpoints, by transformers' options for them."""
    if options is None:
        return 0
    layers = len(decoder_layers(base_model(model)))
    return -(-layers // int(options.get("every_n_layers", 1)))
