"""Which ranks share a node, as the launcher of the processes says."""

import logging
import socket
from collections.abc import Sequence
from itertools import groupby

import torch.distributed as dist

from hf_distca.dispatch.groups import RankMesh, gather_in_world, in_world, mesh_ranks

logger = logging.getLogger(__name__)

Place = tuple[str, int]
"""Where a process runs: its host, and the rank of the first process that was launched with it there."""


def ranks_per_node(mesh: RankMesh | None, timeout_s: float) -> int | tuple[int, ...]:
    """How many of the ranks that train together share a node. A collective of the world.

    A launcher (torchrun, accelerate, deepspeed) numbers the processes of a host one after another, and LOCAL_RANK is a
    process's number there. A rank without it is taken to share its node with nobody.

    Args:
        mesh: the ranks that train together; None for all ranks of the world.
        timeout_s: seconds after which it fails where a process is silent.

    Returns:
        One number for all nodes, or one for each, as `PlanSettings.ranks_per_node`.

    Raises:
        RuntimeError: this process cannot reach the others, or not in time.
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
    """[nodes] how many ranks each node has: consecutive ones of the same place.

    Ranks that are numbered across hosts, round about, each have a place of their own.
    """
    return tuple(len(list(same)) for _, same in groupby(places))


def _one_number(sizes: tuple[int, ...]) -> int | tuple[int, ...]:
    return sizes[0] if len(set(sizes)) == 1 else sizes


def _tell(places: Sequence[Place]) -> None:
    """Log what was found."""
    hosts = [host for host, _ in groupby(host for host, _ in places)]
    if len(hosts) > len(set(hosts)):
        logger.warning(
            "ranks that share a host are not numbered one after another, so plans cannot prefer exchanges inside a "
            "host. Launch ranks host by host (torchrun does; mpirun --map-by slot)"
        )
    logger.info("ranks on each node, as launched: %s", ", ".join(map(str, _sizes(places))))
