"""Backend of the exchange and options of its communicator."""

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

EXCHANGE_CTAS = 8
"""Most thread blocks (CTAs) of an NCCL exchange; each takes room on an SM from attention.

NCCL's own limit is 32, a quarter of an H100's 132 SMs. In MagiAttention's measurements all-to-all exchanges ran fully
under attention that left 4 to 8 SMs free ("How to Ensure Kernels Actually Overlap"); `make gpu` measures it.
"""


def exchange_backend(device: torch.device) -> str:
    """Return the default group's backend for a device, or gloo, over which CUDA tensors go through host memory."""
    default = dist.BackendConfig(dist.Backend(dist.get_backend_config()))
    return str(default.get_device_backend_map().get(device.type, "gloo"))


def exchange_options(backend: str, ctas: int = EXCHANGE_CTAS) -> Any:
    """Return options with which an NCCL exchange starts while attention fills the GPU; None for other backends."""
    if backend != dist.Backend.NCCL:
        return None
    # A stream of high priority gets the next free SM, before the waiting blocks of an attention kernel. All blocks of
    # a cluster would need room at once.
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    for name, value in (("max_ctas", ctas), ("cga_cluster_size", 0)):
        if hasattr(options.config, name):  # not in builds of torch with an NCCL before 2.17
            setattr(options.config, name, value)
    return options


def indexed(device: torch.device) -> torch.device:
    """Return the device with an index: the current device for "cuda"."""
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def device_uuid(device: torch.device) -> str | None:
    """Return a GPU's unique id across hosts; None on the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def check_devices(backend: str, uuids: Sequence[str | None]) -> None:
    """Raise ValueError if ranks with these [ranks] `uuids` share a GPU over NCCL, which would refuse or hang."""
    ranks = {uuid: [rank for rank, other in enumerate(uuids) if other == uuid] for uuid in uuids}
    shared = [f"ranks {of_uuid} on {uuid}" for uuid, of_uuid in ranks.items() if len(of_uuid) > 1]
    if shared and backend == dist.Backend.NCCL:
        raise ValueError(
            f"NCCL takes one rank per GPU, but several ranks share one: {'; '.join(shared)}. Start one process per "
            'GPU, each with its own torch.cuda.set_device(LOCAL_RANK); or use gloo, with ddp_backend="gloo" or '
            'init_process_group("gloo")'
        )


def unreachable(rank: int, error: Exception) -> RuntimeError:
    """Return the error of a rank that gloo did not connect, with the address that gloo used."""
    host, address = socket.gethostname(), "no address"
    with suppress(OSError):
        address = socket.gethostbyname(host)
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "not set")
    return RuntimeError(
        f"rank {rank} cannot reach the other ranks over gloo, which carries control messages: {error}\nUnless "
        "another rank failed before, check the network: gloo gives other ranks the address of the interface named by "
        f"GLOO_SOCKET_IFNAME ({interface} on this host), and without it the "
        f"address that the host's name resolves to ({host!r} here to {address}). Where other hosts cannot reach that "
        "address, set GLOO_SOCKET_IFNAME on every host to an interface that they can reach, such as eth0; `ip -brief "
        "address` lists interfaces"
    )
