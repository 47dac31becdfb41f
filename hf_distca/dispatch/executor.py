"""Carries out the schedule of one core attention on one rank: waits, kernel calls, sends, phase by phase.

Plain tensors in, plain tensors out; `hf_distca.dispatch.attention` makes autograd nodes of it. Columns go by the names
of the kernel contract: q, k, v, o, lse, do, dq, dk, dv.

Shape suffixes: T local rows, Q query rows of a kernel call, R received rows, K key/value rows of a kernel call, H
query heads, G key/value heads, D head dim of queries and keys, E head dim of values.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from hf_distca.dispatch.bound import BoundGroup, BoundNanoBatch, BoundPlan, BoundRoutes
from hf_distca.dispatch.exchange import Column, PendingRows
from hf_distca.dispatch.recorder import NOT_MEASURED, Kind, Work
from hf_distca.dispatch.remote import RemoteCall, ServerRows
from hf_distca.dispatch.rows import RowIndex, merge_rows, put, take
from hf_distca.dispatch.schedule import Kept, KernelCall, Phase, Place, Schedule, Tasks, Transfer
from hf_distca.kernels import AttentionParams
from hf_distca.plan import AttentionKind, Direction

Columns = dict[str, Tensor]
"""Rows of one place, by column."""

Results = tuple[Tensor, Tensor]
"""O and LSE of some rows."""


class CoreAttention:
    """One core attention of one layer on one nano-batch: what its forward and its backward have in common.

    Args:
        bound: the plan, with the exchange and the kernel.
        nano: the nano-batch.
        kind: of the layer's attention.
        params: scale, window and softcap of the layer.
        layer: index of the layer, for the recorder; None where it has none.
        kept: what the forward leaves to the backward.
        lost: servers of the plan: their tasks alone are computed, by the ranks that hold the rows.

    Attributes:
        routes: of this rank.
        forward: while it is under way.
        backward: while it is under way.
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
        self.routes: BoundRoutes = nano.repair(kind, lost) if lost else nano.routes[kind]
        # Autograd's nodes find here what those before them began; nothing stays between forward and backward.
        self.forward: Forward | None = None
        self.backward: Backward | None = None

    def to_repair(self, lost: frozenset[int]) -> "CoreAttention":
        """The core attention of what lost servers were to compute."""
        return CoreAttention(self.bound, self.nano, self.kind, self.params, layer=self.layer, lost=lost)


class Pass(ABC):
    """One direction of a core attention, on its way through its schedule.

    Args:
        attention: what is computed.
        direction: forward or backward.
        schedule: its phases.
        local: columns of the rank's own rows.
    """

    def __init__(self, attention: CoreAttention, direction: Direction, schedule: Schedule, local: Columns) -> None:
        self.attention, self.routes = attention, attention.routes
        self.columns: dict[Place, Columns] = {"local": local, "received": {}}
        self._recorder = attention.bound.recorder
        self._work = Work(attention.layer, attention.nano.index, direction)
        self._left = deque(schedule)
        self._under_way: dict[Hashable, PendingRows] = {}
        self._at_servers: RemoteCall | None = None

    def go_on(self) -> None:
        """Run the phases up to the next pause, or to the end."""
        device_type = self.attention.bound.device.type
        if not torch.is_autocast_enabled(device_type):
            self._go_on()
            return
        # Numbers are computed in the dtype in which they come. Autocast is the thread's: it is left at each pause,
        # since the other nano-batch would run without it.
        with torch.autocast(device_type, enabled=False):
            self._go_on()

    def _go_on(self) -> None:
        measured = self._recorder.measures("phase")
        while self._left:
            phase = self._left.popleft()
            if measured:  # contexts that do nothing would cost some microseconds a layer
                with self._recorded("phase", phase.name):
                    self._run(phase)
            else:
                self._run(phase)
            if phase.pause:
                return

    def run_through(self) -> None:
        """Run all phases, with no other nano-batch in between."""
        while self._left:
            self.go_on()

    def _run(self, phase: Phase) -> None:
        for transfer in phase.wait:
            self._receive(transfer)
        for call in phase.run:
            self._compute(call, self.routes.groups[call.tasks])
        for transfer in phase.send:
            self._send(transfer)

    def _send(self, transfer: Transfer) -> None:
        """Start a transfer."""
        bound, local = self.attention.bound, self.columns["local"]
        if transfer.rows == "servers":
            assert bound.remote is not None  # who plans for servers reaches them
            columns = {name: local[name] for name in transfer.columns}
            self._at_servers = bound.remote.start(self._work, self.routes.servers, self.attention.params, columns)
        elif transfer.back:
            role = self._role(transfer)
            self._under_way[role] = self._send_back(transfer, role)
        else:
            messages = self.routes.messages[transfer.rows]
            columns_T = [local[name] for name in transfer.columns]
            role = self._role(transfer)
            self._under_way[role] = bound.exchange.start(columns_T, messages.traffic, role, messages.rows)

    def _receive(self, transfer: Transfer) -> None:
        """Wait for a transfer, and take its rows in."""
        if transfer.rows == "servers":
            assert self._at_servers is not None
            with self._recorded("wait", "servers"):
                results, lost = self._at_servers.collect()
            self._at_servers = None
            self._add_from_servers(results, lost)
            return
        pending = self._under_way.pop(self._role(transfer))
        with self._recorded("wait", transfer.name) if pending.under_way else NOT_MEASURED:
            columns = dict(zip(transfer.columns, pending.wait(), strict=True))
        if transfer.back:
            self._add_from_ranks(transfer, columns)
        else:
            self.columns["received"].update(columns)

    def _role(self, transfer: Transfer) -> Hashable:
        """What sets an exchange apart from others that are under way or in use at once."""
        return transfer.rows, transfer.back, transfer.stage, self.attention.nano.index, self.attention.repairs

    def _params(self, call: KernelCall) -> AttentionParams:
        return self.attention.params if call.causal else replace(self.attention.params, causal=False)

    def _recorded(self, kind: Kind, part: str, pairs: int = 0) -> AbstractContextManager[None]:
        return self._recorder.span(kind, part, self._work, pairs)

    @abstractmethod
    def _compute(self, call: KernelCall, group: BoundGroup) -> None:
        """Make a kernel call; results go to where its rows are."""

    @abstractmethod
    def _send_back(self, transfer: Transfer, role: Hashable) -> PendingRows:
        """Start the way back of what was computed for other ranks."""

    @abstractmethod
    def _add_from_ranks(self, transfer: Transfer, columns: Columns) -> None:
        """Take in what other ranks computed for this one."""

    @abstractmethod
    def _add_from_servers(self, results: Mapping[int, Mapping[str, Tensor]], lost: frozenset[int]) -> None:
        """Take in what servers computed for this rank, and compute with the other ranks what lost servers did not."""


class Forward(Pass):
    """O and LSE of the rank's rows.

    Args:
        attention: what is computed.
        q_THD: queries of the rank's rows.
        k_TGD: keys.
        v_TGE: values.
    """

    def __init__(self, attention: CoreAttention, q_THD: Tensor, k_TGD: Tensor, v_TGE: Tensor) -> None:
        local = {"q": q_THD, "k": k_TGD, "v": v_TGE}
        super().__init__(attention, "forward", attention.routes.forward, local)
        self._results: dict[Place, Results] = {}

    def results(self) -> Results:
        """o_THE and lse_TH, once all phases have run."""
        return self._results_at("local")

    def kept(self) -> Columns:
        """What the backward is to have of the rows that were received; asked for once their tasks are computed."""
        if self.attention.kept == "nothing":
            return {}
        # The exchange's buffers live shorter than the backward.
        kept = {name: rows_R.clone() for name, rows_R in self.columns["received"].items()}
        if self.attention.kept == "results":
            kept["o"], kept["lse"] = self._results_at("received")
        return kept

    def _results_at(self, place: Place) -> Results:
        """O and LSE of the query rows at a place; undefined where nothing has been computed yet."""
        if place not in self._results:
            q_THD, v_TGE = self.columns[place]["q"], self.columns["local"]["v"]
            rows, heads = q_THD.shape[:2]
            lse_dtype = torch.promote_types(q_THD.dtype, torch.float32)
            o_THE = q_THD.new_empty((rows, heads, v_TGE.shape[2]))
            self._results[place] = o_THE, q_THD.new_empty((rows, heads), dtype=lse_dtype)
        return self._results[place]

    def _compute(self, call: KernelCall, group: BoundGroup) -> None:
        queries, keys = self.columns[call.queries], self.columns[call.keys]
        k_KGD, v_KGE = take(keys["k"], group.k_rows), take(keys["v"], group.k_rows)
        q_QHD = take(queries["q"], group.q_rows)
        with self._recorded("kernel", call.tasks, group.pairs):
            part = self.attention.bound.kernel.forward(q_QHD, k_KGD, v_KGE, group.shapes, self._params(call))
        if not call.first:
            merge_rows(*self._results_at(call.queries), group.q_rows, *part)
        elif group.q_rows == slice(0, queries["q"].shape[0]):
            self._results[call.queries] = part
        else:
            _put(self._results_at(call.queries), group.q_rows, part)

    def _send_back(self, transfer: Transfer, role: Hashable) -> PendingRows:
        way_back = self.routes.messages[transfer.rows].way_back
        return self.attention.bound.exchange.start(self._results_at("received"), way_back, role)

    def _add_from_ranks(self, transfer: Transfer, columns: Columns) -> None:
        _put(self.results(), self.routes.messages[transfer.rows].rows, (columns["o"], columns["lse"]))

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
                _put(self.results(), rows.q_rows, (came["o"], came["lse"]))
            elif repaired is not None and rows.server in lost:
                o_QHE, lse_QH = (take(x_T, rows.q_rows) for x_T in repaired)
                _put(self.results(), rows.q_rows, (o_QHE, lse_QH))


def _put(results: Results, index: RowIndex, part: Results) -> None:
    """Write O and LSE of some rows to where they belong."""
    for x_T, rows_Q in zip(results, part, strict=True):
        put(x_T, index, rows_Q)


class Backward(Pass):
    """Gradients of the rank's rows.

    Args:
        attention: whose gradients.
        do_THE: gradient of O of the rank's rows.
        q_THD: as in the forward.
        k_TGD: as in the forward.
        v_TGE: as in the forward.
        o_THE: result of the forward.
        lse_TH: result of the forward.
    """

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
        self._of_tasks: dict[Tasks, Columns] = {}
        self._from_ranks: Columns = {}
        self._from_servers: list[Columns] = []
        self._repaired: tuple[Tensor, ...] | None = None

    def take_kept(self, kept: Columns) -> None:
        """Have what the forward kept; to be called before what was received is computed."""
        self.columns["received"].update(kept)

    def go_on(self) -> None:
        """See `Pass.go_on`."""
        super().go_on()
        if not any(phase.run or phase.send for phase in self._left) and not self.routes.servers:
            for tasks in (*self.routes.own_in_backward, "prefix"):
                self._of(tasks)
            self.columns.clear()  # the memory goes back while the last rows travel

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """dq_THD, dk_TGD and dv_TGE, once all phases have run."""
        own = [self._of(tasks) for tasks in self.routes.own_in_backward]
        came = [self._from_ranks, *self._from_servers]
        dq_THD = self.routes.query_sums.add_up([x["dq"] for x in (*own, self._of("prefix"), *came)])
        dk_TGD, dv_TGE = (self.routes.key_sums.add_up([x[name] for x in (*own, *came)]) for name in ("dk", "dv"))
        if self._repaired is not None:
            for total, repaired in zip((dq_THD, dk_TGD, dv_TGE), self._repaired, strict=True):
                total.add_(repaired)
        return dq_THD, dk_TGD, dv_TGE

    def _of(self, tasks: Tasks) -> Columns:
        """The gradients of a kernel call; of no rows where the rank has no such tasks."""
        if tasks not in self._of_tasks:
            local = self.columns["local"]
            self._of_tasks[tasks] = {f"d{x}": local[x].new_empty((0, *local[x].shape[1:])) for x in ("q", "k", "v")}
        return self._of_tasks[tasks]

    def _compute(self, call: KernelCall, group: BoundGroup) -> None:
        queries, keys = self.columns[call.queries], self.columns[call.keys]
        k_KGD, v_KGE = take(keys["k"], group.k_rows), take(keys["v"], group.k_rows)
        do_QHE, q_QHD, o_QHE, lse_QH = (take(queries[name], group.q_rows) for name in ("do", "q", "o", "lse"))
        with self._recorded("kernel", call.tasks, group.pairs):
            gradients = self.attention.bound.kernel.backward(
                do_QHE, q_QHD, k_KGD, v_KGE, o_QHE, lse_QH, group.shapes, self._params(call)
            )
        self._of_tasks[call.tasks] = dict(zip(("dq", "dk", "dv"), gradients, strict=True))

    def _send_back(self, transfer: Transfer, role: Hashable) -> PendingRows:
        exchange, way_back = self.attention.bound.exchange, self.routes.messages[transfer.rows].way_back
        if transfer.rows == "queries":
            return exchange.start([self._of("visiting")[name] for name in transfer.columns], way_back, role)
        received = self.columns["received"]
        types: list[Column] = [(received[name].shape[1:], received[name].dtype) for name in ("k", "v")]
        message = exchange.open(types, way_back, role, received["k"].device)
        for name, column_R in zip(transfer.columns, message.columns, strict=True):
            parts = [self._of(tasks)[name] for tasks in ("visiting", "prefix")]
            self.routes.received_sums.add_up(parts, out=column_R)
        return message.send()

    def _add_from_ranks(self, transfer: Transfer, columns: Columns) -> None:
        self._from_ranks.update(columns)

    def _add_from_servers(self, results: Mapping[int, Mapping[str, Tensor]], lost: frozenset[int]) -> None:
        if lost:
            local = self.columns["local"]
            inputs = (local[name] for name in ("do", "q", "k", "v", "o", "lse"))
            repair = Backward(self.attention.to_repair(lost), *inputs)
            repair.run_through()
            self._repaired = repair.gradients()
        # Server after server, as the sums have them.
        parts = [results.get(rows.server) or self._zeros_for(rows) for rows in self.routes.servers]
        self._from_servers = [{name: torch.cat([part[name] for part in parts]) for name in ("dq", "dk", "dv")}]

    def _zeros_for(self, rows: ServerRows) -> Columns:
        """Gradients of the rows of a server that is lost, or that this rank has no rows for."""
        local = self.columns["local"]
        counts = {"q": rows.q_count, "k": rows.k_count, "v": rows.k_count}
        return {f"d{name}": local[name].new_zeros((n, *local[name].shape[1:])) for name, n in counts.items()}
