"""What a rank's core attention spent its time on: one recorder, one clock a device.

The executor reports phases, kernel calls and waits to it; a pool adds what servers report. Whoever wants to know
listens: the trainer's log, the speeds of workers, a timeline.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, NamedTuple, get_args

import torch

from hf_distca.plan import Direction

Kind = Literal["step", "section", "phase", "kernel", "wait", "send", "call", "server"]
"""An optimizer step, and a section of one; a phase of a schedule; a kernel call, a wait for an exchange or the start
of one, which lie within phases; a call to a server, from the departure of its rows to the arrival of the results, by
the host's clock; what the server took of that to compute, added right after the call. Its place within the call is not
known: it is put at the end."""

KINDS: tuple[Kind, ...] = get_args(Kind)

ALWAYS: frozenset[Kind] = frozenset({"wait", "kernel"})
"""Added up even if nobody listens: training logs how long ranks wait, and how long they compute core attention."""

NOT_MEASURED = nullcontext()


class Work(NamedTuple):
    """One core attention.

    Attributes:
        layer: index of the model's attention layer; None where the model does not tell.
        nano_batch: index of the nano-batch.
        direction: forward or backward.
    """

    layer: int | None
    nano_batch: int
    direction: Direction


class Rows(NamedTuple):
    """What an exchange carries; of no rank where it carries nothing.

    Attributes:
        sent: [ranks] rows to each rank.
        received: [ranks] rows from each rank.
    """

    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()


NO_ROWS = Rows()


class Span(NamedTuple):
    """A stretch of time.

    Attributes:
        kind: what went on.
        part: which step, section, phase, exchange, group of tasks or server (its id).
        work: for which core attention; None outside of any.
        begin: when it began, in seconds on the device's clock, which starts anywhere.
        end: when it ended.
        pairs: query-key pairs that a kernel call, here or at a server, computed.
        rows: of the start of an exchange: what it carries.
    """

    kind: Kind
    part: str
    work: Work | None
    begin: float
    end: float
    pairs: int = 0
    rows: Rows = NO_ROWS


class Recording:
    """Spans that a listener asked for, from `Recorder.listen` on.

    Args:
        recorder: whose spans.
        kinds: those to keep.
        most: how many to keep at once, the latest ones; None for all.
    """

    def __init__(self, recorder: "Recorder", kinds: frozenset[Kind], most: int | None = None) -> None:
        self.kinds = kinds
        self._recorder = recorder
        self._spans: deque[Span] = deque(maxlen=most)

    def keep(self, span: Span) -> None:
        """Take in a span, if it is of a kind that was asked for."""
        if span.kind in self.kinds:
            self._spans.append(span)

    def take(self) -> list[Span]:
        """The spans since the last call, in the order in which they ended. On CUDA it waits for them to end."""
        self._recorder.finish()
        spans = list(self._spans)
        self._spans.clear()
        return spans

    def stop(self) -> None:
        """Listen no more."""
        self._recorder.forget(self)


class Recorder:
    """Measures what runs under it, on the clock of the device that does it.

    On the CPU that is the clock of the process. On CUDA work is queued and the host does not wait for it: events
    around it tell when the stream came by. As many events are kept as the stream is behind, whether or not anybody
    asks. What nobody wants is not measured.

    Args:
        device: the rank's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._recordings: list[Recording] = []
        self._kinds: frozenset[Kind] = ALWAYS
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._queued: deque[_Queued] = deque()
        self._free: list[torch.cuda.Event] = []
        self._anchor: torch.cuda.Event | None = None
        self._anchor_s = 0.0  # when the anchor was passed, on the device's clock

    def listen(self, *kinds: Kind, most: int | None = None) -> Recording:
        """Keep spans of these kinds from now on, of all kinds if none is named; `most` of them, the latest."""
        recording = Recording(self, frozenset(kinds or KINDS), most)
        self._recordings.append(recording)
        self._kinds |= recording.kinds
        return recording

    def forget(self, recording: Recording) -> None:
        """Keep nothing more for a listener, if it still listens."""
        self._recordings = [other for other in self._recordings if other is not recording]
        self._kinds = ALWAYS.union(*(other.kinds for other in self._recordings))

    def measures(self, kind: Kind) -> bool:
        """Whether anybody wants to know of this kind."""
        return kind in self._kinds

    def span(
        self, kind: Kind, part: str, work: Work | None = None, pairs: int = 0, rows: Rows = NO_ROWS
    ) -> AbstractContextManager[None]:
        """Measure what is done inside, if anybody wants to know; the arguments are those of a Span."""
        if kind not in self._kinds:
            return NOT_MEASURED
        measured = self._on_cuda if self._device.type == "cuda" else self._here
        return measured(kind, part, work, pairs, rows)

    def clock(self) -> tuple[float, float]:
        """What to add to the host's clock, `time.perf_counter`, for the device's; and by how much that may be too
        large, in seconds. On CUDA it waits for what is queued."""
        if self._device.type != "cuda":
            return 0.0, 0.0
        self.finish()
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
        """Take in a span that was measured elsewhere, such as in a server's reply."""
        self._seconds[span.kind] += span.end - span.begin
        for recording in self._recordings:
            recording.keep(span)

    def seconds(self, kind: Kind) -> float:
        """Seconds of all spans of a kind that were measured so far. On CUDA it waits for them to end."""
        self.finish()
        return self._seconds[kind]

    def drain(self) -> None:
        """Take in what is over, without waiting. The dispatcher does it with every micro-batch."""
        while self._queued and self._queued[0].end.query():
            self._take_in(self._queued.popleft())

    def finish(self) -> None:
        """Take in everything; on CUDA it waits for what is queued."""
        while self._queued:
            self._queued[0].end.synchronize()
            self._take_in(self._queued.popleft())

    @contextmanager
    def _here(self, kind: Kind, part: str, work: Work | None, pairs: int, rows: Rows) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        end = time.perf_counter()
        if self._recordings:
            self.add(Span(kind, part, work, begin, end, pairs, rows))
        else:
            self._seconds[kind] += end - begin

    @contextmanager
    def _on_cuda(self, kind: Kind, part: str, work: Work | None, pairs: int, rows: Rows) -> Iterator[None]:
        self.drain()
        begin, end = self._event(), self._event()
        begin.record()
        yield
        end.record()
        self._queued.append(_Queued(kind, part, work, pairs, rows, begin, end))

    def _event(self) -> torch.cuda.Event:
        return self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)

    def _take_in(self, queued: "_Queued") -> None:
        """Take in a span that is over. Each is measured from the one before: a long time would lose its digits."""
        begin_s = self._anchor_s
        if self._anchor is not None:
            begin_s += self._anchor.elapsed_time(queued.begin) / 1000
            self._free.append(self._anchor)
        seconds = queued.begin.elapsed_time(queued.end) / 1000
        self._anchor, self._anchor_s = queued.begin, begin_s
        self._free.append(queued.end)
        span = Span(queued.kind, queued.part, queued.work, begin_s, begin_s + seconds, queued.pairs, queued.rows)
        self.add(span)


class _Queued(NamedTuple):
    """A span whose end the stream may not have reached."""

    kind: Kind
    part: str
    work: Work | None
    pairs: int
    rows: Rows
    begin: torch.cuda.Event
    end: torch.cuda.Event
