"""Ranks per node, as the launcher of the processes numbers them."""

import logging
import socket
from itertools import groupby

import torch.distributed as dist

from hf_distca.dispatch.groups import RankMesh, gather_in_world, in_world, mesh_ranks

logger = logging.getLogger(__name__)


def ranks_per_node(mesh: RankMesh | None, timeout_s: float) -> int | tuple[int, ...]:
    """Return how many of the ranks that train together share a node. A collective of the world.

    Launchers (torchrun, accelerate, deepspeed) number the processes of a host consecutively; LOCAL_RANK is the number
    on the host. A rank without LOCAL_RANK counts as alone on its node.

    Args:
        mesh: the ranks that train together; None for all ranks of the world.

    Returns:
        One number for all nodes, or one for each, as `PlanSettings.ranks_per_node`.

    Raises:
        RuntimeError: this process cannot reach the others within `timeout_s`.
    """
    if not in_world():
        return 1
    rank = dist.get_rank()
    # The host of every process, and the first rank that was launched with the process there.
    places = gather_in_world((socket.gethostname(), rank - dist.get_node_local_rank(fallback_rank=0)), timeout_s)
    members = mesh_ranks(mesh)
    found = [places[member] for member in members]
    # A node is a run of consecutive ranks with the same place: ranks numbered round-robin across hosts are alone.
    sizes = tuple(len(list(same)) for _, same in groupby(found))
    if rank == members[0]:
        hosts = [host for host, _ in groupby(host for host, _ in found)]
        if len(hosts) > len(set(hosts)):
            logger.warning(
                "ranks that share a host are not numbered one after another, so plans cannot prefer exchanges inside "
                "a host. Launch ranks host by host (torchrun does; mpirun --map-by slot)"
            )
        logger.info("ranks on each node, as launched: %s", ", ".join(map(str, sizes)))
    return sizes[0] if len(set(sizes)) == 1 else sizes
