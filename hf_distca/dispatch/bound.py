"""A plan bound to one rank: routes as index tensors on the device, and schedules, ready for every layer."""

from collections.abc import Callable, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from hf_distca.dispatch.checkpoints import KeptResults
from hf_distca.dispatch.cuts import BoundCuts
from hf_distca.dispatch.exchange import Exchange, Route, bound_route
from hf_distca.dispatch.recorder import NO_ROWS, Recorder, Rows
from hf_distca.dispatch.remote import RemotePlan, ServerRows
from hf_distca.dispatch.rows import (
    ALL_ROWS,
    IndexBuffer,
    IntArray,
    RowIndex,
    RowSum,
    names_all,
    row_index,
)
from hf_distca.kernels import Kernel, TaskShapes
from hf_distca.plan import AttentionKind, MicroBatchPlan, NanoBatch, Plan
from hf_distca.plan.cost import pairs
from hf_distca.plan.intervals import expand
from hf_distca.plan.routes import CallTasks, make_routes, nothing_moves
from hf_distca.plan.schedule import (
    CallKey,
    KeptRows,
    Location,
    Schedule,
    Transfer,
    Turn,
    make_schedule,
)
from hf_distca.plan.stages import stage_slots

Source = tuple[str, int]
"""What computes a part of a gradient, a group of tasks, "ranks" or "servers"; and the stage of its
K/V rows."""
RowsOfSources = dict[Source, IntArray]
"""For each source, the row of a gradient to which each of the source's rows is added."""
TOTAL: Source = "total", 0
"""The sum over earlier sources."""


class BoundTasks(NamedTuple):
    """Tasks of one kernel call, with index tensors of their rows, which are valid once the buffer is sent."""

    shapes: TaskShapes
    pairs: int
    q_rows: RowIndex = ALL_ROWS
    k_rows: RowIndex = ALL_ROWS

    @staticmethod
    def bind(group: CallTasks, buffer: IndexBuffer) -> "BoundTasks":
        """Return a group of tasks on some of the local or received rows, valid once the buffer is sent."""
        shapes = TaskShapes.build(group.q_lens.tolist(), group.k_lens.tolist(), buffer.place)
        return BoundTasks(
            shapes, group.pairs, row_index(group.q_rows, buffer), row_index(group.k_rows, buffer)
        )

    @staticmethod
    def whole(lengths: Sequence[int], window: int | None, buffer: IndexBuffer) -> "BoundTasks":
        """Return a rank's tasks where nothing moves: all documents, or chunks, in row order."""
        shapes = TaskShapes.build(lengths, lengths, buffer.place)
        return BoundTasks(shapes, sum(pairs(0, length, window) for length in lengths))


class GradientSum:
    """Sources of the gradient of rows at one place.

    An early source is added once it is there, to free its memory.
    """

    def __init__(
        self,
        rows: int,
        early: RowsOfSources,
        late: RowsOfSources,
        buffer: IndexBuffer,
        *,
        in_place: bool = True,
    ) -> None:
        self.rows = rows
        total = {TOTAL: np.arange(rows)}
        self.early = {
            source: RowSum({**total, source: targets}, rows, buffer)
            for source, targets in early.items()
        }
        # As the first source, one with each row once and in order is the total.
        self.whole = {source for source, targets in early.items() if names_all(targets, rows)}
        self.late = RowSum({**total, **late} if early else late, rows, buffer, in_place=in_place)


class BoundRoutes:
    """Routes of one rank for one kind of attention, see `hf_distca.plan.routes.Routes`."""

    def __init__(self, plan: Plan, rank: int, turn: Turn, buffer: IndexBuffer) -> None:
        routes = make_routes(plan, rank)
        stages, several = routes.stages, len(routes.stages) > 1

        # 1. Rows that travel between ranks, and to servers.
        self._ranks = ranks = plan.layout.ranks
        self._peers: IntArray | None = None  # ranks of this rank's node
        if plan.nodes is not None and any(stage.forwarded.crossing for stage in stages):
            self._peers = np.flatnonzero(np.equal(plan.nodes[:ranks], plan.nodes[rank]))
        self.forwards = (
            self._peers is not None
        )  # whether any rank forwards K/V rows inside its node
        self.queries = bound_route(routes.queries, buffer, slice(ranks))
        self.rows: dict[Location, int] = {
            "local": routes.local_rows,
            "received": sum(self.queries.received),
        }
        self.keys: list[Route] = []  # of each stage, for K and V, and for dK and dV
        self.gateway_sums: list[
            RowSum
        ] = []  # of each stage: dK and dV of forwarded rows to a gateway's copies
        for stage in stages:
            route = bound_route(stage.keys, buffer, slice(ranks))
            if self._peers is not None:
                hop = bound_route(stage.forwarded, buffer, self._peers)
                hop = replace(hop, crossing=hop.crossing and len(self._peers) > 1)
                # If one stage forwards rows, every stage exchanges rows: all stages share the same
                # memory.
                route = replace(route, crossing=True, forwarded=hop)
                received = sum(route.received)
                sources = {"received": np.arange(received), "forwarded": stage.forwarded.send_rows}
                self.gateway_sums.append(RowSum(sources, received, buffer))
            self.keys.append(route)
        self.slots = stage_slots(
            len(stages), forwards=self.forwards
        )  # memory of each stage's K/V rows
        busy = np.unique(plan.tasks["worker"])
        self.servers = tuple(
            ServerRows(int(worker) - ranks, routes, ranks, buffer) for worker in busy[busy >= ranks]
        )

        # 2. Tasks of each kernel call; calls without tasks are missing.
        remote: dict[CallKey, CallTasks] = {}
        for number, stage in enumerate(stages):
            remote["remote-query", number] = stage.remote_query
            if several:
                remote["remote-query prefix", number] = stage.remote_query_prefix
            remote["remote-KV", number] = stage.remote_kv
        local: dict[CallKey, CallTasks] = {("local", 0): routes.local}
        tasks = remote | local
        if turn == "alone" and any(len(group.q_lens) for group in remote.values()):
            # The backward's local tasks hide two exchanges. Later rows first: they see more keys,
            # so that their memory use peaks before the sums exist.
            earlier, later = routes.local.halves(plan.window)
            halves = (later, earlier) if len(later.q_lens) else (earlier, later)
            local = {("local 1/2", 0): halves[0], ("local 2/2", 0): halves[1]}
            tasks |= local
        self.tasks = {
            name: BoundTasks.bind(group, buffer)
            for name, group in tasks.items()
            if len(group.q_lens)
        }
        self.merges = (
            several and plan.window is None
        )  # whether a query's keys come in several stages

        # 3. Sources of gradients by place, and of received keys by stage. dk and dv have the same
        # sources. An exchange lists the rows of ranks first.
        queries, keys = routes.queries, [stage.keys for stage in stages]
        sent_q, sent_k = sum(self.queries.sent), [sum(route.sent) for route in self.keys]
        q_rows: RowsOfSources = {name: group.q_rows for name, group in (local | remote).items()}
        received_q: RowsOfSources = {
            name: rows for name, rows in q_rows.items() if "query" in name[0]
        }
        of_tasks_q: RowsOfSources = {
            name: rows for name, rows in q_rows.items() if "query" not in name[0]
        }
        of_tasks_k: RowsOfSources = {name: group.k_rows for name, group in local.items()}
        of_tasks_k |= {("ranks", n): keys[n].send_rows[:sent] for n, sent in enumerate(sent_k)}
        of_ranks_q: RowsOfSources = {("ranks", 0): queries.send_rows[:sent_q]}
        of_servers_k: RowsOfSources = {}
        if self.servers:
            of_ranks_q["servers", 0] = queries.send_rows[sent_q:]
            of_servers_k["servers", 0] = keys[0].send_rows[sent_k[0] :]
        self.gradients: dict[tuple[str, Location | int], GradientSum] = {}
        of_places: list[tuple[str, Location, RowsOfSources, RowsOfSources]] = [
            ("dq", "local", of_tasks_q, of_ranks_q),
            ("dq", "received", received_q, {}),
            ("dk", "local", of_tasks_k, of_servers_k),
        ]
        for name, place, early, late in of_places:
            # With several stages the gradients of tasks, and dk and dv of other ranks, are added to
            # totals at once.
            early, late = (early, late) if several else ({}, early | late)
            self.gradients[name, place] = GradientSum(self.rows[place], early, late, buffer)
        for n, route in enumerate(self.keys):
            rows = sum(route.received) + (
                0 if route.forwarded is None else sum(route.forwarded.received)
            )
            readers: RowsOfSources = {
                name: group.k_rows for name, group in remote.items() if name[1] == n
            }
            self.gradients["dk", n] = GradientSum(rows, {}, readers, buffer, in_place=False)
        self.gradients |= {
            ("dv", place): sums for (name, place), sums in self.gradients.items() if name == "dk"
        }

        # 4. The order of all that.
        schedule = partial(
            make_schedule,
            turn=turn,
            calls=frozenset(self.tasks),
            windowed=plan.window is not None,
            stages=len(stages),
            forwards=self.forwards,
            servers=bool(self.servers),
        )
        self.forward = schedule("forward")
        self.backward: dict[KeptRows, Schedule] = {
            kept_rows: schedule("backward", kept_rows=kept_rows) for kept_rows in get_args(KeptRows)
        }

    def rows_of(self, transfer: Transfer) -> Rows:
        """Return the rows of a transfer between ranks, for the recorder.

        NO_ROWS if no rank sends rows to another.
        """
        route = self.queries if transfer.rows == "queries" else self.keys[transfer.stage]
        peers: IntArray | slice | None = slice(None)
        if transfer.rows == "forwarded":
            assert route.forwarded is not None
            route, peers = route.forwarded, self._peers
        if not route.crossing or transfer.rows == "servers":
            return NO_ROWS
        rows = np.zeros((2, self._ranks), np.int64)
        rows[:, peers] = (
            (route.received, route.sent) if transfer.back else (route.sent, route.received)
        )
        return Rows(*map(tuple, rows.tolist()))


class BoundNanoBatch:
    """Nano-batch on one rank: tasks of kinds of attention for which nothing moves, and routes of all other kinds."""

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
        self.last_position = int(self._mine["stop"].max(initial=0)) - 1
        self.local: dict[AttentionKind, BoundTasks] = {}
        self.routes: dict[AttentionKind, BoundRoutes] = {}
        for kind, plan in nano_batch.plans.items():
            if kind in local:
                self.local[kind] = BoundTasks.whole(
                    plan.layout.of_rank(rank)["stop"].tolist(), plan.window, buffer
                )
            else:
                self.routes[kind] = BoundRoutes(plan, rank, turn, buffer)
        self._plans, self._rank, self._device = nano_batch.plans, rank, buffer.device
        self._new_buffer = partial(IndexBuffer, buffer.device, buffer.in_one_go)
        self._repairs: dict[tuple[AttentionKind, frozenset[int]], BoundRoutes] = {}

    @cached_property
    def cuts(self) -> BoundCuts:
        """Segments of documents, and what mixing modules exchange between them."""
        return BoundCuts(self._layout, self._rank, self._new_buffer())

    @cached_property
    def segments(self) -> list[tuple[int, int]]:
        """Rows of each segment in row order, and the length of its whole document."""
        rows, lengths = (
            self._mine["stop"] - self._mine["start"],
            self._layout.lengths[self._mine["document"]],
        )
        return list(zip(rows.tolist(), lengths.tolist(), strict=True))

    @cached_property
    def positions(self) -> Tensor:
        """[rows] position of each row in its document."""
        starts, sizes = self._mine["start"], self._mine["stop"] - self._mine["start"]
        return torch.from_numpy(expand(starts, sizes)).to(self._device)

    def repair(
        self, kind: AttentionKind, lost: frozenset[int], remote: RemotePlan | None
    ) -> BoundRoutes:
        """Return the routes by which the ranks compute the tasks of lost servers."""
        assert remote is not None  # a plan with servers is bound with them
        if (kind, lost) not in self._repairs:
            buffer, rest = self._new_buffer(), remote.repair(self._plans[kind], kind, lost)
            self._repairs[kind, lost] = BoundRoutes(rest, self._rank, "alone", buffer)
            buffer.send()
        return self._repairs[kind, lost]


@dataclass
class Ran:
    """Counts of what ran in a planned step, recomputations included, and who sees its logits."""

    attentions: int = 0
    layers: int = 0  # decoder layers prepared by `plan_layers`
    layers_in_turns: int = 0  # layers that ran their nano-batches in turns
    rotations: int = 0  # calls of rotary embeddings that depend on the lengths of documents
    mixing: int = (
        0  # calls of modules that mix along the row without attention, each for all documents
    )
    # Without gradients: sees logits [C, V], their log-probabilities [C, V] and targets [C] of each
    # chunk of rows.
    watch: Callable[[Tensor, Tensor, Tensor], None] | None = None


@dataclass(frozen=True)
class Runtime:
    """What a rank carries out plans with."""

    device: torch.device
    exchange: Exchange
    kernel: Kernel
    recorder: Recorder
    remote: RemotePlan | None = None  # the plan at its dedicated servers
    keep_received: bool = (
        False  # keep received Q, K and V rows for the backward instead of receiving them again
    )
    keep_core_attention: bool = (
        True  # keep O and LSE of checkpointed layers instead of computing them again
    )
    # Functions of mixing modules by name, in place of transformers' own.
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


class BoundPlan:
    """A planned micro-batch as every layer gets it, under the keyword PLAN_KEY.

    This is a plain class on purpose: FSDP2 copies dataclasses, dicts and named tuples among a
    module's arguments. Accelerate moves anything that has a `to`.

    Attributes:
        nano_batches: nano-batches whose `rows` the layer is called with; one of two if `is_part`.
        local: tasks of all these rows, for kinds where nothing moves; the same kinds on every rank.
        exchanges, cuts_documents: whether ranks exchange rows in any layer, and whether any
            document lies in several segments; the same on every rank.
        pause: called between the start of an exchange and the wait for it; lets the other
            nano-batch run.
    """

    def __init__(
        self,
        plan: MicroBatchPlan,
        rank: int,
        runtime: Runtime,
        *,
        kept_results: KeptResults | None = None,
        in_one_go: bool | None = None,
    ) -> None:
        self.plan, self.runtime, self.ran = plan, runtime, Ran()
        self.pause: Callable[[], None] = lambda: None
        self.kept_results = KeptResults() if kept_results is None else kept_results
        nanos, buffer = plan.nano_batches, IndexBuffer(runtime.device, in_one_go)
        turns: tuple[Turn, ...] = ("alone",) if len(nanos) == 1 else ("first", "second")
        local = {
            kind
            for kind in nanos[0].plans
            if all(nothing_moves(nano.plans[kind]) for nano in nanos)
        }
        self.nano_batches = tuple(
            BoundNanoBatch(index, nano, rank, turn, local, buffer)
            for index, (nano, turn) in enumerate(zip(nanos, turns, strict=True))
        )
        self.local = self.nano_batches[0].local
        if len(turns) > 1:
            first, second = (nano.local for nano in self.nano_batches)
            self.local = {
                kind: BoundTasks.whole(
                    (*first[kind].shapes.q_lens, *second[kind].shapes.q_lens), kind.window, buffer
                )
                for kind in first
            }
        buffer.send()
        self.rows, self.is_part = sum(nano.rows for nano in self.nano_batches), False
        self.exchanges = any(nano.routes for nano in self.nano_batches)
        self.cuts_documents = any(nano.layout.has_cuts for nano in nanos)

    @property
    def document_rows(self) -> tuple[int, ...]:
        """Rows of each document that a layer is called with on this rank, in row order."""
        if self.cuts_documents:
            raise ValueError(
                "a layer mixes the rows of a document other than by attention, but the plan cuts "
                "documents between ranks; plan with document_layout='whole'"
            )
        return tuple(rows for nano in self.nano_batches for rows in nano.cuts.sizes)

    @property
    def segments(self) -> list[tuple[int, int]]:
        """Rows of each segment in row order, and the length of its whole document."""
        return [segment for nano in self.nano_batches for segment in nano.segments]

    @property
    def positions(self) -> Tensor:
        """[rows] position of each row in its document."""
        return torch.cat([nano.positions for nano in self.nano_batches])

    @property
    def last_position(self) -> int:
        """Largest position; -1 without rows."""
        return max(nano.last_position for nano in self.nano_batches)

    @property
    def stages(self) -> int:
        """Number of stages of K/V rows, the most of any nano-batch and kind of attention."""
        return max(
            (len(routes.keys) for nano in self.nano_batches for routes in nano.routes.values()),
            default=1,
        )

    def of_nano_batch(self, index: int, pause: Callable[[], None]) -> "BoundPlan":
        """Return the plan for a layer that runs on the rows of one nano-batch.

        `pause` lets the other one run.
        """
        part, nano = copy(self), self.nano_batches[index]
        part.nano_batches, part.local, part.pause = (nano,), nano.local, pause
        part.rows, part.is_part = nano.rows, True
        return part
