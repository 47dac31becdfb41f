"""Decoder layers in a planned step: two nano-batches that take turns.

`plan_layers` gives each decoder layer a subclass of its own class. The subclass's forward runs the
original forward on each nano-batch's rows inside a greenlet. The attention function pauses between
the start of an exchange and the wait for it, and the other nano-batch runs. Everything outside the
layer (checkpointing, FSDP2, ZeRO-3, hooks) sees one call of one layer.

Greenlets share one thread, and with it saved-tensor hooks and autograd sequence numbers. These
numbers make the backward take turns in the same way; threads would not share them.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from contextvars import copy_context
from functools import cached_property, partial
from typing import Any

from greenlet import getcurrent, greenlet
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging
from transformers.utils.output_capturing import _active_collector

from hf_distca.dispatch.bound import BoundPlan
from hf_distca.models.decoder import decoder_layers, is_attention, mixing_modules
from hf_distca.models.refusals import check_layers
from hf_distca.patches.mixing import layer_runs, plan_mixing
from hf_distca.patches.modules import subclass, uncompiled
from hf_distca.patches.split import ThreadState, join_results, join_states, split_argument
from hf_distca.plan import PLAN_KEY

logger = logging.get_logger(__name__)

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
OF_WEIGHTS = "torch.distributed.fsdp."
"""Module of FSDP2's hooks, which gather and free weights at every call, such as those of experts
inside a layer."""


def plan_layers(model: PreTrainedModel) -> list[type[nn.Module]]:
    """Change a model's decoder layers in place, so that two nano-batches take turns in them.

    Call it before `Accelerator.prepare`; `make_dispatcher` does so. State space layers, linear
    attention and convolutions then run document by document. Outside planned steps the layers work
    as before.

    Returns:
        The subclasses that the model's layers now have.

    Raises:
        ValueError: The model has no layer that transformers can checkpoint.
    """
    check_layers(model)
    subclasses: dict[type[nn.Module], type[nn.Module]] = {}
    layers = decoder_layers(model)
    # Checkpointable layers inside decoder layers may mix along the row too.
    inside = (module for layer in layers for module in layer.modules())
    inner = (
        each
        for each in inside
        if isinstance(each, GradientCheckpointingLayer) and mixing_modules(each)
    )
    for layer in dict.fromkeys([*layers, *inner]):
        if not isinstance(layer, _PlannedLayer):
            cls = type(layer)
            if cls not in subclasses:
                subclasses[cls] = subclass(cls, _PlannedLayer)
            layer.__class__ = subclasses[cls]
        vars(layer).update(
            attends=sum(map(is_attention, layer.modules())), mixes=plan_mixing(layer)
        )
    return list(
        dict.fromkeys(type(layer) for layer in model.modules() if isinstance(layer, _PlannedLayer))
    )


class _PlannedLayer(nn.Module):
    """Base that precedes a decoder layer's own class."""

    attends: int  # number of attention modules that a plan can move
    mixes: int  # number of modules that mix along the row without attention

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        plan = kwargs.get(PLAN_KEY)
        if not isinstance(plan, BoundPlan) or (plan.is_part and not self.mixes):
            return super().forward(*args, **kwargs)
        return self._planned_forward(super().forward, plan, args, kwargs)

    @uncompiled("two nano-batches take turns in a decoder layer; compile the modules inside it")
    def _planned_forward(
        self,
        run: Callable[..., Any],
        plan: BoundPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        ran, attentions, mixing = plan.ran, plan.ran.attentions, plan.ran.mixing
        takes_turns = False
        exchanges = bool(self.attends and plan.exchanges) or bool(
            self.mixes and plan.cuts_documents
        )
        if (
            self.attends or exchanges
        ) and not plan.is_part:  # else no exchange, or the outer layer takes turns
            ran.layers += 1
            takes_turns = len(plan.nano_batches) == 2 and exchanges and not self._is_watched()
            ran.layers_in_turns += takes_turns
        calls = 1 + takes_turns
        result = (
            self._in_turns(run, plan, args, kwargs) if takes_turns else self._run(run, args, kwargs)
        )
        if (
            ran.attentions - attentions < calls * self.attends
            or ran.mixing - mixing < calls * self.mixes
        ):
            raise ValueError(
                f"{type(self).__name__} did not pass its plan to every module that attends or "
                "mixes along the row, so documents would not be kept apart. This model cannot "
                "train with planned attention; train it with stock attention and transformers' "
                "Trainer"
            )
        return result

    def _run(self, run: Callable[..., Any], args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
        with layer_runs(kwargs[PLAN_KEY]) if self.mixes else nullcontext():
            return run(*args, **kwargs)

    def _in_turns(
        self,
        run: Callable[..., Any],
        plan: BoundPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run both nano-batches alternately, from pause to pause, in the same order on every rank."""
        del kwargs[PLAN_KEY]
        first, second = plan.nano_batches
        sizes = first.rows, second.rows
        split_args = [split_argument(f"argument {i}", value, sizes) for i, value in enumerate(args)]
        split_kwargs = {name: split_argument(name, value, sizes) for name, value in kwargs.items()}
        layer, outside, collector = (
            getcurrent(),
            ThreadState(plan.runtime.device.type),
            _active_collector.get(),
        )
        results: list[Any] = [None, None]
        collected: list[dict[str, list[Any]]] = [{}, {}]

        def pause() -> None:
            inside = outside.inside()
            layer.switch()
            inside.restore()

        def run_one(index: int) -> None:
            if collector is not None:  # transformers' records, one set per nano-batch
                collected[index] = {key: [] for key in collector if not key.startswith("_")}
                _active_collector.set(collected[index])
            part = {name: pair[index] for name, pair in split_kwargs.items()}
            part[PLAN_KEY] = plan.of_nano_batch(index, pause)
            results[index] = self._run(run, (pair[index] for pair in split_args), part)

        runners = [greenlet(partial(run_one, index)) for index in range(2)]
        for runner in runners:
            runner.gr_context = copy_context()
        try:
            while not all(runner.dead for runner in runners):
                for runner in runners:
                    if not runner.dead:
                        runner.switch()
                        outside.restore()
        finally:
            for runner in runners:  # if one fails, the other leaves its contexts at once
                runner.throw()
            outside.restore()
        for key in collected[0]:
            for values in zip(collected[0][key], collected[1][key], strict=True):
                collector[key].append(join_results(key, values, sizes))
        for value, pair in zip(
            (*args, *kwargs.values()), (*split_args, *split_kwargs.values()), strict=True
        ):
            join_states(value, pair)
        return join_results("output", tuple(results), sizes)

    @cached_property  # a walk over all modules takes longer than a short layer
    def _inner_hooks(self) -> list[tuple[str, dict[int, Callable[..., Any]]]]:
        inner = [
            (f"{name} ({type(module).__name__})", module) for name, module in self.named_modules()
        ][1:]
        return [(name, getattr(module, kind)) for name, module in inner for kind in HOOKS]

    def _is_watched(self) -> bool:
        """Return whether a module inside the layer has a user's hook, which must see all rows in one call."""
        for name, hooks in self._inner_hooks:
            for hook in hooks.values():
                # transformers' recording of outputs; `_in_turns` joins the records.
                if "output_capturing_hook" in hook.__qualname__ or hook.__module__.startswith(
                    OF_WEIGHTS
                ):
                    continue
                logger.warning_once(
                    f"ping-pong is off in every {type(self).__name__}, because a module inside has "
                    f"a hook, such as {hook.__module__}.{hook.__qualname__} on {name}, which must "
                    "see all rows in one call. Results stay the same, but less computation hides "
                    "exchanges; put the hook on the whole layer to use ping-pong."
                )
                return True
        return False
