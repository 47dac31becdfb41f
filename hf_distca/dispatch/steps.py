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

from hf_distca.call_codec import Direction
from hf_distca.dispatch.bound import BoundGroup, BoundNanoBatch, BoundPlan
from hf_distca.dispatch.exchange import PendingRows
from hf_distca.dispatch.pool import ServerCall
from hf_distca.dispatch.rows import RowSum, put, take
from hf_distca.kernels.contract import AttentionParams
from hf_distca.kernels.merge import merge
from hf_distca.plan import AttentionKind

When = Literal["at start", "before waiting", "around", "last"]
"""When own tasks are computed: once the exchange has started; before the wait for it, when the other half's has
started too; half of them then and half when the results for received rows are on their way; or all of them then."""


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
        self.own_forward, self.own_backward = self._when()
        self.queries_on_the_way: PendingRows
        self.keys_on_the_way: PendingRows
        self.at_servers: ServerCall | None = None
        self.local: tuple[Tensor, ...] = ()  # forward: q, k, v; backward: do, q, k, v, o, lse
        self.result: tuple[Tensor, Tensor]  # forward: o_THE and lse_TH
        self.sums: tuple[RowSum, RowSum, RowSum]  # backward: dq, dk, dv of the local rows

    def _when(self) -> tuple[When, When]:
        """When the forward and the backward compute own tasks."""
        if len(self.bound.nano_batches) == 1:
            return "at start", "around" if self.routes.receives else "at start"
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
        assert self.bound.pool is not None  # who lost servers has a pool
        self.bound.pool.pool.stopwatch.observed.pairs += repair.routes.pairs
        return repair

    def step(self) -> AbstractContextManager[None]:
        """Around each step, never around a pause: numbers are computed in the dtype in which they come.

        Autocast is the thread's: left open across a pause, the other half would run without it. The pool, if there is
        one, is told what time lies between steps.
        """
        watched = nullcontext() if self.bound.pool is None else self.bound.pool.pool.stopwatch.step()
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

    def return_keys(self, columns: list[Tensor]) -> None:
        """Send results for all received rows of the keys' kind back to their owners."""
        self.keys_on_the_way = self.exchange.start(columns, self.routes.keys.way_back, ("keys", True, self.number))

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
    if call.own_forward == "at start":
        call.result = _own_forward(call, q_THD, k_TGD, v_TGE)


def compute_forward(call: AttentionCall) -> tuple[Tensor, ...]:
    """Wait for the received rows, compute their tasks, start the exchange of the results.

    Returns:
        What the backward needs again of the received rows, if the call keeps it.
    """
    routes, kernel = call.routes, call.kernel
    if call.own_forward == "before waiting":
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
        if not routes.prefix_is_causal:  # a part of the task: its own segment's keys are in already
            part = merge(*part, take(o_THE, rows), take(lse_TH, rows))
        put(o_THE, rows, part[0])
        put(lse_TH, rows, part[1])
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
        for rows, columns in results:
            put(o_THE, rows.q_rows, columns[0])
            put(lse_TH, rows.q_rows, columns[1])
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
    call.sums = RowSum(q_THD.shape, q_THD), RowSum(k_TGD.shape, k_TGD), RowSum(v_TGE.shape, v_TGE)
    if call.own_backward == "at start":
        _own_backward(call, call.routes.own)


def compute_backward(call: AttentionCall, kept: tuple[Tensor, ...]) -> None:
    """Wait for the received rows, compute the gradients of their tasks, start the exchange of the gradients.

    Args:
        call: the call.
        kept: what compute_forward returned.
    """
    routes = call.routes
    do_THE, q_THD, _, _, o_THE, lse_TH = call.local
    if call.own_backward == "before waiting":
        _own_backward(call, routes.own)
    elif call.own_backward == "around":
        _own_backward(call, routes.own_halves[0])
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
    came_dk, came_dv = RowSum(k_RGD.shape, k_RGD), RowSum(v_RGE.shape, v_RGE)

    dq_QHD = q_QHD
    if not routes.visiting.empty:
        dq_QHD = _backward(call, routes.visiting, do_QHE, q_QHD, k_RGD, v_RGE, o_QHE, lse_QH, came_dk, came_dv)
    call.return_queries([dq_QHD])
    if not routes.prefix.empty:
        rows = routes.prefix.q_rows
        do_QHE, q_QHD, o_QHE, lse_QH = (take(x, rows) for x in (do_THE, q_THD, o_THE, lse_TH))
        dq_QHD = _backward(call, routes.prefix, do_QHE, q_QHD, k_RGD, v_RGE, o_QHE, lse_QH, came_dk, came_dv)
        call.sums[0].add(rows, dq_QHD)
    call.return_keys([came_dk.result(), came_dv.result()])
    if call.own_backward == "last":
        _own_backward(call, routes.own)
    elif call.own_backward == "around":
        _own_backward(call, routes.own_halves[1])
    if call.at_servers is None:
        call.local = ()


def finish_backward(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """Wait for the gradients that other workers computed: dQ, dK and dV of all local rows."""
    dq, dk, dv = call.sums
    queries, keys = call.routes.queries, call.routes.keys
    (came_dq_QHD,) = call.queries_on_the_way.wait()
    dq.add(queries.rows, came_dq_QHD, borrowed=True)
    came_dk_KGD, came_dv_KGE = call.keys_on_the_way.wait()
    for index, part in keys.rows_by_peer:  # several workers may have used a row: rank after rank
        dk.add(index, came_dk_KGD[part], borrowed=True)
        dv.add(index, came_dv_KGE[part], borrowed=True)
    if call.at_servers is not None:
        results, lost = call.at_servers.collect()
        for rows, (server_dq, server_dk, server_dv) in results:
            dq.add(rows.q_rows, server_dq)
            dk.add(rows.k_rows, server_dk)
            dv.add(rows.k_rows, server_dv)
        if lost:
            repair = call.to_repair(lost)
            start_backward(repair, *call.local)
            compute_backward(repair, ())
            for total, home in zip(call.sums, finish_backward(repair), strict=True):
                total.add(slice(0, len(home)), home)
        call.at_servers, call.local = None, ()
    del call.queries_on_the_way, call.keys_on_the_way, call.sums
    return dq.result(), dk.result(), dv.result()


def _start_servers(call: AttentionCall, direction: Direction, tensors: dict[str, Tensor]) -> None:
    """Send dedicated servers their rows, where the plan has tasks for any."""
    if call.routes.servers:
        assert call.bound.pool is not None  # who plans for servers has a pool
        call.at_servers = call.bound.pool.start(direction, call.nano.number, call.routes, call.params, tensors)


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


def _own_backward(call: AttentionCall, own: BoundGroup) -> None:
    """Add the gradients of own tasks to the sums of the local rows."""
    if own.empty:
        return
    do_THE, q_THD, k_TGD, v_TGE, o_THE, lse_TH = call.local
    dq, dk, dv = call.sums
    do_QHE, q_QHD, o_QHE, lse_QH = (take(x, own.q_rows) for x in (do_THE, q_THD, o_THE, lse_TH))
    dq.add(own.q_rows, _backward(call, own, do_QHE, q_QHD, k_TGD, v_TGE, o_QHE, lse_QH, dk, dv))


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
    dk: RowSum,
    dv: RowSum,
) -> Tensor:
    """Gradients of one kernel call: dK and dV are added to the rows they came from, dQ is returned."""
    k_KGD, v_KGE = take(k_NGD, group.k_rows), take(v_NGE, group.k_rows)
    dq_QHD, dk_KGD, dv_KGE = call.kernel.backward(
        do_QHE, q_QHD, k_KGD, v_KGE, o_QHE, lse_QH, group.shapes, call.params_of(group)
    )
    dk.add_all(group.k_sums, dk_KGD)
    dv.add_all(group.k_sums, dv_KGE)
    return dq_QHD
