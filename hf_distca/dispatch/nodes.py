"""Ranks per node, as the launcher of the processes numbers them."""

import logging
import socket
from collections.abc import Sequence
from itertools import groupby

import torch.distributed as dist

from hf_distca.dispatch.groups import RankMesh, gather_in_world, in_world, mesh_ranks

logger = logging.getLogger(__name__)

Place = tuple[str, int]
"""Host of a process, and the first rank that was launched with it there."""


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
    places = gather_in_world((socket.gethostname(), rank - dist.get_node_local_rank(fallback_rank=0)), timeout_s)
    members = mesh_ranks(mesh)
    found = [places[member] for member in members]
    if rank == members[0]:
        _tell(found)
    return _one_number(_sizes(found))


def _sizes(places: Sequence[Place]) -> tuple[int, ...]:
    """Return the ranks of each node, [nodes]: runs of consecutive ranks with the same place.

    If ranks are numbered round-robin across hosts, each is a node of its own.
    """
    return tuple(len(list(same)) for _, same in groupby(places))


def _one_number(sizes: tuple[int, ...]) -> int | tuple[int, ...]:
    return sizes[0] if len(set(sizes)) == 1 else sizes


def _tell(places: Sequence[Place]) -> None:
    """Log the ranks of each node."""
    hosts = [host for host, _ in groupby(host for host, _ in places)]
    if len(hosts) > len(set(hosts)):
        logger.warning(
            "ranks that share a host are not numbered one after another, so plans cannot let bytes stay on it; launch "
            "them host by host (torchrun does; mpirun --map-by slot)"
        )
    logger.info("ranks on each node, as launched: %s", ", ".join(map(str, _sizes(places))))
