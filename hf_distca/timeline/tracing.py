"""Trace some steps of training; every rank writes its trace into the output folder."""

import json
import logging
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.recorder import Recording, Span
from hf_distca.timeline.events import TRACED, rank_trace
from hf_distca.units import counted

logger = logging.getLogger(__name__)

STEPS_BEFORE = 3
"""Number of first steps without a trace: they allocate memory, choose kernels and fill caches."""
ROUNDS = 8
"""Number of rounds for a common zero of time."""


class StepTracer(TrainerCallback):
    """Record some steps of a training.

    On CUDA the host waits for the GPU at the end of each.

    Args:
        steps: number of steps to record.
        folder: folder into which every rank writes its trace.
        processes: number of processes of the training.
    """

    def __init__(self, dispatcher: Dispatcher, steps: int, folder: Path, *, processes: int) -> None:
        self._dispatcher = dispatcher
        self._most = steps
        self._folder = folder
        self._processes = processes
        self._recording: Recording | None = None
        self.on_train_begin()

    def on_train_begin(self, *_args: Any, **_kwargs: Any) -> None:
        """Forget an earlier training."""
        self._drop()
        self._steps = self._traced = 0
        self._zero = 0.0, 0.0  # see `rank_trace`
        self._spans: list[Span] = []

    @property
    def _process(self) -> int:
        """Number of this process among all."""
        groups = self._dispatcher.groups
        return groups.members[groups.rank]

    def _drop(self) -> None:
        """Stop recording; an unfinished step, which had no batch or failed, is not kept."""
        if self._recording is not None:
            self._recording.stop()
        self._recording = None
        self._step = ExitStack()
        self._section = ExitStack()

    def begin_step(self, number: int) -> None:
        """Start step `number`, from 1 on, before its batches are fetched.

        A collective at the first recorded step.
        """
        self._drop()
        if self._steps < STEPS_BEFORE or self._traced == self._most:
            return
        if self._traced == 0:
            self._zero = self._common_zero()
        self._recording = self._dispatcher.recorder.listen(*TRACED)
        self._step.enter_context(self._dispatcher.recorder.span("step", f"step {number}"))
        self.section("batches")

    def section(self, name: str) -> None:
        """Begin another section of a recorded step."""
        if self._recording is not None:
            self._section.close()
            self._section.enter_context(self._dispatcher.recorder.span("section", name))

    def on_pre_optimizer_step(self, *_args: Any, **_kwargs: Any) -> None:
        """Begin the section of the optimizer: all gradients are computed."""
        self.section("optimizer")

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        """End a step, and write the trace after the last recorded step."""
        self._steps += 1
        if self._recording is None:
            return
        self._section.close()
        self._step.close()
        self._spans += self._recording.take()
        self._traced += 1
        self._drop()
        if self._traced == self._most:
            self._write()

    def on_train_end(self, *_args: Any, **_kwargs: Any) -> None:
        """Write the recorded steps if training ended before all steps were recorded."""
        self._drop()
        is_short = self._traced < self._most
        if is_short and self._process == 0:
            logger.warning(
                "trace_steps=%s: training ended after %s, and the first %s never are recorded "
                "(recorded: %s); set max_steps higher, or trace_steps lower",
                *(self._most, counted(self._steps, "step"), STEPS_BEFORE, self._traced),
            )
        if is_short and self._traced:
            self._write()

    def _common_zero(self) -> tuple[float, float]:
        """Return a moment within the quickest of some rounds in which all ranks met, and its error.

        A collective.
        """
        # No rank leaves a round before all ranks have entered it: on each rank's clock, the last
        # rank's entry lies between the rank's own entering and leaving. Each rank takes its leaving
        # for zero, so ranks differ by no more than the longest of these times.
        groups = self._dispatcher.groups
        durations = []  # of each round, on this rank
        ends = []
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            groups.meet()
            end = time.perf_counter()
            durations.append(end - begin)
            ends.append(end)
        offset, error = self._dispatcher.recorder.clock()
        rank_durations, rank_errors = zip(
            *groups.all_gather((durations, error), in_world=True), strict=True
        )
        longest = [max(durations) for durations in zip(*rank_durations, strict=True)]
        quickest = longest.index(min(longest))
        return ends[quickest] + offset, longest[quickest] + max(rank_errors)

    def _write(self) -> None:
        groups, rank = self._dispatcher.groups, self._process
        path = self._folder / f"trace_rank_{rank}.json"
        trace = rank_trace(self._spans, rank, self._processes, groups.members, self._zero)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(trace))
        self._spans = []
        if rank == 0:
            logger.info(
                "a trace of %s is in %s, beside those of the host's other ranks; open them "
                "in ui.perfetto.dev, or join and draw them with hf-distca timeline %s",
                *(counted(self._traced, "step"), path, path.parent),
            )
