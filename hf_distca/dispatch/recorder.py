"""Time that a rank's core attention takes, on the clock of the device that does the work.

The executor reports phases, kernel calls and waits; remote workers' reports are added. Listeners
are the trainer's log, the speeds of workers and timelines.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch

from hf_distca.plan import Direction

Kind = Literal["step", "section", "phase", "kernel", "wait", "send", "call", "remote"]
"""Kind of a span.

- step, section: an optimizer step, and a section of one.
- phase: a phase of a schedule; kernel calls, waits for exchanges and starts of exchanges (send) lie
  within phases.
- call: a call to a remote worker, from the departure of its rows to the arrival of the results, by
  the host's clock.
- remote: computing time of the remote worker within a call. Its place in the call is unknown; it is
  put at the end.
"""

KINDS: tuple[Kind, ...] = get_args(Kind)
ALWAYS: frozenset[Kind] = frozenset({"wait", "kernel"})
"""Kinds measured without a listener: training logs how long ranks wait and compute core attention.
"""

NOT_MEASURED = nullcontext()


class Work(NamedTuple):
    """The core attention that a span belongs to: a layer, a nano-batch and a direction."""

    layer: int | None  # None if the model does not give an index
    nano_batch: int
    direction: Direction


class Rows(NamedTuple):
    """Rows that an exchange carries to and from each rank, [ranks] each; empty without any.

    The ranks are those of a pod, from `first_rank` on.
    """

    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    first_rank: int = 0


NO_ROWS = Rows()


class Span(NamedTuple):
    """Measured interval of time on a rank."""

    kind: Kind
    part: str  # name of the step, section, phase, exchange, kernel call or remote worker
    work: Work | None
    begin: float  # seconds on the device's clock, from an arbitrary origin
    end: float
    pairs: int = 0  # query-key pairs of a kernel call, here or at a remote worker
    rows: Rows = NO_ROWS  # rows that the start of an exchange carries


@dataclass(eq=False)
class Recording:
    """Spans that a listener asked for with `Recorder.listen`."""

    recorder: "Recorder"
    kinds: frozenset[Kind]
    spans: deque[Span]

    def take(self) -> list[Span]:
        """Return the spans since the last call, in the order of their ends.

        Waits for queued work on CUDA.
        """
        self.recorder.drain(wait=True)
        spans = list(self.spans)
        self.spans.clear()
        return spans

    def stop(self) -> None:
        """Stop listening."""
        self.recorder.forget(self)


class Recorder:
    """Recorder of spans. Kinds without a listener are not measured, except those in ALWAYS.

    On the CPU, times come from the process's clock. On CUDA, times come from events around the
    queued work: the host does not wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._recordings: list[Recording] = []
        self._kinds: frozenset[Kind] = ALWAYS
        self._seconds = dict.fromkeys(KINDS, 0.0)
        # On CUDA: spans whose end the stream may not have reached, without their times.
        self._queued: deque[tuple[Span, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._free: list[torch.cuda.Event] = []
        self._anchor: torch.cuda.Event | None = None
        self._anchor_s = 0.0  # when the anchor was passed, on the device's clock

    def listen(self, *kinds: Kind, most: int | None = None) -> Recording:
        """Record spans of these kinds, or of all kinds if none is named.

        Keep only the latest `most`.
        """
        recording = Recording(self, frozenset(kinds or KINDS), deque(maxlen=most))
        self._recordings.append(recording)
        self._kinds |= recording.kinds
        return recording

    def forget(self, recording: Recording) -> None:
        """Stop recording for a listener."""
        self._recordings = [other for other in self._recordings if other is not recording]
        self._kinds = ALWAYS.union(*(other.kinds for other in self._recordings))

    def measures(self, kind: Kind) -> bool:
        """Return whether this kind is measured."""
        return kind in self._kinds

    def span(
        self, kind: Kind, part: str, work: Work | None = None, pairs: int = 0, rows: Rows = NO_ROWS
    ) -> AbstractContextManager[None]:
        """Return a context whose duration is measured if the kind is.

        See `Span` for the arguments.
        """
        if kind not in self._kinds:
            return NOT_MEASURED
        measured = self._on_cuda if self._device.type == "cuda" else self._here
        return measured(Span(kind, part, work, 0.0, 0.0, pairs, rows))

    def clock(self) -> tuple[float, float]:
        """Return the device clock's seconds ahead of `time.perf_counter`, and their error.

        Wait for queued work.
        """
        if self._device.type != "cuda":
            return 0.0, 0.0
        self.drain(wait=True)
        torch.cuda.synchronize(self._device)
        passed, before = self._event(), time.perf_counter()
        passed.record()
        passed.synchronize()
        after = time.perf_counter()
        if self._anchor is None:
            self._anchor = passed
            return self._anchor_s - before, after - before
        device_s = self._anchor_s + self._anchor.elapsed_time(passed) / 1000
        self._free.append(passed)
        return device_s - before, after - before

    def add(self, span: Span) -> None:
        """Add a span that was measured elsewhere, such as in a remote worker's reply."""
        self._seconds[span.kind] += span.end - span.begin
        for recording in self._recordings:
            if span.kind in recording.kinds:
                recording.spans.append(span)

    def seconds(self, kind: Kind) -> float:
        """Return the seconds of all measured spans of a kind; waits for queued work on CUDA."""
        self.drain(wait=True)
        return self._seconds[kind]

    def drain(self, *, wait: bool = False) -> None:
        """Take in completed spans, once per micro-batch; `wait` for queued work to take in all."""
        while self._queued and (wait or self._queued[0][-1].query()):
            span, begin, end = self._queued.popleft()
            end.synchronize()
            # Times count from the previous span: long intervals of events lose digits.
            if self._anchor is not None:
                self._anchor_s += self._anchor.elapsed_time(begin) / 1000
                self._free.append(self._anchor)
            self._anchor = begin
            self._free.append(end)
            self.add(
                span._replace(
                    begin=self._anchor_s, end=self._anchor_s + begin.elapsed_time(end) / 1000
                )
            )

    @contextmanager
    def _here(self, span: Span) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.add(span._replace(begin=begin, end=time.perf_counter()))

    @contextmanager
    def _on_cuda(self, span: Span) -> Iterator[None]:
        self.drain()
        begin, end = self._event(), self._event()
        begin.record()
        yield
        end.record()
        self._queued.append((span, begin, end))

    def _event(self) -> torch.cuda.Event:
        return self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
