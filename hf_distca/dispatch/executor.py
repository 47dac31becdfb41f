"""Execution of one core attention's schedule on one rank: waits, kernel calls and sends, phase by phase.

Inputs and outputs are plain tensors; `hf_distca.dispatch.attention` wraps them in autograd nodes. Columns have the
names of the kernel contract: q, k, v, o, lse, do, dq, dk, dv.

Shape suffixes: T local rows, H query heads, G key/value heads, D head dim of queries and keys, E head dim of values.
"""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from hf_distca.dispatch.bound import BoundGroup, BoundNanoBatch, BoundRoutes, Runtime
from hf_distca.dispatch.exchange import ExchangeBuffer
from hf_distca.dispatch.recorder import NO_ROWS, NOT_MEASURED, Kind, Rows, Work
from hf_distca.dispatch.remote import RemoteCall
from hf_distca.dispatch.rows import take
from hf_distca.dispatch.totals import Columns, Gradients, Outputs
from hf_distca.kernels import AttentionParams
from hf_distca.plan import AttentionKind, Direction
from hf_distca.planner.schedule import Kept, KernelCall, Location, Phase, Transfer

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
        totals: results so far.
    """

    direction: ClassVar[Direction]
    inputs: ClassVar[tuple[str, ...]]
    totals_class: ClassVar[type[Outputs] | type[Gradients]]

    def __init__(self, attention: CoreAttention, *inputs: Tensor) -> None:
        self.attention, self.runtime, self.routes = attention, attention.runtime, attention.routes
        local = dict(zip(self.inputs, inputs, strict=True))
        self.columns: dict[Location, Columns] = {"local": local, "received": {}}
        self.received_keys: dict[int, Columns] = {}
        self.totals: Outputs | Gradients = self.totals_class(self.routes, local)
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

    def results(self) -> tuple[Tensor, ...]:
        """Return the results of local rows once all phases have run."""
        return self.totals.final()

    def repaired(self, lost: frozenset[int]) -> tuple[Tensor, ...] | None:
        """Compute the tasks of lost servers together with the other ranks; None without lost servers."""
        if not lost:
            return None
        repair = type(self)(self.attention.to_repair(lost), *self.columns["local"].values())
        repair.run_through()
        return repair.results()

    def taken(self, columns: Columns) -> Columns:
        """Return received rows as kernel calls read them."""
        return columns

    @property
    def gradients(self) -> Gradients:
        """The totals of a backward, the only pass in which K and V have results."""
        assert isinstance(self.totals, Gradients)
        return self.totals

    def recorded(self, kind: Kind, part: str, pairs: int = 0) -> AbstractContextManager[None]:
        """Return a context that is recorded as part of this pass."""
        return self.runtime.recorder.span(kind, part, self.work, pairs)

    def _run(self, phase: Phase) -> None:
        for transfer in phase.wait:
            CARRIERS[transfer.rows].finish(self, transfer)
        for call in phase.run:
            self._compute(call, self.routes.groups[call.group])
        for transfer in phase.send:
            carrier = CARRIERS[transfer.rows]
            if self.runtime.recorder.measures("send"):
                rows = carrier.rows_of(self, transfer)
                with self.runtime.recorder.span("send", transfer.name, self.work, rows=rows):
                    carrier.start(self, transfer)
            else:
                carrier.start(self, transfer)

    def _compute(self, call: KernelCall, group: BoundGroup) -> None:
        """Make a kernel call and add its results to the totals."""
        queries = self.columns[call.queries]
        keys = self.columns["local"] if call.keys == "local" else self.received_keys[call.stage]
        rows = [
            take(keys[name], group.k_rows) if name in ("k", "v") else take(queries[name], group.q_rows)
            for name in self.inputs
        ]
        params = self.attention.params if call.causal else replace(self.attention.params, causal=False)
        with self.recorded("kernel", call.name, group.pairs):
            part = self._call_kernel(*rows, group.shapes, params)
        self.totals.add(call, group, part)


class Forward(Pass):
    """Forward pass from q_THD, k_TGD and v_TGE: O and LSE of the rank's rows."""

    direction, inputs, totals_class = "forward", ("q", "k", "v"), Outputs

    def kept(self) -> KeptRows:
        """Return the received rows, O and LSE that the backward needs, once their tasks are computed."""
        if self.attention.kept == "nothing":
            return {}
        kept = {(name, 0): rows_R for name, rows_R in self.columns["received"].items()}
        for stage, columns in self.received_keys.items():
            kept |= {(name, stage): rows_R for name, rows_R in columns.items()}
        if self.attention.kept == "results":
            kept["o", 0], kept["lse", 0] = self.totals.of_received_queries()
        return kept

    def taken(self, columns: Columns) -> Columns:
        """Return received rows, in memory of their own if the backward needs them."""
        if self.attention.kept == "nothing":
            return columns
        # The exchange reuses its buffers before the backward.
        return {name: rows_R.clone() for name, rows_R in columns.items()}


class Backward(Pass):
    """Backward pass from do_THE, q_THD, k_TGD, v_TGE, o_THE and lse_TH: gradients of the rank's rows."""

    direction, inputs, totals_class = "backward", ("do", "q", "k", "v", "o", "lse"), Gradients

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


class _Servers:
    """Rows of both kinds, to dedicated servers, and their results."""

    def rows_of(self, run: Pass, transfer: Transfer) -> Rows:
        return NO_ROWS

    def start(self, run: Pass, transfer: Transfer) -> None:
        assert run.runtime.remote is not None  # a plan with servers is bound with them
        columns = {name: run.columns["local"][name] for name in transfer.columns}
        kind, params = run.attention.kind, run.attention.params
        run.at_servers = run.runtime.remote.start(run.work, run.routes.servers, kind, params, columns)

    def finish(self, run: Pass, transfer: Transfer) -> None:
        assert run.at_servers is not None
        with run.recorded("wait", "servers"):
            results, lost = run.at_servers.collect()
        run.at_servers = None
        run.totals.add_from_servers(results, run.repaired(lost))


class _Ranks:
    """Rows between ranks: queries, keys of a stage, and such keys that are forwarded inside nodes."""

    def rows_of(self, run: Pass, transfer: Transfer) -> Rows:
        return run.routes.rows_of(transfer)

    def start(self, run: Pass, transfer: Transfer) -> None:
        local, stage = run.columns["local"], transfer.stage
        attention, routes = run.attention, run.routes
        if transfer.rows == "queries":
            slot, route = ("queries", 0), routes.queries
            columns = run.totals.of_received_queries() if transfer.back else [local[x] for x in transfer.columns]
        else:
            slot, route = ("keys", routes.slots[stage]), routes.stages[stage].keys
            columns = [local["k"], local["v"]]
        # Rows that are in use at once have different slots.
        slot_of_pass = (*slot, attention.nano.index, attention.repairs)
        buffer = run.runtime.exchange.buffer(slot_of_pass, route, columns)
        match transfer.rows, transfer.back:
            case "queries", True:
                buffer.return_received(columns)
            case "keys", True:
                if not routes.forwards:  # else the gradients were written before they went to the gateways
                    run.gradients.write_received_keys(stage, buffer.received)
                buffer.return_received()
            case "forwarded", True:
                run.gradients.write_received_keys(stage, buffer.received)
                buffer.return_forwarded()
            case "forwarded", False:
                assert route.forwarded is not None
                buffer.forward(route.forwarded.rows)
            case _:
                buffer.send(columns, route.rows)
        run.under_way[transfer] = buffer

    def finish(self, run: Pass, transfer: Transfer) -> None:
        buffer = run.under_way.pop(transfer)
        with run.recorded("wait", transfer.name) if buffer.under_way else NOT_MEASURED:
            columns = dict(zip(transfer.columns, buffer.wait(), strict=True))
        match transfer.rows, transfer.back:
            case "queries", True:
                run.totals.add_from_ranks(columns)
            case "keys", True:
                run.gradients.add_from_stage(transfer.stage, columns)
            case "forwarded", True:
                run.gradients.add_forwarded(transfer.stage, buffer.received, columns)
            case "queries", False:
                run.columns["received"].update(run.taken(columns))
            case "keys", False if run.routes.forwards:
                pass  # kernel calls wait for forwarded rows, which come to the same memory
            case _:
                run.received_keys[transfer.stage] = run.taken(columns)


CARRIERS: dict[str, _Ranks | _Servers] = dict.fromkeys(("queries", "keys", "forwarded"), _Ranks())
CARRIERS["servers"] = _Servers()
"""Transport of each kind of rows, see `Transfer.rows`."""
