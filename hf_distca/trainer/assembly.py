"""Build a dispatcher for the trainer and for custom training loops, and the parts of the trainer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import is_initialized
from transformers import PreTrainedModel, Trainer, TrainerCallback

from hf_distca.config import DistCAConfig
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.groups import RankMesh, mesh_ranks, raised_together, ranks_per_node
from hf_distca.models.decoder import base_model, mixing_layers
from hf_distca.models.settings import plan_settings
from hf_distca.patches.head import adapted_heads
from hf_distca.patches.layers import plan_layers
from hf_distca.patches.prepare import prepare_model
from hf_distca.pool.launch import TOKEN_FILE, open_pool
from hf_distca.pool.rank.pool import Pool
from hf_distca.trainer.costs import LearnedCosts, choices_of
from hf_distca.trainer.loaders import PackedLoaders, UpcomingBatches, columns_of
from hf_distca.trainer.memory import checkpointing_of, log_memory_on_gpu
from hf_distca.trainer.metrics import AttentionTime, ModelFlops, Remedies, StepMeter
from hf_distca.trainer.parallel import (
    allow_for_towers,
    data_parallel_mesh,
    dtype_of_computation,
    gather_whole_layers,
    gathers_parameters,
    launched_processes,
)
from hf_distca.trainer.refusals import NOT_CONNECTED, check_trainer
from hf_distca.trainer.resuming import DataProgress, check_agreement
from hf_distca.trainer.tracing import StepTracer


def make_dispatcher(
    model: PreTrainedModel,
    config: DistCAConfig,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    mesh: RankMesh | None = None,
    checkpointing: bool | None = None,
    folder: Path | None = None,
) -> Dispatcher:
    """Prepare a model for planned core attention and return its dispatcher.

    This is a collective call: every process of the world makes it at the same point, before `Accelerator.prepare`,
    DDP, FSDP2 or DeepSpeed wraps the model. It changes the model in place: decoder layers for `config.ping_pong`, MLPs
    for `config.mlp_chunk_rows`, and the output head for `config.loss_chunk_bytes`.

    Args:
        model: A model that was loaded with `attn_implementation="distca"`.
        config: Settings for packing, balancing and exchanging.
        device: Device of this rank.
        dtype: Dtype of core attention. None takes the model's. Under autocast give autocast's dtype.
        mesh: Ranks that train together: one dimension of a device mesh, or a process group. None takes all ranks.
        checkpointing: Whether layers run again in the backward pass; this affects the choice of plans. None takes the
            model's current setting.
        folder: Folder in which the measured costs of the device are kept for the same run. None keeps nothing.

    Raises:
        ValueError: The model cannot be planned, or the kernel does not support its attention. Also if nodes do not add
            up to the number of ranks, settings differ between ranks, or launched processes are not connected. The
            message says what to change.
        RuntimeError: This rank cannot reach the others.
        ImportError: The package of the kernel is not installed.
    """
    if launched_processes() > 1 and not is_initialized():
        raise NOT_CONNECTED.error()
    launched = ranks_per_node(mesh, config.exchange_timeout)
    with raised_together(config.exchange_timeout):
        settings = plan_settings(
            model, config, ranks=len(mesh_ranks(mesh)), device=device, dtype=dtype, ranks_per_node=launched
        )
    dispatcher = Dispatcher(
        settings,
        device,
        mesh,
        keep_received=config.keep_received,
        keep_core_attention=config.keep_core_attention,
        exchange_timeout=config.exchange_timeout,
    )
    if checkpointing is None:  # older versions of transformers have only `is_gradient_checkpointing`
        names = ("is_activation_checkpointing", "is_gradient_checkpointing")
        checkpointing = getattr(model, next(name for name in names if hasattr(type(base_model(model)), name)))
    dispatcher.choose_by(choices_of(model, dispatcher, config, checkpointing=bool(checkpointing), folder=folder))
    with raised_together(config.exchange_timeout):
        prepare_model(model, config, ping_pong=settings.ping_pong)
    return dispatcher


@dataclass(frozen=True)
class Parts:
    """Parts of a trainer with planned core attention.

    Attributes:
        pool: dedicated attention servers; None without servers.
        mixes: whether the model has layers that mix the rows of a document other than by attention.
        tracer: None without a trace.
    """

    dispatcher: Dispatcher
    pool: Pool | None
    mixes: bool
    learned_costs: LearnedCosts
    meter: StepMeter
    remedies: Remedies
    tracer: StepTracer | None
    loaders: PackedLoaders
    progress: DataProgress
    upcoming: UpcomingBatches

    @property
    def callbacks(self) -> list[TrainerCallback]:
        """Parts that the trainer calls back, in this order."""
        return [self.meter, self.learned_costs, *([self.tracer] if self.tracer else []), self.progress]


def make_parts(trainer: Trainer) -> Parts:
    """Check a trainer with model and accelerator, prepare its model, and build its parts. A collective of the world.

    Raises:
        ValueError: on every rank, if any rank's trainer or model cannot train exactly, or if arguments differ.
    """
    args: Any = trainer.args
    model: Any = trainer.model
    accelerator = trainer.accelerator
    with raised_together(args.exchange_timeout):
        check_trainer(trainer)
        allow_for_towers(model, accelerator)
    mixes = bool(mixing_layers(model))
    dispatcher = make_dispatcher(
        model,
        args,
        args.device,
        dtype=dtype_of_computation(model, args, accelerator),
        mesh=data_parallel_mesh(accelerator),
        checkpointing=checkpointing_of(args, accelerator) is not None,
        folder=Path(str(args.output_dir)),
    )
    if gathers_parameters(accelerator):
        planned = dispatcher.settings.ping_pong or args.mlp_chunk_rows or mixes
        gather_whole_layers(model, [*(plan_layers(model) if planned else []), *adapted_heads(model)])
    check_agreement(args, dispatcher)
    pool = None
    if args.attention_servers != 0:
        pool = open_pool(
            dispatcher,
            args.attention_server_launch,
            address=args.attention_server_address,
            token_file=args.attention_server_token_file or f"{args.output_dir}/{TOKEN_FILE}",
            ranks_serve=args.ranks_serve,
            timeout_s=args.attention_server_timeout,
            transport=args.attention_server_transport,
        )
    flops = None
    if args.device.type == "cuda":  # peaks and memory of other devices are unknown
        log_memory_on_gpu(model, dispatcher, args, accelerator)
        flops = ModelFlops(model, shared_by=max(args.world_size // dispatcher.groups.ranks, 1))
    learned_costs = LearnedCosts(dispatcher)
    return Parts(
        dispatcher,
        pool,
        mixes,
        learned_costs,
        StepMeter(dispatcher, pool, AttentionTime(model), processes=args.world_size, flops=flops, costs=learned_costs),
        Remedies(args, ping_pong=dispatcher.settings.ping_pong),
        StepTracer(dispatcher, args) if args.trace_steps else None,
        PackedLoaders(args, dispatcher, lambda: columns_of(trainer)),
        DataProgress(),
        UpcomingBatches(dispatcher),
    )
