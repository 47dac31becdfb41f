"""A plan bound to one rank: its routes as index tensors on the device, ready for every layer."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from hf_distca.dispatch.checkpoints import KeptResults
from hf_distca.dispatch.exchange import Exchange, Traffic
from hf_distca.dispatch.index_buffer import IndexBuffer
from hf_distca.dispatch.remote import RemotePlan, ServerRows
from hf_distca.dispatch.rows import row_index
from hf_distca.dispatch.sums import RowSum
from hf_distca.kernels import Kernel, TaskShapes
from hf_distca.plan import AttentionKind, MicroBatchPlan, NanoBatch, Plan
from hf_distca.planner.metrics import loads_of
from hf_distca.planner.routes import Messages, TaskGroup, make_routes, tasks_at_home


class BoundGroup:
    """The tasks of one kernel call, as index tensors.

    Attributes:
        shapes: lengths of the tasks.
        q_rows: where the query rows are taken from (local or received query rows).
        k_rows: where the K/V rows are taken from (local or received key rows).
        empty: no task at all.
    """

    def __init__(self, group: TaskGroup, buffer: IndexBuffer) -> None:
        self.shapes = TaskShapes.placed(group.q_lens.tolist(), group.k_lens.tolist(), buffer.place)
        self.q_rows = row_index(group.q_rows, buffer)
        self.k_rows = row_index(group.k_rows, buffer)
        self.empty = len(group.q_lens) == 0


class BoundMessages:
    """Rows of one kind that this rank exchanges with other ranks, as index tensors.

    Attributes:
        rows: local rows to send to ranks, ordered by receiving rank.
        traffic: how many rows go where.
        way_back: the same rows on their way back.
    """

    def __init__(self, messages: Messages, ranks: int, buffer: IndexBuffer) -> None:
        counts = messages.send_counts[:ranks]
        self.rows = row_index(messages.send_rows[: counts.sum()], buffer)
        self.traffic = Traffic(counts.tolist(), messages.recv_counts[:ranks].tolist(), messages.crossing)
        self.way_back = self.traffic.reversed()


class BoundRoutes:
    """The routes of one rank for one kind of attention layer; see `hf_distca.planner.routes.Routes`.

    Args:
        plan: of the kind.
        rank: this one.
        alone: no other nano-batch takes turns with this one.
        buffer: takes the index tensors to the rank's device; to be sent before they are used.

    Attributes:
        pairs: query-key pairs of this rank's tasks.
        servers: the dedicated servers that have tasks of the plan; the same on every rank.
        own_in_backward: own tasks as the backward computes them: in one call, or in two, each with about half of the
            pairs, where own tasks alone have to hide the exchanges before and after.
        query_sums: how dQ of local rows is added up: of own_in_backward, prefix, rows that come back, and servers.
        key_sums: how dK and dV of local rows are: of own_in_backward, rows that come back, and servers.
        received_sums: how dK and dV of received rows are: of visiting and prefix.
    """

    def __init__(self, plan: Plan, rank: int, alone: bool, buffer: IndexBuffer) -> None:
        routes, ranks, window = make_routes(plan, rank), plan.layout.ranks, plan.window
        self.window = window
        self.queries = BoundMessages(routes.queries, ranks, buffer)
        self.keys = BoundMessages(routes.keys, ranks, buffer)
        self.pairs = int(loads_of(plan)[rank])
        busy = np.unique(plan.tasks["worker"])
        self.servers = tuple(ServerRows(int(worker) - ranks, routes, ranks, buffer) for worker in busy[busy >= ranks])
        self.own = BoundGroup(routes.own, buffer)
        self.prefix = BoundGroup(routes.prefix, buffer)
        self.visiting = BoundGroup(routes.visiting, buffer)
        # With full attention a local query's keys are split in its own segment and the rows before it.
        self.prefix_is_causal = window is not None
        own = [routes.own]
        self.own_in_backward: tuple[BoundGroup, ...] = (self.own,)
        if alone and not (self.visiting.empty and self.prefix.empty):
            own = list(routes.own.split(routes.own.half()))
            self.own_in_backward = tuple(BoundGroup(half, buffer) for half in own)
        # What goes to ranks comes back first, in the same order, then what goes to servers.
        query_rows, key_rows = (
            np.split(messages.send_rows, [messages.send_counts[:ranks].sum()])
            for messages in (routes.queries, routes.keys)
        )
        self.query_sums = RowSum(
            [*(group.q_rows for group in own), routes.prefix.q_rows, *query_rows], routes.local_rows, buffer
        )
        self.key_sums = RowSum([*(group.k_rows for group in own), *key_rows], routes.local_rows, buffer)
        self.received_sums = RowSum(
            [routes.visiting.k_rows, routes.prefix.k_rows], sum(self.keys.traffic.received), buffer, in_place=False
        )


class BoundNanoBatch:
    """One nano-batch's routes, one set for every kind of attention of the model.

    Attributes:
        number: 0 or 1.
        rows: rows of it that this rank holds.
        routes: by kind of attention.
    """

    def __init__(self, number: int, nano_batch: NanoBatch, rank: int, alone: bool, buffer: IndexBuffer) -> None:
        self.number = number
        self.rows = int(nano_batch.layout.tokens[rank])
        self.routes = {kind: BoundRoutes(plan, rank, alone, buffer) for kind, plan in nano_batch.plans.items()}
        self._plans, self._rank, self._alone, self._device = nano_batch.plans, rank, alone, buffer.device
        self._repairs: dict[tuple[AttentionKind, frozenset[int]], BoundRoutes] = {}

    def repair(self, kind: AttentionKind, lost: frozenset[int]) -> BoundRoutes:
        """Routes by which the ranks compute what some lost servers were to compute.

        Args:
            kind: of the layer.
            lost: the plan's servers that are lost.
        """
        if (kind, lost) not in self._repairs:
            plan = self._plans[kind]
            rest = tasks_at_home(plan, [plan.layout.ranks + server for server in lost])
            buffer = IndexBuffer(self._device)
            self._repairs[kind, lost] = BoundRoutes(rest, self._rank, self._alone, buffer)
            buffer.send()
        return self._repairs[kind, lost]


@dataclass
class Ran:
    """What a model's layers did in a planned step, recomputations included.

    Attributes:
        attentions: calls of the attention function.
        layers: decoder layers that `plan_layers` has prepared.
        layers_in_turns: of these, how many ran their nano-batches in turns.
    """

    attentions: int = 0
    layers: int = 0
    layers_in_turns: int = 0


class BoundPlan:
    """What a planned micro-batch hands to every layer, as the keyword `distca_plan`.

    A plain class on purpose: FSDP2 copies dataclasses, dicts and named tuples among the arguments of a
    module, and accelerate moves whatever has a `to`.

    Attributes:
        plan: the plan, the same on every rank.
        nano_batches: its nano-batches, bound to this rank.
        exchange: what carries rows between ranks.
        kernel: what computes tasks.
        device: this rank's.
        remote: the plan at its dedicated servers; None without servers.
        keep_received: keep received Q, K and V rows for the backward instead of receiving them again.
        keep_core_attention: keep O and LSE of checkpointed layers instead of computing them again.
        kept_results: these, by attention module and nano-batch.
        ran: what the layers have done with the plan so far.
    """

    def __init__(
        self,
        plan: MicroBatchPlan,
        rank: int,
        device: torch.device,
        exchange: Exchange,
        kernel: Kernel,
        keep_received: bool,
        keep_core_attention: bool = True,
        remote: RemotePlan | None = None,
    ) -> None:
        self.plan = plan
        self.device = device
        alone = len(plan.nano_batches) == 1
        buffer = IndexBuffer(device)
        self.nano_batches = tuple(
            BoundNanoBatch(number, nano, rank, alone, buffer) for number, nano in enumerate(plan.nano_batches)
        )
        buffer.send()
        self.exchange = exchange
        self.kernel = kernel
        self.remote = remote
        self.keep_received = keep_received
        self.keep_core_attention = keep_core_attention
        self.kept_results = KeptResults()
        self.ran = Ran()

    @property
    def rows(self) -> int:
        """Rows that this rank holds."""
        return sum(nano.rows for nano in self.nano_batches)

    def for_layer(self) -> "LayerPlan":
        """The plan as a layer uses it that runs on all rows at once."""
        return LayerPlan(self, self.nano_batches)


def _go_on() -> None:
    """What a layer does between start and wait where no other half is to run."""


@dataclass(eq=False)
class LayerPlan:
    """A bound plan as one layer's attention is to use it.

    Not a thing that FSDP2 meets: it is made inside a layer and handed to that layer's own attention.

    Attributes:
        bound: the plan.
        nano_batches: those whose rows the attention is called with.
        pause: called between the start of an exchange and the wait for it; lets the other half run.
    """

    bound: BoundPlan
    nano_batches: tuple[BoundNanoBatch, ...]
    pause: Callable[[], None] = _go_on

    @property
    def rows(self) -> int:
        """Rows that the attention is called with."""
        return sum(nano.rows for nano in self.nano_batches)
