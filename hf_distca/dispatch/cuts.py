"""Exchanges between the segments of a cut document, for modules that mix its rows in order.

A short convolution reads the last rows before a segment, its halo. A linear recurrence reads the state that the
earlier segments leave. Such a state is affine in the state before: S_out = A·S_in + B. Each segment's rank computes
A and B alone, and ranks exchange these instead of waiting for each other:

    forward     S_in of segment j  = B_{j-1} + A_{j-1}·(B_{j-2} + A_{j-2}·( … B_0))
    backward    dS_out of segment i = dS_in_{i+1} + A_{i+1}ᵀ·(dS_in_{i+2} + A_{i+2}ᵀ·( … dS_in_n))

The backward is the forward in reverse, on the gradients of S_in. A rank keeps S_in of its own segments and nothing of
other ranks.

Each exchange is two autograd nodes, so that the other nano-batch can run in between. Both nodes take a rank's own rows
along: the backward reaches them on every rank in the same order, even without a cut segment.

Shape suffixes: T local rows of a nano-batch, X rows with room for halos, C channels, H heads, K rows and V columns of
a state, R rows or states that arrive.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hf_distca.dispatch.checkpoints import KeptResults, is_checkpointed, is_recomputation
from hf_distca.dispatch.exchange import Exchange, ExchangeBuffer, Route, bound_route
from hf_distca.dispatch.recorder import NOT_MEASURED, Recorder, Work
from hf_distca.dispatch.rows import IndexBuffer, RowSum
from hf_distca.plan import Direction, Layout
from hf_distca.planner.cuts import Chains, Halos, chains, halos


class Packing(NamedTuple):
    """Documents side by side, as kernels of transformers' modules take them."""

    cu_seqlens: Tensor  # [documents + 1] int32, first row of each document, then the number of rows
    seq_idx: Tensor  # [1, rows] int32, document of each row


class BoundCuts:
    """Segments of one rank in a nano-batch, and what they exchange."""

    def __init__(self, layout: Layout, rank: int, buffer: IndexBuffer) -> None:
        mine = layout.of_rank(rank)
        self.sizes: tuple[int, ...] = tuple((mine["stop"] - mine["start"]).tolist())  # rows, in row order
        self._layout, self._rank, self._buffer = layout, rank, buffer
        self._halos: dict[int, BoundHalos] = {}
        self._packings: dict[tuple[int, ...], Packing] = {}

    def bind(self, widths: Iterable[int]) -> None:
        """Make the tables of convolutions that read so many rows, and of states, before a layer asks for them."""
        for width in widths:
            self.halos(width)
        _ = self.chains

    def halos(self, width: int) -> "BoundHalos":
        """Return the halos for convolutions that read `width` rows before a row."""
        if width not in self._halos:
            self._halos[width] = BoundHalos(halos(self._layout, self._rank, width), self._buffer)
        return self._halos[width]

    def packing(self, sizes: tuple[int, ...]) -> Packing | None:
        """Return how a kernel tells documents of these sizes apart; None for a single document."""
        if len(sizes) < 2:
            return None
        if sizes not in self._packings:
            ends = np.cumsum([0, *sizes]).astype(np.int32)
            numbers = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
            self._packings[sizes] = Packing(self._buffer.place(ends), self._buffer.place(numbers)[None])
            self._buffer.send()
        return self._packings[sizes]

    @cached_property
    def chains(self) -> "BoundChains":
        """States that cut segments exchange."""
        return BoundChains(chains(self._layout, self._rank), self._buffer)


class BoundHalos:
    """Halos as index tensors, see `Halos`."""

    def __init__(self, table: Halos, buffer: IndexBuffer) -> None:
        self.rows = table.rows
        self.places_T = buffer.place(table.places)
        self.received_places_R = buffer.place(table.received_places)
        self.local_rows, self.local_places = buffer.place(table.local_rows), buffer.place(table.local_places)
        self.route = bound_route(table.messages, buffer)
        local = len(table.places)
        # Gradients of local rows come from the rows themselves, from halos on this rank and on other ranks.
        rows_of = {"rows": np.arange(local), "local": table.local_rows, "ranks": table.messages.send_rows}
        self.sums = RowSum(rows_of, local, buffer)
        buffer.send()


class BoundChains:
    """States that cut segments exchange, see `Chains`."""

    def __init__(self, table: Chains, buffer: IndexBuffer) -> None:
        self.cut: tuple[int, ...] = tuple(table.cut.tolist())
        self.earlier, self.later = table.earlier, table.later
        self.received = buffer.place(table.received)
        self.route = bound_route(table.messages, buffer)
        buffer.send()


class _Exchange:
    """Exchange of one module on one nano-batch, shared by the nodes of its forward and backward.

    Args:
        keep: whether checkpointed forwards keep what they received in `kept`.

    Attributes:
        known: what the first forward received, in a recomputation that does not exchange again.
    """

    def __init__(
        self,
        name: str,
        nano_batch: int,
        module: nn.Module,
        exchange: Exchange,
        recorder: Recorder,
        kept: KeptResults,
        *,
        keep: bool,
    ) -> None:
        self._name, self._exchange, self._recorder = name, exchange, recorder
        self._nano_batch, self._layer = nano_batch, getattr(module, "layer_idx", None)
        self._key, self._kept = (module, nano_batch, name), kept
        recomputes = is_recomputation()
        self._keeps = keep and not recomputes and is_checkpointed(module.training)
        self.known = kept.take(self._key) if recomputes and self._key in kept else None
        self._buffer: ExchangeBuffer | None = None

    def keep(self, received: Iterable[Tensor]) -> None:
        if self._keeps:
            self._kept.keep(self._key, tuple(each.detach() for each in received))

    def start(self, route: Route, like: Sequence[Tensor], *, back: bool = False) -> None:
        self._buffer = self._exchange.buffer((self._name, 0, self._nano_batch, frozenset()), route, like)
        if back:
            self._buffer.return_received(like)
        else:
            self._buffer.send(like, route.rows)

    def wait(self, direction: Direction) -> list[Tensor]:
        """Return the columns that have arrived; the module's next exchange overwrites them."""
        buffer, self._buffer = self._buffer, None
        assert buffer is not None
        work = Work(self._layer, self._nano_batch, direction)
        with self._recorder.span("wait", self._name, work) if buffer.under_way else NOT_MEASURED:
            return buffer.wait()


class HaloExchange(_Exchange):
    """Exchange of the rows before each segment."""

    def __init__(self, bound: BoundHalos, *args: Any, **kwargs: Any) -> None:
        super().__init__("halos", *args, **kwargs)
        self.bound = bound
        self.d_x_XC: Tensor | None = None  # gradient of the rows with halos, while the halos' part travels

    def send(self, x_TC: Tensor) -> Tensor:
        """Start the exchange and return a token for `receive`."""
        token: Tensor = _SendHalos.apply(self, x_TC)
        return token

    def receive(self, token: Tensor, x_TC: Tensor) -> Tensor:
        """Return the rows with each segment's halo before it: x_XC."""
        x_XC: Tensor = _ReceiveHalos.apply(self, token, x_TC)
        return x_XC


class _SendHalos(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: HaloExchange, x_TC: Tensor) -> Tensor:
        ctx.exchange = exchange
        if exchange.known is None:
            exchange.start(exchange.bound.route, [x_TC])
        return x_TC.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _token: Tensor) -> tuple[Tensor | None, ...]:
        exchange, bound = ctx.exchange, ctx.exchange.bound
        d_x_XC, exchange.d_x_XC = exchange.d_x_XC, None
        (returned_RC,) = exchange.wait("backward")
        d_x_TC, d_local = d_x_XC.index_select(0, bound.places_T), d_x_XC.index_select(0, bound.local_places)
        return None, bound.sums.add_up([d_x_TC, d_local, returned_RC])


class _ReceiveHalos(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: HaloExchange, token: Tensor, x_TC: Tensor) -> Tensor:
        ctx.exchange, bound = exchange, exchange.bound
        (received_RC,) = exchange.wait("forward") if exchange.known is None else exchange.known
        exchange.keep(map(torch.clone, [received_RC]))  # cloned only if kept: the exchange reuses its memory
        x_XC = x_TC.new_zeros((bound.rows, *x_TC.shape[1:]))
        x_XC.index_copy_(0, bound.places_T, x_TC)
        x_XC.index_copy_(0, bound.local_places, x_TC.index_select(0, bound.local_rows))
        x_XC.index_copy_(0, bound.received_places_R, received_RC)
        return x_XC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x_XC: Tensor) -> tuple[Tensor | None, ...]:
        exchange, bound = ctx.exchange, ctx.exchange.bound
        exchange.d_x_XC = d_x_XC
        exchange.start(bound.route, [d_x_XC.index_select(0, bound.received_places_R)], back=True)
        return None, d_x_XC.new_empty(0), None


Transition = tuple[Tensor | None, Tensor | None]
"""A and B of a cut segment, in float32: A [H, K, K], or [H] for a decay that is one number a head; B [H, K, V].

A segment without earlier segments needs no A, one without later segments needs neither.
"""


class StateExchange(_Exchange):
    """Exchange of the states of cut segments.

    Args:
        shapes: of A and of B.
    """

    def __init__(
        self, bound: BoundChains, shapes: tuple[tuple[int, ...], tuple[int, ...]], *args: Any, **kwargs: Any
    ) -> None:
        super().__init__("states", *args, **kwargs)
        self.bound, self._shapes = bound, shapes
        # A, and B or the gradients of S_in, of all cut segments of this rank, while they are exchanged.
        self._own: list[Tensor] = []
        self.states: Sequence[Tensor] = ()  # S_in of this rank's continued segments, in the backward

    def send(self, transitions: Sequence[Transition], anchors: Sequence[Tensor]) -> Tensor:
        """Start the exchange and return a token for `receive`.

        Args:
            anchors: tensors that need a gradient on every rank or on none.
        """
        factors, offsets = [a for a, _ in transitions], [b for _, b in transitions]
        token: Tensor = _SendStates.apply(self, *factors, *offsets, *anchors)
        return token

    def receive(
        self, token: Tensor, rows: Tensor, transitions: Sequence[Transition]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the state before each cut segment, [H, K, V]; None for the first of a document.

        Args:
            rows: results of this rank that need a gradient on every rank or on none; they are returned, to be used in
                their place.
        """
        rows, *states = _ReceiveStates.apply(self, token, rows, *(factor for factor, _ in transitions))
        arrived = iter(states)
        return rows, [next(arrived) if earlier else None for earlier in self.bound.earlier]

    def exchange(
        self, factors: Sequence[Tensor | None], states: Sequence[Tensor | None], like: Tensor, *, back: bool = False
    ) -> None:
        """Start to send A, and B or gradients of S_in, of all cut segments: zeros where no rank reads them."""
        self._own = []
        for shape, parts in zip(self._shapes, (factors, states), strict=True):
            column = like.new_zeros((len(parts), *shape), dtype=torch.float32)
            for number, part in enumerate(parts):
                if part is not None:
                    column[number] = part
            self._own.append(column)
        columns = [column.index_select(0, self.bound.received) for column in self._own] if back else self._own
        self.start(self.bound.route, columns, back=back)

    def arrived(self, direction: Direction) -> tuple[list[Tensor], list[Tensor]]:
        """Return A, and B or gradients of S_in, of all segments that a table of `Chains` numbers."""
        own, self._own = self._own, []
        factors, states = ([*ours, *theirs] for ours, theirs in zip(own, self.wait(direction), strict=True))
        return factors, states


class _SendStates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: StateExchange, *tensors: Tensor | None) -> Tensor:
        ctx.exchange, cut = exchange, len(exchange.bound.cut)
        ctx.others = len(tensors) - 2 * cut
        anchor = tensors[-1]
        assert anchor is not None
        if exchange.known is None:
            exchange.exchange(tensors[:cut], tensors[cut : 2 * cut], anchor)
        return anchor.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _token: Tensor) -> tuple[Tensor | None, ...]:
        exchange: StateExchange = ctx.exchange
        factors, d_states = exchange.arrived("backward")
        states, exchange.states = iter(exchange.states), ()
        d_factors: list[Tensor | None] = []
        gradients: list[Tensor | None] = []
        for earlier, later in zip(exchange.bound.earlier, exchange.bound.later, strict=True):
            gradient = _chained(later[::-1], factors, d_states, _transposed_times) if later else None
            gradients.append(gradient)
            state = next(states) if earlier else None
            d_factor = None
            if state is not None and gradient is not None:
                of_matrix = factors[0].dim() == 3
                d_factor = gradient @ state.mT if of_matrix else (gradient * state).sum((1, 2))
            d_factors.append(d_factor)
        return None, *d_factors, *gradients, *[None] * ctx.others


class _ReceiveStates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: StateExchange, token: Tensor, rows: Tensor, *factors: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.exchange, before = exchange, exchange.known
        if before is None:
            of_all, offsets = exchange.arrived("forward")
            before = tuple(_chained(each, of_all, offsets, _times) for each in exchange.bound.earlier if each)
        exchange.keep(before)
        ctx.states = len(before)
        ctx.save_for_backward(*before, *factors)
        return rows, *before

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor, *d_before: Tensor) -> tuple[Tensor | None, ...]:
        exchange: StateExchange = ctx.exchange
        saved = ctx.saved_tensors  # unpacked once, as checkpoints want it
        exchange.states, factors = saved[: ctx.states], saved[ctx.states :]
        arrived = iter(d_before)
        d_states = [next(arrived) if earlier else None for earlier in exchange.bound.earlier]
        exchange.exchange(factors, d_states, d_rows, back=True)
        return None, d_rows.new_empty(0), d_rows, *[None] * len(factors)


Times = Callable[[Tensor, Tensor], Tensor]


def _chained(numbers: Sequence[int], factors: list[Tensor], offsets: list[Tensor], times: Times) -> Tensor:
    """Return the offset of the last number plus its factor times the same of the numbers before."""
    first, *others = numbers
    state = offsets[first].clone()  # not in memory that is used again
    for number in others:
        state = offsets[number] + times(factors[number], state)
    return state


def _times(factor: Tensor, state_HKV: Tensor) -> Tensor:
    """Return A·S, for A [H, K, K] or [H]."""
    return factor @ state_HKV if factor.dim() == 3 else factor[:, None, None] * state_HKV


def _transposed_times(factor: Tensor, gradient_HKV: Tensor) -> Tensor:
    """Return Aᵀ·dS, for A [H, K, K] or [H]."""
    return _times(factor.mT if factor.dim() == 3 else factor, gradient_HKV)
