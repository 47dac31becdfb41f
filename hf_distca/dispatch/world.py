"""All processes of a launch, which agree on settings before ranks have process groups."""

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hf_distca.checks.run_rules import Run
from hf_distca.dispatch.reports import raised_together
from hf_distca.dispatch.waits import Waits
from hf_distca.units import counted

logger = logging.getLogger(__name__)

Value = TypeVar("Value")
RankMesh = DeviceMesh | dist.ProcessGroup
"""Ranks that train together, as a one-dimensional mesh or as a group."""


def in_world() -> bool:
    """Return whether this process belongs to a launch."""
    return dist.is_available() and dist.is_initialized()


def mesh_ranks(mesh: RankMesh | None) -> list[int]:
    """Return the world ranks that train together, in ascending order.

    Without a mesh all ranks of the world.
    """
    if not in_world():
        return [0]
    if mesh is None:
        return list(range(dist.get_world_size()))
    if isinstance(mesh, DeviceMesh):
        mesh = mesh.get_group()
    return sorted(dist.get_process_group_ranks(mesh))


@dataclass(frozen=True)
class World:
    """All processes of a launch. Every method is a collective of them, on the CPU.

    Attributes:
        limit_s: seconds that a process waits for another one.
    """

    limit_s: float

    def waits(self) -> Waits:
        """Return the waits of this process for others.

        They have their own part of the world's store.
        """
        if not in_world() or dist.get_world_size() == 1:
            return Waits()
        world: Any = dist.group.WORLD
        rank, store = dist.get_rank(), world.get_group_store()
        number = store.add(f"hf_distca/waits/{rank}", 1)  # the same on every rank
        part = dist.PrefixStore(f"hf_distca/waits/{number}", store)
        return Waits(part, rank, dist.get_world_size(), self.limit_s)

    def all_gather(self, value: Value, waits: Waits | None = None) -> list[Value]:
        """Return every process's value, in the order of world ranks.

        Args:
            waits: waits of this process that are open already.
        """
        if not in_world() or dist.get_world_size() == 1:
            return [value]
        gathered = [value] * dist.get_world_size()
        watched = waits or self.waits()
        try:
            with watched.of("other ranks at the start"):
                group = dist.new_group(
                    backend="gloo",
                    timeout=timedelta(seconds=self.limit_s),
                    group_desc="distca world",
                )
                dist.all_gather_object(gathered, value, group=group)
                dist.destroy_process_group(group)
        except RuntimeError as error:
            raise unreachable(dist.get_rank(), error) from error
        finally:
            if waits is None:
                watched.close()
        return gathered

    def raised_together(self) -> AbstractContextManager[None]:
        """Raise an error of input inside the context on every process."""
        return raised_together(self.all_gather)

    def check_alike(self, settings: Mapping[str, Any]) -> None:
        """Raise ValueError on every process if a setting differs between processes.

        Args:
            settings: settings of this process by name, with the same names everywhere.
        """
        check_alike(self.all_gather(settings))

    def ranks_per_node(self, mesh: RankMesh | None = None) -> int | tuple[int, ...]:
        """Return how many of the ranks that train together share a node.

        Launchers (torchrun, accelerate, deepspeed) number the processes of a host consecutively;
        LOCAL_RANK is the number on the host. A rank without LOCAL_RANK counts as alone on its node.
        `PlanSettings.ranks_per_node` takes the result.
        """
        if not in_world():
            return 1
        rank = dist.get_rank()
        # The host of each process, and the first rank that was launched with the process there.
        places = self.all_gather(
            (socket.gethostname(), rank - dist.get_node_local_rank(fallback_rank=0))
        )
        members = mesh_ranks(mesh)
        member_places = [places[member] for member in members]
        # A node is a run of consecutive ranks with the same place: ranks numbered round-robin
        # across hosts are alone.
        sizes = tuple(len(list(node)) for _, node in groupby(member_places))
        if rank == members[0]:
            host_of_members = [host for host, _ in member_places]
            hosts = [host for host, _ in groupby(host_of_members)]
            if len(hosts) > len(set(hosts)):
                logger.warning(
                    "ranks that share a host are not numbered one after another, so plans cannot "
                    "prefer exchanges inside a host. Launch ranks host by host (torchrun does; "
                    "mpirun --map-by slot)"
                )
            logger.info("ranks on each node, as launched: %s", ", ".join(map(str, sizes)))
        return sizes[0] if len(set(sizes)) == 1 else sizes


def check_alike(rank_settings: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError with the first setting that differs between ranks, and its values.

    Args:
        rank_settings: settings of each rank by name, with the same names on all ranks.
    """
    for name in rank_settings[0]:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, settings in enumerate(rank_settings):
            ranks_by_value.setdefault(repr(settings[name]), []).append(rank)
        if len(ranks_by_value) > 1:
            values = [f"{value} on {_named(ranks)}" for value, ranks in ranks_by_value.items()]
            raise Run.DIFFERENT_ARGUMENTS.error(name=name, by_rank=", ".join(values))


def _named(ranks: Sequence[int]) -> str:
    """Return "rank 3", "rank 3 and 1 other", or "rank 3 and 2 others"."""
    further_ranks = f" and {counted(len(ranks) - 1, 'other')}" if len(ranks) > 1 else ""
    return f"rank {ranks[0]}{further_ranks}"


def unreachable(rank: int, error: Exception) -> RuntimeError:
    """Return the error of a rank that gloo did not connect, with the address that gloo used."""
    host = socket.gethostname()
    address = "no address"
    with suppress(OSError):
        address = socket.gethostbyname(host)
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "not set")
    return RuntimeError(
        f"rank {rank} cannot reach the other ranks over gloo, which carries control messages: "
        f"{error}\nUnless another rank failed before, check the network: gloo gives other ranks "
        f"the address of the interface named by GLOO_SOCKET_IFNAME ({interface} on this host), "
        f"and without it the address that the host's name resolves to ({host!r} here to "
        f"{address}). Where other hosts cannot reach that address, set GLOO_SOCKET_IFNAME on "
        "every host to an interface that they can reach, such as eth0; `ip -brief address` lists "
        "interfaces"
    )
