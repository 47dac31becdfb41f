"""Process groups of their own for exchanges and for words between ranks.

No group of the training framework is touched: its collectives and ours never wait in one queue.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hf_distca.dispatch.backends import (
    check_devices,
    device_uuid,
    exchange_backend,
    exchange_options,
    indexed,
    unreachable,
)
from hf_distca.dispatch.failures import Failures

Value = TypeVar("Value")
RankMesh = DeviceMesh | dist.ProcessGroup
"""The ranks that train together, as one dimension of a mesh or as a group."""


def mesh_ranks(mesh: RankMesh | None) -> list[int]:
    """The ranks that train together, by their numbers in the world, in ascending order.

    Args:
        mesh: this process's data-parallel ranks; None for all ranks of the world.

    Raises:
        ValueError: the mesh has more than one dimension.
    """
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
    """The ranks that train together, with a group for tensors and one for small Python objects.

    Creating it is a collective of the world: every process does it at the same point, each with its own mesh where
    several groups of ranks train side by side. It connects every rank with every other of its mesh, so that no layer
    waits for that, and ranks that cannot reach each other fail here.

    Args:
        device: where the exchanged tensors live; the exchange takes the default group's backend for it.
        timeout_s: seconds after which an exchange with a silent peer fails.
        mesh: this process's data-parallel ranks; None for all ranks of the world. Every process gives one, or none
            does, and a rank is in one mesh only.

    Attributes:
        rank: this rank's place in the mesh, from 0 on.
        ranks: how many there are.
        members: which ranks of the world they are.
        exchange: the group of the exchanges; None where there is one rank.
        node: the group of the exchanges inside this rank's node, see `connect_nodes`; None where it has one rank.
        failures: tells each rank why another failed, of whichever mesh; ranks have their numbers in the world there.
        closed: whether `close` has been called.

    Raises:
        RuntimeError: this rank cannot reach the others, or not in time.
        ValueError: on every rank, where ranks share a GPU that they cannot share.
    """

    def __init__(self, device: torch.device, timeout_s: float, mesh: RankMesh | None = None) -> None:
        members = mesh_ranks(mesh)
        self.ranks = len(members)
        self.rank = members.index(dist.get_rank()) if in_world() else 0
        self.exchange: dist.ProcessGroup | None = None
        self.node: dist.ProcessGroup | None = None
        self._side_by_side = mesh is not None
        self.members, self._device, self._timeout = members, device, timedelta(seconds=timeout_s)
        self._words: dist.ProcessGroup | None = None
        self._words_of_world: dist.ProcessGroup | None = None
        self.closed = False
        store = None
        if in_world() and dist.get_world_size() > 1:
            self._device = indexed(device)
            meshes = None if mesh is None else _groups_of(gather_in_world(members, timeout_s))
            try:
                self._words = _new_group(meshes, backend="gloo", timeout=self._timeout, group_desc="distca words")
                self._words_of_world = self._words
                if meshes is not None and len(meshes) > 1:
                    self._words_of_world = dist.new_group(
                        backend="gloo", timeout=self._timeout, group_desc="distca words of the world"
                    )
                uuids = self.all_gather(device_uuid(self._device))
            except RuntimeError as error:
                raise unreachable(self.rank, error) from error
            store = self._words_of_world.get_group_store()
            check_devices(exchange_backend(self._device), uuids)
            self.exchange = self._connected(meshes, self.ranks, "distca exchange")
        world = (dist.get_rank(), dist.get_world_size()) if in_world() else (0, 1)
        self.failures = Failures(store, *world)

    def connect_nodes(self, nodes: Sequence[int] | None) -> None:
        """Connect the ranks of each node for exchanges of their own, so that none inside a node waits for one between
        nodes. A collective of the world.

        Args:
            nodes: [ranks] the node of each rank of the mesh; None where no rows are passed on inside nodes. The same
                on every rank of a mesh; of several meshes some may have nodes, and others not.

        Raises:
            RuntimeError: this rank cannot reach the others of its node, or not in time.
        """
        if nodes is None and not self._side_by_side:
            return
        mine = self.members[self.rank : self.rank + 1]
        if nodes is not None:
            mine = [member for member, node in zip(self.members, nodes, strict=True) if node == nodes[self.rank]]
        of_world = _groups_of(gather_in_world(mine, self._timeout.total_seconds()))
        if any(len(members) > 1 for members in of_world):
            self.node = self._connected(of_world, len(mine), "distca node")

    def _connected(self, meshes: list[list[int]] | None, ranks: int, name: str) -> dist.ProcessGroup | None:
        """A group for exchanges, once a row has gone from every rank to every other; None where it has one rank.

        NCCL connects a pair of ranks when it first has something to send, and asks for memory then.

        Args:
            meshes: as in `_new_group`.
            ranks: number of ranks of this process's group.
            name: of the group.
        """
        backend = exchange_backend(self._device)
        sent, received = (torch.zeros(ranks, dtype=torch.uint8, device=self._device) for _ in range(2))
        one_each = [1] * ranks
        try:
            group = _new_group(
                meshes,
                backend=backend,
                timeout=self._timeout,
                pg_options=exchange_options(backend),
                group_desc=name,
                device_id=self._device if backend == dist.Backend.NCCL else None,
            )
            if ranks == 1:
                dist.destroy_process_group(group)
                return None
            dist.all_to_all_single(received, sent, one_each, one_each, group=group)
            received.cpu()  # not before it is here
        except RuntimeError as error:
            raise RuntimeError(f"rank {self.rank} cannot exchange rows over {backend}: {error}") from error
        return group

    def close(self) -> None:
        """End the groups, and with them their threads and connections. A collective of the world.

        Nothing is exchanged or gathered over them afterwards. Closing twice does nothing, nor does closing once the
        world has ended, and its groups with it.
        """
        if self.closed:
            return
        if in_world():
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self.all_gather(None, in_world=True)  # nothing is on its way on any rank
            groups = dict.fromkeys((self.node, self.exchange, self._words, self._words_of_world))
            for group in groups:
                if group is not None:
                    dist.destroy_process_group(group)
        self.exchange = self.node = self._words = self._words_of_world = None
        self.closed = True

    def check_open(self) -> None:
        """Raise where the groups are closed: torch would take a group of None for all processes of the world.

        Raises:
            RuntimeError: they are.
        """
        if self.closed:
            raise RuntimeError(
                "the process groups of this dispatcher are closed; make a new trainer or dispatcher to continue"
            )

    def all_gather(self, value: Any, *, in_world: bool = False) -> list[Any]:
        """Every rank's value, in the order of the ranks. A collective on the CPU.

        Args:
            value: a small Python object.
            in_world: of all processes of the world, whichever mesh they are in, instead of this mesh.
        """
        self.check_open()
        group = self._words_of_world if in_world else self._words
        if group is None or dist.get_world_size(group) == 1:
            return [value]
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, value, group=group)
        return gathered

    def meet(self) -> None:
        """Wait until every process of the world has come here. A collective on the CPU."""
        self.check_open()
        if self._words_of_world is not None:
            dist.all_reduce(torch.zeros(1), group=self._words_of_world)

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether any rank has it set. A collective on the CPU; every rank has as many flags."""
        self.check_open()
        agreed = torch.tensor(flags, dtype=torch.uint8)
        if self.ranks > 1:
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self._words)
        return [bool(flag) for flag in agreed.tolist()]

    def raise_together(self, error: Exception | None, *, in_world: bool = False) -> None:
        """Raise on every rank if any rank has an error, so that none is left waiting for the others.

        Args:
            error: of this rank.
            in_world: among all processes of the world, whichever mesh they are in, instead of this mesh.

        Raises:
            ValueError: some rank came with an error; says which ranks and what each said.
        """
        errors = self.all_gather(None if error is None else f"{type(error).__name__}: {error}", in_world=in_world)
        _raise_any(error, errors)


@contextmanager
def raised_together(timeout_s: float) -> Iterator[None]:
    """What is checked inside before there are groups is refused on every process. A collective of the world.

    Args:
        timeout_s: seconds after which it fails where a process is silent.

    Raises:
        ValueError: what some process came to is wrong; says which ranks and what each said.
    """
    error = None
    try:
        yield
    except (ValueError, TypeError, ImportError) as caught:
        error = caught
    said = None if error is None else f"{type(error).__name__}: {error}"
    _raise_any(error, gather_in_world(said, timeout_s))


def _raise_any(error: Exception | None, errors: Sequence[str | None]) -> None:
    """Raise if any rank has an error: this rank's own where all say the same, else what each said.

    Args:
        error: of this rank.
        errors: [ranks] what each rank says.
    """
    failed = {rank: message for rank, message in enumerate(errors) if message is not None}
    if not failed:
        return
    if len(set(failed.values())) == 1 and len(failed) == len(errors) and error is not None:
        raise error
    raise ValueError("; ".join(f"rank {rank}: {message}" for rank, message in failed.items())) from error


def in_world() -> bool:
    """Whether this process is one of a launch."""
    return dist.is_available() and dist.is_initialized()


def _groups_of(members: list[list[int]]) -> list[list[int]]:
    """The ranks of every mesh of the world, or of every node.

    Args:
        members: of every process, the ranks of its one.
    """
    return [list(ranks) for ranks in dict.fromkeys(map(tuple, members))]


def gather_in_world(value: Value, timeout_s: float) -> list[Value]:
    """Every process's value, in the order of their ranks in the world. A collective of the world, on the CPU.

    Args:
        value: a small Python object.
        timeout_s: seconds after which it fails where a process is silent.

    Raises:
        RuntimeError: this process cannot reach the others, or not in time.
    """
    if not in_world() or dist.get_world_size() == 1:
        return [value]
    gathered = [value] * dist.get_world_size()
    try:
        world = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s), group_desc="distca world")
        dist.all_gather_object(gathered, value, group=world)
        dist.destroy_process_group(world)
    except RuntimeError as error:
        raise unreachable(dist.get_rank(), error) from error
    return gathered


def _new_group(meshes: list[list[int]] | None, **options: Any) -> dist.ProcessGroup:
    """This process's group. A collective of the world: every process makes the groups of all meshes, in one order.

    Args:
        meshes: the ranks of every mesh, or of every node; None where all ranks of the world are one.
        options: of `torch.distributed.new_group`.
    """
    if meshes is None:
        own: dist.ProcessGroup = dist.new_group(**options)
    else:
        groups = [dist.new_group(ranks, **options) for ranks in meshes]
        own = next(group for ranks, group in zip(meshes, groups, strict=True) if dist.get_rank() in ranks)
    return own
