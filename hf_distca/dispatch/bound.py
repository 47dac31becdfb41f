"""A plan bound to one rank: routes as index tensors on the device, and schedules.

Every layer of a micro-batch uses the same bound plan.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from hf_distca.checks.step_rules import PlannedStep
from hf_distca.dispatch.exchange import Exchange, Route, bound_route
from hf_distca.dispatch.features import BoundImages
from hf_distca.dispatch.host_copies import OffloadedForward
from hf_distca.dispatch.kept_results import KeptResults
from hf_distca.dispatch.recorder import NO_ROWS, Recorder, Rows
from hf_distca.dispatch.remote import RemotePlan, RemoteRows
from hf_distca.dispatch.rows import (
    ALL_ROWS,
    IndexBuffer,
    RowIndex,
    RowSum,
    names_all,
    row_index,
)
from hf_distca.dispatch.segment_exchanges import BoundCuts
from hf_distca.kernels import Kernel, TaskShapes
from hf_distca.plan import AttentionKind, Direction, MicroBatchPlan, NanoBatch, Plan
from hf_distca.plan.arrays import IntArray
from hf_distca.plan.cost import pairs
from hf_distca.plan.cuts import exchanges_states
from hf_distca.plan.intervals import expand
from hf_distca.plan.routes import CallTasks, Routes, Stage, make_routes, nothing_moves
from hf_distca.plan.schedule import (
    CallKey,
    Location,
    Schedule,
    Transfer,
    Turn,
    has_local_tasks_between_stages,
    local_shares,
    make_schedule,
)
from hf_distca.plan.stages import stage_slots

Source = tuple[str, int]
"""Source of a part of a gradient, and the stage of its K/V rows.

Sources are the tasks of a kernel call, "ranks" and "remote".
"""
RowsOfSources = dict[Source, IntArray]
"""For each source, the row of a gradient to which each of the source's rows is added."""
TOTAL: Source = "total", 0
"""The sum over earlier sources."""


class BoundTasks(NamedTuple):
    """Tasks of one kernel call, with index tensors of their rows.

    The index tensors are valid once the buffer that placed them is sent.
    """

    shapes: TaskShapes
    pairs: int
    q_rows: RowIndex = ALL_ROWS
    k_rows: RowIndex = ALL_ROWS

    @staticmethod
    def bind(tasks: CallTasks, buffer: IndexBuffer) -> "BoundTasks":
        """Return tasks on some of the local or received rows."""
        shapes = TaskShapes.build(tasks.q_lens.tolist(), tasks.k_lens.tolist(), buffer.place)
        q_rows = row_index(tasks.q_rows, buffer)
        k_rows = row_index(tasks.k_rows, buffer)
        return BoundTasks(shapes, tasks.pairs, q_rows, k_rows)

    @staticmethod
    def bind_documents(
        lengths: Sequence[int], window: int | None, buffer: IndexBuffer
    ) -> "BoundTasks":
        """Return a rank's tasks where nothing moves: all documents, or chunks, in row order."""
        shapes = TaskShapes.build(lengths, lengths, buffer.place)
        return BoundTasks(shapes, sum(pairs(0, length, window) for length in lengths))


class GradientSum:
    """Sources of the gradient of rows at one place.

    An early source is added to the total as soon as it is computed or has arrived, to free its
    memory. Late sources are added at once when the last of them is there.

    Attributes:
        early: the sum of the total and each early source.
        covering: early sources with each row once and in order. The first source becomes the total
            without being added if it is one of these.
        late: the sum of the total, if there are early sources, and all late sources.
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
        self.covering = {source for source, targets in early.items() if names_all(targets, rows)}
        late_sources = {**total, **late} if early else late
        self.late = RowSum(late_sources, rows, buffer, in_place=in_place)


class BoundRoutes:
    """Routes of one rank for one kind of attention, see `hf_distca.plan.routes.Routes`.

    Attributes:
        rows: number of rows of queries at each place.
        queries, keys: rows that travel between ranks: Q with O, dO and dQ; K and V with dK and dV,
            by stage.
        forwards: whether any rank forwards K/V rows inside its node.
        gateway_sums: by stage, the sums of dK and dV of forwarded rows and of a gateway's copies.
        slots: by stage, the memory of its K/V rows.
        remote: rows that travel to each remote worker with tasks, and back.
        tasks: tasks of each kernel call; calls without tasks are missing.
        merges: whether received queries read K/V rows in several calls.
        begins_with_no_keys: places whose queries have the result of no keys before any call.
        gradients: sources of each gradient, by its name and its place: "local" or "received" rows,
            or the stage of received K/V rows.
        schedules: the schedule of each direction.
    """

    def __init__(self, plan: Plan, rank: int, turn: Turn, buffer: IndexBuffer) -> None:
        routes = make_routes(plan, rank)
        several_stages = len(routes.stages) > 1

        # 1. Rows that travel between ranks, and to remote workers.
        self._ranks = plan.layout.ranks
        self._peers = _forwarding_peers(plan, rank, routes)
        self.forwards = self._peers is not None
        self.queries = bound_route(routes.queries, buffer, slice(self._ranks))
        self.rows: dict[Location, int] = {
            "local": routes.local_rows,
            "received": sum(self.queries.received),
        }
        self.keys = [self._bind_keys(stage, buffer) for stage in routes.stages]
        self.gateway_sums: list[RowSum] = []
        if self.forwards:
            self.gateway_sums = [
                _gateway_sum(route, stage, buffer)
                for route, stage in zip(self.keys, routes.stages, strict=True)
            ]
        self.slots = stage_slots(len(routes.stages), forwards=self.forwards)
        workers = np.unique(plan.tasks["worker"])
        self.remote = tuple(
            RemoteRows(int(worker) - self._ranks, routes, self._ranks, buffer)
            for worker in workers[workers >= self._ranks]
        )

        # 2. Tasks of each kernel call. If no local tasks come between stages, the forward computes
        #    all in one call, even if the backward computes parts of them.
        remote = _remote_tasks(routes)
        local = _local_tasks_of_turn(routes, turn, remote, plan.window)
        tasks = {**remote, **local}
        between_stages = has_local_tasks_between_stages(
            len(routes.stages), windowed=plan.window is not None
        )
        if not between_stages:
            tasks["local", 0] = routes.local
        self.tasks = {
            key: BoundTasks.bind(call_tasks, buffer)
            for key, call_tasks in tasks.items()
            if len(call_tasks.q_lens)
        }
        has_prefix = any(name == "remote-query prefix" for name, _ in self.tasks)
        self.merges = plan.window is None and (several_stages or has_prefix)
        self.begins_with_no_keys: set[Location] = set()
        if self.merges:
            self.begins_with_no_keys = {"received", "local"} if between_stages else {"received"}

        # 3. Sources of gradients.
        self.gradients = self._bind_gradients(routes, local, remote, buffer)

        # 4. The order of all that.
        self.schedules: dict[Direction, Schedule] = {
            direction: make_schedule(
                direction,
                turn,
                calls=frozenset(self.tasks),
                windowed=plan.window is not None,
                stages=len(routes.stages),
                forwards=self.forwards,
                remote_workers=bool(self.remote),
            )
            for direction in get_args(Direction)
        }

    def _bind_keys(self, stage: Stage, buffer: IndexBuffer) -> Route:
        """Return the route of a stage's K/V rows, over one or two hops."""
        route = bound_route(stage.keys, buffer, slice(self._ranks))
        if self._peers is None:
            return route
        second_hop = bound_route(stage.forwarded, buffer, self._peers)
        crossing = second_hop.crossing and len(self._peers) > 1
        # If one stage forwards rows, every stage exchanges rows: all stages share the same memory.
        return replace(route, crossing=True, forwarded=replace(second_hop, crossing=crossing))

    def _bind_gradients(
        self,
        routes: Routes,
        local: dict[CallKey, CallTasks],
        remote: dict[CallKey, CallTasks],
        buffer: IndexBuffer,
    ) -> dict[tuple[str, Location | int], GradientSum]:
        """Return the sums of each gradient at each place; dv has the same sources as dk.

        With several stages the gradients of tasks, and dk and dv of other ranks, are added to
        totals as they come. With one stage all sources are added at once.
        """
        # 1. dQ: of received queries from remote-query tasks; of local ones from all other tasks,
        #    from ranks and from remote workers. An exchange lists the rows of ranks first.
        queries = routes.queries.send_rows
        to_ranks = sum(self.queries.sent)
        dq_of_received: RowsOfSources = {}
        dq_of_tasks: RowsOfSources = {}
        for key, tasks in {**local, **remote}.items():
            sources = dq_of_received if _receives_queries(key) else dq_of_tasks
            sources[key] = tasks.q_rows
        dq_of_others: RowsOfSources = {("ranks", 0): queries[:to_ranks]}

        # 2. dK of local rows: from local tasks, from ranks by stage, and from remote workers.
        dk_of_tasks: RowsOfSources = {key: tasks.k_rows for key, tasks in local.items()}
        for number, (stage, route) in enumerate(zip(routes.stages, self.keys, strict=True)):
            dk_of_tasks["ranks", number] = stage.keys.send_rows[: sum(route.sent)]
        dk_of_remote: RowsOfSources = {}
        if self.remote:
            dq_of_others["remote", 0] = queries[to_ranks:]
            keys_to_ranks = sum(self.keys[0].sent)
            dk_of_remote["remote", 0] = routes.stages[0].keys.send_rows[keys_to_ranks:]

        # 3. The sums, and those of received keys by stage.
        several_stages = len(routes.stages) > 1

        def total(place: Location, early: RowsOfSources, late: RowsOfSources) -> GradientSum:
            if not several_stages:
                return GradientSum(self.rows[place], {}, early | late, buffer)
            return GradientSum(self.rows[place], early, late, buffer)

        gradients: dict[tuple[str, Location | int], GradientSum] = {
            ("dq", "local"): total("local", dq_of_tasks, dq_of_others),
            ("dq", "received"): total("received", dq_of_received, {}),
            ("dk", "local"): total("local", dk_of_tasks, dk_of_remote),
        }
        for number, route in enumerate(self.keys):
            readers: RowsOfSources = {
                key: tasks.k_rows for key, tasks in remote.items() if key[1] == number
            }
            rows = _received_keys(route)
            gradients["dk", number] = GradientSum(rows, {}, readers, buffer, in_place=False)
        for place in ("local", *range(len(self.keys))):
            gradients["dv", place] = gradients["dk", place]
        return gradients

    def rows_of(self, transfer: Transfer) -> Rows:
        """Return the rows of a transfer between ranks, for the recorder.

        NO_ROWS if no rank sends rows to another.
        """
        if transfer.rows == "remote":
            return NO_ROWS
        route = self.queries if transfer.rows == "queries" else self.keys[transfer.stage]
        peers: IntArray | slice | None = slice(None)
        if transfer.rows == "forwarded":
            assert route.forwarded is not None
            route, peers = route.forwarded, self._peers
        if not route.crossing:
            return NO_ROWS
        rows = np.zeros((2, self._ranks), np.int64)  # sent and received
        rows[0, peers] = route.received if transfer.back else route.sent
        rows[1, peers] = route.sent if transfer.back else route.received
        return Rows(*map(tuple, rows.tolist()))


def _forwarding_peers(plan: Plan, rank: int, routes: Routes) -> IntArray | None:
    """Return the ranks of this rank's node; None if no rank forwards K/V rows."""
    if plan.nodes is None or not any(stage.forwarded.crossing for stage in routes.stages):
        return None
    return np.flatnonzero(np.equal(plan.nodes[: plan.layout.ranks], plan.nodes[rank]))


def _received_keys(route: Route) -> int:
    """Return the number of K/V rows that arrive by both hops."""
    direct = sum(route.received)
    return direct if route.forwarded is None else direct + sum(route.forwarded.received)


def _gateway_sum(route: Route, stage: Stage, buffer: IndexBuffer) -> RowSum:
    """Return the sum of dK or dV of a gateway's copies and of the rows that it forwarded."""
    rows = sum(route.received)
    sources = {"received": np.arange(rows), "forwarded": stage.forwarded.send_rows}
    return RowSum(sources, rows, buffer)


def _remote_tasks(routes: Routes) -> dict[CallKey, CallTasks]:
    """Return the tasks of kernel calls on received rows."""
    tasks: dict[CallKey, CallTasks] = {}
    for number, stage in enumerate(routes.stages):
        tasks["remote-query", number] = stage.remote_query
        if len(routes.stages) > 1 or len(stage.remote_query_prefix.q_lens):
            tasks["remote-query prefix", number] = stage.remote_query_prefix
        tasks["remote-KV", number] = stage.remote_kv
    return tasks


def _local_tasks_of_turn(
    routes: Routes, turn: Turn, remote: dict[CallKey, CallTasks], window: int | None
) -> dict[CallKey, CallTasks]:
    """Return the tasks of the backward's kernel calls on local rows."""
    stages, windowed = len(routes.stages), window is not None
    pairs = np.array(routes.local.pairs, np.float64)
    shares = local_shares(turn, stages, pairs, routes.least_local_pairs, windowed=windowed)
    # Parts hide exchanges, if there are any, or let other ranks go on with the next stage.
    needs_parts = has_local_tasks_between_stages(stages, windowed=windowed) or any(
        len(tasks.q_lens) for tasks in remote.values()
    )
    if len(shares) == 1 or not needs_parts:
        return {("local", 0): routes.local}
    # Later rows first: they see more keys, so that their memory use peaks before the sums exist.
    parts = reversed(routes.local.parts([float(share) for share in shares.values()][::-1], window))
    return {
        ("local part", number): part
        for number, part in zip(shares, parts, strict=True)
        if len(part.q_lens)
    }


def _receives_queries(key: CallKey) -> bool:
    """Return whether the queries of a kernel call are received, and dQ returns."""
    return key[0] in ("remote-query", "remote-query prefix")


class BoundNanoBatch:
    """Nano-batch on one rank.

    Attributes:
        local: tasks of the kinds of attention for which nothing moves.
        routes: routes of all other kinds.
    """

    def __init__(
        self,
        index: int,
        nano_batch: NanoBatch,
        rank: int,
        turn: Turn,
        local_kinds: Set[AttentionKind],
        buffer: IndexBuffer,
    ) -> None:
        self.index = index
        self.rows = int(nano_batch.layout.tokens[rank])
        self._layout = nano_batch.layout
        self._segments = nano_batch.layout.of_rank(rank)
        self.last_position = int(self._segments["stop"].max(initial=0)) - 1
        self.local: dict[AttentionKind, BoundTasks] = {}
        self.routes: dict[AttentionKind, BoundRoutes] = {}
        for kind, plan in nano_batch.plans.items():
            if kind in local_kinds:
                lengths = plan.layout.of_rank(rank)["stop"].tolist()
                self.local[kind] = BoundTasks.bind_documents(lengths, plan.window, buffer)
            else:
                self.routes[kind] = BoundRoutes(plan, rank, turn, buffer)
        self._plans = nano_batch.plans
        self._rank = rank
        self._device = buffer.device
        self._new_buffer = partial(IndexBuffer, buffer.device, buffer.in_one_go)
        self._repairs: dict[tuple[AttentionKind, frozenset[int]], BoundRoutes] = {}

    @cached_property
    def cuts(self) -> BoundCuts:
        """Segments of documents, and what mixing modules exchange between them."""
        return BoundCuts(self._layout, self._rank, self._new_buffer())

    @cached_property
    def segments(self) -> list[tuple[int, int]]:
        """Rows of each segment in row order, and the length of its whole document."""
        rows = self._segments["stop"] - self._segments["start"]
        lengths = self._layout.lengths[self._segments["document"]]
        return list(zip(rows.tolist(), lengths.tolist(), strict=True))

    @cached_property
    def positions(self) -> Tensor:
        """[rows] position of each row in its document."""
        starts = self._segments["start"]
        rows = self._segments["stop"] - starts
        return torch.from_numpy(expand(starts, rows)).to(self._device)

    def repair(
        self, kind: AttentionKind, lost: frozenset[int], remote: RemotePlan | None
    ) -> BoundRoutes:
        """Return the routes by which the ranks compute the tasks of lost remote workers."""
        assert remote is not None  # a plan with remote workers is bound with them
        if (kind, lost) not in self._repairs:
            buffer = self._new_buffer()
            lost_tasks = remote.repair(self._plans[kind], kind, lost)
            self._repairs[kind, lost] = BoundRoutes(lost_tasks, self._rank, "alone", buffer)
            buffer.send()
        return self._repairs[kind, lost]


@dataclass
class Ran:
    """Counts of what ran in a planned step, with what ran again in the backward."""

    attentions: int = 0
    layers: int = 0  # decoder layers prepared by `plan_layers`
    layers_in_turns: int = 0  # layers that ran their nano-batches in turns
    rotations: int = 0  # calls of rotary embeddings that depend on the lengths of documents
    # Calls of modules that mix along the row without attention, each for all documents.
    mixing: int = 0
    selected_targets: bool = False  # whether the decoder returned the rows of targets
    # Function that sees logits [C, V], their log-probabilities [C, V] and targets [C] of each chunk
    # of rows; they need no gradients.
    watch: Callable[[Tensor, Tensor, Tensor], None] | None = None


@dataclass(frozen=True)
class Runtime:
    """What a rank carries out plans with."""

    device: torch.device
    exchange: Exchange
    kernel: Kernel
    recorder: Recorder
    remote: RemotePlan | None = None  # the plan at its remote workers
    # Functions of mixing modules by name, in place of transformers' own.
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    # Host memory for this micro-batch's activation checkpoints; None keeps them on the device.
    offload: OffloadedForward | None = None


class BoundPlan:
    """A planned micro-batch as every layer gets it, under the keyword PLAN_KEY.

    This is a plain class on purpose: FSDP2 copies dataclasses, dicts and named tuples among a
    module's arguments. Accelerate moves anything that has a `to`.

    Attributes:
        nano_batches: nano-batches whose `rows` the layer is called with; one of two if `is_part`.
        local: tasks of all these rows, for kinds where nothing moves; the same kinds on every rank.
        exchanges, cuts_paths: whether ranks exchange rows in any layer, and whether any path lies
            in several segments; the same on every rank.
        pause: called between the start of an exchange and the wait for it; lets the other
            nano-batch run.
        target_rows: rows of the targets, in parts in each of which a row comes once; None if each
            row has one target.
        images: travel of features to placeholders, by modality; empty without images.
    """

    def __init__(
        self,
        plan: MicroBatchPlan,
        rank: int,
        runtime: Runtime,
        *,
        kept_results: KeptResults | None = None,
        buffer: IndexBuffer | None = None,
    ) -> None:
        self.plan = plan
        self.runtime = runtime
        self.ran = Ran()
        self.pause: Callable[[], None] = lambda: None
        self.target_rows: list[Tensor] | None = None
        self.images: dict[str, BoundImages] = {}
        self.kept_results = KeptResults() if kept_results is None else kept_results
        nano_batches = plan.nano_batches
        buffer = IndexBuffer(runtime.device) if buffer is None else buffer
        # 1. The nano-batches. A kind whose rows never move takes no part in turns.
        turns: tuple[Turn, ...] = ("alone",) if len(nano_batches) == 1 else ("first", "second")
        local_kinds = {kind for kind in nano_batches[0].plans if _is_local(kind, nano_batches)}
        self.nano_batches = tuple(
            BoundNanoBatch(index, nano, rank, turn, local_kinds, buffer)
            for index, (nano, turn) in enumerate(zip(nano_batches, turns, strict=True))
        )
        # 2. Such a kind runs once over both nano-batches.
        self.local = self.nano_batches[0].local
        if len(turns) > 1:
            first, second = (nano.local for nano in self.nano_batches)
            self.local = {}
            for kind in first:
                lengths = (*first[kind].shapes.q_lens, *second[kind].shapes.q_lens)
                self.local[kind] = BoundTasks.bind_documents(lengths, kind.window, buffer)
        # 3. All row numbers go to the device in one copy.
        buffer.send()
        self.rows = sum(nano.rows for nano in self.nano_batches)
        self.is_part = False
        self.exchanges = any(nano.routes for nano in self.nano_batches)
        self.cuts_paths = any(
            nano.layout.has_cuts or nano.layout.branches is not None for nano in nano_batches
        )

    @cached_property
    def exchanges_states(self) -> bool:
        """Whether any segment starts from a state of another rank; the same on every rank."""
        return any(exchanges_states(nano.layout) for nano in self.plan.nano_batches)

    @property
    def document_rows(self) -> tuple[int, ...]:
        """Rows of each document that a layer is called with on this rank, in row order."""
        if self.cuts_paths:
            raise PlannedStep.CUT_DOCUMENTS.error_here()
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
        part = copy(self)
        nano = self.nano_batches[index]
        part.nano_batches = (nano,)
        part.local = nano.local
        part.pause = pause
        part.rows = nano.rows
        part.is_part = True
        return part


def _is_local(kind: AttentionKind, nano_batches: Sequence[NanoBatch]) -> bool:
    """Return whether nothing moves for a kind of attention, in any nano-batch."""
    return all(nothing_moves(nano.plans[kind]) for nano in nano_batches)
