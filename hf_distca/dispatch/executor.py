"""Execution of a core attention's schedule on one rank: waits, kernel calls and sends by phase.

Inputs and outputs are plain tensors; `dispatch.core_attention` wraps them in autograd nodes.
Columns have the names of the kernel contract: q, k, v, o, lse, do, dq, dk, dv.

Shape suffixes: T local rows, Q query rows of a kernel call, K its key/value rows, R received rows,
N any rows, H query heads, G key/value heads, D head dim of queries and keys, E head dim of values.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hf_distca.dispatch.bound import TOTAL, BoundNanoBatch, BoundRoutes, BoundTasks, Runtime, Source
from hf_distca.dispatch.exchange import ExchangeBuffer
from hf_distca.dispatch.recorder import NO_ROWS, NOT_MEASURED, Work
from hf_distca.dispatch.rows import RowIndex, merge_rows, put, take
from hf_distca.kernels import AttentionParams
from hf_distca.plan import AttentionKind, Direction
from hf_distca.plan.schedule import KernelCall, Location, Phase, Transfer

Columns = dict[str, Tensor]
"""Rows of one place, by column."""
INPUTS: dict[Direction, tuple[str, ...]] = {
    "forward": ("q", "k", "v"),
    "backward": ("do", "q", "k", "v", "o", "lse"),
}
"""Inputs of a kernel, in its order."""


def without_autocast(device_type: str) -> AbstractContextManager[None]:
    """Return a context in which autocast leaves dtypes alone."""
    return (
        torch.autocast(device_type, enabled=False)
        if torch.is_autocast_enabled(device_type)
        else NOT_MEASURED
    )


@dataclass(eq=False)
class CoreAttention:
    """One core attention of one layer on one nano-batch: its forward, then its backward."""

    runtime: Runtime
    nano: BoundNanoBatch
    kind: AttentionKind
    params: AttentionParams
    layer: int | None = None
    # O and LSE of the first forward, for a recomputation that does nothing.
    first_results: tuple[Tensor, ...] | None = None
    # Remote workers whose tasks the ranks compute, and no others.
    lost: frozenset[int] = frozenset()
    running: "Pass" = field(init=False)  # the pass that has begun and not ended

    def begin(self, direction: Direction, *inputs: Tensor) -> None:
        """Begin a pass and run its phases up to the first pause."""
        self.running = Pass(self, direction, inputs)
        self.running.go_on()

    def end(self) -> tuple[Tensor, ...]:
        """Run the phases after the last pause and return the results of local rows."""
        ended = self.running
        del self.running  # its memory ends with its direction
        ended.go_on()
        return ended.results.at("local")


class Pass:
    """One direction of a core attention, run phase by phase.

    Attributes:
        local: INPUTS of the direction, of all local rows.
        received: rows that have arrived, by column and stage; queries have stage 0.
        results: O and LSE, or gradients, as far as they are computed.
        phases: phases of the schedule that have not run yet.
    """

    def __init__(self, core: CoreAttention, direction: Direction, inputs: Iterable[Tensor]) -> None:
        self.core = core
        self.runtime = core.runtime
        nano = core.nano
        if core.lost:
            self.routes = nano.repair(core.kind, core.lost, self.runtime.remote)
        else:
            self.routes = nano.routes[core.kind]
        self.local: Columns = dict(zip(INPUTS[direction], inputs, strict=True))
        self.received: dict[tuple[str, int], Tensor] = {}
        self.work = Work(core.layer, nano.index, direction)
        make_results = _Outputs if direction == "forward" else _Gradients
        self.results: _Outputs | _Gradients = make_results(self.routes, self.local)
        self.phases = deque(self.routes.schedules[direction])
        self._under_way: dict[Transfer, ExchangeBuffer] = {}
        self._remote = _RemoteCalls(core, self.work, self.local, self.results)

    def go_on(self) -> None:
        """Run the phases up to the next pause, or to the end."""
        # Autocast belongs to the thread: restore it at each pause, for the other nano-batch.
        with without_autocast(self.runtime.device.type):
            while self.phases:
                phase = self.phases.popleft()
                with self.runtime.recorder.span("phase", phase.name, self.work):
                    self._run(phase)
                if phase.pause:
                    break
        only_waits = not any(phase.run or phase.send for phase in self.phases)
        if only_waits and not self.routes.remote:
            self.local.clear()  # free the memory while the last rows travel
            self.received.clear()

    def _run(self, phase: Phase) -> None:
        recorder = self.runtime.recorder
        for transfer in phase.wait:
            self._carrier(transfer).finish(transfer)
        for call in phase.run:
            self._compute(call, self.routes.tasks[call.key])
        for transfer in phase.send:
            rows = self.routes.rows_of(transfer) if recorder.measures("send") else NO_ROWS
            with recorder.span("send", transfer.name, self.work, rows=rows):
                self._carrier(transfer).start(transfer)

    def _carrier(self, transfer: Transfer) -> "Pass | _RemoteCalls":
        """Return the object that starts and finishes a transfer.

        Calls to remote workers have an object of their own. Transfers between ranks belong to this
        pass.
        """
        return self._remote if transfer.rows == "remote" else self

    def _compute(self, call: KernelCall, tasks: BoundTasks) -> None:
        inputs = []
        for name in INPUTS[self.work.direction]:
            if name in ("k", "v"):
                location, stage, index = call.keys, call.stage, tasks.k_rows
            else:
                location = call.queries
                stage = 0
                index = tasks.q_rows
            rows_N = self.local[name] if location == "local" else self.received[name, stage]
            inputs.append(take(rows_N, index))
        params = self.core.params if call.causal else replace(self.core.params, causal=False)
        run: Callable[..., tuple[Tensor, ...]] = getattr(self.runtime.kernel, self.work.direction)
        with self.runtime.recorder.span("kernel", call.name, self.work, tasks.pairs):
            part = run(*inputs, tasks.shapes, params)
        self.results.add(call, tasks, part)

    def start(self, transfer: Transfer) -> None:
        """Start to send rows to other ranks."""
        core = self.core
        routes = self.routes
        local = self.local
        stage = transfer.stage
        # 1. The buffer. Rows that are in use at once have different slots.
        if transfer.rows == "queries":
            slot = ("queries", 0)
            route = routes.queries
            columns = (
                self.results.at("received")
                if transfer.back
                else tuple(local[name] for name in transfer.columns)
            )
        else:
            slot = ("keys", routes.slots[stage])
            route = routes.keys[stage]
            columns = local["k"], local["v"]
        buffer = self.runtime.exchange.buffer(
            (*slot, core.nano.index, bool(core.lost)), route, columns
        )
        self._under_way[transfer] = buffer
        # 2. Rows leave; results and gradients return on the same way.
        match transfer.rows, transfer.back:
            case (("queries" | "keys"), False):
                buffer.send(columns, route.rows)
            case "forwarded", False:
                assert route.forwarded is not None
                buffer.forward(route.forwarded.rows)
            case "queries", True:
                buffer.return_received(columns)
            case "keys", True if routes.forwards:
                self._add_to_gateway_copies(buffer, stage)
                buffer.return_received()
            case "keys", True:
                self._write_key_gradients(buffer, transfer)
                buffer.return_received()
            case "forwarded", True:
                self._write_key_gradients(buffer, transfer)
                buffer.return_forwarded()

    def _add_to_gateway_copies(self, buffer: ExchangeBuffer, stage: int) -> None:
        """Add dK and dV that came back from the ranks to which this gateway forwarded K and V."""
        received = sum(self.routes.keys[stage].received)
        for column_R, forwarded_N in zip(buffer.received, buffer.forwarded, strict=True):
            self.routes.gateway_sums[stage].add_up([column_R[:received], forwarded_N])

    def _write_key_gradients(self, buffer: ExchangeBuffer, transfer: Transfer) -> None:
        """Write dK and dV to the memory from which they are sent back."""
        assert isinstance(self.results, _Gradients)
        for name, column_R in zip(transfer.columns, buffer.received, strict=True):
            self.results.add_up(name, transfer.stage, out=column_R)

    def finish(self, transfer: Transfer) -> None:
        """Wait for a transfer and take the rows that have arrived."""
        buffer = self._under_way.pop(transfer)
        span = self.runtime.recorder.span
        with span("wait", transfer.name, self.work) if buffer.under_way else NOT_MEASURED:
            columns: Columns = dict(zip(transfer.columns, buffer.wait(), strict=True))
        match transfer.rows, transfer.back:
            case (("queries" | "keys"), True):
                self.results.add_from_ranks(transfer.stage, columns)
            case "keys", False if self.routes.forwards:
                pass  # forwarded rows come to the same memory
            case "forwarded", True:
                pass  # the rows go on from this memory
            case (("queries" | "keys" | "forwarded"), False):
                for name, rows_R in columns.items():
                    self.received[name, transfer.stage] = rows_R


@dataclass(eq=False)
class _RemoteCalls:
    """Calls to remote workers in one pass.

    After a worker is lost, ranks compute its tasks in its place.
    """

    core: CoreAttention
    work: Work
    local: Columns
    results: "_Outputs | _Gradients"

    def start(self, transfer: Transfer) -> None:
        core = self.core
        remote = self.core.runtime.remote
        assert remote is not None  # a plan with remote workers is bound with them
        workers = core.nano.routes[core.kind].remote
        rows = {name: self.local[name] for name in transfer.columns}
        self.call = remote.start(self.work, workers, core.kind, core.params, rows)

    def finish(self, _transfer: Transfer) -> None:
        core = self.core
        repaired: tuple[Tensor, ...] | None = None
        with core.runtime.recorder.span("wait", "remote workers", self.work):
            answers, lost = self.call.collect()
        if lost:
            repair = CoreAttention(
                core.runtime, core.nano, core.kind, core.params, core.layer, lost=lost
            )
            repair_pass = Pass(repair, self.work.direction, self.local.values())
            while repair_pass.phases:
                repair_pass.go_on()
            repaired = repair_pass.results.at("local")
        self.results.add_from_remote(answers, repaired)


class _Outputs:
    """O and log-sum-exp of the queries at each place, put together in a forward."""

    def __init__(self, routes: BoundRoutes, local: Columns) -> None:
        self._routes = routes
        self._q_THD = local["q"]
        self._v_TGE = local["v"]
        self._wide = torch.promote_types(self._q_THD.dtype, torch.float32)
        self._so_far: dict[Location, tuple[Tensor, ...]] = {}

    def add(self, call: KernelCall, tasks: BoundTasks, part: tuple[Tensor, ...]) -> None:
        """Add the results of a kernel call."""
        if not call.first:
            o_NHE, lse_NH = self._so_far_at(call.queries)
            merge_rows(o_NHE, lse_NH, tasks.q_rows, *part)
        elif self._routes.merges or tasks.q_rows != slice(0, self._routes.rows[call.queries]):
            self._put(call.queries, tasks.q_rows, part)
        else:  # all rows at once
            self._so_far[call.queries] = part

    def add_from_ranks(self, _stage: int, columns: Columns) -> None:
        self._put("local", self._routes.queries.rows, (columns["o"], columns["lse"]))

    def add_from_remote(
        self, answers: Mapping[int, Columns], repaired: tuple[Tensor, ...] | None
    ) -> None:
        for worker in self._routes.remote:
            if columns := answers.get(worker.index):
                self._put("local", worker.q_rows, (columns["o"], columns["lse"]))
            elif repaired is not None:
                self._put("local", worker.q_rows, [take(x_T, worker.q_rows) for x_T in repaired])

    def at(self, place: Location) -> tuple[Tensor, ...]:
        """Return O and LSE of the queries at a place, in the dtypes in which the results travel."""
        o_NHE, lse_NH = self._so_far_at(place)
        return o_NHE.to(self._q_THD.dtype), lse_NH

    def _so_far_at(self, place: Location) -> tuple[Tensor, ...]:
        """Return O and LSE so far of the queries at a place.

        Rows without a result yet are undefined, or have the result of no keys.
        """
        if place not in self._so_far:
            q_THD = self._q_THD
            merges = self._routes.merges
            rows = self._routes.rows[place]
            shape = rows, q_THD.shape[1], self._v_TGE.shape[2]
            o_NHE = q_THD.new_empty(shape, dtype=self._wide if merges else q_THD.dtype)
            lse_NH = q_THD.new_empty(shape[:2], dtype=self._wide)
            if place in self._routes.begins_with_no_keys:
                o_NHE.zero_()
                lse_NH.fill_(-torch.inf)
            self._so_far[place] = o_NHE, lse_NH
        return self._so_far[place]

    def _put(self, place: Location, index: RowIndex, part: Iterable[Tensor]) -> None:
        for x_N, rows_Q in zip(self._so_far_at(place), part, strict=True):
            put(x_N, index, rows_Q)


class _Gradients:
    """dQ, dK and dV of the rows at each place, added up over the plan's sources.

    Received keys are at their stage.
    """

    def __init__(self, routes: BoundRoutes, local: Columns) -> None:
        self._routes = routes
        self._no_rows = {
            f"d{name}": local[name].new_empty((0, *local[name].shape[1:]))
            for name in ("q", "k", "v")
        }
        self._dtype = local["q"].dtype
        self._wide = torch.promote_types(self._dtype, torch.float32)
        self._parts: dict[tuple[str, Location | int, Source], Tensor] = {}
        self._repaired: tuple[Tensor, ...] | None = None

    def add(self, call: KernelCall, _tasks: BoundTasks, part: tuple[Tensor, ...]) -> None:
        """Add the gradients of a kernel call."""
        keys_at: Location | int = "local" if call.keys == "local" else call.stage
        for name, place, rows_N in zip(
            self._no_rows, (call.queries, keys_at, keys_at), part, strict=True
        ):
            self._add(name, place, call.key, rows_N)

    def add_from_ranks(self, stage: int, columns: Columns) -> None:
        for name, rows_N in columns.items():
            self._add(name, "local", ("ranks", stage), rows_N)

    def add_from_remote(
        self, answers: Mapping[int, Columns], repaired: tuple[Tensor, ...] | None
    ) -> None:
        self._repaired = repaired
        for name in self._no_rows:
            parts = []
            for worker in self._routes.remote:
                answer = answers.get(worker.index)
                if answer is None:  # the worker was lost
                    rows = worker.q_count if name == "dq" else worker.k_count
                    parts.append(self._zeros(name, rows, self._dtype))
                else:
                    parts.append(answer[name])
            self._add(name, "local", ("remote", 0), torch.cat(parts))

    def at(self, place: Location) -> tuple[Tensor, ...]:
        """Return dQ of received queries, or dQ, dK and dV of local rows."""
        if place == "received":
            return (self.add_up("dq", place).to(self._dtype),)
        gradients = [self.add_up(name, place) for name in self._no_rows]
        if self._repaired is not None:
            for total_T, repaired_T in zip(gradients, self._repaired, strict=True):
                total_T.add_(repaired_T)
        return tuple(total_T.to(self._dtype) for total_T in gradients)

    def add_up(self, name: str, place: Location | int, out: Tensor | None = None) -> Tensor:
        """Return a gradient once all sources are there; `out` is memory to write it to."""
        sums = self._routes.gradients[name, place]
        return sums.late.add_up(
            [self._take(name, place, source) for source in sums.late.sources], out
        )

    def _add(self, name: str, place: Location | int, source: Source, rows_N: Tensor) -> None:
        """Add a source to the total, or keep its rows until all are there, as the plan declares."""
        sums = self._routes.gradients[name, place]
        total = (name, place, TOTAL)
        if source not in sums.early:
            self._parts[name, place, source] = rows_N
        elif source in sums.covering and total not in self._parts:
            self._parts[total] = rows_N.to(self._wide)
        else:
            self._parts[total] = sums.early[source].add_up([self._take(*total), rows_N])

    def _take(self, name: str, place: Location | int, source: Source) -> Tensor:
        """Remove and return the rows of a source.

        A total of nothing is zeros; tasks that do not exist have no rows.
        """
        if (name, place, source) in self._parts:
            return self._parts.pop((name, place, source))
        if source == TOTAL:
            return self._zeros(name, self._routes.gradients[name, place].rows, self._wide)
        return self._no_rows[name]

    def _zeros(self, name: str, rows: int, dtype: torch.dtype) -> Tensor:
        return self._no_rows[name].new_zeros((rows, *self._no_rows[name].shape[1:]), dtype=dtype)
