"""Measure the costs by which plans are chosen when training begins, and correct them when training shows an error."""

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, TrainerCallback, TrainerState

from hf_distca.config import DistCAConfig
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.groups import raised_together
from hf_distca.dispatch.peers import PeerExchanges
from hf_distca.dispatch.recorder import Recording, Span
from hf_distca.models.shape import model_shape
from hf_distca.plan import MicroBatchPlan
from hf_distca.planner.settings import Choices, PlanSettings
from hf_distca.predict.device import measured_profile, name_of
from hf_distca.predict.links import with_links
from hf_distca.predict.profile import DeviceProfile
from hf_distca.predict.seconds import FloatArray, KernelCost, StepCosts
from hf_distca.predict.setup import Setup
from hf_distca.predict.walk import Walked, predict_plan
from hf_distca.units import AUTO

logger = logging.getLogger(__name__)

PROFILE_FILE = "device_profile.json"
"""File in the output folder with the costs that this run measured."""
LIMIT_S = 1.0
"""Seconds after which no longer kernel call and no larger exchange is measured."""
CORRECTIONS_FILE = "distca_costs.json"
"""File in a checkpoint with the corrections."""
EARLY_STEPS = (2, 8, 30)
EVERY_STEPS = 100
WATCHED_STEPS = 3
"""Number of consecutive steps compared with the costs, from the early steps and from the middle of
every hundred on.

Checkpoints are rarely saved right after these steps, while micro-batches planned with the old costs
are to come.
"""
UNREADABLE = "the costs in %s cannot be read and are measured again (%s)"
"""Warning about a damaged file with measured costs, or with corrections of them."""
MOST_OFF = 0.1
"""Relative error up to which costs stay unchanged, so that plans stay the same from run to run."""


def choices_of(
    model: PreTrainedModel,
    dispatcher: Dispatcher,
    config: DistCAConfig,
    *,
    checkpointing: bool,
    folder: Path | None = None,
) -> Choices | None:
    """Return the planner's choices and costs; None if nothing is chosen. A collective."""
    settings = dispatcher.settings
    # Read also where nothing is chosen: a name that is wrong is wrong on any number of ranks.
    with raised_together(config.exchange_timeout):
        named = None if config.device_profile is None else DeviceProfile.load(config.device_profile)
    # With dedicated servers, every plan is balanced again for the servers that are present.
    if (
        not (config.chooses or named is not None)
        or settings.ranks == 1
        or config.attention_servers != 0
    ):
        return None
    profile = named or _measured_profile(model, dispatcher, folder)
    ranks = (settings.ranks, settings.tokens_per_rank, settings.ranks_per_node)
    costs = Setup(model_shape(model), profile, *ranks, checkpointing=checkpointing).costs
    if checkpointing and not config.keep_core_attention:
        again = tuple(
            replace(each, backward=each.backward.plus(each.forward)) for each in costs.kinds
        )
        costs = replace(costs, kinds=again)
    return Choices.beside(
        settings,
        costs,
        groups=config.document_layout == AUTO,
        coarser=config.balance_tolerance == AUTO,
        nano_batches=(1, 2) if config.ping_pong == AUTO else (2,),
    )


def _measured_profile(
    model: PreTrainedModel, dispatcher: Dispatcher, folder: Path | None
) -> DeviceProfile:
    """Return the profile that an earlier run kept in the folder, or measure one.

    The same on every rank.
    """
    settings, device, groups = dispatcher.settings, dispatcher.device, dispatcher.groups
    # What measured costs depend on: a kept profile with another description is measured again.
    source = (
        f"Measured when training began: {settings.ranks} ranks on nodes of "
        f"{settings.ranks_per_node}, {name_of(device)}, kernel {dispatcher.kernel.name}, "
        f"{settings.dominant_kind}, {settings.bytes_per_value} bytes a value, at most "
        f"{settings.tokens_per_rank} tokens a rank, torch {torch.__version__}, kernel costs "
        f"{', '.join(cost.name for cost in fields(KernelCost))}"
    )
    kept: DeviceProfile | None = None
    if folder is not None:
        file = folder / PROFILE_FILE
        try:
            kept = DeviceProfile.load(str(file)) if file.exists() else None
        except ValueError as error:  # a run ended while it wrote
            if groups.members[groups.rank] == 0:
                logger.warning(UNREADABLE, file, error.__cause__)
    # Ranks that share layers belong to several groups of ranks, and need the same plans.
    kept = groups.all_gather(
        kept if kept is not None and kept.source == source else None, in_world=True
    )[0]
    if kept is not None:
        return kept
    profile = measured_profile(
        dispatcher.kernel,
        settings.dominant_kind,
        model_shape(model).hidden,
        torch.float32 if settings.bytes_per_value == 4 else torch.bfloat16,
        device,
        most_rows=settings.tokens_per_rank,
        limit_s=LIMIT_S,
    )
    measured = with_links(
        profile,
        PeerExchanges(groups, device),
        settings.ranks_per_node,
        collectives=False,
        limit_s=LIMIT_S,
    )
    agreed: DeviceProfile = groups.all_gather(replace(measured, source=source), in_world=True)[0]
    if folder is not None and groups.members[groups.rank] == 0:
        folder.mkdir(parents=True, exist_ok=True)
        agreed.save(folder / PROFILE_FILE)
    return agreed


def observe(spans: Sequence[Span]) -> tuple[float, float]:
    """Return a rank's seconds of a step in kernel calls, and between core attentions of the first forward pass."""
    kernel = sum(span.end - span.begin for span in spans if span.kind == "kernel")
    backward = [
        span.begin for span in spans if span.work is not None and span.work.direction == "backward"
    ]
    first_backward = min(backward, default=np.inf)
    forward = np.array(
        sorted((span.begin, span.end) for span in spans if span.end <= first_backward)
    ).reshape(-1, 2)
    gaps = forward[1:, 0] - np.maximum.accumulate(forward[:-1, 1])
    return kernel, float(gaps.clip(0).sum())


def _predicted(plan: MicroBatchPlan, settings: PlanSettings, costs: StepCosts) -> Walked:
    """Return the predicted seconds of a plan."""
    return predict_plan(plan, costs, settings.node_of_ranks, settings.bytes_per_value)


@dataclass(frozen=True)
class Corrections:
    """Ratios of observed to measured costs."""

    attention: float = 1.0
    other: float = 1.0  # of all computation besides kernel calls
    slowness: tuple[
        float, ...
    ] = ()  # [ranks] time of each rank over the mean; empty if all ranks are alike

    def applied(self, costs: StepCosts) -> StepCosts:
        """Return the corrected costs."""
        kinds = (
            replace(
                kind,
                forward=kind.forward.scaled(self.attention),
                backward=kind.backward.scaled(self.attention),
            )
            for kind in costs.kinds
        )
        others = {
            name: getattr(costs, name) * self.other
            for name in ("before", "after", "head", "launches")
        }
        mixing = costs.mixing and costs.mixing.scaled(self.other)
        return replace(costs, kinds=tuple(kinds), slowness=self.slowness, mixing=mixing, **others)

    def after(
        self,
        costs: StepCosts,
        settings: PlanSettings,
        plans: Sequence[Sequence[MicroBatchPlan]],
        seen: FloatArray,
    ) -> "Corrections":
        """Return corrections for the observed steps, or these corrections if the error is at most `MOST_OFF`.

        Args:
            costs: as measured, without corrections.
            seen: [steps, 2, ranks] seconds as `observe` returns them.
        """
        expected = []
        for of_step in plans:
            kernel = np.sum(
                [
                    predict_plan(
                        plan, costs, settings.node_of_ranks, settings.bytes_per_value
                    ).attention
                    for plan in of_step
                ],
                axis=0,
            )
            first = of_step[0]
            nano_batches = 1 if first.summary.exchange.bytes_total == 0 else len(first.nano_batches)
            between = (costs.depth - 1) * (
                first.tokens * costs.between + nano_batches * costs.launches
            )
            expected.append((kernel, between if costs.depth > 1 else kernel))
        if costs.depth == 1:  # there is no time between layers
            seen = seen[:, [0, 0]]
        every = seen / np.maximum(expected, 1e-9)
        attention, other = np.median(every.mean(axis=2), axis=0).tolist()
        # A rank counts as slow if all its work is slow in all steps; the smallest ratio counts.
        beside = (every / every.mean(axis=2, keepdims=True)).reshape(-1, every.shape[2])
        slowness = np.clip(1.0, beside.min(axis=0), beside.max(axis=0))
        if np.abs(slowness - 1).max() <= MOST_OFF:
            slowness = np.ones(len(slowness))
        known = np.array(self.slowness or (1.0,) * len(slowness))
        off = [attention / self.attention, other / self.other, *(slowness / known)]
        if all(abs(each - 1) <= MOST_OFF for each in off):
            return self
        return Corrections(
            attention, other, () if np.all(slowness == 1) else tuple(slowness.tolist())
        )


class LearnedCosts(TrainerCallback):
    """Compare steps with the measured costs, and correct the costs on all ranks at the same step."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher, self._choices = (
            dispatcher,
            dispatcher.settings.choices,
        )  # with the costs as measured
        self._corrections = Corrections()
        self._recording: Recording | None = None
        self._plans: list[list[MicroBatchPlan]] = []  # of each watched step
        self._seen: list[
            tuple[float, float, float]
        ] = []  # seconds of each: as `observe` returns, and of the step
        self._began = 0.0
        # Seconds of the last watched step outside its micro-batches: optimizer and gradient
        # exchange.
        self.besides = 0.0

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Start recording if this step is watched."""
        step = state.global_step + 1
        is_first = step in EARLY_STEPS or step % EVERY_STEPS == EVERY_STEPS // 2
        if self._choices is not None and (is_first or self._plans):
            self._plans.append([])
            self._recording = self._dispatcher.recorder.listen("kernel", "wait", "phase")
            self._began = time.perf_counter()

    def count(self, plan: MicroBatchPlan) -> None:
        """Note a micro-batch that is about to run."""
        if self._recording is not None:
            self._plans[-1].append(plan)

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        """Correct the costs after the last watched step; a collective at that step."""
        if self._recording is None or self._choices is None:
            return
        self._seen.append((*observe(self._recording.take()), time.perf_counter() - self._began))
        self._recording.stop()
        self._recording = None
        if len(self._seen) < WATCHED_STEPS:
            return
        measured, groups, settings = (
            self._choices.costs,
            self._dispatcher.groups,
            self._dispatcher.settings,
        )
        # Ranks that share layers belong to several groups and need the same plans: the first
        # group's steps count.
        every = groups.all_gather((groups.members, self._seen), in_world=True)
        seen = np.array([every[member][1] for member in every[0][0]]).transpose(
            1, 2, 0
        )  # [steps, 3, ranks]
        plans, self._plans, self._seen = self._plans, [], []
        corrections = self._corrections.after(measured, settings, plans, seen[:, :2])
        if corrections is not self._corrections:
            logger.info(
                "measured costs differ from training steps; plans now use the corrections %s",
                corrections,
            )
            self._correct(corrections)
        costs = self._corrections.applied(measured)
        predicted = [
            sum(_predicted(plan, settings, costs).seconds for plan in of_step) for of_step in plans
        ]
        self.besides = max(float(np.median(seen[:, 2].mean(axis=1) - predicted)), 0.0)

    def _correct(self, corrections: Corrections) -> None:
        present = self._dispatcher.settings.choices  # which a user may have changed
        if present is not None and self._choices is not None:
            self._corrections = corrections
            self._dispatcher.choose_by(
                replace(present, costs=corrections.applied(self._choices.costs))
            )

    def save(self, folder: Path) -> None:
        """Write the corrections into a checkpoint, so that a resumed training makes the same plans."""
        if self._choices is not None:
            folder.mkdir(parents=True, exist_ok=True)
            content = {
                "measured": repr(self._choices.costs),
                "corrections": asdict(self._corrections),
            }
            (folder / CORRECTIONS_FILE).write_text(json.dumps(content), encoding="utf-8")

    def resume(self, folder: Path | None) -> None:
        """Load the corrections of a checkpoint, or reset them. A collective."""
        if self._recording is not None:  # an earlier training ended among watched steps
            self._recording.stop()
        self._recording, self._plans, self._seen = None, [], []
        if self._choices is None:
            return
        groups, kept = self._dispatcher.groups, None
        if folder is not None and groups.members[groups.rank] == 0:
            kept = _kept_corrections(folder / CORRECTIONS_FILE, self._choices.costs)
        self._correct(groups.all_gather(kept or Corrections(), in_world=True)[0])


def _kept_corrections(file: Path, costs: StepCosts) -> Corrections | None:
    """Return a checkpoint's corrections of the same measured costs.

    None, with a warning, if they cannot be read.
    """
    if not file.exists():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        kept = content["corrections"]
        corrections = Corrections(**{**kept, "slowness": tuple(kept["slowness"])})
        # Corrections of other measured costs belong to other devices or settings.
        return corrections if content["measured"] == repr(costs) else None
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning(UNREADABLE, file, f"{type(error).__name__}: {error}")
        return None
