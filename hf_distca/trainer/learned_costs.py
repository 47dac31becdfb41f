"""Correct the costs that plans are chosen by, where training shows them to be off."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from transformers import TrainerCallback

from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.recorder import Recording, Span
from hf_distca.plan import MicroBatchPlan
from hf_distca.planner.seconds import FloatArray, KindCosts, StepCosts
from hf_distca.planner.settings import PlanSettings
from hf_distca.planner.step import predict_plan

logger = logging.getLogger(__name__)

EARLY_STEPS = (2, 8, 30)
EVERY_STEPS = 100
"""Steps of a training, counted from its start, whose times are compared with the costs."""
MOST_OFF = 0.1
"""Costs that are off by less stay as they are: plans then stay the same from run to run."""


@dataclass(frozen=True)
class Observed:
    """What one rank saw in a step.

    Attributes:
        kernel: seconds of its kernel calls.
        between: seconds of its first forward that were no core attention, from the first layer's core attention to
            the last layer's.
        step: seconds of the step.
    """

    kernel: float
    between: float
    step: float


def observe(spans: Sequence[Span], step: float) -> Observed:
    """Count what a rank's spans of a step say.

    Args:
        spans: of kernel calls, waits and phases, of one step.
        step: seconds of the step.
    """
    kernel = sum(span.end - span.begin for span in spans if span.kind == "kernel")
    begins = [span.begin for span in spans if span.work is not None and span.work.direction == "backward"]
    first_backward = min(begins, default=np.inf)
    forward = sorted((span.begin, span.end) for span in spans if span.end <= first_backward)
    between, until = 0.0, None
    for begin, end in forward:
        if until is not None:
            between += max(begin - until, 0.0)
        until = end if until is None else max(until, end)
    return Observed(kernel, between, step)


class LearnedCosts(TrainerCallback):
    """Compares what steps take with the costs, and corrects these on all ranks at the same step.

    Args:
        dispatcher: whose choices are corrected.

    Attributes:
        besides: seconds of an optimizer step besides its micro-batches, as last seen: what the optimizer and the
            exchange of gradients take.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._recording: Recording | None = None
        self._plans: list[MicroBatchPlan] = []
        self._steps = 0
        self._began = 0.0
        self.besides = 0.0

    def on_train_begin(self, *_args: Any, **_kwargs: Any) -> None:
        """Count steps from now on."""
        self._steps = 0

    def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
        """Listen to this step if it is one that counts."""
        self._steps += 1
        due = self._steps in EARLY_STEPS or self._steps % EVERY_STEPS == 0
        if due and self._dispatcher.settings.choices is not None:
            self._plans = []
            self._recording = self._dispatcher.recorder.listen("kernel", "wait", "phase")
            self._began = time.perf_counter()

    def count(self, plan: MicroBatchPlan) -> None:
        """Take note of a micro-batch that is about to run."""
        if self._recording is not None:
            self._plans.append(plan)

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        """Correct the costs. A collective in the steps that count."""
        settings = self._dispatcher.settings
        if self._recording is None or settings.choices is None:
            return
        spans = self._recording.take()
        self._recording.stop()
        self._recording = None
        seen = self._dispatcher.groups.all_gather(observe(spans, time.perf_counter() - self._began))
        costs = settings.choices.costs
        corrected = corrected_costs(costs, settings, self._plans, seen)
        predicted = sum(predict_plan(plan, settings, corrected).seconds for plan in self._plans)
        self.besides = max(float(np.mean([each.step for each in seen])) - predicted, 0.0)
        if corrected is not costs:
            self._dispatcher.choose_by(replace(settings.choices, costs=corrected))


def corrected_costs(
    costs: StepCosts, settings: PlanSettings, plans: Sequence[MicroBatchPlan], seen: Sequence[Observed]
) -> StepCosts:
    """Return the costs, scaled where they are off by more than `MOST_OFF`; else the same object.

    Args:
        costs: as they were.
        settings: of the plans.
        plans: of the step's micro-batches.
        seen: [ranks] what each rank saw of them.
    """
    ranks = len(seen)
    alike = replace(costs, slowness=())
    predicted: FloatArray = np.sum([predict_plan(plan, settings, alike).attention for plan in plans], axis=0)
    kernel = np.array([each.kernel for each in seen])
    attention = float(kernel.sum() / predicted.sum())
    slowness = (kernel / predicted) / attention
    if np.abs(slowness - 1).max() <= MOST_OFF:
        slowness = np.ones(ranks)
    layers = sum(of_kind.layers for of_kind in costs.kinds)
    rows = plans[0].tokens * slowness
    between = (layers - 1) * (rows * (costs.before + costs.after) + len(plans[0].nano_batches) * costs.launches)
    other = float(np.sum([each.between for each in seen]) / between.sum()) if layers > 1 else 1.0
    before = np.array(costs.slowness or (1.0,) * ranks)
    off = [attention, other, *(slowness / before)]
    if all(abs(each - 1) <= MOST_OFF for each in off):
        return costs
    logger.info(
        "costs by which plans are chosen are corrected: core attention takes %.2f of what was expected, other work "
        "%.2f; ranks take %s of the mean",
        attention,
        other,
        ", ".join(f"{each:.2f}" for each in slowness),
    )
    return replace(
        costs,
        kinds=tuple(_scaled(of_kind, attention) for of_kind in costs.kinds),
        before=costs.before * other,
        after=costs.after * other,
        head=costs.head * other,
        launches=costs.launches * other,
        slowness=() if np.all(slowness == 1) else tuple(slowness.tolist()),
    )


def _scaled(of_kind: KindCosts, by: float) -> KindCosts:
    return replace(of_kind, forward=of_kind.forward.scaled(by), backward=of_kind.backward.scaled(by))
