"""The recorder: what it measures and for whom.

On CUDA it runs with a stand-in for the events of a stream.
"""

import pytest
import torch

from hf_distca.dispatch import recorder as recorder_module
from hf_distca.dispatch.recorder import Recorder, Span, Work

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
WORK = Work(3, 1, "backward")


class Stream:
    """A stream at the time `now`, in whole seconds; its queue is reached as the test says.

    It makes its events.
    """

    def __init__(self, monkeypatch):
        self.now, self.made, self.queued = 0, 0, []
        monkeypatch.setattr(torch.cuda, "Event", self.event)

    def event(self, enable_timing):
        assert enable_timing
        self.made += 1
        return Event(self)


class Event:
    """An event as torch.cuda.Event is."""

    def __init__(self, stream):
        self.stream, self.at = stream, None

    def record(self):
        assert self.query(), "the stream has not reached it yet"
        self.at = self.stream.now
        self.stream.queued.append(self)

    def query(self):
        return self not in self.stream.queued

    def synchronize(self):
        while not self.query():
            self.stream.queued.pop(0)

    def elapsed_time(self, after):
        assert self.query()
        assert after.query()
        return (after.at - self.at) * 1000.0


@pytest.mark.parametrize("behind", [0, 1, 5])
def test_events_are_as_many_as_the_stream_is_behind(monkeypatch, behind):
    stream = Stream(monkeypatch)
    recorder = Recorder(CUDA)
    expected = 0
    for index in range(1000):
        stream.now += 1
        with recorder.span("wait", "q"):
            stream.now += index % 7
        expected += index % 7
        del stream.queued[: max(len(stream.queued) - 2 * behind, 0)]
    assert stream.made <= 2 * (behind + 1) + 1  # one is kept to measure the next span from
    assert recorder.seconds("wait") == expected
    assert recorder.seconds("wait") == expected  # reading changes nothing
    assert stream.queued == []


def test_spans_on_cuda_lie_on_one_clock_whatever_lies_within_whatever(monkeypatch):
    stream, recorder = Stream(monkeypatch), Recorder(CUDA)
    recording = recorder.listen()
    stream.now = 100
    with recorder.span("phase", "first", WORK):
        stream.now += 1
        with recorder.span("kernel", "local", WORK, pairs=7):
            stream.now += 2
        stream.now += 4
    stream.now += 8
    with recorder.span("wait", "o lse"):
        stream.now += 16
    kernel, phase, wait = recording.take()
    begin = phase.begin
    assert kernel == Span("kernel", "local", WORK, begin + 1, begin + 3, pairs=7)
    assert phase == Span("phase", "first", WORK, begin, begin + 7)
    assert wait == Span("wait", "o lse", None, begin + 15, begin + 31)
    with pytest.raises(ValueError, match="no"), recorder.span("wait", "q"):
        raise ValueError("no")
    assert recorder.seconds("wait") == 16  # what fails inside is not measured


@pytest.mark.parametrize(
    ("kind", "seconds", "begin", "end"),
    [("wait", 2.0, 10.0, 13.5), ("kernel", 2.0, 10.0, 13.5), ("phase", 0.0, 5.0, 7.0)],
)
def test_on_the_cpu_the_clock_is_that_of_the_process_and_is_read_where_somebody_asked(
    monkeypatch, kind, seconds, begin, end
):
    clock = iter([5.0, 7.0, 10.0, 13.5])
    monkeypatch.setattr(recorder_module.time, "perf_counter", lambda: next(clock))
    recorder = Recorder(CPU)
    with recorder.span(kind, "part", WORK):
        pass
    # What is logged is measured without a listener.
    assert recorder.seconds(kind) == seconds
    recording = recorder.listen(kind)
    with recorder.span(kind, "q", WORK):
        pass
    assert recording.take() == [Span(kind, "q", WORK, begin, end)]


def test_listeners_get_what_they_asked_for():
    recorder = Recorder(CPU)
    kernels, everything = recorder.listen("kernel"), recorder.listen()
    recorder.add(Span("remote", "3", WORK, 1.0, 2.0, pairs=5))
    with recorder.span("kernel", "local", WORK, pairs=4):
        pass
    assert [(span.part, span.pairs) for span in kernels.take()] == [("local", 4)]
    assert [span.kind for span in everything.take()] == ["remote", "kernel"]
    everything.stop()
    everything.stop()  # who closes twice has closed
    latest = recorder.listen("remote", most=2)
    spans = [Span("remote", "3", WORK, float(begin), begin + 1.0) for begin in range(3)]
    for span in spans:
        recorder.add(span)
    assert recorder.seconds("remote") == 4.0
    assert kernels.take() == everything.take() == []
    assert (latest.take(), latest.take()) == (spans[1:], [])
