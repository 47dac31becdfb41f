"""Execution of one core attention's schedule on one rank: waits, kernel calls and sends, phase by phase.

Inputs and outputs are plain tensors; `hf_distca.dispatch.attention` wraps them in autograd nodes. Columns have the
names of the kernel contract: q, k, v, o, lse, do, dq, dk, dv.

Shape suffixes: T local rows, Q query rows of a kernel call, K its key/value rows, R received rows, N any rows, H query
heads, G key/value heads, D head dim of queries and keys, E head dim of values.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from hf_distca.dispatch.bound import TOTAL, BoundGroup, BoundNanoBatch, BoundRoutes, Runtime, Source
from hf_distca.dispatch.exchange import ExchangeBuffer
from hf_distca.dispatch.recorder import NO_ROWS, NOT_MEASURED, Work
from hf_distca.dispatch.remote import RemoteCall
from hf_distca.dispatch.rows import RowIndex, merge_rows, put, take
from hf_distca.kernels import AttentionParams
from hf_distca.plan import AttentionKind, Direction
from hf_distca.planner.schedule import Kept, KernelCall, Location, Phase, Transfer

Columns = dict[str, Tensor]
"""Rows of one place, by column."""

ReceivedRows = dict[tuple[str, int], Tensor]
"""Received rows by column and stage; queries have stage 0."""

INPUTS: dict[Direction, tuple[str, ...]] = {"forward": ("q", "k", "v"), "backward": ("do", "q", "k", "v", "o", "lse")}
"""Inputs of a kernel, in its order."""


def without_autocast(device_type: str) -> AbstractContextManager[None]:
    """Return a context in which autocast leaves dtypes alone."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else NOT_MEASURED


class CoreAttention:
    """One core attention of one layer on one nano-batch: its forward, then its backward.

    Args:
        layer: index of the layer, for the recorder; None if the model does not give one.
        kept: received rows that the forward keeps for the backward.
        known: O and LSE of the first forward, for its recomputation, which exchanges and computes nothing.
        lost: lost servers of the plan: the ranks compute these servers' tasks, and no others.

    Attributes:
        running: the pass that has begun and not ended.
    """

    def __init__(
        self,
        runtime: Runtime,
        nano: BoundNanoBatch,
        kind: AttentionKind,
        params: AttentionParams,
        *,
        layer: int | None = None,
        kept: Kept = "nothing",
        known: tuple[Tensor, ...] | None = None,
        lost: frozenset[int] = frozenset(),
    ) -> None:
        self.runtime, self.nano, self.kind, self.params = runtime, nano, kind, params
        self.layer, self.kept, self.known, self.lost = layer, kept, known, lost
        self.routes: BoundRoutes = nano.routes[kind]
        if lost:
            assert runtime.remote is not None  # a plan with servers is bound with them
            self.routes = nano.repair(kind, lost, runtime.remote)
        self.running: Pass

    def begin(self, direction: Direction, *inputs: Tensor, received: ReceivedRows | None = None) -> None:
        """Begin a pass and run its phases up to the first pause."""
        self.running = Pass(self, direction, inputs, received or {})
        self.running.go_on()

    def end(self) -> "Pass":
        """Run the phases after the last pause and return the pass."""
        ended = self.running
        del self.running  # its memory ends with its direction
        ended.go_on()
        return ended


class Pass:
    """One direction of a core attention, run phase by phase.

    Args:
        inputs: INPUTS with all local rows.
        received: rows that the forward kept for this backward.

    Attributes:
        results: what kernel calls and other workers have computed so far.
    """

    def __init__(
        self, core: CoreAttention, direction: Direction, inputs: Sequence[Tensor], received: ReceivedRows
    ) -> None:
        self.core, self.runtime, self.routes = core, core.runtime, core.routes
        self.local: Columns = dict(zip(INPUTS[direction], inputs, strict=True))
        self.received = dict(received)
        self.work = Work(core.layer, core.nano.index, direction)
        self.results: Outputs | Gradients
        self._call_kernel: Callable[..., tuple[Tensor, ...]]
        if direction == "forward":
            self.results, self._call_kernel = Outputs(self.routes, self.local), self.runtime.kernel.forward
            self._left = deque(self.routes.forward)
        else:
            self.results, self._call_kernel = Gradients(self.routes, self.local), self.runtime.kernel.backward
            self._left = deque(self.routes.backward[core.kept])
        self._keeps = direction == "forward" and core.kept != "nothing"
        self._under_way: dict[Transfer, ExchangeBuffer] = {}
        self._servers = Servers(core, self.work)

    def go_on(self) -> None:
        """Run the phases up to the next pause, or to the end."""
        # Autocast belongs to the thread: restore it at each pause, for the other nano-batch.
        with without_autocast(self.runtime.device.type):
            while self._left:
                phase = self._left.popleft()
                with self.runtime.recorder.span("phase", phase.name, self.work):
                    self._run(phase)
                if phase.pause:
                    break
        done = not any(phase.run or phase.send for phase in self._left)
        if done and self.work.direction == "backward" and not self.routes.servers:
            self.local.clear()  # free the memory while the last rows travel
            self.received.clear()

    def run_through(self) -> tuple[Tensor, ...]:
        """Run all phases without a pause for another nano-batch, and return the results of local rows."""
        while self._left:
            self.go_on()
        return self.results.of_local_rows()

    def kept(self) -> ReceivedRows:
        """Return the received rows, O and LSE that the backward needs, after the forward."""
        if self.core.kept != "results":
            return self.received if self._keeps else {}
        o_RHE, lse_RH = self.results.of_received_queries()
        return {**self.received, ("o", 0): o_RHE, ("lse", 0): lse_RH}

    def _run(self, phase: Phase) -> None:
        recorder = self.runtime.recorder
        for transfer in phase.wait:
            self._finish(transfer)
        for call in phase.run:
            self._compute(call, self.routes.groups[call.group])
        for transfer in phase.send:
            rows = self.routes.rows_of(transfer) if recorder.measures("send") else NO_ROWS
            with recorder.span("send", transfer.name, self.work, rows=rows):
                self._start(transfer)

    def _start(self, transfer: Transfer) -> None:
        """Start a transfer."""
        routes, stage, local = self.routes, transfer.stage, self.local
        match transfer.rows, transfer.back:
            case "servers", _:
                self._servers.ask({name: local[name] for name in transfer.columns})
            case "queries", False:
                columns = [local[name] for name in transfer.columns]
                self._buffer(transfer, columns).send(columns, routes.queries.rows)
            case "queries", True:
                results = self.results.of_received_queries()
                self._buffer(transfer, results).return_received(results)
            case "keys", False:
                columns = [local["k"], local["v"]]
                self._buffer(transfer, columns).send(columns, routes.keys[stage].rows)
            case "forwarded", False:
                forwarded = routes.keys[stage].forwarded
                assert forwarded is not None
                self._buffer(transfer, [local["k"], local["v"]]).forward(forwarded.rows)
            case "forwarded", True:
                buffer = self._buffer(transfer, [local["k"], local["v"]])
                self._write_key_gradients(stage, buffer)
                buffer.return_forwarded()
            case "keys", True:
                buffer = self._buffer(transfer, [local["k"], local["v"]])
                if routes.forwards:  # a gateway adds what came for its copies
                    received = sum(routes.keys[stage].received)
                    for column_R, forwarded_N in zip(buffer.received, buffer.forwarded, strict=True):
                        routes.gateway_sums[stage].add_up([column_R[:received], forwarded_N])
                else:
                    self._write_key_gradients(stage, buffer)
                buffer.return_received()

    def _buffer(self, transfer: Transfer, like: Sequence[Tensor]) -> ExchangeBuffer:
        """Return the buffer of a transfer that starts."""
        routes = self.routes
        # Rows that are in use at once have different slots.
        slot, route = ("queries", 0), routes.queries
        if transfer.rows != "queries":
            slot, route = ("keys", routes.slots[transfer.stage]), routes.keys[transfer.stage]
        slot_of_pass = (*slot, self.core.nano.index, bool(self.core.lost))
        buffer = self._under_way[transfer] = self.runtime.exchange.buffer(slot_of_pass, route, like)
        return buffer

    def _write_key_gradients(self, stage: int, buffer: ExchangeBuffer) -> None:
        """Write dK and dV of a stage's received rows to the memory from which the rows are sent back."""
        assert isinstance(self.results, Gradients)
        for name, column_R in zip(("dk", "dv"), buffer.received, strict=True):
            self.results.add_up(name, stage, out=column_R)

    def _finish(self, transfer: Transfer) -> None:
        """Wait for a transfer and take the rows that have arrived."""
        match transfer.rows, transfer.back:
            case "servers", _:
                self.results.add_from_servers(*self._servers.wait())
            case "queries" | "keys", True:
                self.results.add_from_ranks(transfer.stage, self._arrived(transfer))
            case ("keys", False) | ("forwarded", True) if self.routes.forwards:
                self._arrived(transfer)  # more rows come to the same memory, or go on from there
            case _:
                # The exchange reuses its memory before the backward.
                for name, rows_R in self._arrived(transfer).items():
                    self.received[name, transfer.stage] = rows_R.clone() if self._keeps else rows_R

    def _arrived(self, transfer: Transfer) -> Columns:
        """Wait for a transfer between ranks and return its columns."""
        buffer = self._under_way.pop(transfer)
        span = self.runtime.recorder.span("wait", transfer.name, self.work) if buffer.under_way else NOT_MEASURED
        with span:
            return dict(zip(transfer.columns, buffer.wait(), strict=True))

    def _compute(self, call: KernelCall, group: BoundGroup) -> None:
        """Make a kernel call and add its results."""
        rows = []
        for name in INPUTS[self.work.direction]:
            place, stage, index = call.queries, 0, group.q_rows
            if name in ("k", "v"):
                place, stage, index = call.keys, call.stage, group.k_rows
            rows.append(take(self.local[name] if place == "local" else self.received[name, stage], index))
        params = self.core.params if call.causal else replace(self.core.params, causal=False)
        with self.runtime.recorder.span("kernel", call.name, self.work, group.pairs):
            part = self._call_kernel(*rows, group.shapes, params)
        self.results.add(call, group, part)


class Outputs:
    """O and log-sum-exp of the queries at each place, put together in a forward."""

    def __init__(self, routes: BoundRoutes, local: Columns) -> None:
        self._routes, self._q_THD, self._v_TGE = routes, local["q"], local["v"]
        self._wide = torch.promote_types(self._q_THD.dtype, torch.float32)
        self._so_far: dict[Location, tuple[Tensor, ...]] = {}

    def add(self, call: KernelCall, group: BoundGroup, part: tuple[Tensor, ...]) -> None:
        """Add results of a kernel call."""
        if not call.first:
            o_NHE, lse_NH = self._at(call.queries)
            merge_rows(o_NHE, lse_NH, group.q_rows, *part)
        elif group.q_rows == slice(0, self._routes.rows[call.queries]) and not self._routes.merges:
            self._so_far[call.queries] = part
        else:
            self._put(call.queries, group.q_rows, part)

    def add_from_ranks(self, _stage: int, columns: Columns) -> None:
        """Add results of local queries that other ranks computed."""
        self._put("local", self._routes.queries.rows, (columns["o"], columns["lse"]))

    def add_from_servers(self, answers: Mapping[int, Columns], repaired: tuple[Tensor, ...] | None) -> None:
        """Add results that servers computed, and for lost servers the ranks."""
        for asked in self._routes.servers:
            if columns := answers.get(asked.server):
                self._put("local", asked.q_rows, (columns["o"], columns["lse"]))
            elif repaired is not None:
                self._put("local", asked.q_rows, [take(x_T, asked.q_rows) for x_T in repaired])

    def of_received_queries(self) -> tuple[Tensor, ...]:
        """Return O and LSE of received queries, in the dtypes in which the results travel."""
        return self._final("received")

    def of_local_rows(self) -> tuple[Tensor, ...]:
        """Return O and LSE of local rows."""
        return self._final("local")

    def _final(self, place: Location) -> tuple[Tensor, ...]:
        o_NHE, lse_NH = self._at(place)
        return o_NHE.to(self._q_THD.dtype), lse_NH

    def _at(self, place: Location) -> tuple[Tensor, ...]:
        """Return O and LSE so far of the queries at a place; rows without a result yet are undefined.

        Where results of several stages are merged, such received rows hold the result of no keys, and O is at least
        float32.
        """
        if place not in self._so_far:
            q_THD, merges, rows = self._q_THD, self._routes.merges, self._routes.rows[place]
            shape = rows, q_THD.shape[1], self._v_TGE.shape[2]
            o_NHE = q_THD.new_empty(shape, dtype=self._wide if merges else q_THD.dtype)
            lse_NH = q_THD.new_empty(shape[:2], dtype=self._wide)
            if merges and place == "received":
                o_NHE.zero_()
                lse_NH.fill_(-torch.inf)
            self._so_far[place] = o_NHE, lse_NH
        return self._so_far[place]

    def _put(self, place: Location, index: RowIndex, part: Sequence[Tensor]) -> None:
        for x_N, rows_Q in zip(self._at(place), part, strict=True):
            put(x_N, index, rows_Q)


class Gradients:
    """dQ, dK and dV of the rows at each place, added up in a backward over the sources that the plan declares.

    The place of received keys is their stage.
    """

    def __init__(self, routes: BoundRoutes, local: Columns) -> None:
        self._routes = routes
        self._no_rows = {f"d{name}": local[name].new_empty((0, *local[name].shape[1:])) for name in ("q", "k", "v")}
        self._dtype = local["q"].dtype
        self._wide = torch.promote_types(self._dtype, torch.float32)
        self._parts: dict[tuple[str, Location | int, Source], Tensor] = {}
        self._repaired: tuple[Tensor, ...] | None = None

    def add(self, call: KernelCall, _group: BoundGroup, part: tuple[Tensor, ...]) -> None:
        """Add gradients of a kernel call."""
        keys_at: Location | int = "local" if call.keys == "local" else call.stage
        places = call.queries, keys_at, keys_at
        for name, place, rows_N in zip(self._no_rows, places, part, strict=True):
            self._add(name, place, call.group, rows_N)

    def add_from_ranks(self, stage: int, columns: Columns) -> None:
        """Add gradients of local rows that other ranks computed."""
        for name, rows_N in columns.items():
            self._add(name, "local", ("ranks", stage), rows_N)

    def add_from_servers(self, answers: Mapping[int, Columns], repaired: tuple[Tensor, ...] | None) -> None:
        """Add gradients that servers computed, and for lost servers the ranks."""
        self._repaired = repaired
        for name in self._no_rows:
            parts = []
            for asked in self._routes.servers:
                rows = asked.q_count if name == "dq" else asked.k_count
                came = answers.get(asked.server)
                parts.append(self._zeros(name, rows, self._dtype) if came is None else came[name])
            self._add(name, "local", ("servers", 0), torch.cat(parts))

    def of_received_queries(self) -> tuple[Tensor, ...]:
        """Return dQ of received queries."""
        return (self.add_up("dq", "received").to(self._dtype),)

    def of_local_rows(self) -> tuple[Tensor, ...]:
        """Return dQ, dK and dV of local rows."""
        gradients = [self.add_up(name, "local") for name in self._no_rows]
        for total_T, more_T in zip(gradients, self._repaired or (), strict=False):
            total_T.add_(more_T)
        return tuple(total_T.to(self._dtype) for total_T in gradients)

    def add_up(self, name: str, place: Location | int, out: Tensor | None = None) -> Tensor:
        """Return a gradient once all sources are there; `out` is memory to write it to."""
        sums = self._routes.gradients[name, place]
        return sums.late.add_up([self._take(name, place, source) for source in sums.late.sources], out)

    def _add(self, name: str, place: Location | int, source: Source, rows_N: Tensor) -> None:
        """Add a source to the total, or keep its rows until all are there, as the plan declares."""
        sums, total = self._routes.gradients[name, place], (name, place, TOTAL)
        if source not in sums.early:
            self._parts[name, place, source] = rows_N
        elif source in sums.whole and total not in self._parts:
            self._parts[total] = rows_N.to(self._wide)
        else:
            self._parts[total] = sums.early[source].add_up([self._take(*total), rows_N])

    def _take(self, name: str, place: Location | int, source: Source) -> Tensor:
        """Remove and return the rows of a source: zeros for a total of nothing, no rows of tasks that do not exist."""
        rows_N = self._parts.pop((name, place, source), None)
        if rows_N is None and source == TOTAL:
            rows_N = self._zeros(name, self._routes.gradients[name, place].rows, self._wide)
        return self._no_rows[name] if rows_N is None else rows_N

    def _zeros(self, name: str, rows: int, dtype: torch.dtype) -> Tensor:
        like = self._no_rows[name]
        return like.new_zeros((rows, *like.shape[1:]), dtype=dtype)


class Servers:
    """Tasks of one pass at dedicated servers, and at the ranks if a server is lost."""

    def __init__(self, core: CoreAttention, work: Work) -> None:
        self._core, self._work = core, work
        self._columns: Columns = {}
        self._call: RemoteCall | None = None

    def ask(self, columns: Columns) -> None:
        """Start a call to all servers of the plan, with all local rows."""
        core = self._core
        assert core.runtime.remote is not None  # a plan with servers is bound with them
        self._columns = columns
        self._call = core.runtime.remote.start(self._work, core.routes.servers, core.kind, core.params, columns)

    def wait(self) -> tuple[Mapping[int, Columns], tuple[Tensor, ...] | None]:
        """Return the columns of each server that answered; and the ranks' results if any server was lost."""
        core, call = self._core, self._call
        assert call is not None
        with core.runtime.recorder.span("wait", "servers", self._work):
            answers, lost = call.collect()
        if not lost:
            return answers, None
        inputs = [self._columns[name] for name in INPUTS[self._work.direction]]
        repair = CoreAttention(core.runtime, core.nano, core.kind, core.params, layer=core.layer, lost=lost)
        return answers, Pass(repair, self._work.direction, inputs, {}).run_through()
