"""A plan bound to one rank: routes as index tensors on the device, and schedules, ready for every layer."""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, partial
from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_distca.dispatch.checkpoints import KeptResults
from hf_distca.dispatch.exchange import Exchange, Traffic
from hf_distca.dispatch.recorder import Recorder
from hf_distca.dispatch.remote import RemotePlan, ServerRows
from hf_distca.dispatch.rows import IndexBuffer, row_index
from hf_distca.dispatch.sums import RowSum
from hf_distca.kernels import Kernel, TaskShapes
from hf_distca.plan import AttentionKind, MicroBatchPlan, NanoBatch, Plan
from hf_distca.planner.cost import pairs
from hf_distca.planner.routes import Messages, Stage, TaskGroup, make_routes, nothing_moves
from hf_distca.planner.schedule import Group, Kept, Schedule, Tasks, Turn, make_schedule

IntArray = NDArray[np.int64]


class BoundGroup:
    """Tasks of one kernel call, as index tensors.

    Attributes:
        q_rows: rows among local or received queries.
        k_rows: rows among local or received keys.
        pairs: query-key pairs of the tasks.
    """

    def __init__(self, group: TaskGroup, buffer: IndexBuffer) -> None:
        self.shapes = TaskShapes.placed(group.q_lens.tolist(), group.k_lens.tolist(), buffer.place)
        self.q_rows = row_index(group.q_rows, buffer)
        self.k_rows = row_index(group.k_rows, buffer)
        self.pairs = group.pairs


class LocalTasks:
    """A rank's tasks for a kind of attention where nothing moves: all rows in one kernel call.

    Args:
        lengths: rows of each document, or chunk, in the order of the rank's rows.

    Attributes:
        pairs: query-key pairs of the tasks.
    """

    def __init__(self, lengths: list[int], window: int | None, buffer: IndexBuffer) -> None:
        self.lengths = lengths
        self.shapes = TaskShapes.placed(lengths, lengths, buffer.place)
        self.pairs = sum(pairs(0, length, window) for length in lengths)


class BoundMessages:
    """Rows of one kind that this rank exchanges with other ranks, as index tensors.

    Args:
        passed_on: counts of rows that are then forwarded inside nodes; None if no rank forwards rows.

    Attributes:
        rows: local rows to send, ordered by receiving rank.
    """

    def __init__(self, messages: Messages, ranks: int, buffer: IndexBuffer, passed_on: Traffic | None = None) -> None:
        counts = messages.send_counts[:ranks]
        self.rows = row_index(messages.send_rows[: counts.sum()], buffer)
        received = messages.recv_counts[:ranks].tolist()
        # If one stage forwards rows, every stage exchanges rows: all stages share the same memory.
        crossing = messages.crossing or passed_on is not None
        self.traffic = Traffic(counts.tolist(), received, crossing, passed_on=passed_on)
        self.way_back = self.traffic.reversed()


class BoundStage:
    """K/V rows of one stage of the exchange, and the sums of their gradients.

    Args:
        rows: rows of the nano-batch that the rank holds.
        peers: ranks of this rank's node, this rank included; None if no rank forwards rows in any stage.

    Attributes:
        passed_on: received rows to forward inside the node, ordered by receiving rank.
        passed_back: sum that adds dK and dV of forwarded rows to the gateway's copies.
        received_sums: sum of dK and dV of received rows over the groups of tasks that read them.
        key_sums: sum that adds returned dK and dV of local rows to earlier stages' totals; None for a single stage.
    """

    def __init__(
        self,
        stage: Stage,
        ranks: int,
        rows: int,
        *,
        divided: bool,
        peers: IntArray | None,
        buffer: IndexBuffer,
    ) -> None:
        hop = stage.passed_on
        passed_on = None
        if peers is not None:
            sent, came = hop.send_counts[peers].tolist(), hop.recv_counts[peers].tolist()
            passed_on = Traffic(sent, came, hop.crossing and len(peers) > 1)
        self.keys = BoundMessages(stage.keys, ranks, buffer, passed_on)
        self.passed_on = row_index(hop.send_rows, buffer)
        self.passed_back = _onto(sum(self.keys.traffic.received), hop.send_rows, buffer)
        groups: dict[Tasks, TaskGroup] = {"visiting": stage.visiting, "prefix": stage.prefix}
        if divided:
            groups["visiting prefix"] = stage.visiting_prefix
        self.tasks = tuple(groups)
        received = sum(self.keys.traffic.received) + int(hop.recv_counts.sum())
        sources = [group.k_rows for group in groups.values()]
        self.received_sums = RowSum(sources, received, buffer, in_place=False)
        self.key_sums = _onto(rows, _rows_of_ranks(stage.keys, ranks), buffer) if divided else None


def _onto(rows: int, targets: IntArray, buffer: IndexBuffer) -> RowSum:
    """Return a sum that scatter-adds `targets` onto a dense [rows] base."""
    return RowSum([np.arange(rows), targets], rows, buffer)


def _rows_of_ranks(messages: Messages, ranks: int) -> IntArray:
    """Return the local rows that go to ranks, without the rows that go to servers."""
    return messages.send_rows[: messages.send_counts[:ranks].sum()]


class BoundRoutes:
    """Routes of one rank for one kind of attention, see `hf_distca.planner.routes.Routes`.

    With several stages, gradients of local rows are added to totals of all local rows. The sources of `query_sums` and
    `key_sums` then begin with such a total, which replaces the parts that are already in it.

    Args:
        buffer: to be sent before the index tensors are used.

    Attributes:
        groups: tasks of each kernel call; calls without tasks are missing.
        passes_on: whether any rank forwards K/V rows inside its node.
        merges: whether results of several calls are merged, since a query's keys come in several stages.
        servers: dedicated servers with tasks in the plan; the same on every rank.
        own_in_backward: local tasks as the backward computes them.
        query_sums: sum of dQ of local rows over own_in_backward, prefix, returned rows and servers.
        key_sums: sum of dK and dV of local rows over own_in_backward, returned rows and servers.
        own_key_sums: with several stages, sums that add dK and dV of local tasks to the totals.
        backward: phases of the backward, by what the forward keeps.
    """

    def __init__(self, plan: Plan, rank: int, turn: Turn, buffer: IndexBuffer) -> None:
        routes, ranks = make_routes(plan, rank), plan.layout.ranks
        divided = len(routes.stages) > 1
        self.merges = divided and plan.window is None
        self.queries = BoundMessages(routes.queries, ranks, buffer)
        peers = None
        if plan.nodes is not None and any(stage.passed_on.crossing for stage in routes.stages):
            nodes = np.asarray(plan.nodes[:ranks])
            peers = np.flatnonzero(nodes == nodes[rank])
        self.passes_on = peers is not None
        self._peers, self._ranks = peers, ranks
        self.stages = tuple(
            BoundStage(stage, ranks, routes.local_rows, divided=divided, peers=peers, buffer=buffer)
            for stage in routes.stages
        )
        busy = np.unique(plan.tasks["worker"])
        self.servers = tuple(ServerRows(int(worker) - ranks, routes, ranks, buffer) for worker in busy[busy >= ranks])
        groups: dict[Group, TaskGroup] = {}
        for number, stage in enumerate(routes.stages):
            groups["visiting", number] = stage.visiting
            groups["visiting prefix", number] = stage.visiting_prefix
            groups["prefix", number] = stage.prefix
        groups = {group: tasks for group, tasks in groups.items() if len(tasks.q_lens)}
        own: dict[Tasks, TaskGroup] = {"own": routes.own}
        self.own_in_backward: tuple[Tasks, ...] = ("own",)
        if turn == "alone" and groups:
            self.own_in_backward = ("own 1/2", "own 2/2")
            # Later rows first: they see more keys, so that their memory use peaks before the sums exist.
            earlier, later = routes.own.halves(plan.window)
            halves = (later, earlier) if len(later.q_lens) else (earlier, later)
            own.update(zip(self.own_in_backward, halves, strict=True))
        groups |= {(tasks, 0): group for tasks, group in own.items() if len(group.q_lens)}
        self.groups = {name: BoundGroup(group, buffer) for name, group in groups.items()}

        # Rows sent to ranks come back first, in the same order; rows sent to servers follow. Totals have all rows.
        so_far = [np.arange(routes.local_rows)]
        first_keys = routes.stages[0].keys
        query_rows, key_rows = _rows_of_ranks(routes.queries, ranks), _rows_of_ranks(first_keys, ranks)
        own_parts = [own[tasks] for tasks in self.own_in_backward]
        self.own_key_sums: dict[Tasks, RowSum] = {
            tasks: _onto(routes.local_rows, own[tasks].k_rows, buffer) for tasks in self.own_in_backward if divided
        }
        dq_so_far = so_far if divided else [*(group.q_rows for group in own_parts), routes.stages[0].prefix.q_rows]
        dk_so_far = so_far if divided else [*(group.k_rows for group in own_parts), key_rows]
        self.query_sums = RowSum(
            [*dq_so_far, query_rows, routes.queries.send_rows[len(query_rows) :]], routes.local_rows, buffer
        )
        self.key_sums = RowSum([*dk_so_far, first_keys.send_rows[len(key_rows) :]], routes.local_rows, buffer)
        schedule = partial(
            make_schedule,
            turn=turn,
            groups=frozenset(self.groups),
            windowed=plan.window is not None,
            stages=len(routes.stages),
            passes_on=self.passes_on,
            servers=bool(self.servers),
        )
        self.forward = schedule("forward")
        self.backward: dict[Kept, Schedule] = {kept: schedule("backward", kept=kept) for kept in get_args(Kept)}

    def of_ranks(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Spread numbers of the node's ranks over all ranks: [ranks], 0 outside this rank's node."""
        found = np.zeros(self._ranks, np.int64)
        found[self._peers] = numbers
        return tuple(found.tolist())

    @property
    def divided(self) -> bool:
        """Whether K/V rows come in several stages."""
        return len(self.stages) > 1


class BoundNanoBatch:
    """Routes of one nano-batch, one set for every kind of attention of the model.

    Args:
        local: kinds of attention for which nothing moves in any nano-batch.

    Attributes:
        index: 0 or 1.
        rows: rows of the nano-batch that this rank holds.
        local: tasks of kinds for which nothing moves.
        routes: routes of all other kinds.
    """

    def __init__(
        self,
        index: int,
        nano_batch: NanoBatch,
        rank: int,
        turn: Turn,
        local: Set[AttentionKind],
        buffer: IndexBuffer,
    ) -> None:
        self.index = index
        self.rows = int(nano_batch.layout.tokens[rank])
        self._layout, self._mine = nano_batch.layout, nano_batch.layout.of_rank(rank)
        self.local: dict[AttentionKind, LocalTasks] = {}
        self.routes: dict[AttentionKind, BoundRoutes] = {}
        for kind, plan in nano_batch.plans.items():
            if kind in local:
                self.local[kind] = LocalTasks(plan.layout.of_rank(rank)["stop"].tolist(), plan.window, buffer)
            else:
                self.routes[kind] = BoundRoutes(plan, rank, turn, buffer)
        self._plans, self._rank, self._buffer = nano_batch.plans, rank, buffer.another()
        self._repairs: dict[tuple[AttentionKind, frozenset[int]], BoundRoutes] = {}

    @property
    def has_cuts(self) -> bool:
        """Whether any document is cut between ranks."""
        return self._layout.has_cuts

    @property
    def document_rows(self) -> tuple[int, ...]:
        """Lengths of the documents that this rank holds rows of, in the order of its rows."""
        return tuple(self._layout.lengths[self._mine["document"]].tolist())

    @cached_property
    def positions(self) -> Tensor:
        """[rows] position in its document of each row that this rank holds."""
        ranges = [np.arange(start, stop) for _, start, stop, *_ in self._mine.tolist()]
        return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *ranges])).to(self._buffer.device)

    @property
    def last_position(self) -> int:
        """Largest position; -1 without rows."""
        return int(self._mine["stop"].max(initial=0)) - 1

    def repair(self, kind: AttentionKind, lost: frozenset[int], remote: RemotePlan) -> BoundRoutes:
        """Return the routes by which the ranks compute the tasks of lost servers."""
        if (kind, lost) not in self._repairs:
            rest = remote.repair(self._plans[kind], kind, lost)
            buffer = self._buffer.another()
            self._repairs[kind, lost] = BoundRoutes(rest, self._rank, "alone", buffer)
            buffer.send()
        return self._repairs[kind, lost]


@dataclass
class Ran:
    """Counts of what a model's layers did in a planned step, recomputations included.

    Attributes:
        layers: decoder layers prepared by `plan_layers`.
        layers_in_turns: layers that ran their nano-batches in turns.
        mixing: calls of modules that mix along the row without attention, each for all documents.
    """

    attentions: int = 0
    layers: int = 0
    layers_in_turns: int = 0
    mixing: int = 0


def _no_pause() -> None:
    """Do nothing at a pause: no other nano-batch is to run."""


class BoundPlan:
    """A planned micro-batch as every layer gets it, under the keyword PLAN_KEY.

    This is a plain class on purpose: FSDP2 copies dataclasses, dicts and named tuples among a module's arguments.
    Accelerate moves anything that has a `to`.

    Attributes:
        nano_batches: nano-batches whose rows the layer is called with.
        local: tasks of all these rows, by kind, for kinds where nothing moves; the same kinds on every rank.
        pause: called between the start of an exchange and the wait for it; lets the other nano-batch run.
        remote: the plan at its dedicated servers; None without servers.
        keep_received: keep received Q, K and V rows for the backward instead of receiving them again.
        keep_core_attention: keep O and LSE of checkpointed layers instead of computing them again.
        kept_results: kept O and LSE, by attention module and nano-batch.

    Args:
        in_one_go: see `IndexBuffer`.
    """

    def __init__(
        self,
        plan: MicroBatchPlan,
        rank: int,
        device: torch.device,
        exchange: Exchange,
        kernel: Kernel,
        recorder: Recorder,
        *,
        keep_received: bool,
        keep_core_attention: bool = True,
        remote: RemotePlan | None = None,
        in_one_go: bool | None = None,
    ) -> None:
        self.plan = plan
        self.device = device
        turns: tuple[Turn, ...] = ("alone",) if len(plan.nano_batches) == 1 else ("first", "second")
        buffer = IndexBuffer(device, in_one_go)
        local = {
            kind for kind in plan.nano_batches[0].plans if all(nothing_moves(n.plans[kind]) for n in plan.nano_batches)
        }
        self.nano_batches = tuple(
            BoundNanoBatch(index, nano, rank, turn, local, buffer)
            for index, (nano, turn) in enumerate(zip(plan.nano_batches, turns, strict=True))
        )
        self.local = self.nano_batches[0].local
        if len(self.nano_batches) > 1:
            self.local = {
                kind: LocalTasks(
                    [n for nano in self.nano_batches for n in nano.local[kind].lengths], kind.window, buffer
                )
                for kind in self.local
            }
        buffer.send()
        self.pause: Callable[[], None] = _no_pause
        self.exchange = exchange
        self.kernel = kernel
        self.recorder = recorder
        self.remote = remote
        self.keep_received = keep_received
        self.keep_core_attention = keep_core_attention
        self.kept_results = KeptResults()
        self.ran = Ran()

    @property
    def rows(self) -> int:
        """Rows that a layer is called with on this rank."""
        return sum(nano.rows for nano in self.nano_batches)

    @property
    def document_rows(self) -> tuple[int, ...]:
        """Rows of each document that a layer is called with on this rank, in row order.

        Raises:
            ValueError: on every rank, if any document is cut between ranks.
        """
        if any(nano.has_cuts for nano in self.nano_batches):
            raise ValueError(
                "a layer mixes the rows of a document other than by attention, but the plan cuts documents between "
                "ranks; plan with document_layout='whole'"
            )
        return tuple(rows for nano in self.nano_batches for rows in nano.document_rows)

    @property
    def positions(self) -> Tensor:
        """[rows] position in its document of each row that a layer is called with on this rank."""
        return torch.cat([nano.positions for nano in self.nano_batches])

    @property
    def last_position(self) -> int:
        """Largest position; -1 without rows."""
        return max(nano.last_position for nano in self.nano_batches)

    @property
    def stages(self) -> int:
        """Number of stages of K/V rows, the most of any nano-batch and kind of attention."""
        return max((len(routes.stages) for nano in self.nano_batches for routes in nano.routes.values()), default=1)

    @property
    def exchanges(self) -> bool:
        """Whether ranks exchange rows in any layer; the same on every rank."""
        return any(nano.routes for nano in self.nano_batches)

    @property
    def is_part(self) -> bool:
        """Whether the plan covers one nano-batch of two."""
        return len(self.nano_batches) < len(self.plan.nano_batches)

    def of_nano_batch(self, index: int, pause: Callable[[], None]) -> "BoundPlan":
        """Return the plan for a layer that runs on the rows of one nano-batch.

        Args:
            pause: lets the other nano-batch run.
        """
        part = BoundPlan.__new__(BoundPlan)  # copy() is several times slower; every layer needs two parts
        nano = self.nano_batches[index]
        part.__dict__ = {**self.__dict__, "nano_batches": (nano,), "local": nano.local, "pause": pause}
        return part
