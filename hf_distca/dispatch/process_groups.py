"""Process groups for exchanges and for control messages between ranks, and their backend.

No group of the training framework is touched: its collectives and ours never wait in one queue.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hf_distca.checks.launch_rules import SHARED_GPU
from hf_distca.checks.refusal import RefusedError
from hf_distca.dispatch.control_levels import ControlLevels, objects_of_ranks
from hf_distca.dispatch.reports import (
    ERRORS_OF_INPUT,
    Report,
    raise_any,
    raised_together,
    report_of,
)
from hf_distca.dispatch.world import RankMesh, World, in_world, mesh_ranks, unreachable

EXCHANGE_CTAS = 8
"""Most thread blocks (CTAs) of an NCCL exchange; each takes room on an SM from attention.

NCCL's own limit is 32, a quarter of an H100's 132 SMs. In MagiAttention's measurements all-to-all
exchanges ran fully under attention that left 4 to 8 SMs free ("How to Ensure Kernels Actually
Overlap"); `make gpu` measures it.
"""
Value = TypeVar("Value")
Summary = TypeVar("Summary")


class Groups:
    """Groups of the ranks that train together: one for tensors, one for control messages.

    Creating the groups is a collective of the world. `connect_pods` connects pairs of ranks: no
    layer waits for a connection, and unreachable ranks fail there.

    Args:
        timeout_s: limit of every wait for other ranks; an exchange with a silent peer then fails.
        mesh: one of several meshes side by side that share no rank; None on every process for all
            ranks of the world.
    """

    def __init__(
        self, device: torch.device, timeout_s: float, mesh: RankMesh | None = None
    ) -> None:
        self.members = mesh_ranks(mesh)  # world ranks of the mesh
        self.closed = False
        world = (dist.get_rank(), dist.get_world_size()) if in_world() else (0, 1)
        self.rank = self.members.index(world[0])
        self.ranks = len(self.members)
        self.block = range(self.ranks)  # ranks of the smallest pod of this rank
        self.exchange: dist.ProcessGroup | None = None  # of all ranks of the mesh
        # Of the exchanges of core attention, by the number of ranks in the pod of this rank.
        self.pods: dict[int, dist.ProcessGroup | None] = {}
        self.node: dist.ProcessGroup | None = None  # of the exchanges inside this rank's node
        self._side_by_side = mesh is not None
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._control: dist.ProcessGroup | None = None
        self._control_of_world: dist.ProcessGroup | None = None
        self._levels: ControlLevels | None = None  # None with a single block
        self._world = World(timeout_s)
        self.waits = self._world.waits()  # for the ranks of all meshes
        if world[1] > 1:
            self._device = indexed(device)
            meshes = [self.members] if mesh is None else self._distinct_in_world(self.members)
            options: dict[str, Any] = {"backend": "gloo", "timeout": self._timeout}
            try:
                with self.waits.of("connections to other ranks"):
                    self._control = self._control_of_world = _new_group(
                        meshes, group_desc="distca control", **options
                    )
                    if len(meshes) > 1:
                        self._control_of_world = dist.new_group(
                            group_desc="distca control of the world", **options
                        )
                uuids = self.all_gather(device_uuid(self._device))
            except RuntimeError as error:
                self.waits.close()
                raise unreachable(self.rank, error) from error
            check_devices(exchange_backend(self._device), uuids)
            self.exchange = self._exchange_group(meshes, self.ranks, "distca exchange")
        self.pods[self.ranks] = self.exchange

    def connect_pods(self, pods: Sequence[range]) -> None:
        """Make a group for each pod that this rank may be in. A collective of the world.

        All pairs of ranks of the smallest pod are connected. Pairs of larger pods are few that
        exchange, and NCCL connects them when they do.

        Args:
            pods: ranks of the mesh in each pod, from the smallest pod to the one of all ranks; as
                many on every rank.
        """
        self.block = pods[0]
        if len(pods) > 1:
            self._levels = self._control_levels()
        for ranks in pods[:-1]:
            members = self.members[ranks.start : ranks.stop]
            lists = self._distinct_in_world(members)
            group = self._exchange_group(lists, len(ranks), "distca pod")
            if (earlier := self.pods.get(len(ranks))) is not None:  # of the same ranks
                dist.destroy_process_group(earlier)
            self.pods[len(ranks)] = group
        self._connect_pairs(self.pods[len(self.block)])

    def _control_levels(self) -> ControlLevels:
        """Return the control groups of blocks. A collective of the world."""
        options: dict[str, Any] = {"backend": "gloo", "timeout": self._timeout}
        blocks = self._distinct_in_world(self.members[self.block.start : self.block.stop])
        of_block = _new_group(blocks, group_desc="distca control of the pod", **options)
        own = set(self.members)
        firsts = self._distinct_in_world([block[0] for block in blocks if block[0] in own])
        of_firsts = _new_group(firsts, group_desc="distca control of first ranks", **options)
        assert of_block is not None
        return ControlLevels(of_block, of_firsts)

    def connect_nodes(self, nodes: Sequence[int] | None) -> None:
        """Connect the ranks of each node by a group of their own. A collective of the world.

        Args:
            nodes: [ranks] node of each rank of the mesh; None if the mesh forwards no rows.
        """
        if nodes is None and not self._side_by_side:
            return
        node_of_rank = nodes or range(self.ranks)
        node_members = [
            member
            for member, node in zip(self.members, node_of_rank, strict=True)
            if node == node_of_rank[self.rank]
        ]
        members_of_nodes = self._distinct_in_world(node_members)
        if any(len(members) > 1 for members in members_of_nodes):
            self.node = self._exchange_group(members_of_nodes, len(node_members), "distca node")
            self._connect_pairs(self.node)

    def _distinct_in_world(self, members: list[int]) -> list[list[int]]:
        """Return the distinct lists of ranks of all processes. A collective of the world."""
        if self._control_of_world is None:
            lists = self._world.all_gather(tuple(members), self.waits)
        else:
            lists = self.all_gather(tuple(members), in_world=True)
        return [list(ranks) for ranks in dict.fromkeys(lists)]

    def _exchange_group(
        self, lists: list[list[int]], ranks: int, name: str
    ) -> dist.ProcessGroup | None:
        """Return a group for exchanges; None for a single rank."""
        backend = exchange_backend(self._device)
        options: dict[str, Any] = {"backend": backend, "timeout": self._timeout, "group_desc": name}
        options["device_id"] = self._device if backend == dist.Backend.NCCL else None
        with self._connecting():
            group = _new_group(lists, pg_options=exchange_options(backend), **options)
        if group is not None and ranks == 1:
            dist.destroy_process_group(group)
            return None
        return group

    def _connect_pairs(self, group: dist.ProcessGroup | None) -> None:
        """Connect all pairs of ranks of a group."""
        if group is None:
            return
        ranks = dist.get_world_size(group)
        sent, received = torch.zeros((2, ranks), dtype=torch.uint8, device=self._device)
        with self._connecting():
            # NCCL connects a pair, and takes memory for the pair, at the first send.
            dist.all_to_all_single(received, sent, [1] * ranks, [1] * ranks, group=group)
            received.cpu()  # wait for the arrival

    @contextmanager
    def _connecting(self) -> Iterator[None]:
        """Name the wait for connections, and the rank and backend in its error."""
        backend = exchange_backend(self._device)
        try:
            with self.waits.of(f"connections to other ranks over {backend}"):
                yield
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} cannot exchange rows over {backend}: {error}"
            ) from error

    def close(self) -> None:
        """End the groups with their threads and connections, unless they are closed.

        A collective of the world.
        """
        if self.closed:
            return
        if in_world():
            with self.waits.of("work of the device before the groups close"):
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
            self.meet("all ranks to close their groups")  # no rank has rows under way
            groups = (
                *(self.node, *self.pods.values(), self._control, self._control_of_world),
                *(() if self._levels is None else self._levels),
            )
            for group in dict.fromkeys(groups):
                if group is not None:
                    dist.destroy_process_group(group)
        self.exchange = self.node = self._control = self._control_of_world = self._levels = None
        self.pods = {}
        self.closed = True
        self.waits.close()

    def check_open(self) -> None:
        """Raise if the groups are closed: torch takes a group of None for the world."""
        if self.closed:
            raise RuntimeError(
                "the process groups of this dispatcher are closed; make a new trainer or "
                "dispatcher to continue"
            )

    def all_gather(
        self, value: Any, *, in_world: bool = False, contents: str = "control messages"
    ) -> list[Any]:
        """Return the small Python object of every rank of the mesh, or of the world, in order.

        A collective.

        Args:
            contents: name of the objects in messages about the wait for them.
        """
        self.check_open()
        group = self._control_of_world if in_world else self._control
        if group is None or dist.get_world_size(group) == 1:
            return [value]
        with self.waits.of(f"{contents} of other ranks"):
            if self._levels is None or group is not self._control:
                return objects_of_ranks(value, group)
            return list(chain(*self._levels.of_blocks(objects_of_ranks(value, self._levels.block))))

    def all_gather_in_pod(
        self,
        pod: range,
        make: Callable[[], Value],
        summarize: Callable[[list[Value]], Summary],
        *,
        contents: str,
    ) -> "OfPod[Value, Summary]":
        """Gather the values of a pod's ranks, and a summary of every pod. A collective of the mesh.

        An error of `make` or `summarize` is raised on every rank, as `raise_together` does.

        Args:
            pod: `block`, or all ranks of the mesh; alike on every rank.
            make: returns the value of this rank.
            summarize: returns the summary of a pod from the values of its ranks.
            contents: name of the values in messages about the wait for them.
        """
        self.check_open()
        error: Exception | None = None
        value: Any = None
        try:
            value = make()
        except ERRORS_OF_INPUT as caught:
            error = caught
        levels = self._levels if len(pod) < self.ranks else None
        own = report_of(error), value
        gathered = self.all_gather(own, contents=contents) if levels is None else []
        if levels is not None:
            with self.waits.of(f"{contents} of other ranks"):
                gathered = objects_of_ranks(own, levels.block)
        reports, values = map(list, zip(*gathered, strict=True))
        summary: Any = None
        if not any(reports):
            try:
                summary = summarize(values)
            except ERRORS_OF_INPUT as caught:
                error = caught
                reports = [report_of(error)] * len(pod)
        of_pods = [(reports, summary)]
        if levels is not None:
            with self.waits.of(f"{contents} of other pods"):
                of_pods = levels.of_blocks((reports, summary))
        raise_any(error, list(chain(*(reports for reports, _ in of_pods))))
        return OfPod(values, summary, [summary for _, summary in of_pods])

    def broadcast_checked(self, make: Callable[[], Value], *, contents: str) -> Value:
        """Return on every rank what `make` returns on rank 0. A collective on the CPU.

        An error of `make` is raised on every rank, as `raise_together` does.

        Args:
            contents: name of the object in messages about the wait for it.
        """
        self.check_open()
        if self._control is None or self.ranks == 1:
            return make()
        error: Exception | None = None
        sent: list[Any] = [None]
        if self.rank == 0:
            try:
                sent = [make()]
            except ERRORS_OF_INPUT as caught:
                error = caught
                sent = [report_of(error)]
        with self.waits.of(f"{contents} from rank 0"):
            dist.broadcast_object_list(
                sent, group=self._control, group_src=0, device=torch.device("cpu")
            )
        value: Value | Report = sent[0]
        if isinstance(value, Report):
            raise error or (RefusedError if value.is_sentence else ValueError)(value.message)
        return value

    def summed(self, values: Tensor, name: str) -> Tensor:
        """Return the sum of a tensor over the ranks. A collective of the ranks.

        Args:
            values: of the same shape on every rank.
            name: what the ranks wait for.
        """
        self.check_open()
        total = values.clone()
        if self.ranks > 1:
            with self.waits.of(name):
                dist.all_reduce(total, group=self.exchange)
        return total

    def meet(self, name: str = "all ranks to come here") -> None:
        """Wait for every process of the world. A collective on the CPU."""
        with self.waits.of(name):
            self.all_gather(None, in_world=True)

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether any rank has set the flag. A collective on the CPU."""
        self.check_open()
        agreed = torch.tensor(flags, dtype=torch.uint8)
        if self.ranks > 1:
            with self.waits.of("answers of other ranks"):
                if self._levels is None:
                    dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self._control)
                else:
                    self._levels.maximum(agreed)
        return [bool(flag) for flag in agreed.tolist()]

    def raise_together(self, error: Exception | None, *, in_world: bool = False) -> None:
        """Raise ValueError on every rank, with all errors, if any rank has an error.

        The ranks are those of the mesh, or of the world.
        """
        raise_any(error, self.all_gather(report_of(error), in_world=in_world, contents="checks"))

    def exchange_rows(
        self, rows: Tensor, sent: list[int], received: list[int], name: str
    ) -> Tensor:
        """Return the rows that this rank receives, by the rank that they come from.

        A collective of a pod.

        Args:
            rows: rows [n, ...] that this rank sends, by the rank that they go to.
            sent: [ranks of the pod] rows for each rank.
            received: [ranks of the pod] rows from each rank.
            name: what the ranks wait for.
        """
        self.check_open()
        arriving = rows.new_empty((sum(received), *rows.shape[1:]))
        bytes_sent, bytes_received = (_as_bytes(tensor) for tensor in (rows, arriving))
        with self.waits.of(name):
            group = self.pods[len(sent)]
            dist.all_to_all_single(bytes_received, bytes_sent, received, sent, group=group)
        return arriving

    def raised_together(self, *, in_world: bool = False) -> AbstractContextManager[None]:
        """Raise an error inside the context as `raise_together` does."""
        return raised_together(partial(self.all_gather, in_world=in_world, contents="checks"))


def _as_bytes(rows: Tensor) -> Tensor:
    """Return a view [rows, bytes of a row]: backends do not know every dtype."""
    return rows.reshape(len(rows), rows.shape[1:].numel()).view(torch.uint8)


@dataclass(frozen=True)
class OfPod(Generic[Value, Summary]):
    """Values of the ranks of a pod, and summaries of pods.

    Attributes:
        values: of each rank of the pod.
        own: summary of this pod.
        of_pods: summary of each pod.
    """

    values: list[Value]
    own: Summary
    of_pods: list[Summary]


def _new_group(lists: list[list[int]], **options: Any) -> dist.ProcessGroup | None:
    """Create a group of each list of ranks, and return the group of this process, if it is in one.

    Every process creates them in one order.
    """
    rank = dist.get_rank()
    groups: list[dist.ProcessGroup] = [dist.new_group(ranks, **options) for ranks in lists]
    return next((group for group, ranks in zip(groups, lists, strict=True) if rank in ranks), None)


def exchange_backend(device: torch.device) -> str:
    """Return the default group's backend for a device, or gloo.

    Over gloo CUDA tensors go through host memory.
    """
    default = dist.BackendConfig(dist.Backend(dist.get_backend_config()))
    return str(default.get_device_backend_map().get(device.type, "gloo"))


def exchange_options(backend: str, ctas: int = EXCHANGE_CTAS) -> Any:
    """Return options with which an NCCL exchange starts while attention fills the GPU.

    None for other backends.
    """
    if backend != dist.Backend.NCCL:
        return None
    # A stream of high priority gets the next free SM, before the waiting blocks of an attention
    # kernel. All blocks of a cluster would need room at once.
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    for name, value in (("max_ctas", ctas), ("cga_cluster_size", 0)):
        if hasattr(options.config, name):  # not in builds of torch with an NCCL before 2.17
            setattr(options.config, name, value)
    return options


def indexed(device: torch.device) -> torch.device:
    """Return the device with an index: the current device for "cuda"."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if device == torch.device("cuda")
        else device
    )


def device_uuid(device: torch.device) -> str | None:
    """Return a GPU's unique id across hosts; None on the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def check_devices(backend: str, uuids: Sequence[str | None]) -> None:
    """Raise ValueError if ranks share a GPU over NCCL, which would refuse or hang.

    Args:
        uuids: [ranks] id of each rank's GPU.
    """
    ranks_by_uuid: dict[str | None, list[int]] = {}
    for rank, uuid in enumerate(uuids):
        ranks_by_uuid.setdefault(uuid, []).append(rank)
    shared = [f"ranks {ranks} on {uuid}" for uuid, ranks in ranks_by_uuid.items() if len(ranks) > 1]
    if shared and backend == dist.Backend.NCCL:
        raise SHARED_GPU.error(shared="; ".join(shared))
