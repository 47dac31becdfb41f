"""Activation checkpoints of decoder layers whose tensors go to the host in planned steps.

The functions that checkpoint layers are wrapped when the decoder runs: transformers sets them when
training begins, and trainers of TRL set them again after each generation. The plan brings the
host memory and the copies.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel

from hf_distca.dispatch.bound import BoundPlan
from hf_distca.dispatch.kept_results import checkpoints_around, is_recomputation
from hf_distca.models.decoder import base_model, text_decoder
from hf_distca.patches.modules import uncompiled
from hf_distca.plan import PLAN_KEY

FUNCTIONS = ("_gradient_checkpointing_func", "checkpoint_fn")
"""Attributes of modules with the function that checkpoints a layer: transformers', and FSDP's."""


def offload_checkpoints(model: PreTrainedModel) -> None:
    """Let activation checkpoints of decoder layers go to the host in planned steps, in place."""
    decoder = text_decoder(base_model(model))
    decoder.register_forward_pre_hook(_wrap_checkpoints, with_kwargs=True)


@uncompiled("activation checkpoints are wrapped before the decoder runs")
def _wrap_checkpoints(decoder: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wrap the functions that checkpoint a decoder's layers, before a planned forward."""
    wrap_checkpoints(decoder, kwargs.get(PLAN_KEY))


def wrap_checkpoints(decoder: nn.Module, plan: Any) -> None:
    """Wrap the functions that checkpoint a decoder's layers, for a forward with a plan.

    Backbones of padded batches call it: the plan reaches their forward, but not their hooks.
    """
    if not isinstance(plan, BoundPlan) or plan.runtime.offload is None:
        return
    plan.runtime.offload.start_again()
    for module in decoder.modules():
        for name in FUNCTIONS:
            function = vars(module).get(name)
            if function is not None and not isinstance(function, OffloadedCheckpoint):
                setattr(module, name, OffloadedCheckpoint(function))


@dataclass(frozen=True)
class OffloadedCheckpoint:
    """A function that checkpoints a layer, whose checkpoint goes to the host in planned steps."""

    checkpoint: Callable[..., Any]

    @uncompiled("activation checkpoints go to the host; compile the modules inside a decoder layer")
    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer in a checkpoint.

        Args:
            function: runs the layer; a partial call of transformers with the layer's keywords.
            args, kwargs: further arguments of the layer.
        """
        keywords: dict[str, Any] = getattr(function, "keywords", {})
        arguments = (*keywords.values(), *kwargs.values(), *args)
        plans = [value for value in arguments if isinstance(value, BoundPlan)]
        offload = plans[0].runtime.offload if plans else None
        is_inside = is_recomputation() or checkpoints_around()[0]
        if offload is None or is_inside or not torch.is_grad_enabled():
            return self.checkpoint(function, *args, **kwargs)
        layer = offload.begin()
        with saved_tensors_hooks(layer.pack, layer.unpack):
            return self.checkpoint(function, *args, **kwargs)
