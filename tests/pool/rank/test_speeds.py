"""What trainers learn of speeds, in round numbers: 50 pairs/s measured are 100 pairs/s in one direction."""

from types import SimpleNamespace

import pytest
import torch

from hf_distca.dispatch.recorder import Recorder, Span
from hf_distca.pool.rank.speeds import Observed, Served, Speeds, Stopwatch


@pytest.fixture
def speeds() -> Speeds:
    speeds = Speeds(50.0)
    assert speeds.joined(7, 100.0) == 2.0
    return speeds


def seen(**served: int | float) -> Observed:
    return Observed(calls=2, pairs=200, seconds=2.0, between_s=0.5, servers={7: Served(**served)} if served else {})


def test_before_anything_was_seen_measured_speeds_count(speeds):
    workers = speeds.workers(2, [7], takes_turns=True)
    assert (workers.speed, workers.base_load) == ((1.0, 1.0, 2.0), (0.0, 0.0, 0.0))


def test_speeds_move_halfway_to_what_was_seen(speeds):
    # The rank that saw most of the server's calls knows best: 400 pairs/s, four times a trainer's.
    speeds.learn([seen(pairs=100, seconds=1.0), seen(pairs=400, seconds=1.0)])
    assert speeds.workers(2, [7], takes_turns=True).speed == (1.0, 1.0, 3.0)


def test_in_turns_trainers_work_besides_and_else_servers_wait_for_rows(speeds):
    # 0.25 s between the steps of an attention are 25 pairs; rows travel 0.1 s for the rank that sends last, 10 pairs.
    first, last = (seen(pairs=200, seconds=1.0, alone=2, way_s=way_s) for way_s in (0.8, 0.2))
    speeds.learn([first, last])
    assert speeds.workers(2, [7], takes_turns=True).base_load == (12.5, 12.5, 0.0)
    assert speeds.workers(2, [7], takes_turns=False).base_load == (0.0, 0.0, 5.0)


def test_a_step_without_servers_changes_only_the_trainers_speed(speeds):
    speeds.learn([Observed(pairs=300, seconds=1.0)])
    workers = speeds.workers(1, [7], takes_turns=False)
    assert (workers.speed, workers.base_load) == ((1.0, 2.0), (0.0, 0.0))


def test_a_server_that_was_far_once_is_tried_again(speeds):
    speeds.learn([seen(pairs=200, seconds=1.0, alone=1, way_s=10.0)])
    away = speeds.workers(1, [7], takes_turns=False).base_load[1]
    speeds.learn([Observed(pairs=200, seconds=2.0)])
    assert away == 500.0
    assert speeds.workers(1, [7], takes_turns=False).base_load[1] == 450.0


def test_a_stopwatch_counts_the_kernel_and_what_lies_between_steps_while_servers_compute(monkeypatch):
    now, recorder = 0.0, Recorder(torch.device("cpu"))
    monkeypatch.setattr("hf_distca.pool.rank.speeds.time", SimpleNamespace(perf_counter=lambda: now))
    watch = Stopwatch(recorder)
    # When a step begins and ends, and the calls to servers that are under way then.
    for begins, ends, under_way in [(1, 2, 0), (5, 6, 0), (7, 9, 1), (13, 14, 2), (20, 30, 1), (40, 41, 0)]:
        now, watch.under_way = begins, under_way
        with watch.step():
            now = ends
    recorder.add(Span("kernel", "own", None, 50.0, 57.0, pairs=10))
    recorder.add(Span("wait", "keys", None, 57.0, 60.0))
    assert watch.read() == watch.read() == Observed(pairs=10, seconds=7.0, between_s=1 + 4 + 6)
    recorder.add(Span("kernel", "own", None, 60.0, 61.0, pairs=10))
    watch.begin()
    recorder.add(Span("kernel", "own", None, 61.0, 63.0, pairs=4))
    assert watch.read() == Observed(pairs=4, seconds=2.0)


def test_a_way_is_never_negative():
    # The clocks of two hosts need not run alike.
    watch = Stopwatch(Recorder(torch.device("cpu")))
    watch.served(7, 10, 1.0, -0.5)
    watch.served(7, 20, 1.0, 2.0)
    watch.served(7, 30, 1.0, None)
    assert watch.read() == Observed(servers={7: Served(pairs=60, seconds=3.0, alone=2, way_s=2.0)})
