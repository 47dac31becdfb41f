"""The schedule of a core attention: what comes when, as data."""

import itertools
from dataclasses import replace

import pytest

from hf_distca.planner.schedule import KernelCall, Phase, Transfer, make_schedule, stage_slots


def groups_of(direction, turn, stages):
    """All groups of tasks that a nano-batch of so many stages may have."""
    own = ("local 1/2", "local 2/2") if (direction, turn) == ("backward", "alone") else ("local",)
    tasks = ("remote-query", "remote-query prefix", "remote-KV") if stages > 1 else ("remote-query", "remote-KV")
    return frozenset([*((half, 0) for half in own), *itertools.product(tasks, range(stages))])


def made(direction, turn, stages=1, forwards=False, **options):
    groups = groups_of(direction, turn, stages)
    return make_schedule(
        direction, turn, **{"groups": groups, "windowed": False, "stages": stages, "forwards": forwards} | options
    )


def names(schedule):
    """The phases' names; "|" where the other nano-batch runs."""
    return [part for phase in schedule for part in ([phase.name, "|"] if phase.pause else [phase.name])]


WRITTEN_OUT = {
    ("forward", "alone", 1, False): """
send q, k v / run local / | / wait q, k v; run remote-query; send o lse / run remote-KV / | / wait o lse
""",
    ("forward", "first", 1, False): """
send q, k v / | / run local / wait q, k v; run remote-query; send o lse / run remote-KV / | / wait o lse
""",
    ("forward", "second", 1, False): """
send q, k v / run local / | / wait q, k v; run remote-query; send o lse / run remote-KV / | / wait o lse
""",
    ("backward", "alone", 1, False): """
send do o lse q, k v / run local 1/2 / | / wait do o lse q, k v; run remote-query; send dq
run remote-KV; send dk dv / run local 2/2 / | / wait dq, dk dv
""",
    ("backward", "second", 1, False): """
send do o lse q, k v / | / run local / wait do o lse q, k v; run remote-query; send dq
run remote-KV; send dk dv / | / wait dq, dk dv
""",
    ("backward", "first", 1, False): """
send do o lse q, k v / | / wait do o lse q, k v; run remote-query; send dq
run remote-KV; send dk dv / run local / | / wait dq, dk dv
""",
    ("forward", "alone", 4, False): """
send q, k v, k v [1] / run local / |
wait q, k v; run remote-query, remote-query prefix / run remote-KV; send k v [2]
wait k v [1]; run remote-query [1], remote-query prefix [1] / run remote-KV [1]; send k v [3]
wait k v [2]; run remote-query [2], remote-query prefix [2] / run remote-KV [2]
wait k v [3]; run remote-query [3], remote-query prefix [3]; send o lse / run remote-KV [3] / |
wait o lse
""",
    ("backward", "first", 4, False): """
send do o lse q, k v, k v [1] / |
wait do o lse q, k v; run remote-query, remote-query prefix / run remote-KV; send dk dv, k v [2]
wait k v [1]; run remote-query [1], remote-query prefix [1] / run remote-KV [1]
wait dk dv; send dk dv [1], k v [3] / wait k v [2]; run remote-query [2], remote-query prefix [2]
run remote-KV [2] / wait dk dv [1]; send dk dv [2]
wait k v [3]; run remote-query [3], remote-query prefix [3]; send dq / run remote-KV [3]
wait dk dv [2]; send dk dv [3] / run local / |
wait dq, dk dv [3]
""",
    ("forward", "alone", 1, True): """
send q, k v / run local / | / wait k v; send k v forwarded
wait q, k v forwarded; run remote-query; send o lse / run remote-KV / |
wait o lse
""",
    ("forward", "first", 4, True): """
send q, k v, k v [1] / | / wait k v; send k v forwarded / run local
wait q, k v forwarded, k v [1]; send k v forwarded [1], k v [2] / run remote-query, remote-query prefix / run remote-KV
wait k v forwarded [1], k v [2]; send k v forwarded [2], k v [3]
run remote-query [1], remote-query prefix [1] / run remote-KV [1]
wait k v forwarded [2], k v [3]; send k v forwarded [3]
run remote-query [2], remote-query prefix [2] / run remote-KV [2]
wait k v forwarded [3]; run remote-query [3], remote-query prefix [3]; send o lse / run remote-KV [3] / |
wait o lse
""",
    ("backward", "alone", 1, True): """
send do o lse q, k v / run local 1/2 / | / wait k v; send k v forwarded
wait do o lse q, k v forwarded; run remote-query; send dq / run remote-KV; send dk dv to gateways
wait dk dv to gateways; send dk dv / run local 2/2 / |
wait dq, dk dv
""",
    ("backward", "first", 4, True): """
send do o lse q, k v, k v [1] / | / wait k v; send k v forwarded
wait do o lse q, k v forwarded, k v [1]; send k v forwarded [1], k v [2]
run remote-query, remote-query prefix / run remote-KV; send dk dv to gateways
wait k v forwarded [1], k v [2]; send k v forwarded [2], k v [3]
run remote-query [1], remote-query prefix [1] / run remote-KV [1]; send dk dv to gateways [1]
wait dk dv to gateways; send dk dv / wait k v forwarded [2], k v [3]; send k v forwarded [3]
run remote-query [2], remote-query prefix [2] / run remote-KV [2]; send dk dv to gateways [2]
wait dk dv to gateways [1], dk dv; send dk dv [1]
wait k v forwarded [3]; run remote-query [3], remote-query prefix [3]; send dq
run remote-KV [3]; send dk dv to gateways [3]
wait dk dv to gateways [2], dk dv [1]; send dk dv [2] / wait dk dv to gateways [3]; send dk dv [3] / run local / |
wait dq, dk dv [2], dk dv [3]
""",
}
"""The phases by direction, turn, stages, and whether ranks forward rows inside nodes."""


@pytest.mark.parametrize("case", WRITTEN_OUT, ids=str)
def test_phases_in_order(case):
    assert names(made(*case)) == WRITTEN_OUT[case].strip().replace("\n", " / ").split(" / ")


def test_a_forward_written_out():
    q, kv = Transfer("queries", ("q",)), Transfer("keys", ("k", "v"))
    results = Transfer("queries", ("o", "lse"), back=True)
    assert made("forward", "first") == (
        Phase(send=(q, kv), pause=True),
        Phase(run=(KernelCall("local", "local", "local"),)),
        Phase(wait=(q, kv), run=(KernelCall("remote-query", "received", "received"),), send=(results,)),
        Phase(run=(KernelCall("remote-KV", "local", "received", causal=False, first=False),), pause=True),
        Phase(wait=(results,)),
    )


def calls(schedule):
    return [call for phase in schedule for call in phase.run]


def test_received_queries_read_whole_stages_and_their_own():
    assert calls(made("forward", "alone", 2))[1:3] == [
        KernelCall("remote-query", "received", "received", first=False),
        KernelCall("remote-query prefix", "received", "received", causal=False, first=False),
    ]


def test_a_window_makes_remote_kv_tasks_whole():
    *_, call = calls(made("forward", "alone", windowed=True))
    assert call == KernelCall("remote-KV", "local", "received", causal=True, first=True)


def test_local_tasks_that_are_not_divided_are_computed_while_rows_go_there():
    schedule = made("backward", "alone", groups=frozenset([("local", 0)]))
    assert [phase.name for phase in schedule if phase.run] == ["run local"]
    assert schedule[1].name == "run local"
    assert schedule[1].pause


@pytest.mark.parametrize(
    ("kept", "sent"),
    [("nothing", "do o lse q, k v"), ("received", "do o lse"), ("results", "do")],
)
def test_what_was_kept_is_not_sent_again(kept, sent):
    schedule = made("backward", "first", kept=kept)
    assert schedule[0].name == f"send {sent}"
    assert next(phase for phase in schedule if phase.wait).name == f"wait {sent}; run remote-query; send dq"


@pytest.mark.parametrize("forwards", [False, True])
@pytest.mark.parametrize(
    ("direction", "asked", "answered"),
    [
        ("forward", "q k v to servers", "o lse from servers"),
        ("backward", "q do o lse k v to servers", "dq dk dv from servers"),
    ],
)
def test_servers_are_asked_first_and_waited_for_last(direction, asked, answered, forwards):
    with_servers, without = (made(direction, "second", 1, forwards, servers=servers) for servers in (True, False))
    assert with_servers[0].name == f"{without[0].name}, {asked}"
    assert with_servers[-1].name == f"{without[-1].name}, {answered}"
    assert with_servers[1:-1] == without[1:-1]


def test_ranks_issue_the_same_transfers_whatever_tasks_they_have():
    every = sorted(groups_of("backward", "alone", 1) | {("local", 0)})
    for direction, turn, kept in itertools.product(
        ("forward", "backward"), ("alone", "first", "second"), ("nothing", "received", "results")
    ):
        found = set()
        for count in range(len(every) + 1):
            for groups in map(frozenset, itertools.combinations(every, count)):
                schedule = made(direction, turn, groups=groups, kept=kept)
                assert sum(phase.pause for phase in schedule) == 2
                order, pauses = [], 0
                for phase in schedule:
                    order += [(pauses, "wait", transfer) for transfer in phase.wait]
                    order += [(pauses, "send", transfer) for transfer in phase.send]
                    pauses += phase.pause
                found.add(tuple(order))
                divided = (direction, turn) == ("backward", "alone") and ("local 1/2", 0) in groups
                own = {"local 1/2", "local 2/2"} if divided else {"local"}
                expected = {(tasks, 0) for tasks in own | {"remote-KV", "remote-query"}}
                assert sorted(call.group for call in calls(schedule)) == sorted(groups & expected)
        assert len(found) == 1


def happenings(schedule):
    """What happens, one thing after another."""
    return [
        step
        for phase in schedule
        for step in (
            *(("wait", transfer) for transfer in phase.wait),
            *(("run", call) for call in phase.run),
            *(("send", transfer) for transfer in phase.send),
        )
    ]


SCHEDULES = [
    (direction, turn, stages, forwards, kept)
    for direction, turn, stages, forwards in itertools.product(
        ("forward", "backward"), ("alone", "first", "second"), (1, 2, 3, 4, 5, 7, 12), (False, True)
    )
    for kept in (("nothing",) if direction == "forward" else ("nothing", "received", "results"))
]


def test_what_is_sent_is_waited_for_once_and_in_the_order_of_its_group():
    for direction, turn, stages, forwards, kept in SCHEDULES:
        schedule = made(direction, turn, stages, forwards, servers=True, kept=kept)
        sent, waited = (
            [transfer for did, transfer in happenings(schedule) if did == verb and transfer.rows != "servers"]
            for verb in ("send", "wait")
        )
        assert len(set(sent)) == len(sent)
        assert sorted(sent, key=str) == sorted(waited, key=str)
        there = stages if kept == "nothing" else 0
        counted = [sum(transfer.rows == rows for transfer in sent) for rows in ("keys", "forwarded")]
        of_one_hop = there + stages * (direction == "backward")
        assert counted == [of_one_hop, of_one_hop * forwards]


def test_a_row_takes_one_hop_after_another_and_is_computed_with_in_between():
    for direction, turn, stages, _, kept in SCHEDULES:
        order = happenings(made(direction, turn, stages, True, servers=True, kept=kept))
        for stage in range(stages):
            there, back = Transfer("keys", ("k", "v"), stage=stage), Transfer("keys", ("dk", "dv"), True, stage)
            on, passed_back = replace(there, rows="forwarded"), replace(back, rows="forwarded")
            steps = [*(("send", there), ("wait", there), ("send", on), ("wait", on)) * (kept == "nothing")]
            computed = [
                at
                for at, (did, call) in enumerate(order)
                if did == "run" and call.stage == stage and "local" not in call.tasks
            ]
            assert len(computed) == (3 if stages > 1 else 2)
            after = [("send", passed_back), ("wait", passed_back), ("send", back), ("wait", back)]
            places = [order.index(step) for step in steps] + computed
            places += [order.index(step) for step in after if direction == "backward"]
            assert places == sorted(places)


def test_memory_of_a_stage_is_used_again_once_all_of_its_rows_are_back():
    for direction, turn, stages, forwards, kept in SCHEDULES:
        order = happenings(made(direction, turn, stages, forwards, servers=True, kept=kept))
        slots, in_use = stage_slots(stages, forwards=forwards), 5 if forwards else 3
        assert max(slots) + 1 == min(stages, in_use)
        lives = []
        for stage in range(stages):
            times = [
                at
                for at, (_, what) in enumerate(order)
                if what.stage == stage
                and (what.rows in ("keys", "forwarded") if isinstance(what, Transfer) else what.keys == "received")
            ]
            lives.append((min(times), max(times)))
        for slot in set(slots):
            of_slot = [life for life, number in zip(lives, slots, strict=True) if number == slot]
            assert all(last < first for (_, last), (first, _) in itertools.pairwise(of_slot))
        # No stage has memory to spare: so many are there at once, where there are so many.
        most = max(sum(first <= at <= last for first, last in lives) for at in range(len(order)))
        if (direction, kept) == ("backward", "nothing") and stages >= in_use:
            assert most == in_use
