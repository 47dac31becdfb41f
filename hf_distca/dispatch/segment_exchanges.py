"""Exchanges between the segments of a path, for modules that mix its rows in order.

A short convolution reads the last rows before a segment, its halo. A linear recurrence reads the
state that the earlier segments leave. Such a state is affine in the state before: S_out = A·S_in +
B. Each segment's rank computes A and B alone, and ranks exchange these instead of waiting for each
other. With the segments of a path numbered from 0:

    forward     S_in of segment j  = B_{j-1} + A_{j-1}·(B_{j-2} + A_{j-2}·( … B_0))

A segment whose rank holds all rows of the path before it is complete. Its state is computed alone:
it is the first of such a product, and B is its S_out. Several branches may start after a segment.
The gradient of its state is the sum over these successors:

    backward    dS_out of segment i = Σ of successors c: dS_in_c + A_cᵀ·dS_out_c

The backward exchanges A and dS_in. A rank keeps S_in of its own segments and nothing of other
ranks.

Each exchange is two autograd nodes, so that the other nano-batch can run in between. Both nodes
take a rank's own rows along: the backward reaches them on every rank in the same order, even
without a cut segment.

Shape suffixes: T local rows of a nano-batch, X rows with room for halos, C channels, H heads, K
rows and V columns of a state, R rows or states that arrive.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hf_distca.dispatch.exchange import Exchange, ExchangeBuffer, Route, bound_route
from hf_distca.dispatch.kept_results import ForwardResults, KeptResults
from hf_distca.dispatch.recorder import NOT_MEASURED, Recorder, Work
from hf_distca.dispatch.rows import IndexBuffer, RowSum
from hf_distca.plan import Direction, Layout
from hf_distca.plan.cuts import Chains, Halos, Later, chains, halos
from hf_distca.plan.intervals import row_counts
from hf_distca.plan.runs import Run, runs_of


class Packing(NamedTuple):
    """Documents side by side, as kernels of transformers' modules take them."""

    cu_seqlens: Tensor  # [documents + 1] int32, first row of each document, then the number of rows
    seq_idx: Tensor  # [1, rows] int32, document of each row


class BoundCuts:
    """Segments of one rank in a nano-batch, with the routes of their halos and states."""

    def __init__(self, layout: Layout, rank: int, buffer: IndexBuffer) -> None:
        # Rows of each segment, in row order.
        self.sizes: tuple[int, ...] = tuple(row_counts(layout.of_rank(rank)).tolist())
        self._layout = layout
        self._rank = rank
        self._buffer = buffer
        self._halos: dict[int, BoundHalos] = {}
        self._packings: dict[tuple[int, ...], Packing] = {}
        self._runs: dict[tuple[bool, bool], list[Run]] = {}

    def bind(self, widths: Iterable[int]) -> None:
        """Make the tables of convolutions, of states, and of packed documents.

        Layers read them later, where tables cannot be made.

        Args:
            widths: rows before a row that convolutions read, one number for each kind of them.
        """
        for width in widths:
            self.halos(width)
        for starts in (True, False):
            for run in self.runs(packs=True, starts=starts):
                self.packing(tuple(self.sizes[segment] for segment in run.segments))

    def halos(self, width: int) -> "BoundHalos":
        """Return the halos for convolutions that read `width` rows before a row."""
        if width not in self._halos:
            self._halos[width] = BoundHalos(halos(self._layout, self._rank, width), self._buffer)
        return self._halos[width]

    def runs(self, *, packs: bool, starts: bool) -> list[Run]:
        """Return the runs of a recurrence's kernel, see `runs_of`."""
        if (packs, starts) not in self._runs:
            self._runs[packs, starts] = runs_of(self._table, packs=packs, starts=starts)
        return self._runs[packs, starts]

    def packing(self, sizes: tuple[int, ...]) -> Packing | None:
        """Return how a kernel tells segments of these sizes apart; None for a single segment."""
        if len(sizes) < 2:
            return None
        if sizes not in self._packings:
            ends = np.cumsum([0, *sizes]).astype(np.int32)
            numbers = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
            self._packings[sizes] = Packing(
                self._buffer.place(ends), self._buffer.place(numbers)[None]
            )
            self._buffer.send()
        return self._packings[sizes]

    @cached_property
    def _table(self) -> Chains:
        return chains(self._layout, self._rank)

    @cached_property
    def chains(self) -> "BoundChains":
        """States that cut segments exchange."""
        return BoundChains(self._table, self._buffer)


class BoundHalos:
    """Halos as index tensors, see `Halos`."""

    def __init__(self, table: Halos, buffer: IndexBuffer) -> None:
        self.rows = table.rows
        self.places_T = buffer.place(table.places)
        self.received_places_R = buffer.place(table.received_places)
        self.local_rows = buffer.place(table.local_rows)
        self.local_places = buffer.place(table.local_places)
        self.route = bound_route(table.messages, buffer)
        # Gradients of local rows come from the rows themselves, from halos on this rank and on
        # other ranks.
        local_rows = len(table.places)
        rows_of_sources = {
            "rows": np.arange(local_rows),
            "local": table.local_rows,
            "ranks": table.messages.send_rows,
        }
        self.sums = RowSum(rows_of_sources, local_rows, buffer)
        buffer.send()


class BoundChains:
    """States from which the segments of a rank start, see `Chains`."""

    def __init__(self, table: Chains, buffer: IndexBuffer) -> None:
        self.before = table.before
        self.has_later = table.has_later
        self.linked: tuple[int, ...] = tuple(table.linked.tolist())
        self.earlier = table.earlier
        self.later = table.later
        self.gradient_of = table.gradient_of
        self.gradients = max(table.gradient_of, default=-1) + 1
        self.state_route = bound_route(table.states, buffer)
        self.gradient_route = bound_route(table.gradients, buffer)
        buffer.send()


class _Exchange:
    """Exchange of one module on one nano-batch, shared by the nodes of its forward and backward."""

    def __init__(
        self,
        name: str,
        nano_batch: int,
        module: nn.Module,
        exchange: Exchange,
        recorder: Recorder,
        kept: KeptResults,
    ) -> None:
        self._name = name
        self._exchange = exchange
        self._recorder = recorder
        self._nano_batch = nano_batch
        self._layer = getattr(module, "layer_idx", None)
        # A forward under activation checkpointing keeps what it received: the recomputation then
        # exchanges nothing.
        self.results = ForwardResults(kept, (module, nano_batch, name), training=module.training)
        self._buffer: ExchangeBuffer

    def _start(self, route: Route, columns: Sequence[Tensor], *, back: bool = False) -> None:
        self._buffer = self._exchange.buffer(
            (self._name, 0, self._nano_batch, frozenset()), route, columns
        )
        if back:
            self._buffer.return_received(columns)
        else:
            self._buffer.send(columns, route.rows)

    def _wait(self, direction: Direction) -> list[Tensor]:
        """Return the columns that have arrived; the module's next exchange overwrites them."""
        buffer = self._buffer
        work = Work(self._layer, self._nano_batch, direction)
        del self._buffer  # its memory may be given back before the backward
        with self._recorder.span("wait", self._name, work) if buffer.under_way else NOT_MEASURED:
            return buffer.wait()


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Any, *tensors: Any) -> Tensor:
        ctx.exchange = exchange
        ctx.count = len(tensors)
        if exchange.results.known is None:
            exchange.begin(*tensors)
        token: Tensor = tensors[-1].new_empty(0)
        return token

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _token: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.exchange.end_back()
        return None, *gradients, *[None] * (ctx.count - len(gradients))


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Any, token: Tensor, *tensors: Tensor) -> Any:
        ctx.exchange = exchange
        return exchange.end(ctx, *tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, gradients[0].new_empty(0), *ctx.exchange.begin_back(ctx, *gradients)


class HaloExchange(_Exchange):
    """Exchange of the rows before each segment."""

    def __init__(self, bound: BoundHalos, *args: Any, **kwargs: Any) -> None:
        super().__init__("halos", *args, **kwargs)
        self.bound = bound
        self._d_x_XC: Tensor  # gradient of the rows with halos, while the halos' part travels

    def send(self, x_TC: Tensor) -> Tensor:
        """Start the exchange and return a token for `receive`."""
        token: Tensor = _Send.apply(self, x_TC)
        return token

    def receive(self, token: Tensor, x_TC: Tensor) -> Tensor:
        """Return the rows with each segment's halo before it: x_XC."""
        x_XC: Tensor = _Receive.apply(self, token, x_TC)
        return x_XC

    def begin(self, x_TC: Tensor) -> None:
        """Start the forward's exchange."""
        self._start(self.bound.route, [x_TC])

    def end(self, _ctx: Any, x_TC: Tensor) -> Tensor:
        """Finish the forward's exchange and return the results of `receive`."""
        bound = self.bound
        known = self.results.known
        (received_RC,) = self._wait("forward") if known is None else known
        if self.results.keeps:
            self.results.keep(received_RC.clone())  # the exchange reuses its memory
        # Own rows and halos side by side, each document's halo before its segment.
        x_XC = x_TC.new_zeros((bound.rows, *x_TC.shape[1:]))
        x_XC.index_copy_(0, bound.places_T, x_TC)
        x_XC.index_copy_(0, bound.local_places, x_TC.index_select(0, bound.local_rows))
        x_XC.index_copy_(0, bound.received_places_R, received_RC)
        return x_XC

    def begin_back(self, _ctx: Any, d_x_XC: Tensor) -> tuple[None]:
        """Start the backward's exchange and return the gradients of `receive`'s arguments."""
        self._d_x_XC = d_x_XC
        self._start(
            self.bound.route, [d_x_XC.index_select(0, self.bound.received_places_R)], back=True
        )
        return (None,)

    def end_back(self) -> tuple[Tensor]:
        """Finish the backward's exchange and return the gradients of `send`'s arguments."""
        bound, d_x_XC = self.bound, self._d_x_XC
        del self._d_x_XC
        (returned_RC,) = self._wait("backward")
        d_x_TC, d_local = (
            d_x_XC.index_select(0, bound.places_T),
            d_x_XC.index_select(0, bound.local_places),
        )
        return (bound.sums.add_up([d_x_TC, d_local, returned_RC]),)


Transition = tuple[Tensor | None, Tensor | None]
"""A and B of a linked segment, in float32: A [H, K, K], or [H] for a decay that is one number a
head; B [H, K, V].

A complete segment needs no A, one without later segments needs neither.
"""


class StateExchange(_Exchange):
    """Exchange of the states of linked segments, with A and B of the given shapes."""

    def __init__(
        self,
        bound: BoundChains,
        shapes: tuple[tuple[int, ...], tuple[int, ...]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__("states", *args, **kwargs)
        self.bound = bound
        self._shapes = shapes
        # A, and B or gradients of S_in, of this rank, while they are exchanged.
        self._sent_states: list[Tensor] = []
        # S_in of this rank's linked segments that are not complete, in the backward.
        self._states: Sequence[Tensor] = ()

    def send(self, transitions: Sequence[Transition], anchors: Sequence[Tensor]) -> Tensor:
        """Start the exchange and return a token.

        Anchors need a gradient on every rank or on none.
        """
        token: Tensor = _Send.apply(
            self, *(a for a, _ in transitions), *(b for _, b in transitions), *anchors
        )
        return token

    def receive(
        self, token: Tensor, rows: Tensor, transitions: Sequence[Transition]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the state before each linked segment, [H, K, V]; None if it is complete.

        The rows, results of this rank, need a gradient on every rank or on none; use the returned
        ones in their place.
        """
        rows, *states = _Receive.apply(self, token, rows, *(factor for factor, _ in transitions))
        arrived = iter(states)
        return rows, [next(arrived) if earlier else None for earlier in self.bound.earlier]

    def begin(self, *tensors: Tensor) -> None:
        """Start the forward's exchange."""
        linked = len(self.bound.linked)
        self._start_states(
            self.bound.state_route,
            [*enumerate(tensors[:linked])],
            [*enumerate(tensors[linked : 2 * linked])],
            linked,
            tensors[-1],
        )

    def end(self, ctx: Any, rows: Tensor, *factors: Tensor | None) -> tuple[Tensor, ...]:
        """Finish the forward's exchange and return the results of `receive`."""
        states = self.results.known
        if states is None:
            all_factors, offsets = self._arrived("forward")
            states = tuple(
                _state_after(earlier, all_factors, offsets)
                for earlier in self.bound.earlier
                if earlier
            )
        if self.results.keeps:
            self.results.keep(*(state.detach() for state in states))
        ctx.states = len(states)
        ctx.save_for_backward(*states, *factors)
        return rows, *states

    def begin_back(self, ctx: Any, d_rows: Tensor, *d_states: Tensor) -> tuple[Tensor | None, ...]:
        """Start the backward's exchange and return the gradients of `receive`'s arguments."""
        saved = ctx.saved_tensors  # unpacked once, as checkpoints want it
        self._states = saved[: ctx.states]
        factors = saved[ctx.states :]
        bound = self.bound
        of_incomplete = [number for number in bound.gradient_of if number >= 0]
        self._start_states(
            bound.gradient_route,
            # Segments that share a gradient have no A.
            [*zip(bound.gradient_of, factors, strict=True)],
            [*zip(of_incomplete, d_states, strict=True)],
            bound.gradients,
            d_rows,
        )
        return d_rows, *[None] * len(factors)

    def end_back(self) -> list[Tensor | None]:
        """Finish the backward's exchange and return the gradients of `send`'s arguments."""
        # The backward of S_out = A S_in + B: dB is the gradient of S_out, and dA is dB S_inᵀ.
        factors, d_states = self._arrived("backward")
        states = iter(self._states)
        self._states = ()
        d_factors: list[Tensor | None] = []
        d_offsets: list[Tensor | None] = []
        for earlier, later in zip(self.bound.earlier, self.bound.later, strict=True):
            state = next(states) if earlier else None
            gradient = _gradient_after(later, factors, d_states) if later else None
            d_offsets.append(gradient)
            d_factor = None
            if state is not None and gradient is not None:
                is_matrix = factors[0].dim() == 3
                d_factor = gradient @ state.mT if is_matrix else (gradient * state).sum((1, 2))
            d_factors.append(d_factor)
        return [*d_factors, *d_offsets]

    def _start_states(
        self,
        route: Route,
        factors: Sequence[tuple[int, Tensor | None]],
        states: Sequence[tuple[int, Tensor | None]],
        count: int,
        template: Tensor,
    ) -> None:
        """Start to send A, and B or gradients of S_in.

        They are zeros where no rank reads them.

        Args:
            factors: A, each with its number on this rank.
            states: B or gradients of S_in; those of the same number are added up.
            count: numbers on this rank.
            template: tensor on the device of the exchange.
        """
        self._sent_states = [
            template.new_zeros((count, *shape), dtype=torch.float32) for shape in self._shapes
        ]
        for column, values in zip(self._sent_states, (factors, states), strict=True):
            for number, value in values:
                if value is not None:
                    column[number] += value
        self._start(route, self._sent_states)

    def _arrived(self, direction: Direction) -> tuple[list[Tensor], list[Tensor]]:
        """Return A, and B or gradients of S_in, of all numbers on this rank."""
        sent_factors, sent_states = self._sent_states
        self._sent_states = []
        arrived_factors, arrived_states = self._wait(direction)
        return [*sent_factors, *arrived_factors], [*sent_states, *arrived_states]


def carried(factor: Tensor, state: Tensor) -> Tensor:
    """Return A·S, the part of a state before a segment that is left after it.

    Args:
        factor: A, [H, K, K] or [H].
        state: S, [H, K, V].
    """
    return factor @ state if factor.dim() == 3 else factor[:, None, None] * state


def _state_after(numbers: Sequence[int], factors: list[Tensor], offsets: list[Tensor]) -> Tensor:
    """Return the state after several numbered segments, from their offsets and factors.

    The state after a number is its offset, plus its factor times the state before.
    """
    first_number, *further_numbers = numbers
    state = offsets[first_number].clone()  # not in memory that is used again
    for number in further_numbers:
        state = offsets[number] + carried(factors[number], state)
    return state


def _gradient_after(
    later: Sequence[Later], factors: list[Tensor], d_states: list[Tensor]
) -> Tensor:
    """Return the gradient of the state after a segment.

    Each later segment adds the gradient of its state before. That is its own gradient, plus its
    factor transposed times the gradient of the state after it.
    """
    total = torch.zeros_like(d_states[later[0].gradient])
    after: dict[int, Tensor] = {}  # by place in `later`: gradient of the state after it, so far
    for place, (number, place_before) in enumerate(later):
        d_state = d_states[number]
        if place in after:
            factor = factors[number]
            transposed = factor.mT if factor.dim() == 3 else factor
            d_state = d_state + carried(transposed, after.pop(place))
        if place_before < 0:
            total += d_state
        else:
            known = after.get(place_before)
            after[place_before] = d_state if known is None else known + d_state
    return total
