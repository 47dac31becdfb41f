"""Adjustments for DDP, FSDP and DeepSpeed that transformers and accelerate leave open, also on CPUs."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import parse_flag_from_env
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    StateDictType,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel, TrainingArguments

from hf_distca.dispatch.groups import in_world
from hf_distca.models.decoder import base_model
from hf_distca.models.tensor_parallel import is_divided_at_load

DDP = (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
LAUNCHED = (
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "SLURM_STEP_NUM_TASKS",
)
"""Variables by which launchers tell a process how many were started: torchrun, accelerate and
deepspeed; MPI; srun."""


def join_on_cpu(args: Any) -> None:
    """Let arguments that have not looked up the world connect the processes of a CPU launch over gloo."""
    if launched_processes() > 1 and not torch.accelerator.is_available():
        if asked_for("DEEPSPEED", args.deepspeed):
            args.ddp_backend = args.ddp_backend or "gloo"
            args.dataloader_pin_memory = (
                False  # Trainer turns it off with use_cpu alone, and torch warns
            )
        else:
            args.use_cpu = True


def share_on_cpu(args: Any, model: Any = None) -> None:
    """Let accelerate share a model among CPU processes, by FSDP or as a DistributedConfig divided it at load."""
    state: PartialState = args.distributed_state
    if args.use_cpu and dist.is_initialized():
        # Trainer hands ddp_timeout on without use_cpu only; with it, every collective would wait
        # half an hour.
        set_timeout: Any = (
            getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
        )  # before torch 2.14
        set_timeout(timedelta(seconds=args.ddp_timeout), dist.group.WORLD)
    on_cpu = (
        state.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU)
        and state.num_processes > 1
    )
    if on_cpu and (asked_for("FSDP", args.fsdp) or is_divided_at_load(model)):
        state.distributed_type = (
            DistributedType.MULTI_GPU
        )  # CPUs have no type of their own for this


def launched_processes() -> int:
    """Return the number of launched processes, from a variable that the launcher set; 1 without one."""
    return int(next((os.environ[name] for name in LAUNCHED if os.environ.get(name)), "1"))


@dataclass(frozen=True)
class ProcessCounts:
    """How many processes train together, in the view of everyone who counts them.

    Attributes:
        launched: processes that the launcher started; 1 where no variable says so.
        in_torch: processes that torch.distributed connects.
        in_accelerate: processes that accelerate connects; None in a loop without accelerate.
    """

    launched: int
    in_torch: int
    in_accelerate: int | None

    @classmethod
    def of_this_process(cls) -> "ProcessCounts":
        """Return the counts that this process sees."""
        in_torch = dist.get_world_size() if in_world() else 1
        # An instance would start accelerate where the loop does without.
        return cls(launched_processes(), in_torch, PartialState._shared_state.get("num_processes"))

    @property
    def by_accelerate(self) -> str:
        """What accelerate does, in words."""
        return "has not started" if self.in_accelerate is None else f"connects {self.in_accelerate}"

    @property
    def differ(self) -> bool:
        """Whether someone counts other processes.

        Processes may also be started without a launcher's variables.
        """
        counted = {
            self.in_torch,
            self.in_torch if self.in_accelerate is None else self.in_accelerate,
        }
        return counted != {self.launched} if self.launched > 1 else len(counted) > 1


def asked_for(name: str, argument: Any) -> bool:
    """Return whether a strategy was requested, from accelerate or by a trainer argument."""
    return bool(argument) or bool(parse_flag_from_env(f"ACCELERATE_USE_{name}"))


def data_parallel_mesh(accelerator: Accelerator) -> DeviceMesh | None:
    """Return the ranks that train on different data together with this rank; None for all.

    A collective.
    """
    mesh: DeviceMesh | None = accelerator.torch_device_mesh
    config = accelerator.parallelism_config
    if mesh is None or config is None or config.total_size == 1:
        return None
    if config.dp_dim_names:
        return mesh["dp"]
    # Tensor parallelism takes all ranks: this rank is alone.
    return init_device_mesh(mesh.device_type, (1, mesh.size()), mesh_dim_names=("dp", "tp"))["dp"]


def dtype_of_computation(
    model: PreTrainedModel, args: TrainingArguments, accelerator: Accelerator
) -> torch.dtype:
    """Return the dtype of a model's computation: autocast's, FSDP's or the model's own."""
    config = model.config.distributed_config if is_divided_at_load(model) else None
    in_bf16 = config is not None and config.dp_size > 1 and config.fsdp_mixed_precision
    mixed = "bf16" if args.bf16 else "fp16" if args.fp16 else accelerator.mixed_precision
    if mixed == "fp16":
        return torch.float16
    dtype: torch.dtype = torch.bfloat16 if mixed == "bf16" or in_bf16 else model.dtype
    return dtype


def is_wrapped(model: nn.Module, accelerator: Accelerator) -> bool:
    """Return whether a backward pass through the model combines the gradients of all ranks."""
    kind = accelerator.distributed_type
    if is_divided_at_load(model):
        config = accelerator.parallelism_config
        return (
            isinstance(base_model(model), FSDPModule)
            or config is None
            or config.data_parallel_size == 1
        )
    if kind == DistributedType.DEEPSPEED:
        return accelerator.deepspeed_engine_wrapped is not None
    if kind == DistributedType.FSDP:
        return isinstance(model, (FSDPModule, FullyShardedDataParallel))
    return kind not in DDP or isinstance(model, DistributedDataParallel)


def forget_evaluation(model: nn.Module, accelerator: Accelerator) -> None:
    """Let a model that was prepared for evaluation only be wrapped for training."""
    if is_divided_at_load(model):
        # FSDP2 keeps gathered weights after the forward pass, and the optimizer would get them
        # instead of its shards.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
    # accelerate would skip the model as already prepared, and each rank would train by itself.
    if accelerator.distributed_type in DDP and getattr(model, "_is_accelerate_prepared", False):
        vars(model)["_is_accelerate_prepared"] = False
        if "_original_forward" in vars(
            model
        ):  # the forward without autocast, which preparing adds again
            model.forward = vars(model).pop("_original_forward")


def split_present_layers(model: nn.Module, accelerator: Accelerator) -> None:
    """Let FSDP wrap a model that lacks some of the layers that its class lists, such as those of an image tower."""
    base: Any = base_model(model)
    if getattr(accelerator.state, "fsdp_plugin", None) is not None and base._no_split_modules:
        # accelerate and PEFT raise for listed classes of towers that this model does not have.
        base._no_split_modules = {type(module).__name__ for module in base.modules()} & set(
            base._no_split_modules
        )


def search_for_unused_parameters(
    model: nn.Module, accelerator: Accelerator, asked: bool | None
) -> None:
    """Let DDP look for parameters without a gradient in models where text may leave some, and in no others.

    The search walks over the graph in every micro-batch. transformers turns it on without gradient
    checkpointing.

    Args:
        asked: what the arguments say; None if they leave the choice open.
    """
    if accelerator.distributed_type not in DDP or is_divided_at_load(model):
        return
    if trained_towers(base_model(model)):
        accelerator.ddp_handler.find_unused_parameters = (
            True  # Trainer leaves it off with gradient checkpointing
        )
    elif asked is None and text_trains_all(base_model(model)):
        accelerator.ddp_handler.find_unused_parameters = False


def keep_loss_in_float32(accelerator: Accelerator) -> None:
    """Let FSDP2 return a model's outputs as they are, instead of rounding the loss to the dtype of computation."""
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    policy = getattr(plugin, "mixed_precision_policy", None)
    if isinstance(policy, MixedPrecisionPolicy):
        plugin.mixed_precision_policy = replace(policy, output_dtype=None)


def trained_towers(model: PreTrainedModel) -> list[str]:
    """Return the trained parts of a model besides its text model and head, such as image towers."""
    if model.config.get_text_config(decoder=True) is model.config:
        return []
    of_text = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    reached = {
        id(parameter)
        for module in of_text
        if module is not None
        for parameter in module.parameters()
    }
    missed = (
        name for name, p in model.named_parameters() if p.requires_grad and id(p) not in reached
    )
    return list(dict.fromkeys(".".join(name.split(".")[:2]) for name in missed))


def text_trains_all(model: PreTrainedModel) -> bool:
    """Return whether text surely gives every trained parameter of a model without trained towers a gradient.

    It does in transformers' own models; in one of a user nobody knows. Two things may leave
    parameters out: layers that are skipped at random, and parts with a config of their own in a
    model that has no text model apart from them.
    """
    text = model.config.get_text_config(decoder=True)
    skips = any(value for name, value in vars(text).items() if "layerdrop" in name)
    unknown_parts = text is model.config and bool(model.config.sub_configs)
    return (
        type(model).__module__.startswith("transformers.models.")
        and not skips
        and not unknown_parts
    )


def gathers_parameters(accelerator: Accelerator) -> bool:
    """Return whether ZeRO-3 gathers the parameters of each module when the module begins."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return plugin is not None and plugin.hf_ds_config.is_zero3()


def gather_whole_layers(model: nn.Module, layers: Sequence[type[nn.Module]]) -> None:
    """Let ZeRO-3 gather whole layers of these classes: nano-batches take turns inside, and heads run in chunks."""
    if not layers:
        return
    from deepspeed.utils import set_z3_leaf_modules

    def with_input_gradient(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        # DeepSpeed reduces a layer's gradients in a full backward hook. Without an input that
        # requires a gradient, as with LoRA, that hook runs before the layer's backward pass and
        # releases the parameters too early.
        inputs = [x for x in args if isinstance(x, Tensor) and x.is_floating_point()]
        trains = torch.is_grad_enabled() and any(
            parameter.requires_grad for parameter in layer.parameters()
        )
        if not trains or not inputs or any(x.requires_grad for x in inputs):
            return args
        return tuple(x.detach().requires_grad_() if x is inputs[0] else x for x in args)

    set_z3_leaf_modules(model, list(layers))
    for layer in model.modules():
        if isinstance(layer, tuple(layers)):
            layer.register_forward_pre_hook(with_input_gradient)


@contextmanager
def whole_weights(accelerator: Accelerator, engine: Any) -> Iterator[None]:
    """Make FSDP and ZeRO-3 save the whole model inside the block, also where checkpoints hold shards."""
    fsdp: Any = getattr(accelerator.state, "fsdp_plugin", None)
    with ExitStack() as restored:
        for holder, name, whole in (
            (fsdp, "state_dict_type", StateDictType.FULL_STATE_DICT),
            (engine and engine._config.zero_config, "gather_16bit_weights_on_model_save", True),
        ):
            if holder is not None:
                restored.callback(setattr, holder, name, getattr(holder, name))
                setattr(holder, name, whole)
        yield
