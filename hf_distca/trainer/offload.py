"""How many layers' activation checkpoints go to the host, and the host memory for that."""

import logging
import socket
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from hf_distca.checks.run_rules import Run
from hf_distca.config import DistCAConfig
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.host_copies import CHUNK_BYTES, ActivationOffload, HostMemory
from hf_distca.models.checkpointing import checkpoint_row_bytes, offloaded_layers
from hf_distca.models.decoder import base_model
from hf_distca.patches.offload import offload_checkpoints
from hf_distca.units import AUTO, counted

logger = logging.getLogger(__name__)

GB = 1e9
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
    config: DistCAConfig,
    dispatcher: Dispatcher,
    *,
    checkpointed: int,
    excess: int = 0,
    hidden_bytes: int | None = None,
) -> None:
    """Let activation checkpoints go to the host as the settings say.

    A collective of the world.

    Args:
        model: the model before it is wrapped; changed in place.
        checkpointed: number of layers that have checkpoints.
        excess: bytes by which training exceeds the device's memory, at least 0, for "auto"; the
            largest of all ranks counts.
        hidden_bytes: bytes of a value of the hidden state; None for the model's dtype.

    Raises:
        ValueError: on every rank, if layers have no checkpoints, or a host has too little memory.
    """
    setting = config.offload_activations
    if setting is True and not checkpointed:
        raise Run.NO_CHECKPOINTS.error()
    if setting is False or not checkpointed:
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
    layer_bytes = row_bytes * settings.tokens_per_rank
    mine = RankNeeds(socket.gethostname(), available_host_memory(), layer_bytes, excess)
    needs_of_ranks = dispatcher.groups.all_gather(mine, in_world=True)
    layers = chosen_layers(needs_of_ranks, offloaded_layers(checkpointed), setting)
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


def chosen_layers(needs_of_ranks: list[RankNeeds], possible: int, setting: bool | str) -> int:
    """Return how many layers' activation checkpoints go to the host, the same on every rank.

    Args:
        possible: number of layers that can.
        setting: the setting.
    """
    layers = possible
    if setting == AUTO:
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
        error = Run.HOST_MEMORY.error(
            layers=layers,
            host=host,
            needed=f"{layers * layer_of_ranks / GB:.1f}",
            available=f"{available / GB:.1f}",
            ranks=len(ranks_there),
            fraction=HOST_LEFT,
        )
        if setting != AUTO:
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
