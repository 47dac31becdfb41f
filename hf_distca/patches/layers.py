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

from hf_distca.checks.step_rules import PlannedStep
from hf_distca.dispatch.bound import BoundPlan
from hf_distca.models.decoder import decoder_layers, is_attention, mixing_modules
from hf_distca.patches.mixing import layer_runs, plan_mixing
from hf_distca.patches.modules import subclass, uncompiled
from hf_distca.patches.split import ThreadState, join_results, join_states, split_argument
from hf_distca.plan import PLAN_KEY

logger = logging.get_logger(__name__)

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes of a module that hold the hooks of its calls."""
WEIGHT_HOOKS = "torch.distributed.fsdp."
"""Package of FSDP2's hooks, which gather and free weights at every call, such as those of experts
inside a layer."""


def plan_layers(model: PreTrainedModel) -> list[type[nn.Module]]:
    """Change a model's decoder layers in place, so that two nano-batches take turns in them.

    Call it before `Accelerator.prepare`; `make_dispatcher` does so. State space layers, linear
    attention and convolutions then run document by document. Outside planned steps the layers work
    as before.

    Returns:
        The subclasses that the model's layers now have.
    """
    subclasses: dict[type[nn.Module], type[nn.Module]] = {}
    for layer in _layers_to_plan(model):
        if not isinstance(layer, _PlannedLayer):
            cls = type(layer)
            if cls not in subclasses:
                subclasses[cls] = subclass(cls, _PlannedLayer)
            layer.__class__ = subclasses[cls]
        attentions = sum(map(is_attention, layer.modules()))
        vars(layer).update(attends=attentions, mixes=plan_mixing(layer))
    planned = (layer for layer in model.modules() if isinstance(layer, _PlannedLayer))
    return list(dict.fromkeys(type(layer) for layer in planned))


def _layers_to_plan(model: nn.Module) -> list[nn.Module]:
    """Return a model's decoder layers, then the checkpointable layers in them that mix rows."""
    layers = decoder_layers(model)
    inner_layers = [
        module
        for layer in layers
        for module in layer.modules()
        if isinstance(module, GradientCheckpointingLayer) and mixing_modules(module)
    ]
    return list(dict.fromkeys([*layers, *inner_layers]))


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
        """Run the layer with a plan, in turns if its exchanges can be hidden.

        Args:
            run: the layer's own forward.
            args, kwargs: its arguments.
        """
        ran = plan.ran
        attentions_before = ran.attentions
        mixing_before = ran.mixing
        # 1. Run the layer.
        takes_turns = self._takes_turns(plan)
        result = (
            self._in_turns(run, plan, args, kwargs) if takes_turns else self._run(run, args, kwargs)
        )
        # 2. Check that the plan reached every module that needs it, in every nano-batch.
        calls = 2 if takes_turns else 1
        attentions = ran.attentions - attentions_before
        mixing = ran.mixing - mixing_before
        if attentions < calls * self.attends or mixing < calls * self.mixes:
            raise PlannedStep.LOST_PLAN.error_here(layer=type(self).__name__)
        return result

    def _takes_turns(self, plan: BoundPlan) -> bool:
        """Return whether two nano-batches take turns in this call, and count the call."""
        exchanges_rows = bool(self.attends and plan.exchanges)
        exchanges_states = bool(self.mixes and plan.exchanges_states)
        exchanges = exchanges_rows or exchanges_states
        if plan.is_part:  # the layer around this one takes turns
            return False
        if not self.attends and not exchanges:
            return False
        takes_turns = len(plan.nano_batches) == 2 and exchanges and not self._is_watched()
        plan.ran.layers += 1
        plan.ran.layers_in_turns += takes_turns
        return takes_turns

    def _run(self, run: Callable[..., Any], args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
        """Run the layer's own forward once."""
        with layer_runs(kwargs[PLAN_KEY]) if self.mixes else nullcontext():
            return run(*args, **kwargs)

    def _in_turns(
        self,
        run: Callable[..., Any],
        plan: BoundPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run both nano-batches alternately, from pause to pause.

        The order is the same on every rank.
        """
        # 1. Divide the layer's arguments between the nano-batches.
        del kwargs[PLAN_KEY]
        first, second = plan.nano_batches
        sizes = first.rows, second.rows
        split_args = [
            split_argument(f"argument {index}", value, sizes) for index, value in enumerate(args)
        ]
        split_kwargs = {name: split_argument(name, value, sizes) for name, value in kwargs.items()}

        # 2. Run both in greenlets. A pause goes back to this greenlet, which resumes the other one.
        scheduler = getcurrent()
        state_around = ThreadState(plan.runtime.device.type)
        collector = _active_collector.get()
        results: list[Any] = [None, None]
        records: list[dict[str, list[Any]]] = [{}, {}]  # what transformers records of outputs

        def pause() -> None:
            state_inside = state_around.inside()
            scheduler.switch()
            state_inside.restore()

        def run_nano_batch(index: int) -> None:
            if collector is not None:
                records[index] = {key: [] for key in collector if not key.startswith("_")}
                _active_collector.set(records[index])
            nano_args = [shares[index] for shares in split_args]
            nano_kwargs = {name: shares[index] for name, shares in split_kwargs.items()}
            nano_kwargs[PLAN_KEY] = plan.of_nano_batch(index, pause)
            results[index] = self._run(run, nano_args, nano_kwargs)

        runners = [greenlet(partial(run_nano_batch, index)) for index in range(2)]
        for runner in runners:
            runner.gr_context = copy_context()
        try:
            while not all(runner.dead for runner in runners):
                for runner in runners:
                    if not runner.dead:
                        runner.switch()
                        state_around.restore()
        finally:
            for runner in runners:  # if one fails, the other leaves its contexts at once
                runner.throw()
            state_around.restore()

        # 3. Join records, states that the layer leaves to later layers, and results.
        for key in records[0]:
            for outputs in zip(records[0][key], records[1][key], strict=True):
                collector[key].append(join_results(key, outputs, sizes))
        values = (*args, *kwargs.values())
        split_values = (*split_args, *split_kwargs.values())
        for value, shares in zip(values, split_values, strict=True):
            join_states(value, shares)
        return join_results("output", tuple(results), sizes)

    @cached_property  # a walk over all modules takes longer than a short layer
    def _inner_hooks(self) -> list[tuple[str, dict[int, Callable[..., Any]]]]:
        """Description of each module inside the layer, with its hooks of each kind."""
        hooks: list[tuple[str, dict[int, Callable[..., Any]]]] = []
        for name, module in self.named_modules():
            if module is not self:
                description = f"{name} ({type(module).__name__})"
                hooks += [(description, getattr(module, kind)) for kind in HOOKS]
        return hooks

    def _is_watched(self) -> bool:
        """Return whether a module inside the layer has a user's hook.

        Such a hook must see all rows in one call.
        """
        for name, hooks in self._inner_hooks:
            for hook in hooks.values():
                # transformers' recording of outputs: `_in_turns` joins the records.
                is_recording = "output_capturing_hook" in hook.__qualname__
                if is_recording or hook.__module__.startswith(WEIGHT_HOOKS):
                    continue
                logger.warning_once(
                    f"ping-pong is off in every {type(self).__name__}, because a module inside has "
                    f"a hook, such as {hook.__module__}.{hook.__qualname__} on {name}, which must "
                    "see all rows in one call. Results stay the same, but less computation hides "
                    "exchanges; put the hook on the whole layer to use ping-pong."
                )
                return True
        return False
