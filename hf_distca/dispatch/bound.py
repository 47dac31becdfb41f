"""A plan bound to one rank: its routes as index tensors on the device, ready for every layer."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from hf_distca.dispatch.exchange import Exchange, Traffic
from hf_distca.dispatch.rows import RowIndex, add_rounds, row_index
from hf_distca.kernels.contract import Kernel, TaskShapes
from hf_distca.plan import MicroBatchPlan, NanoBatch
from hf_distca.planner.routes import Messages, TaskGroup, make_routes


class BoundGroup:
    """The tasks of one kernel call, as index tensors.

    Attributes:
        shapes: lengths of the tasks.
        q_rows: where the query rows are taken from (local or received query rows).
        k_rows: where the K/V rows are taken from (local or received key rows).
        k_sums: rounds in which the gradients of the K/V rows are added up where they were taken from.
        empty: no task at all.
    """

    def __init__(self, group: TaskGroup, device: torch.device) -> None:
        self.shapes = TaskShapes.build(group.q_lens.tolist(), group.k_lens.tolist(), device)
        self.q_rows = row_index(group.q_rows, device)
        self.k_rows = row_index(group.k_rows, device)
        self.k_sums = add_rounds(group.k_rows, device)
        self.empty = len(group.q_lens) == 0


class BoundMessages:
    """Rows of one kind that this rank exchanges, as index tensors.

    Attributes:
        rows: local rows to send, ordered by receiving rank.
        rows_by_peer: the same, rank by rank, with each rank's part of the sequence; ranks without a row
            are left out. No row stands twice in one rank's part.
        traffic: how many rows go where.
        way_back: the same rows on their way back.
    """

    def __init__(self, messages: Messages, device: torch.device) -> None:
        self.rows = row_index(messages.send_rows, device)
        self.traffic = Traffic(messages.send_counts.tolist(), messages.recv_counts.tolist(), messages.crossing)
        self.way_back = self.traffic.reversed()
        ends = np.cumsum(messages.send_counts)
        self.rows_by_peer: list[tuple[RowIndex, slice]] = [
            (row_index(messages.send_rows[stop - count : stop], device), slice(int(stop - count), int(stop)))
            for count, stop in zip(messages.send_counts, ends, strict=True)
            if count
        ]


class BoundRoutes:
    """The routes of one rank for one kind of attention layer; see `hf_distca.planner.routes.Routes`."""

    def __init__(self, nano_batch: NanoBatch, window: int | None, rank: int, device: torch.device) -> None:
        routes = make_routes(nano_batch.plans[window], rank)
        self.window = window
        self.local_rows = routes.local_rows
        self.queries = BoundMessages(routes.queries, device)
        self.keys = BoundMessages(routes.keys, device)
        self.own = BoundGroup(routes.own, device)
        self.prefix = BoundGroup(routes.prefix, device)
        self.visiting = BoundGroup(routes.visiting, device)
        # With full attention a local query's keys are split in its own segment and the rows before it.
        self.prefix_is_causal = window is not None


class BoundNanoBatch:
    """One nano-batch's routes, one set for every attention window of the model.

    Attributes:
        number: 0 or 1.
        rows: rows of it that this rank holds.
        routes: by window.
    """

    def __init__(self, number: int, nano_batch: NanoBatch, rank: int, device: torch.device) -> None:
        self.number = number
        self.rows = int(nano_batch.layout.tokens[rank])
        self.routes = {window: BoundRoutes(nano_batch, window, rank, device) for window in nano_batch.plans}


class BoundPlan:
    """What a planned micro-batch hands to every layer, as the keyword `distca_plan`.

    A plain class on purpose: FSDP2 copies dataclasses, dicts and named tuples among the arguments of a
    module, and accelerate moves whatever has a `to`.

    Attributes:
        plan: the plan, the same on every rank.
        nano_batches: its nano-batches, bound to this rank.
        exchange: what carries rows between ranks.
        kernel: what computes tasks.
        keep_received: keep received Q, K and V rows for the backward instead of receiving them again.
        kept_results: O and LSE of checkpointed layers, by attention module and nano-batch, from the first
            forward to the backward.
        calls: attention layers that have used the plan so far.
    """

    def __init__(
        self,
        plan: MicroBatchPlan,
        rank: int,
        device: torch.device,
        exchange: Exchange,
        kernel: Kernel,
        keep_received: bool,
    ) -> None:
        self.plan = plan
        self.nano_batches = tuple(
            BoundNanoBatch(number, nano, rank, device) for number, nano in enumerate(plan.nano_batches)
        )
        self.exchange = exchange
        self.kernel = kernel
        self.keep_received = keep_received
        self.kept_results: dict[tuple[nn.Module, int], tuple[Tensor, Tensor]] = {}
        self.calls = 0

    @property
    def rows(self) -> int:
        """Rows that this rank holds."""
        return sum(nano.rows for nano in self.nano_batches)

    def for_layer(self) -> "LayerPlan":
        """The plan as a layer uses it that runs on all rows at once and is not checkpointed."""
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
        keep_results: the layer is checkpointed, and its core attention is not to be computed again.
    """

    bound: BoundPlan
    nano_batches: tuple[BoundNanoBatch, ...]
    pause: Callable[[], None] = _go_on
    keep_results: bool = False

    @property
    def takes_turns(self) -> bool:
        """Whether another half runs where this one pauses."""
        return self.pause is not _go_on

    @property
    def rows(self) -> int:
        """Rows that the attention is called with."""
        return sum(nano.rows for nano in self.nano_batches)
