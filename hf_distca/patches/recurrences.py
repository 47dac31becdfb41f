"""Recurrences of a planned step, over the segments that a rank holds.

Segments whose rank holds all rows of their path before them are complete: they start from zeros, or
from the state after the segment before them, from which several branches may start. Any other
segment runs from a state of zeros. The state before it, S_in, follows from the states of other
ranks and adds r·S_in to its rows, see `hf_distca.dispatch.segment_exchanges`.

Shape suffixes: T rows, H heads, K rows and V columns of a state, N segments.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_distca.dispatch.bound import BoundNanoBatch
from hf_distca.dispatch.executor import without_autocast
from hf_distca.dispatch.segment_exchanges import Packing, StateExchange, Transition, carried
from hf_distca.patches.mixing_calls import MixingCall
from hf_distca.plan.runs import Run

Read = Callable[[Tensor], Tensor]
"""Function that turns the state before a segment into r·S in float32, [T, H, V]."""


class Part(NamedTuple):
    """Segments that a recurrence computes at once.

    Attributes:
        rows: of each tensor that the recurrence reads, [1, T, ...].
        packing: how packed segments are told apart; None for one segment.
        states: [N, H, K, V] states before the segments; None for zeros.
        lacks_state: whether the state before the segment is not known yet. Then r is computed, and
            A if there are later segments.
        has_later: whether other segments start after these. Then the state after each is computed.
    """

    rows: Sequence[Tensor]
    packing: Packing | None
    states: Tensor | None
    lacks_state: bool
    has_later: bool


class Result(NamedTuple):
    """Results of a recurrence on some segments.

    Attributes:
        rows: [1, T, H, V] outputs.
        states: [N, H, K, V] states after the segments in float32; B if the state before is not
            known yet.
        read: function that returns the share of an unknown state before the segment in its rows.
        factor: A of a segment without a known state: the state after it is A·S + B.
    """

    rows: Tensor
    states: Tensor | None = None
    read: Read | None = None
    factor: Tensor | None = None


class Recurrence(NamedTuple):
    """A recurrence as a module computes it.

    Attributes:
        compute: function that computes segments. It gets states only if `starts`.
        shapes: of A and of a state.
        packs: whether it computes several whole documents at once.
        starts: whether it starts from given states.
    """

    compute: Callable[[Part], Result]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    packs: bool
    starts: bool


def recur(
    call: MixingCall, recurrence: Recurrence, tensors: Sequence[Tensor], values: Tensor
) -> Tensor:
    """Compute a recurrence over each document, [1, T, H, V].

    What other ranks need comes first: while states travel, all else is computed, in both
    nano-batches.

    Args:
        tensors: [1, T, ...] each, what the recurrence reads.
        values: [1, T, H, V], of the shape of the result.
    """
    nano_batches = call.plan.nano_batches
    divided = zip(nano_batches, *map(call.of_nano_batches, tensors), strict=True)
    parts = [_OnNanoBatch(call, nano, recurrence, rows, values[:, :0]) for nano, *rows in divided]
    for part in parts:
        part.send_states()
    # The second nano-batch computes before the pause, because the first is about to wait.
    is_second = nano_batches[0].index == 1
    if is_second:
        parts[0].compute_rest()
    call.pause()
    outputs = []
    for part in parts:
        if not is_second:
            part.compute_rest()
        outputs += part.receive_states()
    return torch.cat(outputs, 1)


class _OnNanoBatch:
    """Recurrence over the rows of one nano-batch, in three steps.

    Args:
        rows: [1, T, ...] of the nano-batch, of each tensor that the recurrence reads.
        no_rows: [1, 0, H, V].
    """

    def __init__(
        self,
        call: MixingCall,
        nano: BoundNanoBatch,
        recurrence: Recurrence,
        rows: Sequence[Tensor],
        no_rows: Tensor,
    ) -> None:
        self._recurrence = recurrence
        self._rows = rows
        self._no_rows = no_rows
        self._cuts = nano.cuts
        self._chains = nano.cuts.chains
        self._exchange = StateExchange(self._chains, recurrence.shapes, **call.exchange(nano))
        self._runs = self._cuts.runs(packs=recurrence.packs, starts=recurrence.starts)
        self._parts = [torch.split(x, list(self._cuts.sizes), 1) for x in rows]
        self._results: dict[Run, Result] = {}
        # By complete segment with later ones: the state after it.
        self._states: dict[int, Tensor] = {}
        self._transitions: list[Transition] = []  # of linked segments
        self._token: Tensor

    def send_states(self) -> None:
        """Compute what other ranks need, and start to send it."""
        factors: dict[int, Tensor | None] = {}
        offsets: dict[int, Tensor | None] = {}
        for run in self._runs:
            if run.early:
                result = self._compute(run)
                if run.link is not None:
                    factors[run.link] = result.factor
                    offsets[run.link] = None if result.states is None else result.states[0]
        self._transitions = [
            (factors[link], offsets[link]) if link in factors else (None, self._states[segment])
            for link, segment in enumerate(self._chains.linked)
        ]
        self._token = self._exchange.send(self._transitions, self._rows)

    def compute_rest(self) -> None:
        """Compute what no other rank needs."""
        for run in self._runs:
            if not run.early:
                self._compute(run)

    def receive_states(self) -> list[Tensor]:
        """Add the share of the states that arrived.

        Returns:
            Rows of the nano-batch, in row order.
        """
        outputs = [self._results[run].rows for run in self._runs]
        # Some result goes through the exchange on every rank, see `StateExchange.receive`.
        outputs = outputs or [self._no_rows]
        outputs[0], states = self._exchange.receive(self._token, outputs[0], self._transitions)
        for index, run in enumerate(self._runs):
            state = None if run.link is None else states[run.link]
            if state is not None:
                outputs[index] = _with_state(outputs[index], self._results[run], state)
        return self._in_order(outputs)

    def _compute(self, run: Run) -> Result:
        """Compute a run, and keep its results."""
        first = run.segments[0]
        before = [self._chains.before[segment] for segment in run.segments]
        states = [self._states[segment] for segment in before if segment >= 0]
        recurrence = self._recurrence
        part = Part(
            [self._rows_of(run, index) for index in range(len(self._rows))],
            self._cuts.packing(tuple(self._cuts.sizes[segment] for segment in run.segments)),
            torch.stack(states) if states and recurrence.starts else None,
            lacks_state=run.link is not None or bool(states and not recurrence.starts),
            has_later=self._chains.has_later[first],
        )
        result = recurrence.compute(part)
        if states and not recurrence.starts:
            result = _started(result, states[0])
        if run.link is None and result.states is not None:
            self._states.update(zip(run.segments, result.states.unbind(), strict=True))
        self._results[run] = result
        return result

    def _rows_of(self, run: Run, index: int) -> Tensor:
        """Return the rows of a run, of one of the tensors that the recurrence reads."""
        first, last = run.segments[0], run.segments[-1]
        if run.is_contiguous:
            start = sum(self._cuts.sizes[:first])
            return self._rows[index].narrow(1, start, sum(self._cuts.sizes[first : last + 1]))
        return torch.cat([self._parts[index][segment] for segment in run.segments], 1)

    def _in_order(self, outputs: list[Tensor]) -> list[Tensor]:
        """Return the outputs of all runs in row order."""
        by_segment: dict[int, Tensor] = {}
        for run, rows in zip(self._runs, outputs, strict=False):  # without runs there are no rows
            if run.is_contiguous:
                by_segment[run.segments[0]] = rows
            else:
                sizes = [self._cuts.sizes[segment] for segment in run.segments]
                by_segment.update(zip(run.segments, torch.split(rows, sizes, 1), strict=True))
        return [by_segment[segment] for segment in sorted(by_segment)] or outputs


def _with_state(rows: Tensor, result: Result, state: Tensor) -> Tensor:
    """Return the rows of a segment with the share of the state before it."""
    assert result.read is not None
    with without_autocast(state.device.type):
        return (rows.float() + result.read(state)).to(rows.dtype)


def _started(result: Result, state: Tensor) -> Result:
    """Return the result of a segment that starts from a state, from its result without one."""
    states = None
    if result.states is not None:
        assert result.factor is not None
        states = result.states + carried(result.factor, state)
    return Result(_with_state(result.rows, result, state), states)
