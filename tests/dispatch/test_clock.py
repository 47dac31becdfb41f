"""Clocks on CUDA, with a stand-in for the events of a stream."""

import pytest
import torch

from hf_distca.dispatch.clock import Clock

CUDA = torch.device("cuda")


class Stream:
    """What has been queued; it gets done as the test says.

    Attributes:
        now: the time that an event records, in whole seconds.
        made: events made so far.
        queued: events that are recorded and not reached.
    """

    def __init__(self):
        self.now, self.made, self.queued = 0, 0, []


class Event:
    """An event as torch.cuda.Event is."""

    def __init__(self, stream):
        self.stream, self.at = stream, None

    def record(self):
        assert self not in self.stream.queued, "the stream has not reached it yet"
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


@pytest.fixture
def stream(monkeypatch):
    stream = Stream()

    def make(enable_timing):
        assert enable_timing
        stream.made += 1
        return Event(stream)

    monkeypatch.setattr(torch.cuda, "Event", make)
    return stream


@pytest.mark.parametrize("behind", [0, 1, 5])
def test_events_are_as_many_as_the_stream_is_behind(stream, behind):
    clock, expected = Clock(), 0
    for number in range(1000):
        stream.now += 1
        with clock.running(CUDA):
            stream.now += number % 7
        expected += number % 7
        del stream.queued[: max(len(stream.queued) - 2 * behind, 0)]
    assert stream.made == 2 * (behind + 1)
    assert clock.seconds() == expected
    assert clock.seconds() == expected
    assert stream.queued == []


def test_seconds_wait_for_what_is_queued(stream):
    clock = Clock()
    for _ in range(3):
        with clock.running(CUDA):
            stream.now += 2
    assert stream.made == 6
    assert clock.seconds() == 6
    with clock.running(CUDA):
        stream.now += 5
    assert stream.made == 6
    assert clock.seconds() == 11
