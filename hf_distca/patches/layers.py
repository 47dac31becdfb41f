"""Decoder layers in a planned step: two halves that take turns, and core attention that is computed once.

`plan_layers` gives each decoder layer a subclass of its own class. The subclass's forward runs the original
forward on each nano-batch's rows inside a greenlet; the attention function pauses between the start of an
exchange and the wait for it, and the other half runs. Everything outside the layer (checkpointing, FSDP2,
ZeRO-3, hooks) sees one call of one layer.

Greenlets and not threads: one thread keeps autocast, grad mode, saved-tensor hooks and the autograd sequence
numbers, which make the backward take turns the same way, common to both halves.
"""

from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from greenlet import getcurrent, greenlet
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.output_capturing import _active_collector

from hf_distca.dispatch.bound import BoundPlan, LayerPlan
from hf_distca.dispatch.dispatcher import PLAN_KEY
from hf_distca.patches.halves import join_halves, split_argument
from hf_distca.patches.model import is_attention


def plan_layers(model: PreTrainedModel, *, keep_core_attention: bool = True) -> list[type[nn.Module]]:
    """Let a model's decoder layers run planned micro-batches half by half. Do it before `prepare`.

    Outside a planned step the layers behave as before.

    Args:
        model: the model; its layers are changed in place.
        keep_core_attention: under gradient checkpointing keep O and log-sum-exp of core attention for the
            backward instead of exchanging and computing again: per token and layer one more row of O and
            four bytes a query head.

    Returns:
        The subclasses, one for each class of decoder layer.

    Raises:
        ValueError: the model has no layer that transformers can checkpoint.
    """
    subclasses: dict[type[nn.Module], type[nn.Module]] = {}
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer) and any(map(is_attention, layer.modules())):
            cls = type(layer)
            if cls not in subclasses and not issubclass(cls, _PlannedLayer):
                # accelerate and PEFT find layers by the name of their class.
                subclasses[cls] = type(
                    cls.__name__, (_PlannedLayer, cls), {"_keep_core_attention": keep_core_attention}
                )
            if cls in subclasses:
                layer.__class__ = subclasses[cls]
    if not subclasses and not any(isinstance(layer, _PlannedLayer) for layer in model.modules()):
        raise ValueError(
            f"{type(model).__name__} has no decoder layer of transformers' GradientCheckpointingLayer; set "
            "ping_pong=False"
        )
    return list(subclasses.values())


class _PlannedLayer:
    """Comes before a decoder layer's own class."""

    _keep_core_attention: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = super().forward
        bound = kwargs.get(PLAN_KEY)
        if not isinstance(bound, BoundPlan):
            return run(*args, **kwargs)
        del kwargs[PLAN_KEY]
        keep = self._keep_core_attention and self.gradient_checkpointing and self.training
        if len(bound.nano_batches) == 1 or _has_hooks(self):
            plan = LayerPlan(bound, bound.nano_batches, keep_results=keep)
            return run(*args, **kwargs, **{PLAN_KEY: plan})
        rows = bound.rows
        first = bound.nano_batches[0].rows
        halves = []
        for nano, part in zip(bound.nano_batches, (slice(0, first), slice(first, rows)), strict=True):
            half_args = [split_argument(f"argument {i}", value, part, rows) for i, value in enumerate(args)]
            half_kwargs = {name: split_argument(name, value, part, rows) for name, value in kwargs.items()}
            half_kwargs[PLAN_KEY] = LayerPlan(bound, (nano,), pause=getcurrent().switch, keep_results=keep)
            halves.append((half_args, half_kwargs))
        return _take_turns(run, halves, first, rows)


def _take_turns(run: Callable[..., Any], halves: list[tuple[list[Any], dict[str, Any]]], first: int, rows: int) -> Any:
    """Run both halves, one until it pauses, then the other, in the same order on every rank."""
    outer = _active_collector.get()
    results: list[Any] = [None, None]
    collected: list[dict[str, list[Any]]] = [{}, {}]

    def half(number: int) -> None:
        args, kwargs = halves[number]
        if outer is not None:  # what transformers records of modules inside the layer, half by half
            collected[number] = {key: [] for key in outer if not key.startswith("_")}
            _active_collector.set(collected[number])
        results[number] = run(*args, **kwargs)

    runners = [greenlet(half), greenlet(half)]
    for runner in runners:
        runner.gr_context = copy_context()
    for number, runner in enumerate(runners):
        runner.switch(number)
    while not all(runner.dead for runner in runners):
        for runner in runners:
            if not runner.dead:
                runner.switch()
    sizes = (first, rows - first)
    for key in collected[0]:
        for values in zip(collected[0][key], collected[1][key], strict=True):
            outer[key].append(join_halves(key, values, sizes))
    return join_halves("output", tuple(results), sizes)


def _has_hooks(layer: nn.Module) -> bool:
    """Whether a module inside the layer has a hook of the user's, which is to see all rows in one call."""
    for module in layer.modules():
        if module is layer:
            continue
        if module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            return True
        if any("output_capturing_hook" not in hook.__qualname__ for hook in module._forward_hooks.values()):
            return True
    return False
