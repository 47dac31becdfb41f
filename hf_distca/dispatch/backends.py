"""Backend of the exchange and options of its communicator."""

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

EXCHANGE_CTAS = 8
"""Thread blocks (CTAs) that NCCL may use for an exchange; each takes room on an SM from attention.

NCCL's own limit is 32 (ncclConfig_t in its user guide), a quarter of an H100's 132 SMs. In MagiAttention's
measurements all-to-all exchanges ran fully under attention that left 4 to 8 SMs free (post "How to Ensure Kernels
Actually Overlap"). NCCL rounds channels to a power of two. Not measured here yet: the part "exchange blocks" of `make
gpu` measures it.
"""


def exchange_backend(device: torch.device) -> str:
    """Return the default group's backend for a device, or gloo if it has none.

    A launch over gloo exchanges CUDA tensors through host memory, so that ranks can share a GPU.
    """
    default = dist.BackendConfig(dist.Backend(dist.get_backend_config()))
    return str(default.get_device_backend_map().get(device.type, "gloo"))


def exchange_options(backend: str, ctas: int = EXCHANGE_CTAS) -> Any:
    """Return options of the exchange's group; with NCCL they let an exchange start while attention fills the GPU.

    A stream of high priority gets the next free SM, before the waiting blocks of an attention kernel. Clusters are
    off: all blocks of a cluster need room at once.

    Args:
        ctas: most thread blocks of an exchange.

    Returns:
        ProcessGroupNCCL.Options; None on other backends.
    """
    if backend != dist.Backend.NCCL:
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    for name, value in (("max_ctas", ctas), ("cga_cluster_size", 0)):
        if hasattr(options.config, name):  # not in builds of torch with an NCCL before 2.17
            setattr(options.config, name, value)
    return options


def indexed(device: torch.device) -> torch.device:
    """Return the device with its index: "cuda" is the current device."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def device_uuid(device: torch.device) -> str | None:
    """Return a GPU's unique id across hosts; None on the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def check_devices(backend: str, uuids: Sequence[str | None]) -> None:
    """Raise if NCCL would refuse ranks that share a GPU, or hang.

    Args:
        uuids: [ranks] from `device_uuid`.

    Raises:
        ValueError: two ranks have the same GPU.
    """
    if backend != dist.Backend.NCCL:
        return
    ranks_by_uuid: dict[str | None, list[int]] = {}
    for rank, uuid in enumerate(uuids):
        ranks_by_uuid.setdefault(uuid, []).append(rank)
    shared = [f"ranks {ranks} on {uuid}" for uuid, ranks in ranks_by_uuid.items() if len(ranks) > 1]
    if shared:
        raise ValueError(
            f"NCCL takes one rank per GPU, got {'; '.join(shared)}: start one process per GPU, each with its own "
            'torch.cuda.set_device(LOCAL_RANK), or all over gloo, with ddp_backend="gloo" or '
            'init_process_group("gloo")'
        )


def unreachable(rank: int, error: Exception) -> RuntimeError:
    """Return the error of a rank that gloo did not connect, with the address that gloo used and the remedy."""
    host = socket.gethostname()
    address = "no address"
    with suppress(OSError):
        address = socket.gethostbyname(host)
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    return RuntimeError(
        f"rank {rank} cannot reach the other ranks over gloo, which carries control messages: {error}\n"
        "Unless another rank failed before, look at the network: gloo gives others the address of the interface "
        f"named by GLOO_SOCKET_IFNAME ({'not set' if interface is None else interface} on this host), and without it "
        f"the one that the host's name resolves to ({host!r} here to {address}). Where other hosts cannot reach that, "
        "set GLOO_SOCKET_IFNAME on every host to an interface that they can, such as eth0; `ip -brief address` lists "
        "them"
    )
