"""Execution of one core attention's schedule on one rank: waits, kernel calls and sends, phase by phase.

A pass also collects results: O and log-sum-exp, or gradients, of all kernel calls that compute parts of them. Inputs
and outputs are plain tensors; `hf_distca.dispatch.attention` wraps them in autograd nodes. Columns have the names of
the kernel contract: q, k, v, o, lse, do, dq, dk, dv.

Shape suffixes: T local rows, Q query rows of a kernel call, R received rows, H query heads, G key/value heads, D head
dim of queries and keys, E head dim of values.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from hf_distca.dispatch.bound import BoundGroup, BoundNanoBatch, BoundRoutes, Runtime
from hf_distca.dispatch.exchange import ExchangeBuffer
from hf_distca.dispatch.recorder import NOT_MEASURED, Kind, Work
from hf_distca.dispatch.remote import RemoteCall
from hf_distca.dispatch.rows import RowIndex, add_rows, merge_rows, put, take
from hf_distca.kernels import AttentionParams
from hf_distca.plan import AttentionKind, Direction
from hf_distca.planner.schedule import Kept, KernelCall, Location, Phase, Transfer

Columns = dict[str, Tensor]
"""Rows of one place, by column."""

DQ, DK, DV = DQKV = ("dq", "dk", "dv")

KeptRows = dict[tuple[str, int], Tensor]
"""Rows that the forward received, by column and stage."""


def without_autocast(device_type: str) -> AbstractContextManager[None]:
    """Return a context in which autocast leaves dtypes alone."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else NOT_MEASURED


class CoreAttention:
    """One core attention of one layer on one nano-batch, shared by its forward and its backward.

    Args:
        layer: index of the layer, for the recorder; None if the model does not give one.
        lost: lost servers of the plan: the ranks compute these servers' tasks, and no others.
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
        lost: frozenset[int] = frozenset(),
    ) -> None:
        self.runtime, self.nano, self.kind, self.params = runtime, nano, kind, params
        self.layer, self.kept = layer, kept
        self.repairs = bool(lost)
        self.routes: BoundRoutes = nano.routes[kind]
        if lost:
            assert runtime.remote is not None  # a plan with servers is bound with them
            self.routes = nano.repair(kind, lost, runtime.remote)
        # Later autograd nodes continue the pass that an earlier node began; neither outlives its direction.
        self.forward: Forward | None = None
        self.backward: Backward | None = None

    def to_repair(self, lost: frozenset[int]) -> "CoreAttention":
        """Return the core attention of the tasks that lost servers were to compute."""
        return CoreAttention(self.runtime, self.nano, self.kind, self.params, layer=self.layer, lost=lost)


class Pass:
    """One direction of a core attention, run phase by phase.

    Args:
        inputs: inputs of the kernel in its order, with all local rows.

    Attributes:
        columns: rows at each place, without received K and V.
        received_keys: received K and V by stage.
    """

    direction: ClassVar[Direction]
    inputs: ClassVar[tuple[str, ...]]

    def __init__(self, attention: CoreAttention, *inputs: Tensor) -> None:
        self.attention, self.runtime, self.routes = attention, attention.runtime, attention.routes
        local = dict(zip(self.inputs, inputs, strict=True))
        self.columns: dict[Location, Columns] = {"local": local, "received": {}}
        self.received_keys: dict[int, Columns] = {}
        self.dtype = local["q"].dtype
        self.wide = torch.promote_types(self.dtype, torch.float32)
        self.work = Work(attention.layer, attention.nano.index, self.direction)
        self.under_way: dict[Transfer, ExchangeBuffer] = {}
        self.at_servers: RemoteCall | None = None
        kernel, forward = self.runtime.kernel, self.direction == "forward"
        self._call_kernel: Callable[..., tuple[Tensor, ...]] = kernel.forward if forward else kernel.backward
        self._left = deque(self.routes.forward if forward else self.routes.backward[attention.kept])

    def go_on(self) -> None:
        """Run the phases up to the next pause, or to the end."""
        measured = self.runtime.recorder.measures("phase")
        # Autocast belongs to the thread: restore it at each pause, for the other nano-batch.
        with without_autocast(self.runtime.device.type):
            while self._left:
                phase = self._left.popleft()
                if measured:  # even empty contexts cost some microseconds per layer
                    with self.recorded("phase", phase.name):
                        self._run(phase)
                else:
                    self._run(phase)
                if phase.pause:
                    return

    def run_through(self) -> None:
        """Run all phases without a pause for another nano-batch."""
        while self._left:
            self.go_on()

    def recorded(self, kind: Kind, part: str, pairs: int = 0) -> AbstractContextManager[None]:
        """Return a context that is recorded as part of this pass."""
        return self.runtime.recorder.span(kind, part, self.work, pairs)

    @abstractmethod
    def add(self, call: KernelCall, group: BoundGroup, part: tuple[Tensor, ...]) -> None:
        """Add the results of a kernel call."""

    @abstractmethod
    def add_from_ranks(self, columns: Columns) -> None:
        """Add results of local queries that other ranks computed."""

    @abstractmethod
    def add_from_servers(self, results: Mapping[int, Columns], repaired: tuple[Tensor, ...] | None) -> None:
        """Add results that servers computed.

        Args:
            results: columns by server.
            repaired: results of the ranks for lost servers' tasks; None if no server was lost.
        """

    @abstractmethod
    def of_received_queries(self) -> Sequence[Tensor]:
        """Return the results of received queries, which go back to other ranks."""

    @abstractmethod
    def results(self) -> tuple[Tensor, ...]:
        """Return the results of local rows once all phases have run."""

    def taken(self, columns: Columns) -> Columns:
        """Return received rows as kernel calls read them."""
        return columns

    def return_keys(self, transfer: Transfer, buffer: ExchangeBuffer) -> None:
        """Start to return results of K and V, which only a backward has."""
        raise NotImplementedError

    def add_returned_keys(self, transfer: Transfer, buffer: ExchangeBuffer, columns: Columns) -> None:
        """Add results of K and V that other ranks computed."""
        raise NotImplementedError

    def _run(self, phase: Phase) -> None:
        recorder = self.runtime.recorder
        for transfer in phase.wait:
            if transfer.rows == "servers":
                self._wait_for_servers()
            else:
                self._finish(transfer)
        for call in phase.run:
            self._compute(call, self.routes.groups[call.group])
        for transfer in phase.send:
            start = self._ask_servers if transfer.rows == "servers" else self._start
            if recorder.measures("send"):
                with recorder.span("send", transfer.name, self.work, rows=self.routes.rows_of(transfer)):
                    start(transfer)
            else:
                start(transfer)

    def _start(self, transfer: Transfer) -> None:
        """Start a transfer between ranks."""
        attention, routes, local = self.attention, self.routes, self.columns["local"]
        if transfer.rows == "queries":
            slot, route = ("queries", 0), routes.queries
            columns = self.of_received_queries() if transfer.back else [local[x] for x in transfer.columns]
        else:
            slot, route = ("keys", routes.slots[transfer.stage]), routes.stages[transfer.stage].keys
            columns = [local["k"], local["v"]]
        # Rows that are in use at once have different slots.
        slot_of_pass = (*slot, attention.nano.index, attention.repairs)
        buffer = self.under_way[transfer] = self.runtime.exchange.buffer(slot_of_pass, route, columns)
        match transfer.rows, transfer.back:
            case "queries", True:
                buffer.return_received(columns)
            case _, True:
                self.return_keys(transfer, buffer)
            case "forwarded", False:
                assert route.forwarded is not None
                buffer.forward(route.forwarded.rows)
            case _:
                buffer.send(columns, route.rows)

    def _finish(self, transfer: Transfer) -> None:
        """Wait for a transfer between ranks and take the rows that have arrived."""
        buffer = self.under_way.pop(transfer)
        with self.recorded("wait", transfer.name) if buffer.under_way else NOT_MEASURED:
            columns = dict(zip(transfer.columns, buffer.wait(), strict=True))
        match transfer.rows, transfer.back:
            case "queries", True:
                self.add_from_ranks(columns)
            case _, True:
                self.add_returned_keys(transfer, buffer, columns)
            case "queries", False:
                self.columns["received"].update(self.taken(columns))
            case "keys", False if self.routes.forwards:
                pass  # kernel calls wait for forwarded rows, which come to the same memory
            case _:
                self.received_keys[transfer.stage] = self.taken(columns)

    def _ask_servers(self, transfer: Transfer) -> None:
        """Start a call to the dedicated servers, with rows of both kinds."""
        assert self.runtime.remote is not None  # a plan with servers is bound with them
        columns = {name: self.columns["local"][name] for name in transfer.columns}
        kind, params = self.attention.kind, self.attention.params
        self.at_servers = self.runtime.remote.start(self.work, self.routes.servers, kind, params, columns)

    def _wait_for_servers(self) -> None:
        """Add the servers' results; the ranks compute the tasks of lost servers together."""
        assert self.at_servers is not None
        with self.recorded("wait", "servers"):
            results, lost = self.at_servers.collect()
        self.at_servers, repaired = None, None
        if lost:
            repair = type(self)(self.attention.to_repair(lost), *self.columns["local"].values())
            repair.run_through()
            repaired = repair.results()
        self.add_from_servers(results, repaired)

    def _compute(self, call: KernelCall, group: BoundGroup) -> None:
        """Make a kernel call and add its results."""
        queries = self.columns[call.queries]
        keys = self.columns["local"] if call.keys == "local" else self.received_keys[call.stage]
        rows = [
            take(keys[name], group.k_rows) if name in ("k", "v") else take(queries[name], group.q_rows)
            for name in self.inputs
        ]
        params = self.attention.params if call.causal else replace(self.attention.params, causal=False)
        with self.recorded("kernel", call.name, group.pairs):
            part = self._call_kernel(*rows, group.shapes, params)
        self.add(call, group, part)


class Forward(Pass):
    """Forward pass from q_THD, k_TGD and v_TGE: O and log-sum-exp of local rows, and of received queries."""

    direction, inputs = "forward", ("q", "k", "v")

    def __init__(self, attention: CoreAttention, *inputs: Tensor) -> None:
        super().__init__(attention, *inputs)
        self._results: dict[Location, tuple[Tensor, Tensor]] = {}

    def kept(self) -> KeptRows:
        """Return the received rows, O and LSE that the backward needs, once their tasks are computed."""
        if self.attention.kept == "nothing":
            return {}
        kept = {(name, 0): rows_R for name, rows_R in self.columns["received"].items()}
        for stage, columns in self.received_keys.items():
            kept |= {(name, stage): rows_R for name, rows_R in columns.items()}
        if self.attention.kept == "results":
            kept["o", 0], kept["lse", 0] = self.of_received_queries()
        return kept

    def taken(self, columns: Columns) -> Columns:
        """Return received rows, in memory of their own if the backward needs them."""
        if self.attention.kept == "nothing":
            return columns
        # The exchange reuses its buffers before the backward.
        return {name: rows_R.clone() for name, rows_R in columns.items()}

    def add(self, call: KernelCall, group: BoundGroup, part: tuple[Tensor, ...]) -> None:
        """Put or merge O and LSE of a kernel call."""
        o_QHE, lse_QH = part
        if not call.first:
            merge_rows(*self._at(call.queries), group.q_rows, o_QHE, lse_QH)
        elif group.q_rows == slice(0, self.routes.rows[call.queries]) and not self.routes.merges:
            self._results[call.queries] = o_QHE, lse_QH
        else:
            self._put(call.queries, group.q_rows, o_QHE, lse_QH)

    def add_from_ranks(self, columns: Columns) -> None:
        """Put O and LSE that other ranks computed."""
        self._put("local", self.routes.queries.rows, columns["o"], columns["lse"])

    def add_from_servers(self, results: Mapping[int, Columns], repaired: tuple[Tensor, ...] | None) -> None:
        """Put O and LSE that servers computed, or the ranks for lost servers."""
        for asked in self.routes.servers:
            if asked.server in results:
                came = results[asked.server]
                self._put("local", asked.q_rows, came["o"], came["lse"])
            elif repaired is not None:
                self._put("local", asked.q_rows, *(take(x_T, asked.q_rows) for x_T in repaired))

    def of_received_queries(self) -> tuple[Tensor, Tensor]:
        """Return O and LSE of received queries."""
        return self._final("received")

    def results(self) -> tuple[Tensor, Tensor]:
        """Return O and LSE of local rows."""
        return self._final("local")

    def _final(self, place: Location) -> tuple[Tensor, Tensor]:
        """Return O and LSE at a place, in the dtypes in which they travel."""
        o_THE, lse_TH = self._at(place)
        return o_THE.to(self.dtype), lse_TH

    def _at(self, place: Location) -> tuple[Tensor, Tensor]:
        """Return O and LSE so far of the query rows at a place.

        Rows without a result yet are undefined. Where results of several stages are merged, such received rows hold
        the result of no keys, and O is at least float32.
        """
        if place not in self._results:
            q_THD, merges = self.columns["local"]["q"], self.routes.merges
            rows, heads, dim = self.routes.rows[place], q_THD.shape[1], self.columns["local"]["v"].shape[2]
            o_THE = q_THD.new_empty((rows, heads, dim), dtype=self.wide if merges else self.dtype)
            lse_TH = q_THD.new_empty((rows, heads), dtype=self.wide)
            if merges and place == "received":
                o_THE.zero_()
                lse_TH.fill_(-torch.inf)
            self._results[place] = o_THE, lse_TH
        return self._results[place]

    def _put(self, place: Location, index: RowIndex, *part: Tensor) -> None:
        for x_T, rows_Q in zip(self._at(place), part, strict=True):
            put(x_T, index, rows_Q.to(x_T.dtype))


class Backward(Pass):
    """Backward pass from do_THE, q_THD, k_TGD, v_TGE, o_THE and lse_TH: dQ, dK and dV of local and received rows.

    With several stages, parts are added to totals at once; otherwise they are kept and added up at the end.
    """

    direction, inputs = "backward", ("do", "q", "k", "v", "o", "lse")

    def __init__(self, attention: CoreAttention, *inputs: Tensor) -> None:
        super().__init__(attention, *inputs)
        local = self.columns["local"]
        self._no_rows = {name: local[name[1:]].new_empty((0, *local[name[1:]].shape[1:])) for name in DQKV}
        self._parts: dict[tuple[str, int], Columns] = {}  # by source and stage
        self._totals: dict[tuple[Location, str], Tensor] = {}  # over the stages so far, in at least float32
        self._repaired: tuple[Tensor, ...] | None = None

    def take_kept(self, kept: KeptRows) -> None:
        """Take the rows that the forward kept, before their tasks are computed."""
        for (name, stage), rows_R in kept.items():
            columns = self.received_keys.setdefault(stage, {}) if name in ("k", "v") else self.columns["received"]
            columns[name] = rows_R

    def go_on(self) -> None:
        """Run the phases up to the next pause, and free the columns after their last use."""
        super().go_on()
        if not any(phase.run or phase.send for phase in self._left) and not self.routes.servers:
            self.columns.clear()  # free the memory while the last rows travel
            self.received_keys.clear()

    def add(self, call: KernelCall, group: BoundGroup, part: tuple[Tensor, ...]) -> None:
        """Add the gradients of a kernel call; dK and dV of received rows wait for `return_keys`."""
        columns = self._parts[call.group] = dict(zip(DQKV, part, strict=True))
        if not self.routes.divided:
            return
        for name in DQKV if call.keys == "local" else (DQ,):
            place: Location = call.queries if name == DQ else "local"
            index, rows = (group.q_rows if name == DQ else group.k_rows), columns.pop(name)
            if (place, name) not in self._totals and index == slice(0, self.routes.rows[place]):
                self._totals[place, name] = rows.to(self.wide)
            elif name == DQ:
                add_rows(self._total(place, name), index, rows)
            else:  # tasks may share keys
                self.routes.local_key_sums[call.tasks].add_up([self._total(place, name), rows])

    def add_from_ranks(self, columns: Columns) -> None:
        """Take gradients of local rows that other ranks computed."""
        self._parts.setdefault(("ranks", 0), {}).update(columns)

    def return_keys(self, transfer: Transfer, buffer: ExchangeBuffer) -> None:
        """Start to return dK and dV of a stage's received rows: to gateways first, if rows were forwarded."""
        forwarded = transfer.rows == "forwarded"
        if forwarded or not self.routes.forwards:  # else the gradients were written before they went to the gateways
            self._write_received_keys(transfer.stage, buffer.received)
        if forwarded:
            buffer.return_forwarded()
        else:
            buffer.return_received()

    def add_returned_keys(self, transfer: Transfer, buffer: ExchangeBuffer, columns: Columns) -> None:
        """Add returned dK and dV of a stage: to a gateway's copies of forwarded rows, or to local rows."""
        stage = self.routes.stages[transfer.stage]
        if transfer.rows == "forwarded":
            received = sum(stage.keys.received)
            for column_R, forwarded_R in zip(buffer.received, columns.values(), strict=True):
                stage.forwarded_sums.add_up([column_R[:received], forwarded_R])
        elif stage.key_sums is None:
            self.add_from_ranks(columns)
        else:
            for name, rows_T in columns.items():
                stage.key_sums.add_up([self._total("local", name), rows_T])

    def add_from_servers(self, results: Mapping[int, Columns], repaired: tuple[Tensor, ...] | None) -> None:
        """Take gradients that servers computed, and gradients of the ranks for lost servers."""
        self._repaired = repaired
        columns: dict[str, list[Tensor]] = {name: [] for name in DQKV}
        for asked in self.routes.servers:  # the order that the sums expect
            for name, rows in zip(DQKV, (asked.q_count, asked.k_count, asked.k_count), strict=True):
                came = results.get(asked.server)
                columns[name].append(came[name] if came else self._zeros(name, rows, self.dtype))
        self._parts["servers", 0] = {name: torch.cat(parts) for name, parts in columns.items()}

    def of_received_queries(self) -> Sequence[Tensor]:
        """Return dQ of received queries."""
        dq_RHD = self._total("received", DQ) if self.routes.divided else self._part(DQ, 0, "remote-query")
        return [dq_RHD.to(self.dtype)]

    def _write_received_keys(self, stage: int, columns_R: Sequence[Tensor]) -> None:
        """Write dK and dV of a stage's received rows to the memory from which the rows are sent back."""
        sums = self.routes.stages[stage].received_sums
        for name, column_R in zip((DK, DV), columns_R, strict=True):
            sums.add_up([self._part(name, stage, source) for source in sums.sources], out=column_R)
        if self.routes.divided:  # their dQ has been added up: free the memory
            for source in sums.sources:
                self._parts.pop((source, stage), None)

    def results(self) -> tuple[Tensor, ...]:
        """Return dQ, dK and dV of local rows."""
        results = []
        for at, name in enumerate(DQKV):
            sums = self.routes.query_sums if name == DQ else self.routes.key_sums
            total_T = sums.add_up([self._part(name, 0, source) for source in sums.sources])
            if self._repaired is not None:
                total_T.add_(self._repaired[at])
            results.append(total_T.to(self.dtype))
        return tuple(results)

    def _part(self, name: str, stage: int, source: str) -> Tensor:
        """Return a gradient from one source; zero rows if the rank has no such tasks."""
        if source == "total":
            return self._total("local", name)
        return self._parts.get((source, stage), self._no_rows)[name]

    def _total(self, place: Location, name: str) -> Tensor:
        """Return a gradient of all rows at a place, summed over the stages so far."""
        if (place, name) not in self._totals:
            self._totals[place, name] = self._zeros(name, self.routes.rows[place], self.wide)
        return self._totals[place, name]

    def _zeros(self, name: str, rows: int, dtype: torch.dtype) -> Tensor:
        like = self._no_rows[name]
        return like.new_zeros((rows, *like.shape[1:]), dtype=dtype)
