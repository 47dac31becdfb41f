"""Processes and strategy of a launch.

Adjustments for DDP, FSDP and DeepSpeed that transformers and accelerate leave open.
"""

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

from hf_distca.dispatch.world import in_world
from hf_distca.models.checkpointing import checkpointing_options
from hf_distca.models.decoder import base_model
from hf_distca.models.model_facts import text_trains_all, trained_towers
from hf_distca.models.tensor_parallel import is_divided_at_load
from hf_distca.run import Strategy

DDP = (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
"""Types of a launch that wraps the model by DDP."""
TASKS_OF_SLURM = "SLURM_STEP_NUM_TASKS"
LAUNCHED = (
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    TASKS_OF_SLURM,
)
"""Variables by which launchers tell a process how many were started: torchrun, accelerate and
deepspeed; MPI; srun."""
STDIN = 0


def join_on_cpu(args: Any) -> None:
    """Let the processes of a CPU launch connect over gloo.

    Call it before the arguments have looked up the world.
    """
    if launched_processes() == 1 or torch.accelerator.is_available():
        return
    if asked_for("DEEPSPEED", args.deepspeed):
        args.ddp_backend = args.ddp_backend or "gloo"
        # Trainer turns it off with use_cpu alone, and torch warns.
        args.dataloader_pin_memory = False
    else:
        args.use_cpu = True


def share_on_cpu(args: Any, model: Any = None) -> None:
    """Let accelerate share a model among CPU processes.

    FSDP shares it, or a DistributedConfig divided it at load.
    """
    state: PartialState = args.distributed_state
    if args.use_cpu and dist.is_initialized():
        # Trainer hands ddp_timeout on without use_cpu only; with it, every collective would wait
        # half an hour. Before torch 2.14 the function has another name.
        set_timeout: Any = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
        set_timeout(timedelta(seconds=args.ddp_timeout), dist.group.WORLD)
    is_cpu_launch = (
        state.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU)
        and state.num_processes > 1
    )
    if is_cpu_launch and (asked_for("FSDP", args.fsdp) or is_divided_at_load(model)):
        # CPUs have no type of their own for this.
        state.distributed_type = DistributedType.MULTI_GPU


def launched_processes() -> int:
    """Return the number of processes that the launcher started, or 1 if no variable says so."""
    counts = {name: os.environ[name] for name in LAUNCHED if os.environ.get(name)}
    # `srun --ntasks 8 --pty bash` starts eight shells, of which one has the terminal. A process
    # that somebody starts there is alone. Processes that srun starts have no terminal.
    if os.isatty(STDIN):
        counts.pop(TASKS_OF_SLURM, None)
    return int(next(iter(counts.values()), 1))


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
        connected_by_torch = dist.get_world_size() if in_world() else 1
        # An instance would start accelerate where the loop does without.
        connected_by_accelerate = PartialState._shared_state.get("num_processes")
        return cls(launched_processes(), connected_by_torch, connected_by_accelerate)

    @property
    def by_accelerate(self) -> str:
        """What accelerate does, in words."""
        return "has not started" if self.in_accelerate is None else f"connects {self.in_accelerate}"

    @property
    def differ(self) -> bool:
        """Whether the launcher, torch and accelerate count different numbers of processes.

        Processes may also be started without a launcher's variables: `launched` is then 1.
        """
        connected = {self.in_torch}
        if self.in_accelerate is not None:
            connected.add(self.in_accelerate)
        if self.launched > 1:
            return connected != {self.launched}
        return len(connected) > 1


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
        # The mesh that accelerate has made: torch warns where mesh["dp"] names a flattened one.
        return mesh[tuple(config.dp_dim_names)]._flatten("dp")
    # Tensor parallelism takes all ranks: this rank is alone.
    return init_device_mesh(mesh.device_type, (1, mesh.size()), mesh_dim_names=("dp", "tp"))["dp"]


def replicas_of(config: Any) -> int:
    """Return the replicas of a `DistributedConfig`; before transformers 5.23 it has none."""
    replicas: int = getattr(config, "dp_replicate_size", 1)
    return replicas


def dtype_of_computation(
    model: PreTrainedModel, args: TrainingArguments, accelerator: Accelerator
) -> torch.dtype:
    """Return the dtype of a model's computation: autocast's, FSDP's or the model's own."""
    autocast = accelerator.mixed_precision
    if args.fp16:
        autocast = "fp16"
    if args.bf16:
        autocast = "bf16"
    if autocast == "fp16":
        return torch.float16
    config = model.config.distributed_config if is_divided_at_load(model) else None
    fsdp_computes_in_bf16 = (
        config is not None
        and config.fsdp_size * replicas_of(config) > 1
        and config.fsdp_mixed_precision
    )
    if autocast == "bf16" or fsdp_computes_in_bf16:
        return torch.bfloat16
    dtype: torch.dtype = model.dtype
    return dtype


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
        # The forward without autocast. Preparing adds autocast again.
        if "_original_forward" in vars(model):
            model.forward = vars(model).pop("_original_forward")


def split_present_layers(model: nn.Module, accelerator: Accelerator) -> None:
    """Let FSDP wrap a model that lacks some of the layers that its class lists.

    Such layers may be those of an image tower.
    """
    base: Any = base_model(model)
    if getattr(accelerator.state, "fsdp_plugin", None) is not None and base._no_split_modules:
        # accelerate and PEFT raise for listed classes of towers that this model does not have.
        present_classes = {type(module).__name__ for module in base.modules()}
        base._no_split_modules = present_classes & set(base._no_split_modules)


def search_for_unused_parameters(
    model: nn.Module, accelerator: Accelerator, setting: bool | None
) -> None:
    """Let DDP look for parameters without a gradient only in models where text may leave some.

    The search walks over the graph in every micro-batch. transformers turns it on without gradient
    checkpointing.

    Args:
        setting: what the arguments say; None if they leave the choice open.
    """
    if accelerator.distributed_type not in DDP or is_divided_at_load(model):
        return
    base = base_model(model)
    if trained_towers(base):
        # Trainer leaves it off with gradient checkpointing.
        accelerator.ddp_handler.find_unused_parameters = True
    elif setting is None and text_trains_all(base):
        accelerator.ddp_handler.find_unused_parameters = False


def keep_loss_in_float32(accelerator: Accelerator) -> None:
    """Let FSDP2 return a model's outputs as they are.

    Otherwise it would round the loss to the dtype of computation.
    """
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    policy = getattr(plugin, "mixed_precision_policy", None)
    if isinstance(policy, MixedPrecisionPolicy):
        plugin.mixed_precision_policy = replace(policy, output_dtype=None)


def gathers_parameters(accelerator: Accelerator) -> bool:
    """Return whether ZeRO-3 gathers the parameters of each module when the module begins."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return plugin is not None and plugin.hf_ds_config.is_zero3()


def gather_whole_layers(model: nn.Module, layers: Sequence[type[nn.Module]]) -> None:
    """Let ZeRO-3 gather whole layers of these classes.

    In decoder layers nano-batches take turns, and heads run once for each chunk. ZeRO-3 would
    gather their modules each time.
    """
    if not layers:
        return
    from deepspeed.utils import set_z3_leaf_modules

    def with_input_gradient(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        # DeepSpeed reduces a layer's gradients in a full backward hook. Without an input that
        # requires a gradient, as with LoRA, that hook runs before the layer's backward pass and
        # releases the parameters too early.
        inputs = [
            value for value in args if isinstance(value, Tensor) and value.is_floating_point()
        ]
        has_trained_weights = any(parameter.requires_grad for parameter in layer.parameters())
        trains = torch.is_grad_enabled() and has_trained_weights
        if not trains or not inputs or any(value.requires_grad for value in inputs):
            return args
        first_input = inputs[0]
        tracked_input = first_input.detach().requires_grad_()
        return tuple(tracked_input if value is first_input else value for value in args)

    set_z3_leaf_modules(model, list(layers))
    for layer in model.modules():
        if isinstance(layer, tuple(layers)):
            layer.register_forward_pre_hook(with_input_gradient)


@contextmanager
def whole_weights(accelerator: Accelerator, engine: Any) -> Iterator[None]:
    """Let FSDP and ZeRO-3 save the whole model inside the block.

    Checkpoints may nevertheless hold shards.

    Args:
        engine: DeepSpeed's engine; None without DeepSpeed.
    """
    fsdp: Any = getattr(accelerator.state, "fsdp_plugin", None)
    zero = None if engine is None else engine._config.zero_config
    with ExitStack() as restoring:
        for config, name, value in (
            (fsdp, "state_dict_type", StateDictType.FULL_STATE_DICT),
            (zero, "gather_16bit_weights_on_model_save", True),
        ):
            if config is not None:
                restoring.callback(setattr, config, name, getattr(config, name))
                setattr(config, name, value)
        yield
