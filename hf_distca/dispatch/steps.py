"""The six steps of one layer's disaggregated core attention on one nano-batch, three forward and three back.

              forward                                     backward
    start     start the exchange of Q, K, V;              start the exchange of dO, Q, K, V, O, LSE;
              compute own tasks (here or later, `When`)   gradients of own tasks (here or later, `When`)
    compute   wait; compute what was received;            wait; gradients of what was received;
              start the exchange of O                     start the exchange of dQ, dK, dV
    finish    wait for O                                  wait for dQ, dK, dV and add them up

Dedicated servers get their rows in `start` and are asked for the results in `finish`; what a lost server did not give
is computed then, by the ranks that hold its rows.

Plain functions of tensors; `hf_distca.dispatch.attention` makes autograd nodes of them.

Shape suffixes: T local rows, Q query rows of a kernel call, R received rows, K key/value rows of a kernel call, H
query heads, G key/value heads, D head dim of queries and keys, E head dim of values.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from hf_distca.dispatch.bound import BoundGroup, BoundNanoBatch, BoundPlan
from hf_distca.dispatch.exchange import Column, Message, PendingRows
from hf_distca.dispatch.remote import RemoteCall
from hf_distca.dispatch.rows import merge_rows, put, take
from hf_distca.dispatch.schedule import Direction
from hf_distca.kernels import AttentionParams
from hf_distca.plan import AttentionKind

When = Literal["at start", "before waiting", "around", "last"]
"""When own tasks are computed: once the exchange has started; before the wait for it, when the other half's has
started too; half of them then and half when the results for received rows are on their way; or all of them then."""


Gradients = tuple[Tensor, Tensor, Tensor]
"""dQ, dK and dV of the rows of one kernel call."""


class AttentionCall:
    """One attention of one layer on one nano-batch, on its way through the steps.

    Holds what one step hands to the next; nothing stays here between forward and backward.

    Args:
        bound: the plan, with the exchange and the kernel.
        nano: the nano-batch, with the routes of this rank.
        kind: of the layer's attention.
        params: scale, window and softcap of the layer.
        keep_received: keep for the backward what the forward received and computed of it.
        results_change: O and LSE are not final when the worker has computed them (sinks are added by the owner).
    """

    def __init__(
        self,
        bound: BoundPlan,
        nano: BoundNanoBatch,
        kind: AttentionKind,
        params: AttentionParams,
        *,
        keep_received: bool = False,
        results_change: bool = False,
    ) -> None:
        self.bound = bound
        self.nano = nano
        self.kind = kind
        self.routes = nano.routes[kind]
        self.number = nano.number  # sets the buffers of the exchange apart
        self.exchange = bound.exchange
        self.kernel = bound.kernel
        self.params = params
        self.keep_received = keep_received
        self.keep_results = keep_received and not results_change
        self.queries_on_the_way: PendingRows
        self.keys_on_the_way: PendingRows
        self.at_servers: RemoteCall | None = None
        self.local: tuple[Tensor, ...] = ()  # forward: q, k, v; backward: do, q, k, v, o, lse
        self.result: tuple[Tensor, Tensor]  # forward: o_THE and lse_TH
        self.own_gradients: list[Gradients]  # backward: of own tasks, call by call
        self.prefix_dq_QHD: Tensor  # backward

    @property
    def own_tasks(self) -> tuple[When, When]:
        """When the forward and the backward compute own tasks."""
        if len(self.bound.nano_batches) == 1:
            return "at start", "around" if len(self.routes.own_in_backward) > 1 else "at start"
        # The half that starts first leaves its own tasks until the other half's exchange has started too. In the
        # backward that is the second half; after the first half nothing comes that would hide the return of its
        # dK and dV: own tasks do.
        if self.nano.number == 1:
            return "at start", "before waiting"
        return "before waiting", "last"

    def to_repair(self, lost: frozenset[int]) -> "AttentionCall":
        """The call of what lost servers were to compute, by the ranks that hold the rows."""
        repair = AttentionCall(self.bound, self.nano, self.kind, self.params)
        repair.routes = self.nano.repair(self.kind, lost)
        repair.number = 2 + self.number
        return repair

    def step(self) -> AbstractContextManager[None]:
        """Around each step, never around a pause: numbers are computed in the dtype in which they come.

        Autocast is the thread's: left open across a pause, the other half would run without it. Servers, if there are
        any, are told what time lies between steps.
        """
        watched = nullcontext() if self.bound.remote is None else self.bound.remote.step()
        device = self.bound.device.type
        return _without_autocast(device, watched) if torch.is_autocast_enabled(device) else watched

    def send_queries(self, columns: list[Tensor]) -> None:
        """Send rows of the queries' kind to the workers: of every column those that the routes name."""
        queries = self.routes.queries
        role = ("queries", False, self.number)
        self.queries_on_the_way = self.exchange.start(columns, queries.traffic, role, queries.rows)

    def send_keys(self, columns: list[Tensor]) -> None:
        """Send rows of the keys' kind to the workers."""
        keys = self.routes.keys
        self.keys_on_the_way = self.exchange.start(columns, keys.traffic, ("keys", False, self.number), keys.rows)

    def return_queries(self, columns: list[Tensor]) -> None:
        """Send results for all received rows of the queries' kind back to their owners."""
        role = ("queries", True, self.number)
        self.queries_on_the_way = self.exchange.start(columns, self.routes.queries.way_back, role)

    def open_return_of_keys(self, k_RGD: Tensor, v_RGE: Tensor) -> Message:
        """Make room for results for all received rows of the keys' kind, shaped like these."""
        columns: list[Column] = [(x.shape[1:], x.dtype) for x in (k_RGD, v_RGE)]
        return self.exchange.open(columns, self.routes.keys.way_back, ("keys", True, self.number), k_RGD.device)

    def params_of(self, group: BoundGroup) -> AttentionParams:
        """The mask of a group of tasks."""
        sees_all = group is self.routes.prefix and not self.routes.prefix_is_causal
        return replace(self.params, causal=False) if sees_all else self.params


@contextmanager
def _without_autocast(device: str, inner: AbstractContextManager[None]) -> Iterator[None]:
    with torch.autocast(device, enabled=False), inner:
        yield


def start_forward(call: AttentionCall, q_THD: Tensor, k_TGD: Tensor, v_TGE: Tensor) -> None:
    """Start the exchange of Q, K and V; compute own tasks, if they are to come at the start."""
    call.send_queries([q_THD])
    call.send_keys([k_TGD, v_TGE])
    _start_servers(call, "forward", {"q": q_THD, "k": k_TGD, "v": v_TGE})
    call.local = (q_THD, k_TGD, v_TGE)
    if call.own_tasks[0] == "at start":
        call.result = _own_forward(call, q_THD, k_TGD, v_TGE)


def compute_forward(call: AttentionCall) -> tuple[Tensor, ...]:
    """Wait for the received rows, compute their tasks, start the exchange of the results.

    Returns:
        What the backward needs again of the received rows, if the call keeps it.
    """
    routes, kernel = call.routes, call.kernel
    if call.own_tasks[0] == "before waiting":
        q_THD, k_TGD, v_TGE = call.local
        call.result = _own_forward(call, q_THD, k_TGD, v_TGE)
    (q_RHD,) = call.queries_on_the_way.wait()
    k_RGD, v_RGE = call.keys_on_the_way.wait()

    # Visitors first: their results have a way to go.
    if routes.visiting.empty:
        o_QHE = q_RHD.new_empty((0, q_RHD.shape[1], v_RGE.shape[2]))
        lse_QH = q_RHD.new_empty((0, q_RHD.shape[1]), dtype=_lse_dtype(q_RHD))
    else:
        k_KGD, v_KGE = take(k_RGD, routes.visiting.k_rows), take(v_RGE, routes.visiting.k_rows)
        o_QHE, lse_QH = kernel.forward(q_RHD, k_KGD, v_KGE, routes.visiting.shapes, call.params)
    call.return_queries([o_QHE, lse_QH])

    if not routes.prefix.empty:
        q_THD = call.local[0]
        o_THE, lse_TH = call.result
        rows = routes.prefix.q_rows
        k_KGD, v_KGE = take(k_RGD, routes.prefix.k_rows), take(v_RGE, routes.prefix.k_rows)
        part = kernel.forward(take(q_THD, rows), k_KGD, v_KGE, routes.prefix.shapes, call.params_of(routes.prefix))
        if routes.prefix_is_causal:
            put(o_THE, rows, part[0])
            put(lse_TH, rows, part[1])
        else:  # a part of the task: its own segment's keys are in already
            merge_rows(o_THE, lse_TH, rows, *part)
    # The exchange's buffers live shorter than the backward.
    kept = tuple(x.clone() for x in (q_RHD, k_RGD, v_RGE)) if call.keep_received else ()
    if call.keep_results:
        kept += (o_QHE, lse_QH)
    del call.keys_on_the_way
    if call.at_servers is None:
        call.local = ()
    return kept


def finish_forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Wait for the results of the rank's rows that were computed elsewhere: O and LSE of all local rows."""
    o_THE, lse_TH = call.result
    came_o_QHE, came_lse_QH = call.queries_on_the_way.wait()
    put(o_THE, call.routes.queries.rows, came_o_QHE)
    put(lse_TH, call.routes.queries.rows, came_lse_QH)
    if call.at_servers is not None:
        results, lost = call.at_servers.collect()
        for rows in call.routes.servers:
            if came := results.get(rows.server):
                put(o_THE, rows.q_rows, came["o"])
                put(lse_TH, rows.q_rows, came["lse"])
        if lost:
            repair = call.to_repair(lost)
            start_forward(repair, *call.local)
            compute_forward(repair)
            home_o_THE, home_lse_TH = finish_forward(repair)
            for rows in call.routes.servers:
                if rows.server in lost:
                    put(o_THE, rows.q_rows, take(home_o_THE, rows.q_rows))
                    put(lse_TH, rows.q_rows, take(home_lse_TH, rows.q_rows))
        call.at_servers, call.local = None, ()
    del call.queries_on_the_way, call.result
    return o_THE, lse_TH


def start_backward(
    call: AttentionCall, do_THE: Tensor, q_THD: Tensor, k_TGD: Tensor, v_TGE: Tensor, o_THE: Tensor, lse_TH: Tensor
) -> None:
    """Start the exchange of what workers need again; gradients of own tasks, if they are to come at the start."""
    again = [do_THE]
    if not call.keep_results:
        again += [o_THE, lse_TH]
    if not call.keep_received:
        again += [q_THD]
    call.send_queries(again)
    if not call.keep_received:
        call.send_keys([k_TGD, v_TGE])
    columns = {"q": q_THD, "do": do_THE, "o": o_THE, "lse": lse_TH, "k": k_TGD, "v": v_TGE}
    _start_servers(call, "backward", columns)
    call.local = (do_THE, q_THD, k_TGD, v_TGE, o_THE, lse_TH)
    call.own_gradients = []
    if call.own_tasks[1] == "at start":
        _own_backward(call)


def compute_backward(call: AttentionCall, kept: tuple[Tensor, ...]) -> None:
    """Wait for the received rows, compute the gradients of their tasks, start the exchange of the gradients.

    Args:
        call: the call.
        kept: what compute_forward returned.
    """
    routes, own_tasks = call.routes, call.own_tasks[1]
    do_THE, q_THD, _, _, o_THE, lse_TH = call.local
    if own_tasks in ("before waiting", "around"):
        _own_backward(call)
    received = call.queries_on_the_way.wait()
    if call.keep_results:
        (do_QHE,) = received
        q_QHD, k_RGD, v_RGE, o_QHE, lse_QH = kept
    elif call.keep_received:
        do_QHE, o_QHE, lse_QH = received
        q_QHD, k_RGD, v_RGE = kept
    else:
        do_QHE, o_QHE, lse_QH, q_QHD = received
        k_RGD, v_RGE = call.keys_on_the_way.wait()

    dq_QHD, *visiting_keys = _backward(call, routes.visiting, do_QHE, q_QHD, k_RGD, v_RGE, o_QHE, lse_QH)
    call.return_queries([dq_QHD])
    rows = routes.prefix.q_rows
    do_QHE, q_QHD, o_QHE, lse_QH = (take(x, rows) for x in (do_THE, q_THD, o_THE, lse_TH))
    call.prefix_dq_QHD, *prefix_keys = _backward(call, routes.prefix, do_QHE, q_QHD, k_RGD, v_RGE, o_QHE, lse_QH)
    message = call.open_return_of_keys(k_RGD, v_RGE)
    for column, *parts in zip(message.columns, visiting_keys, prefix_keys, strict=True):
        routes.received_sums.add_up(parts, out=column)
    call.keys_on_the_way = message.send()
    if own_tasks in ("last", "around"):
        _own_backward(call)
    if call.at_servers is None:
        call.local = ()


def finish_backward(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """Wait for the gradients that other workers computed: dQ, dK and dV of all local rows."""
    routes = call.routes
    columns = [list(column) for column in zip(*call.own_gradients, strict=True)]  # of dq, dk, dv
    columns[0] += [call.prefix_dq_QHD, *call.queries_on_the_way.wait()]
    for column, came in zip(columns[1:], call.keys_on_the_way.wait(), strict=True):
        column.append(came)
    lost: frozenset[int] = frozenset()
    if call.at_servers is not None:
        results, lost = call.at_servers.collect()
        for column, came in zip(columns, _of_all_servers(call, results), strict=True):
            column.append(came)
    sums = (routes.query_sums, routes.key_sums, routes.key_sums)
    dq_THD, dk_TGD, dv_TGE = (sum.add_up(column) for sum, column in zip(sums, columns, strict=True))
    if lost:
        repair = call.to_repair(lost)
        start_backward(repair, *call.local)
        compute_backward(repair, ())
        for total, home in zip((dq_THD, dk_TGD, dv_TGE), finish_backward(repair), strict=True):
            total.add_(home)
    call.at_servers, call.local = None, ()
    del call.queries_on_the_way, call.keys_on_the_way, call.own_gradients, call.prefix_dq_QHD
    return dq_THD, dk_TGD, dv_TGE


def _of_all_servers(call: AttentionCall, results: dict[int, dict[str, Tensor]]) -> list[Tensor]:
    """dQ, dK and dV of the rows that servers were sent, server after server; 0 where a server is lost."""
    _, q_THD, k_TGD, v_TGE, _, _ = call.local
    parts = []
    for rows in call.routes.servers:
        came = results.get(rows.server, {})
        owners = (("dq", q_THD, rows.q_count), ("dk", k_TGD, rows.k_count), ("dv", v_TGE, rows.k_count))
        parts.append([came[name] if came else x.new_zeros((count, *x.shape[1:])) for name, x, count in owners])
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def _start_servers(call: AttentionCall, direction: Direction, tensors: dict[str, Tensor]) -> None:
    """Send dedicated servers their rows, where the plan has tasks for any."""
    if call.routes.servers:
        assert call.bound.remote is not None  # the plan has servers
        call.at_servers = call.bound.remote.start(
            direction, call.nano.number, call.routes.servers, call.params, tensors
        )


def _own_forward(call: AttentionCall, q_THD: Tensor, k_TGD: Tensor, v_TGE: Tensor) -> tuple[Tensor, Tensor]:
    """O and LSE of the local rows, filled in as far as own tasks go."""
    own = call.routes.own
    rows, heads, head_dim = q_THD.shape[0], q_THD.shape[1], v_TGE.shape[2]
    if not own.empty:
        k_KGD, v_KGE = take(k_TGD, own.k_rows), take(v_TGE, own.k_rows)
        o_QHE, lse_QH = call.kernel.forward(take(q_THD, own.q_rows), k_KGD, v_KGE, own.shapes, call.params)
        if own.q_rows == slice(0, rows):
            return o_QHE, lse_QH
    o_THE = q_THD.new_empty((rows, heads, head_dim))
    lse_TH = q_THD.new_empty((rows, heads), dtype=_lse_dtype(q_THD))
    if not own.empty:
        put(o_THE, own.q_rows, o_QHE)
        put(lse_TH, own.q_rows, lse_QH)
    return o_THE, lse_TH


def _own_backward(call: AttentionCall) -> None:
    """The gradients of own tasks, or of the next half of them."""
    own = call.routes.own_in_backward[len(call.own_gradients)]
    do_THE, q_THD, k_TGD, v_TGE, o_THE, lse_TH = call.local
    do_QHE, q_QHD, o_QHE, lse_QH = (take(x, own.q_rows) for x in (do_THE, q_THD, o_THE, lse_TH))
    call.own_gradients.append(_backward(call, own, do_QHE, q_QHD, k_TGD, v_TGE, o_QHE, lse_QH))


def _lse_dtype(q: Tensor) -> torch.dtype:
    """The dtype in which kernels give the log-sum-exp."""
    return torch.promote_types(q.dtype, torch.float32)


def _backward(
    call: AttentionCall,
    group: BoundGroup,
    do_QHE: Tensor,
    q_QHD: Tensor,
    k_NGD: Tensor,
    v_NGE: Tensor,
    o_QHE: Tensor,
    lse_QH: Tensor,
) -> Gradients:
    """The gradients of one kernel call."""
    k_KGD, v_KGE = take(k_NGD, group.k_rows), take(v_NGE, group.k_rows)
    if group.empty:
        return q_QHD, k_KGD, v_KGE
    return call.kernel.backward(do_QHE, q_QHD, k_KGD, v_KGE, o_QHE, lse_QH, group.shapes, call.params_of(group))
