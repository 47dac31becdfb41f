"""Refuse strategies that plans do not support, before any work starts."""

from typing import Any

from transformers import Trainer

from hf_distca.models.decoder import base_model
from hf_distca.models.tensor_parallel import is_divided_at_load

ROWS_ARE_PLACED = (
    "divides documents among ranks, but plans already do so: a document may be as long as the tokens_per_rank of all "
    "ranks together"
)
DIVIDED_AT_LOAD = (
    'load the model with from_pretrained(name, attn_implementation="distca", '
    "distributed_config=transformers.distributed.DistributedConfig(tp_size=…, fsdp_size=…))"
)
SUMMED_GRADIENTS = "replicated_with_grad_allreduce"
"""Name in transformers for modules that stay whole inside divided attention, such as norms of Q and K."""


def check_rows_are_whole(context: int, sequence: int) -> None:
    """Raise unless each rank has rows of its own; arguments are sizes of context and sequence parallelism."""
    if context > 1:
        raise ValueError(
            f"context parallelism (cp_size={context}) {ROWS_ARE_PLACED}; set cp_size=1, and raise dp_shard_size to "
            "shard the weights over the same ranks"
        )
    if sequence > 1:
        raise ValueError(
            f"sequence parallelism (sp_size={sequence}) {ROWS_ARE_PLACED}; set sp_size=1, and use ZeRO-3 to shard the "
            "weights over the same ranks"
        )


def check_parallelism(trainer: Trainer) -> None:
    """Raise ValueError unless plans support the trainer's strategy."""
    args: Any = trainer.args
    check_rows_are_whole(trainer.get_cp_size(), trainer.get_sp_size())
    tensor = trainer.get_tp_size()
    model: Any = trainer.model
    config = model.config.distributed_config if is_divided_at_load(model) else None
    if tensor > 1 and config is None:
        raise ValueError(
            f"tensor parallelism of size {tensor} is set, but the model was not divided when it was loaded, or "
            f"DeepSpeed divided it, which is not supported; {DIVIDED_AT_LOAD}, and launch without --use_fsdp and "
            "--use_deepspeed"
        )
    if config is None:
        return
    if config.pp_size > 1:
        raise ValueError(
            f"pipeline parallelism (pp_size={config.pp_size}) gives ranks different layers, but ranks exchange core "
            "attention within the same layer; set pp_size=1, and raise fsdp_size to use the same ranks"
        )
    if base_model(model) is not model and max(tensor, config.dp_replicate_size) > 1:
        raise ValueError(
            f"adapters of PEFT cannot be trained with tp_size={tensor} and "
            f"dp_replicate_size={config.dp_replicate_size}: PEFT does not divide its adapters as the model's layers "
            "are divided; set both to 1, and raise fsdp_size to use the same ranks"
        )
    if tensor == 1:
        return
    if args.attention_servers != 0:
        raise ValueError(
            f"attention_servers={args.attention_servers!r} cannot be used with tensor parallelism (tp_size={tensor}): "
            "servers serve one group of ranks, but ranks with different heads form separate groups; set "
            "attention_servers=0, or tp_size=1"
        )
    if args.gradient_accumulation_steps > 1 and SUMMED_GRADIENTS in model.tp_plan.values():
        raise ValueError(
            f"gradient_accumulation_steps={args.gradient_accumulation_steps} gives {type(model).__name__} wrong "
            "gradients with tensor parallelism: after each micro-batch transformers sums the gradients of its norms "
            f"over the {tensor} ranks, including gradients that it summed before. Set gradient_accumulation_steps=1 "
            "and raise tokens_per_rank; where memory is short, use mlp_chunk_rows and gradient_checkpointing"
        )
