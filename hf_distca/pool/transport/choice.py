"""Which transport carries rows: what a process can do, by its settings and its host."""

from enum import StrEnum

import torch

from hf_distca.pool.transport.contract import Memory
from hf_distca.pool.transport.gpu import SideCopies
from hf_distca.pool.transport.nixl.agent import NixlAgent, has_rdma, is_installed
from hf_distca.pool.transport.nixl.arena import Arena
from hf_distca.pool.transport.tcp import HostMemory
from hf_distca.pool.wire.errors import LinkLost


class Choice(StrEnum):
    """What was asked for."""

    AUTO = "auto"
    TCP = "tcp"
    NIXL = "nixl"


def make_memory(choice: Choice, device: torch.device, address: str) -> Memory:
    """Where rows lie: in an `Arena` where they can travel over NIXL, else in `HostMemory`, which says why.

    Args:
        choice: which transport. AUTO is NIXL where that needs no open port of UCX: with RDMA devices.
        device: where rows are computed with.
        address: of the interface that UCX may listen on, where it must.

    Raises:
        ValueError: NIXL was asked for and cannot be used.
    """
    if choice is Choice.TCP:
        return HostMemory(device)
    if choice is Choice.AUTO and not is_installed():
        return HostMemory(device, "NIXL is not installed")
    if choice is Choice.AUTO and not has_rdma():
        return HostMemory(device, "the host has no RDMA device")
    try:
        copies = SideCopies(device) if device.type == "cuda" else None
        return Arena(NixlAgent(address), device, copies, required=choice is Choice.NIXL)
    except (ImportError, ValueError, LinkLost) as error:
        if choice is Choice.AUTO:
            return HostMemory(device, str(error))
        raise ValueError(f"attention_server_transport='nixl' cannot be used: {error}") from error
