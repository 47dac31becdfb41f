"""Core attention of one layer, disaggregated, as autograd nodes.

Three nodes make one attention, so that two nano-batches can take turns between them: Send, Compute and Receive run
the forward's steps start, compute and finish (see `hf_distca.dispatch.steps`), and in reverse order the backward's:
Receive starts, Compute computes, Send finishes.

The engine runs backward nodes in the reverse order of their creation, so the backward's exchanges follow
from the forward's order on every rank alike. Between the nodes only an empty token travels: forward and
backward hand over other sizes, which autograd would reject.

Shape suffixes: T local rows, H query heads, G key/value heads, D head dim of queries and keys, E head dim of values.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hf_distca.dispatch.bound import LayerPlan
from hf_distca.dispatch.checkpoints import is_checkpointed, is_recomputation
from hf_distca.dispatch.steps import (
    AttentionCall,
    compute_backward,
    compute_forward,
    finish_backward,
    finish_forward,
    start_backward,
    start_forward,
)
from hf_distca.kernels import AttentionParams
from hf_distca.plan import AttentionKind


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
        ValueError: the rows, or the layer's kind of attention, are not those of the plan, or the kernel cannot do it.
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
    kind = AttentionKind(params.window, q_THD.shape[1], k_TGD.shape[1], q_THD.shape[2], v_TGE.shape[2])
    recomputes = is_recomputation()
    keeps = plan.bound.keep_core_attention and not recomputes and is_checkpointed(module is None or module.training)
    halves = []
    for nano, *qkv in zip(
        plan.nano_batches, *(_by_nano_batch(x_T, plan) for x_T in (q_THD, k_TGD, v_TGE)), strict=True
    ):
        if kind not in nano.routes:
            raise ValueError(
                f"a layer has {kind}; the plan was made for {'; '.join(map(str, nano.routes))}: "
                "give all of them in PlanSettings.kinds"
            )
        kept = plan.bound.kept_results.take((module, nano.number)) if recomputes else None
        call = AttentionCall(
            plan.bound,
            nano,
            kind,
            params,
            # Where results are kept through a checkpoint, what was received is gone with the first forward.
            keep_received=plan.bound.keep_received and not keeps and kept is None,
            results_change=sinks_H is not None,
        )
        halves.append((call, kept, qkv))

    # In the same order whether both nano-batches are here or each in a half of the layer: ranks stay in step even if
    # only some of them run halves. A recomputation keeps to it too: checkpointing finds saved tensors by their order.
    tokens = [_Send.apply(call, kept, *qkv) for call, kept, qkv in halves]
    plan.pause()
    tokens = [_Compute.apply(call, kept, token) for (call, kept, _), token in zip(halves, tokens, strict=True)]
    plan.pause()
    outputs = []
    for (call, kept, qkv), token in zip(halves, tokens, strict=True):
        o_THE, lse_TH = _Receive.apply(call, kept, token, *qkv, sinks_H)
        if keeps:
            plan.bound.kept_results.keep((module, call.nano.number), (o_THE.detach(), lse_TH))
        outputs.append(o_THE)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _by_nano_batch(x_T: Tensor, plan: LayerPlan) -> Sequence[Tensor]:
    """The rows of each nano-batch. Split and not sliced: the backward of slices copies each into zeros of all rows."""
    rows = [nano.rows for nano in plan.nano_batches]
    return (x_T,) if len(rows) == 1 else torch.split(x_T, rows)


Kept = tuple[Tensor, ...] | None
"""O and LSE of the first forward where this is its recomputation: then nothing is exchanged or computed, and the nodes
are there for the backward only."""


class _Context(Protocol):
    """What autograd keeps of a node from its forward to its backward. Sinks that a layer does not have are None."""

    call: AttentionCall
    saved_tensors: tuple[Any, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, call: AttentionCall, kept: Kept, q_THD: Tensor, k_TGD: Tensor, v_TGE: Tensor) -> Tensor:
        ctx.call = call
        if kept is None:
            with call.step():
                start_forward(call, q_THD, k_TGD, v_TGE)
        return q_THD.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, _token: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.call.step():
            return None, None, *finish_backward(ctx.call)


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, call: AttentionCall, kept: Kept, token: Tensor) -> Tensor:
        ctx.call = call
        if kept is None:
            with call.step():
                ctx.save_for_backward(*compute_forward(call))
        return token.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, token: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.call.step():
            compute_backward(ctx.call, ctx.saved_tensors)
        return None, None, token.new_empty(0)


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        call: AttentionCall,
        kept: Kept,
        token: Tensor,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGE: Tensor,
        sinks_H: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.call = call
        if kept is None:
            with call.step():
                kept = _with_sinks(*finish_forward(call), sinks_H)
        o_THE, lse_TH = kept
        ctx.save_for_backward(q_THD, k_TGD, v_TGE, o_THE, lse_TH, sinks_H)
        ctx.mark_non_differentiable(lse_TH)
        ctx.set_materialize_grads(False)  # that of the log-sum-exp would be zeros that nobody reads
        return o_THE, lse_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, do_THE: Tensor, _lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q_THD, k_TGD, v_TGE, o_THE, lse_TH, sinks_H = ctx.saved_tensors
        with ctx.call.step():
            start_backward(ctx.call, do_THE, q_THD, k_TGD, v_TGE, o_THE, lse_TH)
        d_sinks_H = None
        if sinks_H is not None and ctx.needs_input_grad[6]:
            share_TH = (sinks_H.to(lse_TH.dtype) - lse_TH).exp()  # of the softmax that lies on the sink
            d_sinks_H = -(share_TH * (do_THE.float() * o_THE.float()).sum(-1)).sum(0).to(sinks_H.dtype)
        return None, None, do_THE.new_empty(0), None, None, None, d_sinks_H


def _with_sinks(o_THE: Tensor, lse_TH: Tensor, sinks_H: Tensor | None) -> tuple[Tensor, Tensor]:
    """O and LSE with the learned sinks in the softmax.

    A sink is one more key with a value of zero: it changes the softmax's denominator only, and with O and LSE changed
    the backward of all other keys is the usual one.
    """
    if sinks_H is None:
        return o_THE, lse_TH
    with_sink_TH = torch.logaddexp(lse_TH, sinks_H.to(lse_TH.dtype))
    return (o_THE * (lse_TH - with_sink_TH).exp().unsqueeze(-1)).to(o_THE.dtype), with_sink_TH
