"""A plan bound to one rank: routes as index tensors on the device, and schedules, ready for every layer."""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from hf_distca.dispatch.checkpoints import KeptResults
from hf_distca.dispatch.cuts import BoundCuts
from hf_distca.dispatch.exchange import Exchange, Route
from hf_distca.dispatch.recorder import NO_ROWS, Recorder, Rows
from hf_distca.dispatch.remote import RemotePlan, ServerRows
from hf_distca.dispatch.rows import IndexBuffer, IntArray, RowSum, row_index
from hf_distca.kernels import Kernel, TaskShapes
from hf_distca.plan import AttentionKind, MicroBatchPlan, NanoBatch, Plan
from hf_distca.planner.cost import pairs
from hf_distca.planner.routes import ExchangedRows, Stage, TaskGroup, make_routes, nothing_moves
from hf_distca.planner.schedule import (
    Group,
    Kept,
    Location,
    Schedule,
    TaskName,
    Transfer,
    Turn,
    make_schedule,
    stage_slots,
)


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


class BoundStage:
    """K/V rows of one stage of the exchange, and the sums of their gradients.

    Args:
        rows: rows of the nano-batch that the rank holds.
        peers: ranks of this rank's node, this rank included; None if no rank forwards rows in any stage.

    Attributes:
        forwarded_sums: sum that adds dK and dV of forwarded rows to the gateway's copies.
        received_sums: sum of dK and dV of received rows over the groups of tasks that read the rows.
        key_sums: sum that adds returned dK and dV of local rows to earlier stages' totals; None for a single stage.
    """

    def __init__(
        self, stage: Stage, ranks: int, rows: int, *, divided: bool, peers: IntArray | None, buffer: IndexBuffer
    ) -> None:
        hop = stage.forwarded
        forwarded = None
        if peers is not None:
            sent, came = hop.send_counts[peers].tolist(), hop.recv_counts[peers].tolist()
            forwarded = Route(sent, came, hop.crossing and len(peers) > 1, row_index(hop.send_rows, buffer))
        self.keys = _bound_route(stage.keys, ranks, buffer, forwarded)
        received = sum(self.keys.received)
        self.forwarded_sums = _onto(received, hop.send_rows, buffer)
        read = {"remote-query": stage.remote_query.k_rows, "remote-KV": stage.remote_kv.k_rows}
        if divided:
            read["remote-query prefix"] = stage.remote_query_prefix.k_rows
        self.received_sums = RowSum(read, received + int(hop.recv_counts.sum()), buffer, in_place=False)
        self.key_sums = _onto(rows, _rows_of_ranks(stage.keys, ranks), buffer) if divided else None


def _bound_route(messages: ExchangedRows, ranks: int, buffer: IndexBuffer, forwarded: Route | None = None) -> Route:
    """Return the route of rows between ranks, without the rows of servers."""
    # If one stage forwards rows, every stage exchanges rows: all stages share the same memory.
    crossing = messages.crossing or forwarded is not None
    rows = row_index(_rows_of_ranks(messages, ranks), buffer)
    return Route(
        messages.send_counts[:ranks].tolist(), messages.recv_counts[:ranks].tolist(), crossing, rows, forwarded
    )


def _onto(rows: int, targets: IntArray, buffer: IndexBuffer) -> RowSum:
    """Return a sum that scatter-adds `targets` onto a dense [rows] base."""
    return RowSum({"present": np.arange(rows), "added": targets}, rows, buffer)


def _rows_of_ranks(messages: ExchangedRows, ranks: int) -> IntArray:
    """Return the local rows that go to ranks, without the rows that go to servers."""
    return messages.send_rows[: messages.send_counts[:ranks].sum()]


class BoundRoutes:
    """Routes of one rank for one kind of attention, see `hf_distca.planner.routes.Routes`.

    With several stages, gradients of local rows are added to totals of all local rows. Such a total then replaces the
    sources of `query_sums` and `key_sums` that are already in it.

    Args:
        buffer: to be sent before the index tensors are used.

    Attributes:
        rows: rows at each place: local rows, and received queries.
        groups: tasks of each kernel call; calls without tasks are missing.
        divided: whether K/V rows come in several stages.
        forwards: whether any rank forwards K/V rows inside its node.
        slots: memory slot of each stage's K/V rows.
        merges: whether results of several calls are merged, since a query's keys come in several stages.
        servers: dedicated servers with tasks in the plan; the same on every rank.
        query_sums: sum of dQ of local rows.
        key_sums: sum of dK and dV of local rows.
        local_key_sums: with several stages, sums that add dK and dV of local tasks to the totals.
        backward: phases of the backward, by what the forward keeps.
    """

    def __init__(self, plan: Plan, rank: int, turn: Turn, buffer: IndexBuffer) -> None:
        routes, ranks = make_routes(plan, rank), plan.layout.ranks
        # 1. Rows that travel between ranks, and to servers.
        self.divided = len(routes.stages) > 1
        self.merges = self.divided and plan.window is None
        self._ranks = ranks
        self._peers: IntArray | None = None
        if plan.nodes is not None and any(stage.forwarded.crossing for stage in routes.stages):
            self._peers = np.flatnonzero(np.equal(plan.nodes[:ranks], plan.nodes[rank]))
        self.forwards = self._peers is not None
        self.queries = _bound_route(routes.queries, ranks, buffer)
        self.rows: dict[Location, int] = {"local": routes.local_rows, "received": sum(self.queries.received)}
        self.stages = tuple(
            BoundStage(stage, ranks, routes.local_rows, divided=self.divided, peers=self._peers, buffer=buffer)
            for stage in routes.stages
        )
        self.slots = stage_slots(len(self.stages), forwards=self.forwards)
        busy = np.unique(plan.tasks["worker"])
        self.servers = tuple(ServerRows(int(worker) - ranks, routes, ranks, buffer) for worker in busy[busy >= ranks])

        # 2. Tasks of each kernel call.
        groups: dict[Group, TaskGroup] = {}
        for number, stage in enumerate(routes.stages):
            groups["remote-query", number] = stage.remote_query
            groups["remote-query prefix", number] = stage.remote_query_prefix
            groups["remote-KV", number] = stage.remote_kv
        local: dict[TaskName, TaskGroup] = {"local": routes.local}
        if turn == "alone" and any(len(tasks.q_lens) for tasks in groups.values()):
            # The backward's local tasks hide two exchanges. Later rows first: they see more keys, so that their memory
            # use peaks before the sums exist.
            earlier, later = routes.local.halves(plan.window)
            halves = (later, earlier) if len(later.q_lens) else (earlier, later)
            local = {"local 1/2": halves[0], "local 2/2": halves[1]}
        groups["local", 0] = routes.local
        for tasks, group in local.items():
            groups[tasks, 0] = group
        self.groups = {name: BoundGroup(group, buffer) for name, group in groups.items() if len(group.q_lens)}

        # 3. Sources of gradients of local rows, in order. Rows that went to ranks come first among those that return.
        keys = routes.stages[0].keys
        all_rows = {"total": np.arange(routes.local_rows)}
        dq_rows, dk_rows = dict(all_rows), all_rows
        if not self.divided:
            dq_rows = {
                **{tasks: group.q_rows for tasks, group in local.items()},
                "remote-KV": routes.stages[0].remote_kv.q_rows,
            }
            dk_rows = {**{tasks: group.k_rows for tasks, group in local.items()}, "ranks": _rows_of_ranks(keys, ranks)}
        dq_rows["ranks"] = _rows_of_ranks(routes.queries, ranks)
        if self.servers:
            dq_rows["servers"], dk_rows["servers"] = (
                messages.send_rows[len(_rows_of_ranks(messages, ranks)) :] for messages in (routes.queries, keys)
            )
        self.query_sums = RowSum(dq_rows, routes.local_rows, buffer)
        self.key_sums = RowSum(dk_rows, routes.local_rows, buffer)
        self.local_key_sums: dict[TaskName, RowSum] = {}
        if self.divided:
            self.local_key_sums = {
                tasks: _onto(routes.local_rows, group.k_rows, buffer) for tasks, group in local.items()
            }

        # 4. The order of all that.
        schedule = partial(
            make_schedule,
            turn=turn,
            groups=frozenset(self.groups),
            windowed=plan.window is not None,
            stages=len(routes.stages),
            forwards=self.forwards,
            servers=bool(self.servers),
        )
        self.forward = schedule("forward")
        self.backward: dict[Kept, Schedule] = {kept: schedule("backward", kept=kept) for kept in get_args(Kept)}

    def rows_of(self, transfer: Transfer) -> Rows:
        """Return the rows of a transfer between ranks, for the recorder; NO_ROWS if no rank sends rows to another."""
        if transfer.rows == "servers":
            return NO_ROWS
        route = self.queries if transfer.rows == "queries" else self.stages[transfer.stage].keys
        peers: IntArray | slice | None = slice(None)
        if transfer.rows == "forwarded":
            assert route.forwarded is not None
            route, peers = route.forwarded, self._peers
        if not route.crossing:
            return NO_ROWS
        rows = np.zeros((2, self._ranks), np.int64)
        rows[:, peers] = (route.received, route.sent) if transfer.back else (route.sent, route.received)
        sent, received = rows.tolist()
        return Rows(tuple(sent), tuple(received))


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

    @cached_property
    def cuts(self) -> BoundCuts:
        """Segments of documents, and what modules that mix rows in order exchange between them."""
        return BoundCuts(self._layout, self._rank, self._buffer.another())

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


@dataclass(frozen=True)
class Runtime:
    """What a rank carries out plans with.

    Attributes:
        remote: the plan at its dedicated servers; None without servers.
        keep_received: keep received Q, K and V rows for the backward instead of receiving them again.
        keep_core_attention: keep O and LSE of checkpointed layers instead of computing them again.
        functions: functions of mixing modules by name, in place of transformers' own.
    """

    device: torch.device
    exchange: Exchange
    kernel: Kernel
    recorder: Recorder
    remote: RemotePlan | None = None
    keep_received: bool = False
    keep_core_attention: bool = True
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


class BoundPlan:
    """A planned micro-batch as every layer gets it, under the keyword PLAN_KEY.

    This is a plain class on purpose: FSDP2 copies dataclasses, dicts and named tuples among a module's arguments.
    Accelerate moves anything that has a `to`.

    Attributes:
        nano_batches: nano-batches whose rows the layer is called with.
        local: tasks of all these rows, by kind, for kinds where nothing moves; the same kinds on every rank.
        kept_results: kept O and LSE, by attention module and nano-batch.
        pause: called between the start of an exchange and the wait for it; lets the other nano-batch run.
    """

    def __init__(
        self,
        plan: MicroBatchPlan,
        runtime: Runtime,
        nano_batches: tuple[BoundNanoBatch, ...],
        local: dict[AttentionKind, LocalTasks],
        kept_results: KeptResults,
        ran: Ran,
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        self.plan, self.runtime, self.nano_batches, self.local = plan, runtime, nano_batches, local
        self.kept_results, self.ran, self.pause = kept_results, ran, pause

    @classmethod
    def bind(
        cls,
        plan: MicroBatchPlan,
        rank: int,
        runtime: Runtime,
        *,
        kept_results: KeptResults | None = None,
        in_one_go: bool | None = None,
    ) -> "BoundPlan":
        """Return a plan bound to a rank.

        Args:
            kept_results: where O and LSE are kept; None: in new memory.
            in_one_go: see `IndexBuffer`.
        """
        turns: tuple[Turn, ...] = ("alone",) if len(plan.nano_batches) == 1 else ("first", "second")
        buffer = IndexBuffer(runtime.device, in_one_go)
        kinds = {
            kind for kind in plan.nano_batches[0].plans if all(nothing_moves(n.plans[kind]) for n in plan.nano_batches)
        }
        nano_batches = tuple(
            BoundNanoBatch(index, nano, rank, turn, kinds, buffer)
            for index, (nano, turn) in enumerate(zip(plan.nano_batches, turns, strict=True))
        )
        local = nano_batches[0].local
        if len(nano_batches) > 1:
            local = {
                kind: LocalTasks([n for nano in nano_batches for n in nano.local[kind].lengths], kind.window, buffer)
                for kind in local
            }
        buffer.send()
        return cls(plan, runtime, nano_batches, local, KeptResults() if kept_results is None else kept_results, Ran())

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self.runtime.device

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
        if self.cuts_documents:
            raise ValueError(
                "a layer mixes the rows of a document other than by attention, but the plan cuts documents between "
                "ranks; plan with document_layout='whole'"
            )
        return tuple(rows for nano in self.nano_batches for rows in nano.cuts.sizes)

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
    def cuts_documents(self) -> bool:
        """Whether any document of the micro-batch lies in several segments; the same on every rank."""
        return any(nano.layout.has_cuts for nano in self.plan.nano_batches)

    @property
    def is_part(self) -> bool:
        """Whether the plan covers one nano-batch of two."""
        return len(self.nano_batches) < len(self.plan.nano_batches)

    def of_nano_batch(self, index: int, pause: Callable[[], None]) -> "BoundPlan":
        """Return the plan for a layer that runs on the rows of one nano-batch.

        Args:
            pause: lets the other nano-batch run.
        """
        nano = self.nano_batches[index]
        return BoundPlan(self.plan, self.runtime, (nano,), nano.local, self.kept_results, self.ran, pause)
