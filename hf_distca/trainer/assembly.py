"""Build a dispatcher for the trainer and for custom training loops."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, Trainer

from hf_distca.checks.argument_rules import DISPATCHED
from hf_distca.checks.launch_rules import NOT_CONNECTED
from hf_distca.checks.refusal import check
from hf_distca.config import DistCAConfig
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.padded_rows import PaddedBatches
from hf_distca.dispatch.process_groups import Groups
from hf_distca.dispatch.world import RankMesh, World, mesh_ranks
from hf_distca.memory.fitting import fit_into_memory, offload_activations
from hf_distca.models import fla
from hf_distca.models.checkpointing import checkpointed_layers, layers_with_checkpoints
from hf_distca.models.decoder import mixing_layers
from hf_distca.models.describe import describe_run
from hf_distca.models.images import image_model
from hf_distca.models.model_facts import check_is_model
from hf_distca.models.sharing import shares_prefixes, why_sequences_share_nothing
from hf_distca.models.tables import model_limits
from hf_distca.patches.head import adapted_heads
from hf_distca.patches.layers import plan_layers
from hf_distca.patches.padded_models import pack_backbone
from hf_distca.patches.prepare import prepare_model
from hf_distca.planner.settings import POD_RANKS_OF_PADDED
from hf_distca.profiling.costs import with_costs
from hf_distca.run import RunSpec
from hf_distca.trainer import parallel
from hf_distca.trainer.launch_facts import check_trainer
from hf_distca.trainer.resuming import check_agreement
from hf_distca.units import AUTO

logger = logging.getLogger(__name__)

ONE_RANK = (
    "one rank trains, so nothing will be balanced: core attention is balanced among ranks, "
    "processes that train on different documents. accelerate launch --config_file "
    "examples/configs/ddp.yaml --num_processes N starts N of them"
)
"""Warning of a training that this library cannot make faster."""


def make_dispatcher(
    model: PreTrainedModel,
    config: DistCAConfig,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    mesh: RankMesh | None = None,
    checkpointed: int | None = None,
    folder: Path | None = None,
    **facts: Any,
) -> Dispatcher:
    """Prepare a model for planned core attention and return its dispatcher.

    This is a collective call: every process of the world makes it at the same point, before
    `Accelerator.prepare`, DDP, FSDP2 or DeepSpeed wraps the model. It changes the model in place:
    decoder layers for ping-pong, MLPs for `config.mlp_chunk_rows`, and the output head for
    `config.loss_chunk_bytes`.

    Args:
        model: A loaded model of transformers, or PEFT's around one. Planned attention replaces its
            own.
        config: Settings for packing, balancing and exchanging.
        device: Device of this rank.
        dtype: Dtype of core attention. None takes the model's. Under autocast give autocast's
            dtype.
        mesh: Ranks that train together: one dimension of a device mesh, or a process group. None
            takes all ranks.
        checkpointed: Number of decoder layers that will have checkpoints: they run again in the
            backward pass. None counts those that have checkpoints now.
        folder: Folder in which the measured costs of the device are kept for the same run. None
            keeps nothing.
        facts: What a trainer knows of the launch besides, as `describe_run` takes it.

    Raises:
        ValueError: The model, kernel, nodes, settings or launch do not fit. Every rank says what to
            change.
        RuntimeError: This rank cannot reach the others.
        ImportError: The package of the kernel is not installed.
    """
    check(DISPATCHED, {"config": config, "mesh": mesh})
    device = torch.device(device)
    # 1. Look at the launch and at the model on every process.
    world = World(config.exchange_timeout)
    with world.raised_together():
        check_is_model(model)
        check((NOT_CONNECTED,), parallel.ProcessCounts.of_this_process())
        if checkpointed is None:
            checkpointed = layers_with_checkpoints(model)
    world.check_alike(config.of_all_ranks())
    nodes = world.ranks_per_node(mesh)
    # 2. Describe the run. What follows reads the run, not the settings.
    facts = {"checkpointing": {} if checkpointed else None, **facts}
    with world.raised_together():
        run = describe_run(
            model,
            config,
            ranks=len(mesh_ranks(mesh)),
            device=device,
            dtype=dtype,
            ranks_per_node=nodes,
            **facts,
        )
    # 3. Connect the ranks, and measure the costs by which plans are chosen.
    dispatcher = Dispatcher(run.plans, device, mesh, exchange_timeout=world.limit_s)
    if dispatcher.groups.members == [0] and not run.has_remote_workers:
        logger.warning(ONE_RANK)
    dispatcher.limits = model_limits(model)
    # Measuring the device draws random numbers, and rollouts and dropout of a seed stay what they
    # are without it.
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        run = with_costs(run, dispatcher, folder)
    dispatcher.run = run = replace(run, device_memory=smallest_memory(dispatcher.groups, device))
    dispatcher.choose_by(run.plans.costs)
    # 4. Prepare the model.
    with world.raised_together():
        prepare_model(model, run)
    if config.offload_activations is True:
        offload_activations(model, dispatcher, checkpointed=checkpointed)
    return dispatcher


def pack_padded(
    model: PreTrainedModel,
    config: DistCAConfig,
    device: torch.device,
    *,
    dispatcher: Dispatcher | None = None,
    **options: Any,
) -> Dispatcher:
    """Let a model compute padded batches packed and planned, and return its dispatcher.

    After it, `model(input_ids, attention_mask)` computes only the tokens, balanced over all ranks,
    and returns what it returned before: hidden states, logits and a loss for [B, L], with 0 where a
    hidden state is padding's. Every forward of a padded batch is a collective call: ranks call the
    model equally often, and so are its backward passes. Generation, calls with a cache and batches
    that carry a plan are as before. No cache is returned.

    This is a collective call, like `make_dispatcher`, before `Accelerator.prepare`. A model that is
    never trained, such as a reference model, may be wrapped already.

    Args:
        model: A loaded model of transformers, or PEFT's around one. Planned attention replaces its
            own.
        config: Settings for packing, balancing and exchanging. Ranks compute more tokens than they
            can hold one micro-batch after another. A given dispatcher has its settings already.
        device: Device of this rank.
        dispatcher: Dispatcher of another model with the same kinds of attention, such as the
            trained model of a reference model. None makes one.
        options: Further arguments of `make_dispatcher`.

    Raises:
        ValueError: The model, kernel, nodes, settings or launch do not fit. Every rank says what to
            change.
    """
    if dispatcher is None:
        planning = {**_pods_of_padded(config), **(options.pop("planning", None) or {})}
        dispatcher = make_dispatcher(model, config, device, planning=planning, **options)
    else:
        with dispatcher.groups.raised_together():
            prepare_model(model, dispatcher.run)
    shares = sequences_share_prefixes(model, dispatcher)
    batches = PaddedBatches(dispatcher, share_prefixes=shares, image_model=image_model(model))
    pack_backbone(model, batches)
    return dispatcher


def sequences_share_prefixes(model: PreTrainedModel, dispatcher: Dispatcher) -> bool:
    """Return whether sequences of a model's padded batches share prefixes; rank 0 logs why not."""
    reason = why_sequences_share_nothing(model)
    return shares_prefixes(dispatcher.run.share_prefixes, reason, dispatcher.groups.rank)


def _pods_of_padded(config: DistCAConfig) -> dict[str, int]:
    """Return what the plans of padded batches take for "auto" pods, as fields of PlanSettings."""
    return {"pod_ranks": POD_RANKS_OF_PADDED} if config.planning.pod_ranks == AUTO else {}


def smallest_memory(groups: Groups, device: torch.device) -> int | None:
    """Return the bytes of the GPU with the least memory among all ranks; None on CPUs.

    A collective.
    """
    mine = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    return min((memory for memory in groups.all_gather(mine) if memory is not None), default=None)


def warn_of_kernels(model: PreTrainedModel, device: torch.device) -> None:
    """Warn of kernels that will fail in the backward on this device.

    The model's layers use them.
    """
    if device.type != "cuda" or not fla.uses_fla(model):
        return
    fault = fla.backward_fault(torch.cuda.get_device_capability(device), fla.versions_that_matter())
    if fault is not None:
        logger.warning(
            "the first backward of %s will fail: %s. %s", type(model).__name__, fault, fla.REMEDY
        )


def gathers_whole_layers(model: PreTrainedModel, run: RunSpec, accelerator: Accelerator) -> bool:
    """Return whether ZeRO-3 gathers the weights of a whole decoder layer before the layer runs.

    Without changes to its layers, a model gathers the weights of one module at a time.
    """
    divided = run.plans.may_ping_pong or run.mlp_chunk_rows or mixing_layers(model)
    return bool(divided) and parallel.gathers_parameters(accelerator)


def pack_teacher(teacher: PreTrainedModel, config: DistCAConfig, trainer: Trainer) -> Dispatcher:
    """Let the teacher of a trainer compute padded batches, and return its dispatcher.

    A collective of the world. FSDP2 or DeepSpeed may have wrapped the teacher already.

    Args:
        config: settings of the teacher, which is never trained.
    """
    args: Any = trainer.args
    accelerator = trainer.accelerator
    dtype = parallel.dtype_of_computation(teacher, args, accelerator)
    facts = parallel.facts_of_launch(teacher, args, accelerator, dtype)
    # ZeRO-3 gathers the weights of one module at a time.
    gathers = parallel.gathers_parameters(accelerator)
    return pack_padded(
        teacher,
        config,
        args.device,
        dtype=dtype,
        mesh=parallel.data_parallel_mesh(accelerator),
        **{**facts, "checkpointing": None, "planning": {"ping_pong": False} if gathers else {}},
    )


def prepare_trainer(trainer: Trainer, *, packs: bool) -> Dispatcher:
    """Check a trainer with model and accelerator on all ranks, and prepare its model.

    A collective of the world.

    Args:
        packs: whether documents are packed, and not batches that are padded.
    """
    args: Any = trainer.args
    model: Any = trainer.model
    accelerator = trainer.accelerator
    with World(args.exchange_timeout).raised_together():
        check_trainer(trainer, packs=packs)
        parallel.split_present_layers(model, accelerator)
        parallel.search_for_unused_parameters(model, accelerator, args.ddp_find_unused_parameters)
        parallel.keep_loss_in_float32(accelerator)
    if args.process_index == 0:
        warn_of_kernels(model, args.device)
    # ZeRO-3 reduces the gradients of whole layers once in a backward, and a padded batch may be
    # several micro-batches.
    layers_run_once = not packs and parallel.gathers_parameters(accelerator)
    dtype = parallel.dtype_of_computation(model, args, accelerator)
    planning: dict[str, Any] = {} if packs else _pods_of_padded(args)
    if layers_run_once and args.planning.ping_pong == AUTO:
        planning["ping_pong"] = False
    facts = parallel.facts_of_launch(model, args, accelerator, dtype)
    dispatcher = make_dispatcher(
        model,
        args,
        args.device,
        dtype=dtype,
        mesh=parallel.data_parallel_mesh(accelerator),
        checkpointed=checkpointed_layers(model, facts["checkpointing"]),
        folder=Path(str(args.output_dir)),
        **facts,
        planning=planning,
    )
    if args.device.type == "cuda":  # the memory of other devices is unknown
        fit_into_memory(model, args, dispatcher, may_chunk=not layers_run_once)
    if parallel.gathers_parameters(accelerator):
        layers = (
            plan_layers(model) if gathers_whole_layers(model, dispatcher.run, accelerator) else []
        )
        parallel.gather_whole_layers(model, [*layers, *adapted_heads(model)])
    check_agreement(args, dispatcher)
    return dispatcher
