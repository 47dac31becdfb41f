"""What ranks learn of speeds, in round numbers: 50 pairs/s measured are 100 pairs/s in one
direction.
"""

import pytest

from hf_distca.dispatch.recorder import Span, Work
from hf_distca.pool.rank.speeds import Observed, Served, Speeds, observe


@pytest.fixture
def speeds():
    speeds = Speeds(50.0)
    assert speeds.joined(7, 100.0) == 2.0
    assert known(speeds) == (50.0, (1.0, 2.0), (0.0, 0.0), (0.0, 0.0))
    return speeds


def known(speeds):
    """The ranks' speed; speeds of a rank and server 7; base loads of both, in turns and without."""
    in_turns, one = (speeds.workers(1, [7], takes_turns=turns) for turns in (True, False))
    assert in_turns.speed == one.speed
    return speeds.pairs_per_second, one.speed, in_turns.base_load, one.base_load


def test_speeds_and_base_loads_move_halfway_to_what_was_seen_in_the_same_steps(speeds):
    # The rank that saw most of the server's calls knows best: 400 pairs/s, four times a rank's.
    # 0.25 s between the phases of an attention are 25 pairs; rows travel 0.1 s for the rank that
    # sends last, 10 pairs. In turns ranks work besides, else servers wait for rows.
    served = ({"pairs": 100, "travel_s": 0.8}, {"pairs": 400, "travel_s": 0.2})
    speeds.learn(
        [
            Observed(2, 200, 2.0, 0.5, {7: Served(**figures, seconds=1.0, alone=2)})
            for figures in served
        ]
    )
    assert known(speeds) == (50.0, (1.0, 3.0), (12.5, 0.0), (0.0, 5.0))
    assert speeds.workers(2, [7], takes_turns=True).base_load == (12.5, 12.5, 0.0)
    # Now the ranks compute 200 pairs/s, twice what they were taken for, and the server three times
    # that.
    speeds.learn(
        [Observed(2, 200, 1.0, 0.5, {7: Served(pairs=600, seconds=1.0, alone=2, travel_s=0.2)})]
    )
    assert known(speeds) == (75.0, (1.0, 3.0), (31.25, 0.0), (0.0, 12.5))


def test_a_server_that_was_far_once_is_tried_again_and_a_step_without_pairs_or_servers_changes_less(
    speeds,
):
    travel = []
    for observed in (
        Observed(seconds=1.0),
        Observed(pairs=200, seconds=2.0),
        Observed(2, 200, 2.0, 0.5, {7: Served(pairs=200, seconds=1.0, alone=1, travel_s=10.0)}),
        Observed(pairs=200, seconds=2.0),
        # No call was alone: nothing is known of the way, and it was used.
        Observed(2, 200, 2.0, 0.5, {7: Served(pairs=200, seconds=1.0)}),
        Observed(pairs=300, seconds=1.0),
    ):
        speeds.learn([observed])
        pairs_per_second, speed, _, (_, far) = known(speeds)
        travel.append(far)
        assert pairs_per_second == (50.0 if len(travel) < 6 else 100.0)
        assert speed == (1.0, 2.0)
    assert travel == [0.0, 0.0, 500.0, 450.0, 450.0, 405.0]
    speeds.joined(7, 100.0)  # as a new member
    assert known(speeds)[-1] == (0.0, 0.0)


PING = Work(0, 0, "forward")
PONG = Work(0, 1, "forward")
BACKWARD = Work(0, 1, "backward")
SEND = "run local; send q, q k v to remote workers"
COLLECT = "wait o lse, o lse from remote workers"


def phase(work, part, begin, end):
    return Span("phase", part, work, begin, end)


def answered(server, work, travel_s, seconds, pairs):
    """What a rank records when a server has answered, by another clock than phases are on."""
    end = 1000.0 + travel_s + seconds
    return [
        Span("call", str(server), work, 1000.0, end),
        Span("remote", str(server), work, end - seconds, end, pairs),
    ]


def test_kernel_calls_and_the_time_between_phases_while_calls_to_servers_are_under_way():
    assert observe([]) == Observed()
    spans = [
        phase(PING, "run local", 1, 2),
        phase(PING, SEND, 5, 6),
        Span("kernel", "local", PING, 50.0, 57.0, pairs=10),
        phase(PONG, SEND, 7, 9),
        # The phases of a repair end before the one that they are in.
        phase(PING, "run local", 15, 16),
        phase(PING, "run remote-query", 13, 17),
        phase(PING, COLLECT, 20, 30),
        Span("kernel", "remote-query", PONG, 57.0, 58.0, pairs=4),
        phase(PONG, COLLECT, 33, 35),
        phase(PING, "run local", 40, 41),
    ]
    assert observe(spans) == Observed(calls=2, pairs=14, seconds=8.0, between_s=1 + 4 + 3 + 3)


def test_a_way_is_what_a_call_took_besides_the_servers_kernel_while_no_other_was_under_way():
    spans = [
        phase(PING, SEND, 0, 1),
        phase(PONG, SEND, 1, 2),  # while the first is under way
        *answered(7, PING, travel_s=1.25, seconds=1.75, pairs=40),
        *answered(9, PING, travel_s=0.25, seconds=1.0, pairs=30),
        phase(PING, COLLECT, 2, 3),
        *answered(7, PONG, travel_s=99.0, seconds=1.75, pairs=40),
        phase(PONG, COLLECT, 3, 4),
        phase(BACKWARD, SEND, 4, 5),
        *answered(7, BACKWARD, travel_s=1.25, seconds=1.75, pairs=40),
        phase(BACKWARD, COLLECT, 5, 6),
    ]
    servers = {
        7: Served(120, 5.25, alone=2, travel_s=2.5),
        9: Served(30, 1.0, alone=1, travel_s=0.25),
    }
    assert observe(spans) == Observed(calls=3, servers=servers)
    # On CUDA phases are known later than calls.
    assert observe(sorted(spans, key=lambda span: span.kind == "phase")) == observe(spans)
    # The clocks of two hosts need not run alike, and the beginning of a call, or of all, may not
    # have been kept.
    hosts = [*answered(7, PING, -0.5, 1.0, 10), *answered(7, PING, 2.0, 1.0, 20)]
    assert observe(hosts).servers == {7: Served(30, 2.0, alone=2, travel_s=2.0)}
    whole = answered(7, PING, 1.0, 2.0, 20)
    cut = [*whole, whole[1], phase(PING, COLLECT, 0, 1), phase(PONG, "run local", 5, 6)]
    assert observe(cut) == Observed(calls=1, servers={7: Served(40, 4.0, alone=1, travel_s=1.0)})
