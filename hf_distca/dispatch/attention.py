"""Core attention of one layer, disaggregated: exchange, compute, exchange back, and the same in reverse.

Three autograd nodes make one attention, so that two nano-batches can take turns between them:

              forward                                     backward
    Send      start the exchange of Q, K, V;              wait for dQ, dK, dV and add them up
              compute own tasks
    Compute   wait; compute what was received;            wait; gradients of what was received;
              start the exchange of O                     start the exchange of dQ, dK, dV
    Receive   wait for O                                  start the exchange of dO, Q, K, V, O, LSE;
                                                          gradients of own tasks (or, in the half that
                                                          comes last, at the end of Compute)

The engine runs backward nodes in the reverse order of their creation, so the backward's exchanges follow
from the forward's order on every rank alike. Between the nodes only an empty token travels: forward and
backward hand over other sizes, which autograd would reject.

Shape suffixes: T local rows, Q query rows of a kernel call, R received rows, K key/value rows of a kernel call, H
query heads, G key/value heads, D head dim of queries and keys, E head dim of values.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from hf_distca.dispatch.bound import BoundGroup, BoundNanoBatch, LayerPlan
from hf_distca.dispatch.exchange import PendingRows
from hf_distca.dispatch.rows import RowSum, put, take
from hf_distca.kernels.contract import AttentionParams
from hf_distca.kernels.merge import merge


class _Layer:
    """One attention of one layer on one nano-batch, on its way through the three nodes.

    Holds what one node hands to the next; nothing stays here between forward and backward.

    Attributes:
        kept: O and LSE of the first forward where this is its recomputation: then nothing is exchanged or
            computed, and the nodes are there for the backward only.
    """

    def __init__(
        self,
        plan: LayerPlan,
        nano: BoundNanoBatch,
        params: AttentionParams,
        kept: tuple[Tensor, Tensor] | None,
    ) -> None:
        bound = plan.bound
        routes = nano.routes[params.window]
        self.exchange = bound.exchange
        self.kernel = bound.kernel
        # Where results are kept through a checkpoint, what was received is gone with the first forward.
        self.keep_received = bound.keep_received and not plan.keep_results
        self.routes = routes
        self.nano_batch = nano.number
        self.params = params
        self.prefix_params = params if routes.prefix_is_causal else replace(params, causal=False)
        self.kept = kept
        self.queries_on_the_way: PendingRows
        self.keys_on_the_way: PendingRows
        # In a backward of two halves the one that comes last (the first of the forward) has nothing after it that
        # would hide the return of its dK and dV: its own tasks wait until these are on their way.
        self.own_gradients_last = plan.takes_turns and nano.number == 0
        self.local: tuple[Tensor, ...] = ()  # forward: q, k, v; backward: do, q, k, v, o, lse
        self.result: tuple[Tensor, Tensor]  # forward: o_THE and lse_TH
        self.sums: tuple[RowSum, RowSum, RowSum]  # backward: dq, dk, dv of the local rows

    def start_queries(self, columns: list[Tensor], *, back: bool = False) -> None:
        """Send rows of the queries' kind to the workers, or back to their owners."""
        traffic = self.routes.queries.traffic
        role = ("queries", back, self.nano_batch)
        self.queries_on_the_way = self.exchange.start(columns, traffic.reversed() if back else traffic, role)

    def start_keys(self, columns: list[Tensor], *, back: bool = False) -> None:
        """Send rows of the keys' kind to the workers, or back to their owners."""
        traffic = self.routes.keys.traffic
        role = ("keys", back, self.nano_batch)
        self.keys_on_the_way = self.exchange.start(columns, traffic.reversed() if back else traffic, role)

    def params_of(self, group: BoundGroup) -> AttentionParams:
        return self.prefix_params if group is self.routes.prefix else self.params


def disaggregated_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGE: Tensor,
    sinks_H: Tensor | None,
    plan: LayerPlan,
    params: AttentionParams,
    module: nn.Module | None = None,
) -> Tensor:
    """Core attention of this rank's rows, computed wherever the plan says.

    Args:
        q_THD: queries of the rank's rows, after position embedding; all three in one dtype.
        k_TGD: keys.
        v_TGE: values.
        sinks_H: learned attention sinks, one logit a query head (gpt-oss), or None.
        plan: the plan of the micro-batch as the layer is to use it.
        params: scale, window and softcap of the layer.
        module: the attention layer, by which results are kept through a checkpoint.

    Returns:
        o_THE.

    Raises:
        ValueError: the rows, or the layer's window, are not those of the plan, or the kernel cannot do it.
    """
    if q_THD.shape[0] != plan.rows:
        raise ValueError(
            f"the plan gives this rank {plan.rows} rows, the model runs on {q_THD.shape[0]}; a plan belongs "
            "to the batch it came with"
        )
    plan.bound.kernel.check(
        device=q_THD.device,
        dtype=q_THD.dtype,
        head_dim_qk=q_THD.shape[2],
        head_dim_v=v_TGE.shape[2],
        params=params,
    )
    kept_results = plan.bound.kept_results
    outputs, row = [], 0
    for nano in plan.nano_batches:
        if params.window not in nano.routes:
            raise ValueError(
                f"a layer has attention window {params.window}, the plan was made for {list(nano.routes)}; "
                "give all of them in PlanSettings.windows"
            )
        rows = slice(row, row + nano.rows)
        row += nano.rows
        # Only a checkpoint runs a forward inside a backward.
        recomputes = plan.keep_results and torch._C._current_graph_task_id() != -1
        kept = kept_results.pop((module, nano.number), None) if recomputes else None
        layer = _Layer(plan, nano, params, kept)
        # A recomputation takes its turns too: checkpointing finds saved tensors by their order.
        token = _Send.apply(layer, q_THD[rows], k_TGD[rows], v_TGE[rows])
        plan.pause()
        token = _Compute.apply(layer, token)
        plan.pause()
        o_THE, lse_TH = _Receive.apply(layer, token, q_THD[rows], k_TGD[rows], v_TGE[rows], sinks_H)
        if plan.keep_results and not recomputes:
            kept_results[module, nano.number] = o_THE.detach(), lse_TH
        outputs.append(o_THE)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class _Send(torch.autograd.Function):
    """Start the exchange of Q, K and V; compute the tasks that need nothing of it."""

    @staticmethod
    def forward(ctx: FunctionCtx, layer: _Layer, q_THD: Tensor, k_TGD: Tensor, v_TGE: Tensor) -> Tensor:
        ctx.layer = layer
        if layer.kept is not None:
            return q_THD.new_empty(0)
        routes = layer.routes
        queries, keys = routes.queries, routes.keys
        layer.start_queries([take(q_THD, queries.rows)])
        layer.start_keys([take(k_TGD, keys.rows), take(v_TGE, keys.rows)])
        layer.local = (q_THD, k_TGD, v_TGE)
        layer.result = _own_forward(layer, q_THD, k_TGD, v_TGE)
        return q_THD.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, _token: Tensor) -> tuple[Tensor | None, ...]:
        layer = ctx.layer
        dq, dk, dv = layer.sums
        queries, keys = layer.routes.queries, layer.routes.keys
        (came_dq_QHD,) = layer.queries_on_the_way.wait()
        dq.add(queries.rows, came_dq_QHD, borrowed=True)
        came_dk_KGD, came_dv_KGE = layer.keys_on_the_way.wait()
        for index, part in keys.rows_by_peer:  # several workers may have used a row: rank after rank
            dk.add(index, came_dk_KGD[part], borrowed=True)
            dv.add(index, came_dv_KGE[part], borrowed=True)
        del layer.queries_on_the_way, layer.keys_on_the_way, layer.sums
        return None, dq.result(), dk.result(), dv.result()


class _Compute(torch.autograd.Function):
    """Wait for the received rows, compute their tasks, start the exchange of the results."""

    @staticmethod
    def forward(ctx: FunctionCtx, layer: _Layer, token: Tensor) -> Tensor:
        ctx.layer = layer
        if layer.kept is not None:
            return token.new_empty(0)
        routes, kernel = layer.routes, layer.kernel
        (q_RHD,) = layer.queries_on_the_way.wait()
        k_RGD, v_RGE = layer.keys_on_the_way.wait()
        if layer.keep_received:
            ctx.save_for_backward(*(x.clone() for x in (q_RHD, k_RGD, v_RGE)))  # the exchange's buffers live shorter

        # Visitors first: their results have a way to go.
        k_KGD, v_KGE = take(k_RGD, routes.visiting.k_rows), take(v_RGE, routes.visiting.k_rows)
        if routes.visiting.empty:
            o_QHE = q_RHD.new_empty((0, q_RHD.shape[1], v_RGE.shape[2]))
            lse_QH = q_RHD.new_empty((0, q_RHD.shape[1]), dtype=_lse_dtype(q_RHD))
        else:
            o_QHE, lse_QH = kernel.forward(q_RHD, k_KGD, v_KGE, routes.visiting.shapes, layer.params)
        layer.start_queries([o_QHE, lse_QH], back=True)

        if not routes.prefix.empty:
            q_THD = layer.local[0]
            o_THE, lse_TH = layer.result
            rows = routes.prefix.q_rows
            k_KGD, v_KGE = take(k_RGD, routes.prefix.k_rows), take(v_RGE, routes.prefix.k_rows)
            part = kernel.forward(take(q_THD, rows), k_KGD, v_KGE, routes.prefix.shapes, layer.prefix_params)
            if not routes.prefix_is_causal:  # a part of the task: its own segment's keys are in already
                part = merge(*part, take(o_THE, rows), take(lse_TH, rows))
            put(o_THE, rows, part[0])
            put(lse_TH, rows, part[1])
        del layer.keys_on_the_way
        layer.local = ()
        return token.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, token: Tensor) -> tuple[Tensor | None, ...]:
        layer = ctx.layer
        routes = layer.routes
        do_THE, q_THD, _, _, o_THE, lse_TH = layer.local
        if layer.keep_received:
            do_QHE, o_QHE, lse_QH = layer.queries_on_the_way.wait()
            q_QHD, k_RGD, v_RGE = ctx.saved_tensors
        else:
            q_QHD, do_QHE, o_QHE, lse_QH = layer.queries_on_the_way.wait()
            k_RGD, v_RGE = layer.keys_on_the_way.wait()
        came_dk, came_dv = RowSum(tuple(k_RGD.shape), k_RGD), RowSum(tuple(v_RGE.shape), v_RGE)

        dq_QHD = q_QHD
        if not routes.visiting.empty:
            dq_QHD = _backward(layer, routes.visiting, do_QHE, q_QHD, k_RGD, v_RGE, o_QHE, lse_QH, came_dk, came_dv)
        layer.start_queries([dq_QHD], back=True)
        if not routes.prefix.empty:
            rows = routes.prefix.q_rows
            dq_QHD = _backward(
                layer,
                routes.prefix,
                *(take(x, rows) for x in (do_THE, q_THD)),
                k_RGD,
                v_RGE,
                *(take(x, rows) for x in (o_THE, lse_TH)),
                came_dk,
                came_dv,
            )
            layer.sums[0].add(rows, dq_QHD)
        layer.start_keys([came_dk.result(), came_dv.result()], back=True)
        if layer.own_gradients_last:
            _own_backward(layer)
        layer.local = ()
        return None, token.new_empty(0)


class _Receive(torch.autograd.Function):
    """Wait for the results of the rank's rows that were computed elsewhere."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        layer: _Layer,
        token: Tensor,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGE: Tensor,
        sinks_H: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.layer = layer
        if layer.kept is not None:
            o_THE, lse_TH = layer.kept
            layer.kept = None
            return _Receive._result(ctx, q_THD, k_TGD, v_TGE, o_THE, lse_TH, sinks_H)
        o_THE, lse_TH = layer.result
        came_o_QHE, came_lse_QH = layer.queries_on_the_way.wait()
        put(o_THE, layer.routes.queries.rows, came_o_QHE)
        put(lse_TH, layer.routes.queries.rows, came_lse_QH)
        del layer.queries_on_the_way, layer.result
        if sinks_H is not None:
            # A sink is one more key with a value of zero: it changes the softmax's denominator only, and
            # with O and LSE changed the backward of all other keys is the usual one.
            with_sink_TH = torch.logaddexp(lse_TH, sinks_H.to(lse_TH.dtype))
            o_THE = (o_THE * (lse_TH - with_sink_TH).exp().unsqueeze(-1)).to(o_THE.dtype)
            lse_TH = with_sink_TH
        return _Receive._result(ctx, q_THD, k_TGD, v_TGE, o_THE, lse_TH, sinks_H)

    @staticmethod
    def _result(
        ctx: FunctionCtx,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGE: Tensor,
        o_THE: Tensor,
        lse_TH: Tensor,
        sinks_H: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q_THD, k_TGD, v_TGE, o_THE, lse_TH, sinks_H)
        ctx.mark_non_differentiable(lse_TH)
        return o_THE, lse_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, do_THE: Tensor, _lse: Tensor | None) -> tuple[Tensor | None, ...]:
        layer = ctx.layer
        routes = layer.routes
        queries, keys = routes.queries, routes.keys
        q_THD, k_TGD, v_TGE, o_THE, lse_TH, sinks_H = ctx.saved_tensors

        columns = [do_THE, o_THE, lse_TH] if layer.keep_received else [q_THD, do_THE, o_THE, lse_TH]
        layer.start_queries([take(x, queries.rows) for x in columns])
        if not layer.keep_received:
            layer.start_keys([take(x, keys.rows) for x in (k_TGD, v_TGE)])
        layer.local = (do_THE, q_THD, k_TGD, v_TGE, o_THE, lse_TH)
        layer.sums = tuple(RowSum(tuple(x.shape), x) for x in (q_THD, k_TGD, v_TGE))
        if not layer.own_gradients_last:
            _own_backward(layer)

        d_sinks_H = None
        if sinks_H is not None and ctx.needs_input_grad[5]:
            share_TH = (sinks_H.to(lse_TH.dtype) - lse_TH).exp()  # of the softmax that lies on the sink
            d_sinks_H = -(share_TH * (do_THE.float() * o_THE.float()).sum(-1)).sum(0).to(sinks_H.dtype)
        return None, do_THE.new_empty(0), None, None, None, d_sinks_H


def _own_forward(layer: _Layer, q_THD: Tensor, k_TGD: Tensor, v_TGE: Tensor) -> tuple[Tensor, Tensor]:
    """O and LSE of the local rows, filled in as far as own tasks go."""
    own = layer.routes.own
    rows, heads, head_dim = q_THD.shape[0], q_THD.shape[1], v_TGE.shape[2]
    if own.empty:
        o_QHE = lse_QH = None
    else:
        k_KGD, v_KGE = take(k_TGD, own.k_rows), take(v_TGE, own.k_rows)
        o_QHE, lse_QH = layer.kernel.forward(take(q_THD, own.q_rows), k_KGD, v_KGE, own.shapes, layer.params)
        if own.q_rows == slice(0, rows):
            return o_QHE, lse_QH
    o_THE = q_THD.new_empty((rows, heads, head_dim))
    lse_TH = q_THD.new_empty((rows, heads), dtype=_lse_dtype(q_THD))
    if o_QHE is not None:
        put(o_THE, own.q_rows, o_QHE)
        put(lse_TH, own.q_rows, lse_QH)
    return o_THE, lse_TH


def _own_backward(layer: _Layer) -> None:
    """Add the gradients of own tasks to the sums of the local rows."""
    own = layer.routes.own
    if own.empty:
        return
    do_THE, q_THD, k_TGD, v_TGE, o_THE, lse_TH = layer.local
    dq, dk, dv = layer.sums
    do_QHE, q_QHD, o_QHE, lse_QH = (take(x, own.q_rows) for x in (do_THE, q_THD, o_THE, lse_TH))
    dq.add(own.q_rows, _backward(layer, own, do_QHE, q_QHD, k_TGD, v_TGE, o_QHE, lse_QH, dk, dv))


def _lse_dtype(q: Tensor) -> torch.dtype:
    """The dtype in which kernels give the log-sum-exp."""
    return torch.promote_types(q.dtype, torch.float32)


def _backward(
    layer: _Layer,
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
    dq_QHD, dk_KGD, dv_KGE = layer.kernel.backward(
        do_QHE, q_QHD, k_KGD, v_KGE, o_QHE, lse_QH, group.shapes, layer.params_of(group)
    )
    dk.add_all(group.k_sums, dk_KGD)
    dv.add_all(group.k_sums, dv_KGE)
    return dq_QHD
