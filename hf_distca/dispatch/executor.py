"""Execution of one core attention's schedule on one rank: waits, kernel calls and sends, phase by phase.

Inputs and outputs are plain tensors; `hf_distca.dispatch.attention` wraps them in autograd nodes. Columns have the
names of the kernel contract: q, k, v, o, lse, do, dq, dk, dv.

Shape suffixes: T local rows, Q query rows of a kernel call, R received rows, K key/value rows of a kernel call, H
query heads, G key/value heads, D head dim of queries and keys, E head dim of values.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from hf_distca.dispatch.bound import BoundGroup, BoundMessages, BoundNanoBatch, BoundPlan, BoundRoutes
from hf_distca.dispatch.exchange import Column, Message, PendingRows
from hf_distca.dispatch.recorder import NO_ROWS, NOT_MEASURED, Kind, Rows, Work
from hf_distca.dispatch.remote import RemoteCall, ServerRows
from hf_distca.dispatch.rows import RowIndex, add_rows, merge_rows, put, take
from hf_distca.kernels import AttentionParams
from hf_distca.plan import AttentionKind, Direction
from hf_distca.planner.schedule import (
    IN_USE,
    IN_USE_IN_HOPS,
    Group,
    Kept,
    KernelCall,
    Phase,
    Place,
    Schedule,
    Tasks,
    Transfer,
)

Columns = dict[str, Tensor]
"""Rows of one place, by column."""

Results = tuple[Tensor, Tensor]
"""O and LSE of some rows."""

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
        bound: BoundPlan,
        nano: BoundNanoBatch,
        kind: AttentionKind,
        params: AttentionParams,
        *,
        layer: int | None = None,
        kept: Kept = "nothing",
        lost: frozenset[int] = frozenset(),
    ) -> None:
        self.bound, self.nano, self.kind, self.params, self.layer, self.kept = bound, nano, kind, params, layer, kept
        self.repairs = bool(lost)
        self.routes: BoundRoutes = nano.routes[kind]
        if lost:
            assert bound.remote is not None  # a plan with servers is bound with them
            self.routes = nano.repair(kind, lost, bound.remote)
        # Later autograd nodes continue the pass that an earlier node began; neither outlives its direction.
        self.forward: Forward | None = None
        self.backward: Backward | None = None

    def to_repair(self, lost: frozenset[int]) -> "CoreAttention":
        """Return the core attention of the tasks that lost servers were to compute."""
        return CoreAttention(self.bound, self.nano, self.kind, self.params, layer=self.layer, lost=lost)


class Pass(ABC):
    """One direction of a core attention, run phase by phase."""

    def __init__(self, attention: CoreAttention, direction: Direction, schedule: Schedule, local: Columns) -> None:
        self.attention, self.routes = attention, attention.routes
        self.columns: dict[Place, Columns] = {"local": local, "received": {}}
        self._received_keys: dict[int, Columns] = {}  # by stage
        self._recorder = attention.bound.recorder
        self._work = Work(attention.layer, attention.nano.index, direction)
        self._left = deque(schedule)
        self._under_way: dict[Transfer, PendingRows] = {}
        self._at_servers: RemoteCall | None = None

    def go_on(self) -> None:
        """Run the phases up to the next pause, or to the end."""
        measured = self._recorder.measures("phase")
        # Autocast belongs to the thread: restore it at each pause, for the other nano-batch.
        with without_autocast(self.attention.bound.device.type):
            while self._left:
                phase = self._left.popleft()
                if measured:  # even empty contexts cost some microseconds per layer
                    with self._recorded("phase", phase.name):
                        self._run(phase)
                else:
                    self._run(phase)
                if phase.pause:
                    return

    def run_through(self) -> None:
        """Run all phases without a pause for another nano-batch."""
        while self._left:
            self.go_on()

    def _run(self, phase: Phase) -> None:
        for transfer in phase.wait:
            self._receive(transfer)
        for call in phase.run:
            self._compute(call, self.routes.groups[call.group])
        for transfer in phase.send:
            self._send(transfer)

    def _send(self, transfer: Transfer) -> None:
        """Start a transfer."""
        if self._recorder.measures("send"):
            with self._recorder.span("send", transfer.name, self._work, rows=self._rows_of(transfer)):
                self._start(transfer)
        else:
            self._start(transfer)

    def _rows_of(self, transfer: Transfer) -> Rows:
        """Return the rows of a transfer for the recorder; NO_ROWS if no rank sends rows to another."""
        if transfer.rows == "servers":
            return NO_ROWS
        messages = self._messages(transfer)
        traffic = messages.way_back if transfer.back else messages.traffic
        if transfer.rows != "passed on":
            return Rows(tuple(traffic.sent), tuple(traffic.received)) if traffic.crossing else NO_ROWS
        hop = traffic.passed_on
        assert hop is not None
        return Rows(self.routes.of_ranks(hop.sent), self.routes.of_ranks(hop.received)) if hop.crossing else NO_ROWS

    def _start(self, transfer: Transfer) -> None:
        bound, local = self.attention.bound, self.columns["local"]
        if transfer.rows == "servers":
            assert bound.remote is not None  # a plan with servers is bound with them
            columns = {name: local[name] for name in transfer.columns}
            self._at_servers = bound.remote.start(
                self._work, self.routes.servers, self.attention.kind, self.attention.params, columns
            )
        elif transfer.back:
            self._under_way[transfer] = self._send_back(transfer, self._role(transfer))
        elif transfer.rows == "passed on":
            stage, received = self.routes.stages[transfer.stage], self._received_keys[transfer.stage]
            columns_R = [received[name] for name in transfer.columns]
            role = self._role(transfer)
            pending = bound.exchange.pass_on(columns_R, stage.keys.traffic, role, stage.passed_on)
            self._under_way[transfer] = pending
        else:
            messages = self._messages(transfer)
            columns_T = [local[name] for name in transfer.columns]
            role = self._role(transfer)
            self._under_way[transfer] = bound.exchange.start(columns_T, messages.traffic, role, messages.rows)

    def _receive(self, transfer: Transfer) -> None:
        """Wait for a transfer and take in its rows."""
        if transfer.rows == "servers":
            assert self._at_servers is not None
            with self._recorded("wait", "servers"):
                results, lost = self._at_servers.collect()
            self._at_servers = None
            self._add_from_servers(results, lost)
            return
        pending = self._under_way.pop(transfer)
        with self._recorded("wait", transfer.name) if pending.under_way else NOT_MEASURED:
            columns = dict(zip(transfer.columns, pending.wait(), strict=True))
        if transfer.back:
            self._add_from_ranks(transfer, columns)
        else:
            self._take_in(transfer, columns)

    def _take_in(self, transfer: Transfer, columns: Columns) -> None:
        """Make received rows available to kernel calls."""
        if transfer.rows in ("keys", "passed on"):
            self._received_keys[transfer.stage] = columns
        else:
            self.columns["received"].update(columns)

    def _messages(self, transfer: Transfer) -> BoundMessages:
        """Return the messages of a transfer between ranks."""
        return self.routes.queries if transfer.rows == "queries" else self.routes.stages[transfer.stage].keys

    def _keys_of(self, call: KernelCall) -> Columns:
        """Return the columns that hold a kernel call's keys and values."""
        return self.columns["local"] if call.keys == "local" else self._received_keys[call.stage]

    def _role(self, transfer: Transfer) -> Hashable:
        """Return a key that differs between exchanges whose buffers are in use at once."""
        rows = "keys" if transfer.rows == "passed on" else transfer.rows
        in_use = IN_USE_IN_HOPS if self.routes.passes_on else IN_USE
        return rows, transfer.stage % in_use, self.attention.nano.index, self.attention.repairs

    def _params(self, call: KernelCall) -> AttentionParams:
        return self.attention.params if call.causal else replace(self.attention.params, causal=False)

    def _recorded(self, kind: Kind, part: str, pairs: int = 0) -> AbstractContextManager[None]:
        return self._recorder.span(kind, part, self._work, pairs)

    @abstractmethod
    def _compute(self, call: KernelCall, group: BoundGroup) -> None:
        """Make a kernel call and store its results."""

    @abstractmethod
    def _send_back(self, transfer: Transfer, role: Hashable) -> PendingRows:
        """Start to send results back to the ranks that own the rows."""

    @abstractmethod
    def _add_from_ranks(self, transfer: Transfer, columns: Columns) -> None:
        """Take in results that other ranks computed for this rank."""

    @abstractmethod
    def _add_from_servers(self, results: Mapping[int, Mapping[str, Tensor]], lost: frozenset[int]) -> None:
        """Take in results from servers; compute the tasks of lost servers together with the other ranks."""


class Forward(Pass):
    """Forward pass: O and LSE of the rank's rows."""

    def __init__(self, attention: CoreAttention, q_THD: Tensor, k_TGD: Tensor, v_TGE: Tensor) -> None:
        local = {"q": q_THD, "k": k_TGD, "v": v_TGE}
        super().__init__(attention, "forward", attention.routes.forward, local)
        self._results: dict[Place, Results] = {}

    def results(self) -> Results:
        """Return o_THE and lse_TH once all phases have run."""
        return self._final("local")

    def kept(self) -> KeptRows:
        """Return the received rows, O and LSE that the backward needs, once their tasks are computed."""
        if self.attention.kept == "nothing":
            return {}
        kept = {(name, 0): rows_R for name, rows_R in self.columns["received"].items()}
        for stage, columns in self._received_keys.items():
            kept |= {(name, stage): rows_R for name, rows_R in columns.items()}
        if self.attention.kept == "results":
            kept["o", 0], kept["lse", 0] = self._final("received")
        return kept

    def _take_in(self, transfer: Transfer, columns: Columns) -> None:
        all_there = transfer.rows != "keys" or not self.routes.passes_on
        if self.attention.kept != "nothing" and all_there:  # the exchange reuses its buffers before the backward
            columns = {name: rows_R.clone() for name, rows_R in columns.items()}
        super()._take_in(transfer, columns)

    def _results_at(self, place: Place) -> Results:
        """Return O and LSE so far of the query rows at a place.

        Rows without a result yet are undefined. Where results of several stages are merged, such received rows hold
        the result of no keys, and O is at least float32.
        """
        if place not in self._results:
            q_THD, v_TGE = self.columns[place]["q"], self.columns["local"]["v"]
            rows, heads = q_THD.shape[:2]
            wide = torch.promote_types(q_THD.dtype, torch.float32)
            merges = self.routes.merges
            o_THE = q_THD.new_empty((rows, heads, v_TGE.shape[2]), dtype=wide if merges else q_THD.dtype)
            lse_TH = q_THD.new_empty((rows, heads), dtype=wide)
            if merges and place == "received":
                o_THE.zero_()
                lse_TH.fill_(-torch.inf)
            self._results[place] = o_THE, lse_TH
        return self._results[place]

    def _final(self, place: Place) -> Results:
        """Return O and LSE of the query rows at a place, in the dtypes in which they travel."""
        o_THE, lse_TH = self._results_at(place)
        return o_THE.to(self.columns["local"]["q"].dtype), lse_TH

    def _compute(self, call: KernelCall, group: BoundGroup) -> None:
        queries, keys = self.columns[call.queries], self._keys_of(call)
        k_KGD, v_KGE = take(keys["k"], group.k_rows), take(keys["v"], group.k_rows)
        q_QHD = take(queries["q"], group.q_rows)
        with self._recorded("kernel", call.name, group.pairs):
            part = self.attention.bound.kernel.forward(q_QHD, k_KGD, v_KGE, group.shapes, self._params(call))
        if not call.first:
            merge_rows(*self._results_at(call.queries), group.q_rows, *part)
        elif group.q_rows == slice(0, queries["q"].shape[0]) and not self.routes.merges:
            self._results[call.queries] = part
        else:
            _put(self._results_at(call.queries), group.q_rows, part)

    def _send_back(self, transfer: Transfer, role: Hashable) -> PendingRows:
        way_back = self._messages(transfer).way_back
        return self.attention.bound.exchange.start(self._final("received"), way_back, role)

    def _add_from_ranks(self, transfer: Transfer, columns: Columns) -> None:
        _put(self._results_at("local"), self._messages(transfer).rows, (columns["o"], columns["lse"]))

    def _add_from_servers(self, results: Mapping[int, Mapping[str, Tensor]], lost: frozenset[int]) -> None:
        repaired: Results | None = None
        if lost:
            local = self.columns["local"]
            repair = Forward(self.attention.to_repair(lost), local["q"], local["k"], local["v"])
            repair.run_through()
            repaired = repair.results()
        for rows in self.routes.servers:
            if rows.server in results:
                came = results[rows.server]
                _put(self._results_at("local"), rows.q_rows, (came["o"], came["lse"]))
            elif repaired is not None and rows.server in lost:
                o_QHE, lse_QH = (take(x_T, rows.q_rows) for x_T in repaired)
                _put(self._results_at("local"), rows.q_rows, (o_QHE, lse_QH))


def _put(results: Results, index: RowIndex, part: Results) -> None:
    """Write O and LSE of some rows to where the index says."""
    for x_T, rows_Q in zip(results, part, strict=True):
        put(x_T, index, rows_Q.to(x_T.dtype))


class Backward(Pass):
    """Backward pass: gradients of the rank's rows."""

    def __init__(
        self,
        attention: CoreAttention,
        do_THE: Tensor,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGE: Tensor,
        o_THE: Tensor,
        lse_TH: Tensor,
    ) -> None:
        local = {"do": do_THE, "q": q_THD, "k": k_TGD, "v": v_TGE, "o": o_THE, "lse": lse_TH}
        super().__init__(attention, "backward", attention.routes.backward[attention.kept], local)
        self._dtype = q_THD.dtype
        self._of_groups: dict[Group, Columns] = {}
        self._totals: dict[tuple[Place, str], Tensor] = {}  # over the stages so far
        self._from_ranks: Columns = {}
        self._from_servers: list[Columns] = []
        self._repaired: tuple[Tensor, ...] | None = None

    def take_kept(self, kept: KeptRows) -> None:
        """Take the rows that the forward kept, before their tasks are computed."""
        for (name, stage), rows_R in kept.items():
            columns = self._received_keys.setdefault(stage, {}) if name in ("k", "v") else self.columns["received"]
            columns[name] = rows_R

    def go_on(self) -> None:
        """Run the phases up to the next pause, and free the columns after their last use."""
        super().go_on()
        if not any(phase.run or phase.send for phase in self._left) and not self.routes.servers and self.columns:
            for name in ("dq", "dk", "dv"):  # a gradient not begun yet takes its shape from the columns
                self._so_far(name)
            self.columns.clear()  # free the memory while the last rows travel
            self._received_keys.clear()

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq_THD, dk_TGD and dv_TGE once all phases have run."""
        came = [self._from_ranks, *self._from_servers]
        dq_THD = self.routes.query_sums.add_up([*self._so_far("dq"), *(x["dq"] for x in came)])
        came = self._from_servers if self.routes.divided else came
        dk_TGD, dv_TGE = (
            self.routes.key_sums.add_up([*self._so_far(name), *(x[name] for x in came)]) for name in ("dk", "dv")
        )
        if self._repaired is not None:
            for total, repaired in zip((dq_THD, dk_TGD, dv_TGE), self._repaired, strict=True):
                total.add_(repaired)
        return dq_THD.to(self._dtype), dk_TGD.to(self._dtype), dv_TGE.to(self._dtype)

    def _so_far(self, name: str) -> list[Tensor]:
        """Return this rank's parts of a gradient of its rows: a total over stages, or one part per kernel call."""
        if self.routes.divided:
            return [self._total("local", name)]
        calls = (*self.routes.own_in_backward, "prefix") if name == "dq" else self.routes.own_in_backward
        return [self._of(tasks)[name] for tasks in calls]

    def _of(self, tasks: Tasks, stage: int = 0) -> Columns:
        """Return the gradients of a kernel call; zero rows if the rank has no such tasks."""
        group = tasks, stage
        if group not in self._of_groups:
            local = self.columns["local"]
            self._of_groups[group] = {f"d{x}": local[x].new_empty((0, *local[x].shape[1:])) for x in ("q", "k", "v")}
        return self._of_groups[group]

    def _total(self, place: Place, name: str) -> Tensor:
        """Return a gradient of all rows at a place, summed over the stages so far in at least float32."""
        if (place, name) not in self._totals:
            like = self.columns[place][name.removeprefix("d")]
            dtype = torch.promote_types(like.dtype, torch.float32)
            self._totals[place, name] = like.new_zeros(like.shape, dtype=dtype)
        return self._totals[place, name]

    def _compute(self, call: KernelCall, group: BoundGroup) -> None:
        queries, keys = self.columns[call.queries], self._keys_of(call)
        k_KGD, v_KGE = take(keys["k"], group.k_rows), take(keys["v"], group.k_rows)
        do_QHE, q_QHD, o_QHE, lse_QH = (take(queries[name], group.q_rows) for name in ("do", "q", "o", "lse"))
        with self._recorded("kernel", call.name, group.pairs):
            gradients = self.attention.bound.kernel.backward(
                do_QHE, q_QHD, k_KGD, v_KGE, o_QHE, lse_QH, group.shapes, self._params(call)
            )
        columns = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
        self._of_groups[call.group] = columns
        if self.routes.divided:
            self._add_to_totals(call, group)

    def _add_to_totals(self, call: KernelCall, group: BoundGroup) -> None:
        """Add a kernel call's gradients to the totals and free them.

        dK and dV of received rows are not added: they are sent back.
        """
        columns = self._of_groups[call.group]
        for name in ("dq", "dk", "dv") if call.keys == "local" else ("dq",):
            place: Place = call.queries if name == "dq" else "local"
            index, rows = (group.q_rows if name == "dq" else group.k_rows), columns.pop(name)
            every_row = slice(0, len(self.columns[place][name.removeprefix("d")]))
            if (place, name) not in self._totals and index == every_row:
                self._totals[place, name] = rows.to(torch.promote_types(rows.dtype, torch.float32))
            elif name == "dq":
                add_rows(self._total(place, name), index, rows)
            else:  # tasks may share keys
                self.routes.own_key_sums[call.tasks].add_up([self._total(place, name), rows])

    def _send_back(self, transfer: Transfer, role: Hashable) -> PendingRows:
        if transfer.rows == "queries":
            exchange, way_back = self.attention.bound.exchange, self._messages(transfer).way_back
            dq_RHD = self._total("received", "dq") if self.routes.divided else self._of("visiting")["dq"]
            return exchange.start([dq_RHD.to(self.columns["local"]["q"].dtype)], way_back, role)
        message = self._message_back(transfer, role)
        if transfer.rows == "passed on" or not self.routes.passes_on:
            self._sum_received(transfer, message.columns)
        return message.pass_on() if transfer.rows == "passed on" else message.send()

    def _message_back(self, transfer: Transfer, role: Hashable) -> Message:
        """Return the message that sends dK and dV of a stage's received rows back."""
        local = self.columns["local"]
        types: list[Column] = [(local[name].shape[1:], local[name].dtype) for name in ("k", "v")]
        way_back = self._messages(transfer).way_back
        return self.attention.bound.exchange.open(types, way_back, role, local["k"].device)

    def _sum_received(self, transfer: Transfer, columns: Sequence[Tensor]) -> None:
        """Add up dK and dV of a stage's received rows in the memory from which they are sent back."""
        stage = self.routes.stages[transfer.stage]
        for name, column_R in zip(transfer.columns, columns, strict=True):
            parts = [self._of(tasks, transfer.stage)[name] for tasks in stage.tasks]
            stage.received_sums.add_up(parts, out=column_R)
        if self.routes.divided:  # their dQ has been added up: free the memory
            for tasks in stage.tasks:
                del self._of_groups[tasks, transfer.stage]

    def _add_from_ranks(self, transfer: Transfer, columns: Columns) -> None:
        if transfer.rows == "passed on":
            self._add_passed_back(transfer, columns)
        elif transfer.rows == "keys" and self.routes.divided:
            key_sums = self.routes.stages[transfer.stage].key_sums
            assert key_sums is not None
            for name, rows_T in columns.items():
                key_sums.add_up([self._total("local", name), rows_T])
        else:
            self._from_ranks.update(columns)

    def _add_passed_back(self, transfer: Transfer, columns: Columns) -> None:
        """Add dK and dV of forwarded rows to the gateway's copies, before those return to their owners."""
        stage = self.routes.stages[transfer.stage]
        message = self._message_back(transfer, self._role(transfer))
        received = sum(stage.keys.traffic.received)
        for column_R, passed_R in zip(message.columns, columns.values(), strict=True):
            stage.passed_back.add_up([column_R[:received], passed_R])

    def _add_from_servers(self, results: Mapping[int, Mapping[str, Tensor]], lost: frozenset[int]) -> None:
        if lost:
            local = self.columns["local"]
            inputs = (local[name] for name in ("do", "q", "k", "v", "o", "lse"))
            repair = Backward(self.attention.to_repair(lost), *inputs)
            repair.run_through()
            self._repaired = repair.gradients()
        # Server after server, the order that the sums expect.
        parts = [results.get(rows.server) or self._zeros_for(rows) for rows in self.routes.servers]
        self._from_servers = [{name: torch.cat([part[name] for part in parts]) for name in ("dq", "dk", "dv")}]

    def _zeros_for(self, rows: ServerRows) -> Columns:
        """Return zero gradients for the rows of a server that gave no result."""
        local = self.columns["local"]
        counts = {"q": rows.q_count, "k": rows.k_count, "v": rows.k_count}
        return {f"d{name}": local[name].new_zeros((n, *local[name].shape[1:])) for name, n in counts.items()}
