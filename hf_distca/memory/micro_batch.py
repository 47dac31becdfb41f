"""Memory that a planned micro-batch takes on a rank: the real step, run on fake tensors and counted.

The count includes the effects of model, adapters, autocast and checkpoints, since the real code runs.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from hf_distca.dispatch.bound import BoundPlan
from hf_distca.memory.core_attention import HOST, Use, bound_plan, run_core_attention
from hf_distca.memory.live import LiveMemory, Part
from hf_distca.memory.stand_ins import any_grouped_mm
from hf_distca.models.decoder import base_model
from hf_distca.models.mixing import halo_widths
from hf_distca.plan import PLAN_KEY, MicroBatchPlan


def count_micro_batch(
    model: nn.Module, plan: MicroBatchPlan, rank: int, use: Use, mode: FakeTensorMode
) -> dict[Part, int]:
    """Return peak bytes by part during the forward and backward of a micro-batch.

    All gradients and exchange buffers exist from the start, as after an earlier micro-batch of the step.

    Args:
        model: a model of fake tensors, its decoder layers prepared for ping-pong if the plan needs it. Its
            checkpointing is changed as `use` says.
    """
    live = LiveMemory()
    live.belong([*model.parameters(), *model.buffers()], "weights")
    _checkpoint(base_model(model), use.checkpointing, live)
    bound = bound_plan(plan, rank, use, live)
    for nano in bound.nano_batches:  # made now, since tables cannot be made of fake tensors
        nano.cuts.bind(halo_widths(model))
    dtype = use.autocast or base_model(model).dtype
    with ExitStack() as stack:
        stack.enter_context(mode)
        stack.enter_context(live)
        stack.enter_context(any_grouped_mm())
        for nano in plan.nano_batches[:1]:
            for kind in nano.plans:
                run_core_attention(bound, kind, dtype)
        with live.making("gradients"):
            for parameter in model.parameters():
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        live.begin()
        _run_step(model, bound, use.autocast, live)
        for parameter in model.parameters():
            parameter.grad = None
    return dict(live.peak)


def _run_step(model: nn.Module, bound: BoundPlan, autocast: torch.dtype | None, live: LiveMemory) -> None:
    """Run forward and backward of a micro-batch as the trainer does."""
    names = ("input_ids", "position_ids", "labels", "shift_labels")
    batch = {name: torch.zeros((1, bound.rows), dtype=torch.long) for name in names}
    targets = torch.ones((), dtype=torch.long)

    def decoder_ended(_module: nn.Module, _args: Any, output: Any) -> None:
        live.now_making("loss")
        output[0].register_hook(loss_ended)

    def loss_ended(_gradient: Tensor) -> None:
        live.now_making("backward")

    handle = base_model(model).get_decoder().register_forward_hook(decoder_ended)
    try:
        with torch.autocast(HOST.type, dtype=autocast, enabled=autocast is not None):
            output = model(**batch, use_cache=False, num_items_in_batch=targets, **{PLAN_KEY: bound})
        loss = output.loss
        del output
        loss.backward()
    finally:
        handle.remove()
        live.now_making("activations")


def _checkpoint(model: Any, checkpointing: Mapping[str, Any] | None, live: LiveMemory) -> None:
    """Set a model's checkpointing as transformers' trainer does, or turn it off."""
    if checkpointing is None:
        getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()
        return
    options = dict(checkpointing)
    every = {"every_n_layers": options.pop("every_n_layers")} if "every_n_layers" in options else {}
    offload = options.pop("offload", False)
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable(options or {"use_reentrant": False}, **every)
    if offload:
        for module in model.modules():
            if hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = _offloaded(module._gradient_checkpointing_func, live)


def _offloaded(checkpoint: Any, live: LiveMemory) -> Any:
    """Return a checkpoint whose inputs go to the host, which is the same device here."""

    def to_host(x: Tensor) -> Tensor:
        with live.making("host"):
            return x.clone()

    @wraps(checkpoint)
    def offloaded(*args: Any, **kwargs: Any) -> Any:
        with saved_tensors_hooks(to_host, torch.clone):
            return checkpoint(*args, **kwargs)

    return offloaded
