"""Process groups for exchanges and for control messages between ranks, and the nodes that ranks share.

No group of the training framework is touched: its collectives and ours never wait in one queue.
"""

import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hf_distca.dispatch import backends
from hf_distca.dispatch.failures import Failures

logger = logging.getLogger(__name__)

Value = TypeVar("Value")
RankMesh = DeviceMesh | dist.ProcessGroup
"""Ranks that train together, as a one-dimensional mesh or as a group."""


def mesh_ranks(mesh: RankMesh | None) -> list[int]:
    """Return the world ranks that train together, in ascending order; without a mesh all ranks of the world."""
    if not in_world():
        return [0]
    if mesh is None:
        return list(range(dist.get_world_size()))
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(
                f"the mesh has the dimensions {mesh.mesh_dim_names} of sizes {tuple(mesh.shape)}; expected one "
                'dimension, that of the data-parallel ranks, such as mesh["dp"]'
            )
        mesh = mesh.get_group()
    return sorted(dist.get_process_group_ranks(mesh))


class Groups:
    """Groups of the ranks that train together: one for tensors, one for control messages.

    Creating the groups is a collective of the world. All pairs of ranks are connected here: no layer waits for a
    connection, and unreachable ranks fail here.

    Args:
        timeout_s: seconds after which an exchange with a silent peer fails.
        mesh: one of several meshes side by side that share no rank; None on every process for all ranks of the world.

    Attributes:
        members: world ranks of the mesh.
        exchange: group of the exchanges; None with one rank.
        node: group of the exchanges inside this rank's node; None for a node of one rank.
        failures: errors of the ranks of all meshes, by world rank.
    """

    def __init__(self, device: torch.device, timeout_s: float, mesh: RankMesh | None = None) -> None:
        self.members, self.closed = mesh_ranks(mesh), False
        world = (dist.get_rank(), dist.get_world_size()) if in_world() else (0, 1)
        self.rank, self.ranks = self.members.index(world[0]), len(self.members)
        self.exchange: dist.ProcessGroup | None = None
        self.node: dist.ProcessGroup | None = None
        self._side_by_side = mesh is not None
        self._device, self._timeout = device, timedelta(seconds=timeout_s)
        self._control: dist.ProcessGroup | None = None
        self._control_of_world: dist.ProcessGroup | None = None
        store = None
        if world[1] > 1:
            self._device = backends.indexed(device)
            meshes = [self.members] if mesh is None else self._in_world(self.members)
            options: dict[str, Any] = {"backend": "gloo", "timeout": self._timeout}
            try:
                self._control = self._control_of_world = _new_group(meshes, group_desc="distca control", **options)
                if len(meshes) > 1:
                    self._control_of_world = dist.new_group(group_desc="distca control of the world", **options)
                uuids = self.all_gather(backends.device_uuid(self._device))
            except RuntimeError as error:
                raise backends.unreachable(self.rank, error) from error
            store = self._control_of_world.get_group_store()
            backends.check_devices(backends.exchange_backend(self._device), uuids)
            self.exchange = self._connected(meshes, self.ranks, "distca exchange")
        self.failures = Failures(store, *world)

    def connect_nodes(self, nodes: Sequence[int] | None) -> None:
        """Connect the ranks of each node by a group of their own. A collective of the world.

        Args:
            nodes: [ranks] node of each rank of the mesh; None if the mesh forwards no rows.
        """
        if nodes is None and not self._side_by_side:
            return
        of_ranks = nodes or range(self.ranks)
        mine = [member for member, node in zip(self.members, of_ranks, strict=True) if node == of_ranks[self.rank]]
        of_world = self._in_world(mine)
        if any(len(members) > 1 for members in of_world):
            self.node = self._connected(of_world, len(mine), "distca node")

    def _in_world(self, mine: list[int]) -> list[list[int]]:
        """Return the distinct lists of ranks of all processes. A collective of the world."""
        of_world = _gather_in_world(tuple(mine), self._timeout.total_seconds())
        return [list(ranks) for ranks in dict.fromkeys(of_world)]

    def _connected(self, lists: list[list[int]], ranks: int, name: str) -> dist.ProcessGroup | None:
        """Return a group for exchanges, with all pairs of ranks connected; None for a single rank."""
        backend = backends.exchange_backend(self._device)
        sent, received = torch.zeros((2, ranks), dtype=torch.uint8, device=self._device)
        options: dict[str, Any] = {"backend": backend, "timeout": self._timeout, "group_desc": name}
        options["device_id"] = self._device if backend == dist.Backend.NCCL else None
        try:
            group = _new_group(lists, pg_options=backends.exchange_options(backend), **options)
            if ranks == 1:
                dist.destroy_process_group(group)
                return None
            # NCCL connects a pair, and takes memory for the pair, at the first send.
            dist.all_to_all_single(received, sent, [1] * ranks, [1] * ranks, group=group)
            received.cpu()  # wait for the arrival
        except RuntimeError as error:
            raise RuntimeError(f"rank {self.rank} cannot exchange rows over {backend}: {error}") from error
        return group

    def close(self) -> None:
        """End the groups with their threads and connections, unless they are closed. A collective of the world."""
        if self.closed:
            return
        if in_world():
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self.meet()  # no rank has rows under way
            for group in dict.fromkeys((self.node, self.exchange, self._control, self._control_of_world)):
                if group is not None:
                    dist.destroy_process_group(group)
        self.exchange = self.node = self._control = self._control_of_world = None
        self.closed = True

    def check_open(self) -> None:
        """Raise if the groups are closed: torch takes a group of None for the world."""
        if self.closed:
            raise RuntimeError(
                "the process groups of this dispatcher are closed; make a new trainer or dispatcher to continue"
            )

    def all_gather(self, value: Any, *, in_world: bool = False) -> list[Any]:
        """Return every rank's small Python object, in the order of the ranks. A collective on the CPU.

        Args:
            in_world: gather from all processes of the world instead of this mesh.
        """
        self.check_open()
        group = self._control_of_world if in_world else self._control
        if group is None or dist.get_world_size(group) == 1:
            return [value]
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, value, group=group)
        return gathered

    def meet(self) -> None:
        """Wait for every process of the world. A collective on the CPU."""
        self.check_open()
        if self._control_of_world is not None:
            dist.all_reduce(torch.zeros(1), group=self._control_of_world)

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether any rank has set the flag. A collective on the CPU."""
        self.check_open()
        agreed = torch.tensor(flags, dtype=torch.uint8)
        if self.ranks > 1:
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self._control)
        return [bool(flag) for flag in agreed.tolist()]

    def raise_together(self, error: Exception | None, *, in_world: bool = False) -> None:
        """Raise ValueError on every rank, of the mesh or the world, if any rank has an error, with all errors."""
        _raise_any(error, partial(self.all_gather, in_world=in_world))

    def raised_together(self, *, in_world: bool = False) -> AbstractContextManager[None]:
        """Raise an error inside the context as `raise_together` does."""
        return _raised_together(partial(self.all_gather, in_world=in_world))


def raised_together(timeout_s: float) -> AbstractContextManager[None]:
    """Raise an error inside the context on every process, before groups exist. A collective of the world."""
    return _raised_together(partial(_gather_in_world, timeout_s=timeout_s))


@contextmanager
def _raised_together(gather: Callable[[str | None], list[str | None]]) -> Iterator[None]:
    error = None
    try:
        yield
    except (ValueError, TypeError, ImportError, OSError) as caught:
        error = caught
    _raise_any(error, gather)


def _raise_any(error: Exception | None, gather: Callable[[str | None], list[str | None]]) -> None:
    """Raise if any rank has an error: this rank's own if all have the same, else all messages."""
    errors = gather(None if error is None else f"{type(error).__name__}: {error}")
    failed = [f"rank {rank}: {message}" for rank, message in enumerate(errors) if message is not None]
    if error is not None and len(set(errors)) == 1:
        raise error
    if failed:
        raise ValueError("; ".join(failed)) from error


def in_world() -> bool:
    """Return whether this process belongs to a launch."""
    return dist.is_available() and dist.is_initialized()


def _gather_in_world(value: Value, timeout_s: float) -> list[Value]:
    """Return every process's value, in the order of world ranks. A collective of the world, on the CPU."""
    if not in_world() or dist.get_world_size() == 1:
        return [value]
    gathered = [value] * dist.get_world_size()
    try:
        world = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s), group_desc="distca world")
        dist.all_gather_object(gathered, value, group=world)
        dist.destroy_process_group(world)
    except RuntimeError as error:
        raise backends.unreachable(dist.get_rank(), error) from error
    return gathered


def _new_group(lists: list[list[int]], **options: Any) -> dist.ProcessGroup:
    """Create a group of each list of ranks, in one order on every process, and return this process's group."""
    groups: list[dist.ProcessGroup] = [dist.new_group(ranks, **options) for ranks in lists]
    return groups[[dist.get_rank() in ranks for ranks in lists].index(True)]


def ranks_per_node(mesh: RankMesh | None, timeout_s: float) -> int | tuple[int, ...]:
    """Return how many of the ranks that train together share a node. A collective of the world.

    Launchers (torchrun, accelerate, deepspeed) number the processes of a host consecutively; LOCAL_RANK is the number
    on the host. A rank without LOCAL_RANK counts as alone on its node.

    Returns:
        One number for all nodes, or one for each, as `PlanSettings.ranks_per_node`.
    """
    if not in_world():
        return 1
    rank = dist.get_rank()
    # The host of every process, and the first rank that was launched with the process there.
    places = _gather_in_world((socket.gethostname(), rank - dist.get_node_local_rank(fallback_rank=0)), timeout_s)
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
