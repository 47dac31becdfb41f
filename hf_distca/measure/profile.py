"""Measure the profile of a device and of its links to other ranks."""

import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np
import torch

from hf_distca.dispatch.groups import Groups
from hf_distca.kernels import Kernel
from hf_distca.kernels.speed import peak_flops
from hf_distca.measure.device import measured_kernel, measured_launches, measured_matrices, measured_memory
from hf_distca.measure.links import measured_exchange, measured_link, peers_of
from hf_distca.plan import AttentionKind
from hf_distca.planner.nodes import EXCHANGE_BANDWIDTH, NETWORK_BANDWIDTH, NODE_BANDWIDTH
from hf_distca.planner.seconds import KernelCost, LinkCost, Links
from hf_distca.sim.costs import DeviceProfile


def measured_profile(
    kernel: Kernel,
    kind: AttentionKind,
    hidden: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    queries: Sequence[int] | None = None,
    limit_s: float = inf,
) -> DeviceProfile:
    """Measure one device; its links are taken from an H100.

    Args:
        queries: as in `measured_kernel`.
        limit_s: as in `measured_kernel`.
    """
    flops = measured_matrices(hidden, dtype, device)
    forward, backward, accuracy = measured_kernel(kernel, kind, dtype, device, queries=queries, limit_s=limit_s)
    name, device_name = str(dtype).removeprefix("torch."), name_of(device)
    return DeviceProfile(
        name=f"{device_name}, {name}",
        source=f"Measured with the kernel {kernel.name} and torch {torch.__version__}",
        dtype=name,
        measured=kind,
        forward=forward,
        backward=backward,
        flops_per_second=flops,
        bytes_per_second=measured_memory(hidden, dtype, device),
        peak_flops=peak_flops(device_name) or flops,
        links=_of_an_h100(NODE_BANDWIDTH),
        exchange=_of_an_h100(EXCHANGE_BANDWIDTH),
        launches=measured_launches(dtype, device),
        accuracy=accuracy,
    )


def with_links(
    profile: DeviceProfile,
    groups: Groups,
    device: torch.device,
    ranks_per_node: int | tuple[int, ...],
    *,
    collectives: bool = True,
    limit_s: float = inf,
) -> DeviceProfile:
    """Return the mean of all ranks' profiles, with links measured by all ranks together. A collective.

    Args:
        ranks_per_node: as in PlanSettings.
        collectives: also measure torch's own collectives over the default group; else they count as fast as exchanges.
            Over gloo both are the same.
        limit_s: as in `measured_exchange`.
    """
    agreed = _mean(groups.all_gather(profile))
    exchange = links = measured_exchange(groups, device, ranks_per_node, limit_s=limit_s)
    if collectives and device.type == "cuda":
        inside, across = peers_of(groups.ranks, ranks_per_node)
        within = measured_link(groups, device, inside, alone=True)
        links = Links(within, within if across == inside else measured_link(groups, device, across, alone=True))
    sharing = ranks_per_core(groups) if device.type == "cpu" else 1.0
    return replace(agreed, links=links, exchange=exchange, ranks_per_core=sharing)


def ranks_per_core(groups: Groups) -> float:
    """Return the threads per core, at least 1, of the host with the fewest. A collective.

    All processes of the world count.
    """
    here = (socket.gethostname(), torch.get_num_threads(), os.sched_getaffinity(0))
    threads: dict[str, int] = {}
    cores: dict[str, set[int]] = {}
    for host, count, allowed in groups.all_gather(here, in_world=True):
        threads[host] = threads.get(host, 0) + count
        cores[host] = cores.get(host, set()) | allowed
    return max(min(threads[host] / len(cores[host]) for host in threads), 1.0)


def name_of(device: torch.device) -> str:
    """Return the name of a device for people."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _mean(profiles: Sequence[DeviceProfile]) -> DeviceProfile:
    """Return the mean of the ranks' measured profiles, the same on every rank."""

    def mean(name: str) -> float:
        return float(np.mean([getattr(profile, name) for profile in profiles]))

    def cost(name: str) -> KernelCost:
        each = [list(vars(getattr(profile, name)).values()) for profile in profiles]
        return KernelCost(*np.mean(each, axis=0).tolist())

    return replace(
        profiles[0],
        forward=cost("forward"),
        backward=cost("backward"),
        flops_per_second=mean("flops_per_second"),
        bytes_per_second=mean("bytes_per_second"),
        launches=mean("launches"),
    )


def _of_an_h100(within: float) -> Links:
    """Return links that were not measured, with `within` GB/s inside a node."""
    return Links(LinkCost(3e-5, within * 1e9), LinkCost(3e-5, NETWORK_BANDWIDTH * 1e9))
