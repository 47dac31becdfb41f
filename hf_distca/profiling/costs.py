"""Costs by which plans are chosen: measured when training begins, corrected while it runs."""

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback, TrainerState

from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.peers import PeerExchanges
from hf_distca.dispatch.recorder import Recording, Span
from hf_distca.plan import MicroBatchPlan
from hf_distca.plan.arrays import FloatArray
from hf_distca.predict.corrections import Corrections, expected_seconds
from hf_distca.predict.device_profile import DeviceProfile
from hf_distca.predict.seconds import KernelCost, StepCosts
from hf_distca.predict.walk import predict_plan
from hf_distca.profiling.device import measured_profile, name_of
from hf_distca.profiling.links import with_links
from hf_distca.run import RunSpec
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


def with_costs(run: RunSpec, dispatcher: Dispatcher, folder: Path | None = None) -> RunSpec:
    """Return the run with the costs by which plans are chosen, if any are. A collective.

    A run that has a device profile keeps it.

    Args:
        folder: output folder of the run.
    """
    settings = run.plans
    chosen = (settings.document_layout, settings.balance_tolerance, settings.ping_pong)
    chooses = AUTO in chosen and settings.ranks > 1 and not run.has_remote_workers
    if run.profile is not None or not chooses:
        return run
    return run.with_profile(_measured_profile(run, dispatcher, folder))


def _measured_profile(run: RunSpec, dispatcher: Dispatcher, folder: Path | None) -> DeviceProfile:
    """Return the profile that an earlier run kept in the folder, or measure one. A collective.

    The profile is the same on every rank.
    """
    settings, device, groups = dispatcher.settings, dispatcher.device, dispatcher.groups
    source = _description(dispatcher)
    is_first = groups.members[groups.rank] == 0  # of all ranks

    # 1. The profile of an earlier run, if it was measured in the same way. Ranks that share layers
    #    belong to several groups of ranks, and need the same plans: the first rank's file counts.
    kept_profile = None
    if folder is not None:
        kept_profile = _kept_profile(folder / PROFILE_FILE, warns=is_first)
    if kept_profile is not None and kept_profile.source != source:
        kept_profile = None
    first_profile: DeviceProfile | None = groups.all_gather(kept_profile, in_world=True)[0]
    if first_profile is not None:
        return first_profile

    # 2. Each rank measures its device, and all ranks together measure their links.
    profile = measured_profile(
        dispatcher.kernel,
        settings.dominant_kind,
        run.model.hidden,
        torch.float32 if settings.bytes_per_value == 4 else torch.bfloat16,
        device,
        most_rows=settings.rows_per_rank,
        limit_s=LIMIT_S,
    )
    measured = with_links(
        profile,
        PeerExchanges(groups, device),
        settings.ranks_per_node,
        collectives=False,
        limit_s=LIMIT_S,
    )

    # 3. Ranks agree on the first rank's result, which is kept.
    result: DeviceProfile = groups.all_gather(replace(measured, source=source), in_world=True)[0]
    with groups.raised_together(in_world=True):
        if folder is not None and is_first:
            folder.mkdir(parents=True, exist_ok=True)
            result.save(folder / PROFILE_FILE)
    return result


def _description(dispatcher: Dispatcher) -> str:
    """Return what measured costs depend on.

    A kept profile with another description is measured again.
    """
    settings, device = dispatcher.settings, dispatcher.device
    return (
        f"Measured when training began: {settings.ranks} ranks on nodes of "
        f"{settings.ranks_per_node}, {name_of(device)}, kernel {dispatcher.kernel.name}, "
        f"{settings.dominant_kind}, {settings.bytes_per_value} bytes a value, at most "
        f"{settings.rows_per_rank} tokens a rank, torch {torch.__version__}, kernel costs "
        f"{', '.join(cost.name for cost in fields(KernelCost))}"
    )


def _kept_profile(file: Path, *, warns: bool) -> DeviceProfile | None:
    """Return the profile that an earlier run kept; None if there is none, or if it is damaged."""
    try:
        return DeviceProfile.load(str(file)) if file.exists() else None
    except ValueError as error:  # a run ended while it wrote
        if warns:
            logger.warning(UNREADABLE, file, error.__cause__)
        return None


def observe(spans: Sequence[Span]) -> tuple[float, float]:
    """Return a rank's seconds of a step in kernel calls, and between core attentions.

    Between core attentions the first forward pass counts.
    """
    kernel = sum(span.end - span.begin for span in spans if span.kind == "kernel")
    backward_begins = [
        span.begin for span in spans if span.work is not None and span.work.direction == "backward"
    ]
    first_backward = min(backward_begins, default=np.inf)
    forward = sorted((span.begin, span.end) for span in spans if span.end <= first_backward)
    begins, ends = np.array(forward).reshape(-1, 2).T
    # From the end of all spans so far to the beginning of the next one. Spans may overlap.
    gaps = begins[1:] - np.maximum.accumulate(ends[:-1])
    return kernel, float(gaps.clip(0).sum())


class LearnedCosts(TrainerCallback):
    """Compare steps with the measured costs, and correct the costs.

    All ranks correct them at the same step.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._measured = dispatcher.settings.costs
        self._corrections = Corrections()
        self._recording: Recording | None = None
        self._plans: list[list[MicroBatchPlan]] = []  # of each watched step
        # Seconds of each watched step: the two that `observe` returns, and the whole step.
        self._observed: list[tuple[float, float, float]] = []
        self._began = 0.0
        # Seconds of the last watched step outside its micro-batches: optimizer and gradient
        # exchange.
        self.besides = 0.0

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Start recording if this step is watched."""
        step = state.global_step + 1
        is_first = step in EARLY_STEPS or step % EVERY_STEPS == EVERY_STEPS // 2
        if self._measured is not None and (is_first or self._plans):
            self._plans.append([])
            self._recording = self._dispatcher.recorder.listen("kernel", "wait", "phase")
            self._began = time.perf_counter()

    def count(self, plan: MicroBatchPlan) -> None:
        """Note a micro-batch that is about to run."""
        if self._recording is not None:
            self._plans[-1].append(plan)

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        """Correct the costs after the last watched step; a collective at that step."""
        if self._recording is None or self._measured is None:
            return
        kernel_s, between_s = observe(self._recording.take())
        self._observed.append((kernel_s, between_s, time.perf_counter() - self._began))
        self._recording.stop()
        self._recording = None
        if len(self._observed) == WATCHED_STEPS:
            self._compare(self._measured)

    def _compare(self, measured: StepCosts) -> None:
        """Compare the watched steps with the costs, and correct the costs. A collective."""
        settings = self._dispatcher.settings
        nodes, bytes_per_value = settings.node_of_ranks, settings.bytes_per_value
        plans = self._plans
        rank = self._dispatcher.groups.rank
        expected = [
            expected_seconds(plans_of_step, rank, measured, nodes, bytes_per_value)
            for plans_of_step in plans
        ]
        of_all = self._seconds_of_all(expected)
        observed = of_all[:, :3]
        self._plans = []
        self._observed = []
        corrections = self._corrections.after(measured, of_all[:, 3:], observed[:, :2])
        if corrections is not self._corrections:
            logger.info(
                "measured costs differ from training steps; plans now use the corrections %s",
                corrections,
            )
            self._correct(corrections)
        costs = self._corrections.applied(measured)
        predicted = []
        for plans_of_step in plans:
            walked = [predict_plan(plan, costs, nodes, bytes_per_value) for plan in plans_of_step]
            predicted.append(sum(micro_batch.seconds for micro_batch in walked))
        step_seconds = observed[:, 2].mean(axis=1)
        self.besides = max(float(np.median(step_seconds - predicted)), 0.0)

    def _seconds_of_all(self, expected: Sequence[tuple[float, float]]) -> FloatArray:
        """Return [steps, 5, ranks] seconds of the watched steps on all ranks. A collective.

        They are the three observed ones and the two expected ones.

        Ranks that share layers belong to several groups and need the same plans: the steps of the
        first group count.
        """
        groups = self._dispatcher.groups
        own = [(*seconds, *more) for seconds, more in zip(self._observed, expected, strict=True)]
        gathered = groups.all_gather((groups.members, own), in_world=True)
        members_of_first, _ = gathered[0]
        seconds_by_rank = [gathered[member][1] for member in members_of_first]
        return np.array(seconds_by_rank).transpose(1, 2, 0)

    def _correct(self, corrections: Corrections) -> None:
        """Let plans use corrected costs, unless a user has turned choosing off."""
        if self._measured is not None and self._dispatcher.settings.costs is not None:
            self._corrections = corrections
            self._dispatcher.choose_by(corrections.applied(self._measured))

    def save(self, folder: Path) -> None:
        """Write the corrections into a checkpoint.

        A resumed training then makes the same plans.
        """
        if self._measured is not None:
            folder.mkdir(parents=True, exist_ok=True)
            content = {
                "measured": repr(self._measured),
                "corrections": asdict(self._corrections),
            }
            (folder / CORRECTIONS_FILE).write_text(json.dumps(content), encoding="utf-8")

    def resume(self, folder: Path | None) -> None:
        """Load the corrections of a checkpoint, or reset them. A collective."""
        if self._recording is not None:  # an earlier training ended among watched steps
            self._recording.stop()
        self._recording = None
        self._plans = []
        self._observed = []
        if self._measured is None:
            return
        groups = self._dispatcher.groups
        corrections: Corrections | None = None
        if folder is not None and groups.members[groups.rank] == 0:
            corrections = _kept_corrections(folder / CORRECTIONS_FILE, self._measured)
        self._correct(groups.all_gather(corrections or Corrections(), in_world=True)[0])


def _kept_corrections(file: Path, costs: StepCosts) -> Corrections | None:
    """Return a checkpoint's corrections of the same measured costs; None if it has none.

    A file that cannot be read is warned of.
    """
    if not file.exists():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        fields_of_file = content["corrections"]
        slowness = tuple(fields_of_file["slowness"])  # a list in JSON
        corrections = Corrections(**{**fields_of_file, "slowness": slowness})
        # Corrections of other measured costs belong to other devices or settings.
        return corrections if content["measured"] == repr(costs) else None
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning(UNREADABLE, file, f"{type(error).__name__}: {error}")
        return None
