"""What ranks learn of speeds, in round numbers: 50 pairs/s measured are 100 pairs/s in one direction."""

import pytest

from hf_distca.dispatch.recorder import Span, Work
from hf_distca.pool.rank.speeds import Observed, Served, Speeds, observe


@pytest.fixture
def speeds() -> Speeds:
    speeds = Speeds(50.0)
    assert speeds.joined(7, 100.0) == 2.0
    assert speeds.pairs_per_second == 50.0
    return speeds


def seen(**served: int | float) -> Observed:
    return Observed(calls=2, pairs=200, seconds=2.0, between_s=0.5, servers={7: Served(**served)} if served else {})


def test_before_anything_was_seen_measured_speeds_count(speeds):
    workers = speeds.workers(2, [7], takes_turns=True)
    assert (workers.speed, workers.base_load) == ((1.0, 1.0, 2.0), (0.0, 0.0, 0.0))


def test_speeds_move_halfway_to_what_was_seen(speeds):
    # The rank that saw most of the server's calls knows best: 400 pairs/s, four times a rank's.
    speeds.learn([seen(pairs=100, seconds=1.0), seen(pairs=400, seconds=1.0)])
    assert speeds.workers(2, [7], takes_turns=True).speed == (1.0, 1.0, 3.0)


def test_in_turns_ranks_work_besides_and_else_servers_wait_for_rows(speeds):
    # 0.25 s between the phases of an attention are 25 pairs; rows travel 0.1 s for the rank that sends last, 10 pairs.
    first, last = (seen(pairs=200, seconds=1.0, alone=2, way_s=way_s) for way_s in (0.8, 0.2))
    speeds.learn([first, last])
    assert speeds.workers(2, [7], takes_turns=True).base_load == (12.5, 12.5, 0.0)
    assert speeds.workers(2, [7], takes_turns=False).base_load == (0.0, 0.0, 5.0)


def test_servers_are_held_against_what_the_ranks_did_in_the_same_steps(speeds):
    # The ranks compute 200 pairs/s, twice what they were taken for, and the server eight times that.
    seen_by_all = Observed(calls=2, pairs=200, seconds=1.0, between_s=0.5)
    seen_by_all.servers[7] = Served(pairs=1600, seconds=1.0, alone=2, way_s=0.2)
    speeds.learn([seen_by_all])
    assert speeds.pairs_per_second == 75.0
    workers = speeds.workers(1, [7], takes_turns=True)
    assert (workers.speed, workers.base_load) == ((1.0, 5.0), (25.0, 0.0))
    assert speeds.workers(1, [7], takes_turns=False).base_load == (0.0, 10.0)


def test_a_kernel_that_computed_no_pairs_says_nothing_of_speeds(speeds):
    speeds.learn([Observed(seconds=1.0)])
    assert speeds.pairs_per_second == 50.0


def test_a_step_without_servers_changes_only_the_ranks_speed(speeds):
    speeds.learn([Observed(pairs=300, seconds=1.0)])
    assert speeds.pairs_per_second == 100.0
    workers = speeds.workers(1, [7], takes_turns=False)
    assert (workers.speed, workers.base_load) == ((1.0, 2.0), (0.0, 0.0))


def test_a_server_that_was_far_once_is_tried_again(speeds):
    speeds.learn([seen(pairs=200, seconds=1.0, alone=1, way_s=10.0)])
    away = speeds.workers(1, [7], takes_turns=False).base_load[1]
    speeds.learn([Observed(pairs=200, seconds=2.0)])
    assert away == 500.0
    assert speeds.workers(1, [7], takes_turns=False).base_load[1] == 450.0
    speeds.learn([seen(pairs=200, seconds=1.0)])  # no call was alone: nothing is known of the way, and it was used
    assert speeds.workers(1, [7], takes_turns=False).base_load[1] == 450.0
    speeds.joined(7, 100.0)  # as a new member
    assert speeds.workers(1, [7], takes_turns=False).base_load[1] == 0.0


def phase(work: Work, part: str, begin: float, end: float) -> Span:
    return Span("phase", part, work, begin, end)


def answered(server: int, work: Work, way_s: float, seconds: float, pairs: int) -> list[Span]:
    """What a rank records when a server has answered."""
    end = 1000.0 + way_s + seconds  # of another clock than phases are on
    return [
        Span("call", str(server), work, 1000.0, end),
        Span("server", str(server), work, end - seconds, end, pairs),
    ]


PING, PONG = Work(0, 0, "forward"), Work(0, 1, "forward")
SEND, COLLECT = "run local; send q, q k v to servers", "wait o lse, o lse from servers"


def test_nothing_is_observed_in_nothing():
    assert observe([]) == Observed()


def test_kernel_calls_and_the_time_between_phases_while_calls_to_servers_are_under_way():
    spans = [
        phase(PING, "run local", 1, 2),
        phase(PING, SEND, 5, 6),
        Span("kernel", "local", PING, 50.0, 57.0, pairs=10),
        phase(PONG, SEND, 7, 9),
        phase(PING, "run remote-query", 13, 14),
        phase(PING, COLLECT, 20, 30),
        Span("kernel", "remote-query", PONG, 57.0, 58.0, pairs=4),
        phase(PONG, COLLECT, 33, 35),
        phase(PING, "run local", 40, 41),
    ]
    assert observe(spans) == Observed(calls=2, pairs=14, seconds=8.0, between_s=1 + 4 + 6 + 3)


def test_a_way_is_what_a_call_took_besides_the_servers_kernel_while_no_other_was_under_way():
    backward = Work(0, 1, "backward")
    spans = [
        phase(PING, SEND, 0, 1),
        phase(PONG, SEND, 1, 2),  # while the first is under way
        *answered(7, PING, way_s=1.25, seconds=1.75, pairs=40),
        *answered(9, PING, way_s=0.25, seconds=1.0, pairs=30),
        phase(PING, COLLECT, 2, 3),
        *answered(7, PONG, way_s=99.0, seconds=1.75, pairs=40),
        phase(PONG, COLLECT, 3, 4),
        phase(backward, SEND, 4, 5),
        *answered(7, backward, way_s=1.25, seconds=1.75, pairs=40),
        phase(backward, COLLECT, 5, 6),
    ]
    expected = {
        7: Served(pairs=120, seconds=5.25, alone=2, way_s=2.5),
        9: Served(pairs=30, seconds=1.0, alone=1, way_s=0.25),
    }
    assert observe(spans) == Observed(calls=3, servers=expected)
    # On CUDA phases are known later than calls.
    late = sorted(spans, key=lambda span: span.kind == "phase")
    assert observe(late) == observe(spans)


def test_a_way_is_never_negative():
    # The clocks of two hosts need not run alike.
    spans = [*answered(7, PING, -0.5, 1.0, 10), *answered(7, PING, 2.0, 1.0, 20)]
    assert observe(spans) == Observed(servers={7: Served(pairs=30, seconds=2.0, alone=2, way_s=2.0)})


def test_a_repair_is_the_ranks_own_work_within_the_phase_that_found_the_loss():
    spans = [
        phase(PING, SEND, 0, 1),
        phase(PONG, SEND, 2, 3),
        # The phases of the repair end before the one that they are in.
        phase(PING, "run local", 5, 6),
        Span("kernel", "local", PING, 5.0, 6.0, pairs=10),
        phase(PING, COLLECT, 4, 8),
        *answered(9, PONG, 1.0, 2.0, 20),
        phase(PONG, COLLECT, 8, 9),
    ]
    seen_of_9 = Served(pairs=20, seconds=2.0)
    assert observe(spans) == Observed(calls=2, pairs=10, seconds=1.0, between_s=2.0, servers={9: seen_of_9})


def test_spans_whose_beginnings_were_not_kept_do_no_harm():
    _, cut = answered(7, PING, 1.0, 2.0, 20)
    spans = [cut, phase(PING, COLLECT, 0, 1), phase(PONG, "run local", 5, 6)]
    assert observe(spans) == Observed(calls=1, servers={7: Served(pairs=20, seconds=2.0)})
    whole = answered(7, PING, 1.0, 2.0, 20)  # the call of another answer
    assert observe([*whole, cut]).servers == {7: Served(pairs=40, seconds=4.0, alone=1, way_s=1.0)}
