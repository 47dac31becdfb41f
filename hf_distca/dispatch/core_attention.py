"""Core attention of one layer, disaggregated, as autograd nodes.

A kind of attention for which nothing moves is one node: one kernel call on all rows, in each
direction. Other kinds take three nodes, so that two nano-batches can take turns between them. Send,
Compute and Receive run the forward's phases up to the first pause, the second pause and the end;
the backward runs in reverse order. See `hf_distca.plan.schedule` for the phases.

The engine runs backward nodes in the reverse order of their creation. The backward's exchanges
therefore follow from the forward's order on every rank alike. Only an empty token travels between
nodes: forward and backward hand over different sizes, which autograd would reject.

Shape suffixes: T local rows, H query heads, G key/value heads, D head dim of queries and keys, E
head dim of values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hf_distca.checks.step_rules import PlannedStep
from hf_distca.dispatch.bound import BoundNanoBatch, BoundPlan
from hf_distca.dispatch.executor import CoreAttention, without_autocast
from hf_distca.dispatch.kept_results import ForwardResults
from hf_distca.dispatch.recorder import Work
from hf_distca.kernels import AttentionParams, Need
from hf_distca.plan import AttentionKind, Direction


def disaggregated_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGE: Tensor,
    sinks_H: Tensor | None,
    plan: BoundPlan,
    params: AttentionParams,
    module: nn.Module | None = None,
    *,
    chunk: int | None = None,
) -> Tensor:
    """Compute core attention of this rank's rows, and return o_THE.

    The workers that the plan names compute it.

    Args:
        q_THD: queries after position embedding; q, k and v have one dtype.
        sinks_H: learned attention sinks, one logit per query head (gpt-oss), or None.
        module: the attention layer, the key of its kept results.
        chunk: rows of the layer's attention chunks; None for no chunks.
    """
    if q_THD.shape[0] != plan.rows:
        raise PlannedStep.OTHER_ROWS.error_here(rows=q_THD.shape[0], planned=plan.rows)
    plan.runtime.kernel.check(
        Need(q_THD.dtype, q_THD.shape[2], v_TGE.shape[2], params), q_THD.device
    )
    kind = AttentionKind(
        params.window, q_THD.shape[1], k_TGD.shape[1], q_THD.shape[2], v_TGE.shape[2], chunk
    )
    call = _LayerCall(plan, kind, params, module)
    if kind in plan.local:
        return _attend_locally(call, q_THD, k_TGD, v_TGE, sinks_H)
    # 1. Divide the rows between the nano-batches.
    sizes = [nano.rows for nano in plan.nano_batches]
    # The backward of slices, instead of a split, would copy each slice into zeros of all rows.
    divided = [
        (x_T,) if len(sizes) == 1 else torch.split(x_T, sizes) for x_T in (q_THD, k_TGD, v_TGE)
    ]
    parts = []
    for nano, *qkv in zip(plan.nano_batches, *divided, strict=True):
        results = call.results(nano)
        parts.append((call.core_attention(nano, results), results, qkv))
    # 2. Make the nodes. The order is the same whether both nano-batches are here or take turns:
    #    ranks stay in step even if nano-batches take turns on some ranks only. A recomputation
    #    keeps the order too: checkpointing matches saved tensors by order.
    tokens = [_Send.apply(core, *qkv) for core, _, qkv in parts]
    plan.pause()
    tokens = [_Compute.apply(core, token) for (core, *_), token in zip(parts, tokens, strict=True)]
    plan.pause()
    outputs = []
    for (core, results, qkv), token in zip(parts, tokens, strict=True):
        o_THE, lse_TH = _Receive.apply(core, token, *qkv, sinks_H)
        if results.keeps:
            results.keep(o_THE.detach(), lse_TH)
        outputs.append(o_THE)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


@dataclass(frozen=True)
class _LayerCall:
    """One call of a layer's core attention."""

    plan: BoundPlan
    kind: AttentionKind
    params: AttentionParams
    module: nn.Module | None

    @property
    def layer(self) -> int | None:
        """Index of the layer in its model; None if the module has none."""
        index: int | None = getattr(self.module, "layer_idx", None)
        return index

    def results(self, nano: BoundNanoBatch) -> ForwardResults:
        """Return O and LSE of a nano-batch, as activation checkpointing keeps them."""
        training = self.module is None or self.module.training
        return ForwardResults(self.plan.kept_results, (self.module, nano.index), training=training)

    def core_attention(self, nano: BoundNanoBatch, results: ForwardResults) -> CoreAttention:
        """Return the core attention of one nano-batch, for which rows move."""
        if self.kind not in nano.routes:
            kinds = "; ".join(map(str, (*self.plan.local, *nano.routes)))
            raise PlannedStep.OTHER_KIND.error_here(kind=self.kind, planned=kinds)
        return CoreAttention(
            self.plan.runtime, nano, self.kind, self.params, self.layer, results.known
        )


def _attend_locally(
    call: _LayerCall, q_THD: Tensor, k_TGD: Tensor, v_TGE: Tensor, sinks_H: Tensor | None
) -> Tensor:
    """Compute core attention of a kind for which nothing moves, and return o_THE."""
    runtime = call.plan.runtime
    tasks = call.plan.local[call.kind]
    nano = call.plan.nano_batches[0]

    def run(direction: Direction, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Call the kernel on all rows, recorded as one phase."""
        work = Work(call.layer, nano.index, direction)
        compute: Callable[..., tuple[Tensor, ...]] = getattr(runtime.kernel, direction)
        with (
            without_autocast(runtime.device.type),
            runtime.recorder.span("phase", "run local", work),
            runtime.recorder.span("kernel", "local", work, tasks.pairs),
        ):
            return compute(*inputs, tasks.shapes, call.params)

    results = call.results(nano)
    o_THE: Tensor
    o_THE, lse_TH = _Local.apply(run, results.known, q_THD, k_TGD, v_TGE, sinks_H)
    if results.keeps:
        results.keep(o_THE.detach(), lse_TH)
    return o_THE


class _Local(torch.autograd.Function):
    """Core attention of all rows of a rank where nothing moves."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[..., tuple[Tensor, ...]],
        first_results: tuple[Tensor, ...] | None,
        *qkv_sinks: Any,
    ) -> tuple[Tensor, ...]:
        *qkv, sinks_H = qkv_sinks
        ctx.run = run
        results = first_results
        if results is None:
            results = _with_sinks(run("forward", *qkv), sinks_H)
        return _save(ctx, qkv, results, sinks_H)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_THE: Tensor, _lse: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, sinks_H = ctx.saved_tensors
        gradients = ctx.run("backward", do_THE, *inputs)
        return None, None, *gradients, _sink_gradient(ctx, do_THE, inputs[3], inputs[4], sinks_H)


class _Send(torch.autograd.Function):
    """Phases of the forward up to the first pause, and of the backward after the second pause."""

    @staticmethod
    def forward(
        ctx: Any, core: CoreAttention, q_THD: Tensor, k_TGD: Tensor, v_TGE: Tensor
    ) -> Tensor:
        ctx.core = core
        if core.first_results is None:
            core.begin("forward", q_THD, k_TGD, v_TGE)
        return q_THD.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _token: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.core.end()


class _Compute(torch.autograd.Function):
    """Autograd node that runs the phases between the two pauses of core attention."""

    @staticmethod
    def forward(ctx: Any, core: CoreAttention, token: Tensor) -> Tensor:
        ctx.core = core
        if core.first_results is None:
            core.running.go_on()
        return token.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, ...]:
        ctx.core.running.go_on()
        return None, token.new_empty(0)


class _Receive(torch.autograd.Function):
    """Phases of the forward after the second pause, and of the backward up to the first pause."""

    @staticmethod
    def forward(
        ctx: Any, core: CoreAttention, token: Tensor, *qkv_sinks: Any
    ) -> tuple[Tensor, ...]:
        *qkv, sinks_H = qkv_sinks
        ctx.core = core
        results = core.first_results
        core.first_results = None  # autograd keeps them, or hooks that offload them
        if results is None:
            results = _with_sinks(core.end(), sinks_H)
        return _save(ctx, qkv, results, sinks_H)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_THE: Tensor, _lse: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, sinks_H = ctx.saved_tensors  # unpacked once, as checkpoints want it
        ctx.core.begin("backward", do_THE, *inputs)
        d_sinks_H = _sink_gradient(ctx, do_THE, inputs[3], inputs[4], sinks_H)
        token = do_THE.new_empty(0)
        # The gradients of Q, K and V come from the node of `_Send`.
        return None, token, None, None, None, d_sinks_H


def _save(
    ctx: Any, qkv: list[Tensor], results: tuple[Tensor, ...], sinks_H: Tensor | None
) -> tuple[Tensor, ...]:
    """Save a node's inputs and results, O and LSE, for the backward; return the results."""
    ctx.save_for_backward(*qkv, *results, sinks_H)
    ctx.mark_non_differentiable(results[1])
    ctx.set_materialize_grads(False)  # no zeros for the gradient of LSE, which is unused
    return results


def _with_sinks(results: tuple[Tensor, ...], sinks_H: Tensor | None) -> tuple[Tensor, ...]:
    """Return O and LSE with the learned sinks in the softmax.

    A sink is one more key with a value of zero: it changes only the softmax's denominator. With
    these O and LSE the backward of all other keys is unchanged.
    """
    if sinks_H is None:
        return results
    o_THE, lse_TH = results
    lse_and_sink_TH = torch.logaddexp(lse_TH, sinks_H.to(lse_TH.dtype))
    share_TH = (lse_TH - lse_and_sink_TH).exp()  # of all keys but the sink, in the softmax
    return (o_THE * share_TH.unsqueeze(-1)).to(o_THE.dtype), lse_and_sink_TH


def _sink_gradient(
    ctx: Any, do_THE: Tensor, o_THE: Tensor, lse_TH: Tensor, sinks_H: Tensor | None
) -> Tensor | None:
    """Return the gradient of learned sinks from O and LSE that include the sinks.

    None if none is needed.
    """
    if sinks_H is None or not ctx.needs_input_grad[-1]:
        return None
    share_TH = (sinks_H.to(lse_TH.dtype) - lse_TH).exp()  # the sink's share of the softmax
    return -(share_TH * (do_THE.float() * o_THE.float()).sum(-1)).sum(0).to(sinks_H.dtype)
