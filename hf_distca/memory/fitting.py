"""Let a training fit into a GPU and its host, before training begins.

A count of the memory of a step decides. What checkpoints of layers keep goes to the host first,
which changes no result. MLPs run in chunks only if the training still does not fit.
"""

import logging
import socket
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn
from transformers import PreTrainedModel

from hf_distca.checks.argument_rules import liger_replaces_mlps
from hf_distca.checks.capacity_rules import BEYOND_DEVICE, Capacity
from hf_distca.checks.refusal import RefusedError
from hf_distca.checks.run_rules import Run
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.host_copies import CHUNK_BYTES, ActivationOffload, HostMemory
from hf_distca.memory.counter import MemoryCounter, longest_documents
from hf_distca.models.checkpointing import (
    checkpoint_row_bytes,
    checkpointed_layers,
    offloaded_layers,
)
from hf_distca.models.decoder import base_model
from hf_distca.models.images import image_model
from hf_distca.patches.chunked_mlp import chunk_layers
from hf_distca.patches.offload import offload_checkpoints
from hf_distca.planner.micro_batch import plan_micro_batch
from hf_distca.run import RunSpec
from hf_distca.units import AUTO, counted

logger = logging.getLogger(__name__)

GB = 1e9
LEFT = 0.95
"""Fraction of a device's memory for tensors; CUDA, NCCL and gaps between tensors take the rest."""
CHUNK_ROWS = 8192
"""Rows of a chunk of an MLP that keep a GPU busy, where `mlp_chunk_rows` is "auto"."""
HOST_LEFT = 0.9
"""Fraction of a host's available memory for checkpoints; data and the optimizer take the rest."""
CGROUP = Path("/sys/fs/cgroup")
"""Folder with the limits of this process's container."""
LAYER_TENSORS = 8
"""Most tensors of a layer's activation checkpoint: its input, and O and log-sum-exp of two
nano-batches."""
REMAINDERS = LAYER_TENSORS * CHUNK_BYTES
"""Most bytes of host memory that a layer's activation checkpoint leaves empty, at the ends of its
tensors."""


def fit_into_memory(
    model: PreTrainedModel, args: Any, dispatcher: Dispatcher, *, may_chunk: bool
) -> None:
    """Count the memory of training on a GPU, and change what does not fit.

    Checkpoints go to the host first, which changes no result. MLPs run in chunks only if training
    still does not fit. `dispatcher.run` has what was chosen.

    A collective of the world.
    """

    def counted() -> CountedMemory | None:
        if dispatcher.groups.rank > 0:
            return None
        total = torch.cuda.get_device_properties(dispatcher.device).total_memory
        return log_memory(model, dispatcher.run, memory_beside_engine(args, total))

    run = dispatcher.run
    taken = counted()
    if args.offload_activations == AUTO:
        offload_activations(
            model,
            dispatcher,
            checkpointed=checkpointed_layers(model, run.checkpointing),
            excess=0 if taken is None else taken.excess,
            # Other strategies cast the weights, and with them the hidden state.
            hidden_bytes=None if run.strategy == "ddp" else run.plans.bytes_per_value,
        )
    offloaded = offloaded_bytes(dispatcher.offload)
    if args.mlp_chunk_rows == AUTO and may_chunk and not liger_replaces_mlps(args):
        excess = 0 if taken is None else taken.excess - offloaded
        if chunk_if_needed(model, dispatcher, excess):
            taken = counted()
    if taken is not None:
        warn_of_memory(taken, offloaded)


def memory_beside_engine(args: Any, total: int) -> int:
    """Return the bytes of a GPU for training, beside an inference engine of TRL in the process.

    The engine keeps its share while the model trains, unless it sleeps.
    """
    is_beside = getattr(args, "use_vllm", False) and args.vllm_mode == "colocate"
    if not is_beside or args.vllm_enable_sleep_mode:
        return total
    return total - int(args.vllm_gpu_memory_utilization * total)


# Memory of a step


NO_IMAGES = "; without the images that are encoded, see hf-distca plan"
"""What a count leaves out where the model sees images."""


class CountedMemory(NamedTuple):
    """Memory of training on a device, with all checkpoints on the device."""

    rows_per_rank: int
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
    if image_model(model) is not None:  # how many images a rank encodes is not known yet
        listed += NO_IMAGES
    total = CountedMemory(plans.rows_per_rank, sum(parts.values()), memory, listed)
    logger.info(
        "memory with %s tokens on each rank: %.1f of %.1f GB (%s)",
        total.rows_per_rank,
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
        warning = BEYOND_DEVICE.format(
            rows=counted.rows_per_rank,
            needed=(counted.total - offloaded) / GB,
            memory=counted.memory / GB,
            parts=counted.listed,
        )
        logger.warning(warning)


# Checkpoints of layers on the host


class RankNeeds(NamedTuple):
    """What one rank knows when layers are chosen."""

    host: str
    available: int  # bytes of memory that its host, or its container there, can still give
    layer_bytes: int  # bytes of the checkpoint of a layer with all rows
    excess: int  # bytes by which training exceeds the device's memory, at least 0

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for a layer: a tensor's last chunk has a remainder."""
        return self.layer_bytes + REMAINDERS


def offload_activations(
    model: Any,
    dispatcher: Dispatcher,
    *,
    checkpointed: int,
    excess: int | None = None,
    hidden_bytes: int | None = None,
) -> None:
    """Let activation checkpoints go to the host: of all layers, or of as many as do not fit.

    A collective of the world.

    Args:
        model: the model before it is wrapped; changed in place.
        checkpointed: number of layers that have checkpoints.
        excess: bytes by which training exceeds the device's memory, at least 0; the largest of all
            ranks counts. None lets the checkpoints of all layers go.
        hidden_bytes: bytes of a value of the hidden state; None for the model's dtype.

    Raises:
        ValueError: on every rank, if layers have no checkpoints, or a host has too little memory.
    """
    if not checkpointed:
        if excess is None:
            raise Run.NO_CHECKPOINTS.error()
        return
    # 1. Choose the layers on all ranks alike.
    base: Any = base_model(model)
    settings = dispatcher.settings
    row_bytes = checkpoint_row_bytes(
        base.config.get_text_config(decoder=True).hidden_size,
        settings.kinds,
        hidden_bytes=hidden_bytes or base.dtype.itemsize,
        value_bytes=settings.bytes_per_value,
    )
    layer_bytes = row_bytes * settings.rows_per_rank
    mine = RankNeeds(socket.gethostname(), available_host_memory(), layer_bytes, excess or 0)
    needs_of_ranks = dispatcher.groups.all_gather(mine, in_world=True)
    possible = offloaded_layers(checkpointed)
    layers = chosen_layers(needs_of_ranks, possible, all_layers=excess is None)
    if layers == 0:
        return
    # 2. Reserve host memory for the layers, and change the model.
    is_pinned = dispatcher.device.type == "cuda"
    host = HostMemory(layers * mine.host_bytes, pinned=is_pinned)
    dispatcher.offload = ActivationOffload(dispatcher.device, layers, host)
    offload_checkpoints(model)
    if dispatcher.groups.rank == 0:
        size = layers * layer_bytes / GB
        logger.info(
            "activation checkpoints of %s go to the host: %.1f GB on each rank",
            counted(layers, "layer"),
            size,
        )


def chosen_layers(needs_of_ranks: list[RankNeeds], possible: int, *, all_layers: bool) -> int:
    """Return how many layers' activation checkpoints go to the host, the same on every rank.

    Args:
        possible: number of layers that can.
        all_layers: whether all of these layers go; else as many as do not fit into the memory.

    Raises:
        ValueError: all layers go, and a host has too little memory.
    """
    layers = possible
    if not all_layers:
        missing = max(-(-needs.excess // needs.layer_bytes) for needs in needs_of_ranks)
        layers = min(possible, missing)
    hosts = dict.fromkeys(needs.host for needs in needs_of_ranks)
    for host in hosts:
        ranks_there = [needs for needs in needs_of_ranks if needs.host == host]
        available = int(HOST_LEFT * min(needs.available for needs in ranks_there))
        layer_of_ranks = sum(needs.host_bytes for needs in ranks_there)
        fitting = available // layer_of_ranks
        if fitting >= layers:
            continue
        error = Capacity.HOST_MEMORY.error(
            layers=layers,
            host=host,
            needed=f"{layers * layer_of_ranks / GB:.1f}",
            available=f"{available / GB:.1f}",
            ranks=len(ranks_there),
            fraction=HOST_LEFT,
        )
        if all_layers:
            raise error
        logger.warning("%s", error)
        layers = fitting
    return layers


def offloaded_bytes(offload: ActivationOffload | None) -> int:
    """Return the most bytes of a device that checkpoints on the host free."""
    return 0 if offload is None else offload.host.limit - offload.layers * REMAINDERS


def available_host_memory(cgroup: Path = CGROUP) -> int:
    """Return the bytes of memory that the host, or this process's container, can still give."""
    available: int = psutil.virtual_memory().available
    limit = cgroup / "memory.max"
    if not limit.exists() or limit.read_text().strip() == "max":
        return available
    statistics = (line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    pages = {name: int(size) for name, size in statistics}
    # The system takes back pages of files when memory is short.
    used = int((cgroup / "memory.current").read_text())
    used -= pages["active_file"] + pages["inactive_file"]
    return min(available, int(limit.read_text()) - used)


# MLPs in chunks


def chunk_if_needed(model: PreTrainedModel, dispatcher: Dispatcher, excess: int) -> bool:
    """Compute MLPs in chunks if training does not fit otherwise; return whether they are.

    A collective of the world.

    Args:
        excess: bytes by which training exceeds the device's memory; the largest of all ranks
            counts.
    """
    excess = max(dispatcher.groups.all_gather(excess, in_world=True))
    if excess <= 0 or dispatcher.settings.rows_per_rank <= CHUNK_ROWS:
        return False
    with suppress(RefusedError):  # no MLP can be divided
        chunk_layers(model, CHUNK_ROWS)
        dispatcher.run = replace(dispatcher.run, mlp_chunk_rows=CHUNK_ROWS)
        if dispatcher.groups.rank == 0:
            logger.warning(
                "training would exceed the GPU's memory by %.1f GB, so MLPs and norms run over "
                "%s rows at a time. Sums of their weights' gradients are rounded once a chunk; "
                "set mlp_chunk_rows=0 to compute all rows at once",
                excess / 1e9,
                CHUNK_ROWS,
            )
        return True
    return False
