"""The schedule of a core attention: what comes when, as data."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from hf_distca.plan.schedule import (
    MANY_STAGES,
    KernelCall,
    Phase,
    Transfer,
    local_places,
    local_shares,
    make_schedule,
)
from hf_distca.plan.stages import stage_slots


def calls_of(direction, turn, stages):
    """Keys of all kernel calls that a nano-batch of so many stages may have."""
    parts = len(local_places("backward", turn, stages, windowed=False))
    divided = stages >= MANY_STAGES or (direction, turn) == ("backward", "alone")
    own = [("local part", part) for part in range(parts)] if divided else [("local", 0)]
    tasks = (
        ("remote-query", "remote-query prefix", "remote-KV")
        if stages > 1
        else ("remote-query", "remote-KV")
    )
    return frozenset([*own, *itertools.product(tasks, range(stages))])


def made(direction, turn, stages=1, forwards=False, **options):
    keys = calls_of(direction, turn, stages)
    return make_schedule(
        direction,
        turn,
        **{"calls": keys, "windowed": False, "stages": stages, "forwards": forwards} | options,
    )


def names(schedule):
    """The phases' names; "|" where the other nano-batch runs."""
    return [
        part for phase in schedule for part in ([phase.name, "|"] if phase.pause else [phase.name])
    ]


def calls(schedule):
    return [call for phase in schedule for call in phase.run]


WRITTEN_OUT = {
    (
        "backward",
        "alone",
        1,
        False,
    ): (
        """
send do o lse q, k v / run local part / | / wait do o lse q, k v; run remote-query; send dq
run remote-KV; send dk dv / run local part [1] / | / wait dq, dk dv
"""
    ),
    (
        "forward",
        "second",
        1,
        False,
    ): (
        """
send q, k v / run local / |
wait q, k v; run remote-query; send o lse / run remote-KV / |
wait o lse
"""
    ),
    (
        "backward",
        "first",
        1,
        False,
    ): (
        """
send do o lse q, k v / | / wait do o lse q, k v; run remote-query; send dq
run remote-KV; send dk dv / run local / | / wait dq, dk dv
"""
    ),
    (
        "forward",
        "alone",
        4,
        False,
    ): (
        """
send q, k v, k v [1] / run local / |
wait q, k v; run remote-query, remote-query prefix / run remote-KV; send k v [2]
wait k v [1]; run remote-query [1], remote-query prefix [1] / run remote-KV [1]; send k v [3]
wait k v [2]; run remote-query [2], remote-query prefix [2] / run remote-KV [2]
wait k v [3]; run remote-query [3], remote-query prefix [3]; send o lse / run remote-KV [3] / |
wait o lse
"""
    ),
    (
        "forward",
        "alone",
        5,
        False,
    ): (
        """
send q, k v, k v [1] / run local part / |
wait q, k v; run remote-query, remote-query prefix / run remote-KV; send k v [2]
run local part [1]
wait k v [1]; run remote-query [1], remote-query prefix [1] / run remote-KV [1]; send k v [3]
run local part [2]
wait k v [2]; run remote-query [2], remote-query prefix [2] / run remote-KV [2]; send k v [4]
run local part [3]
wait k v [3]; run remote-query [3], remote-query prefix [3] / run remote-KV [3]
run local part [4]
wait k v [4]; run remote-query [4], remote-query prefix [4]; send o lse / run remote-KV [4]
run local part [5] / |
wait o lse
"""
    ),
    (
        "backward",
        "first",
        4,
        False,
    ): (
        """
send do o lse q, k v, k v [1] / |
wait do o lse q, k v; run remote-query, remote-query prefix / run remote-KV; send dk dv, k v [2]
wait k v [1]; run remote-query [1], remote-query prefix [1] / run remote-KV [1]
wait dk dv; send dk dv [1], k v [3] / wait k v [2]; run remote-query [2], remote-query prefix [2]
run remote-KV [2] / wait dk dv [1]; send dk dv [2]
wait k v [3]; run remote-query [3], remote-query prefix [3]; send dq / run remote-KV [3]
wait dk dv [2]; send dk dv [3] / run local / |
wait dq, dk dv [3]
"""
    ),
    (
        "forward",
        "first",
        4,
        True,
    ): (
        """
send q, k v, k v [1] / | / wait k v; send k v forwarded / run local
wait q, k v forwarded, k v [1]; send k v forwarded [1], k v [2]
run remote-query, remote-query prefix / run remote-KV
wait k v forwarded [1], k v [2]; send k v forwarded [2], k v [3]
run remote-query [1], remote-query prefix [1] / run remote-KV [1]
wait k v forwarded [2], k v [3]; send k v forwarded [3]
run remote-query [2], remote-query prefix [2] / run remote-KV [2]
wait k v forwarded [3]; run remote-query [3], remote-query prefix [3]; send o lse
run remote-KV [3] / |
wait o lse
"""
    ),
    (
        "backward",
        "first",
        4,
        True,
    ): (
        """
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
wait dk dv to gateways [2], dk dv [1]; send dk dv [2]
wait dk dv to gateways [3]; send dk dv [3] / run local / |
wait dq, dk dv [2], dk dv [3]
"""
    ),
}
"""The phases by direction, turn, stages, and whether ranks forward rows inside nodes; others are in
test_design."""


@pytest.mark.parametrize("case", WRITTEN_OUT, ids=str)
def test_phases_in_order(case):
    assert names(made(*case)) == WRITTEN_OUT[case].strip().replace("\n", " / ").split(" / ")


def test_local_tasks_that_are_not_divided_are_computed_while_rows_are_sent():
    undivided = made("backward", "alone", calls=frozenset([("local", 0)]))
    assert names(undivided)[1:3] == ["run local", "|"]
    assert len(calls(undivided)) == 1


@pytest.mark.parametrize("forwards", [False, True])
@pytest.mark.parametrize("turn", ["alone", "first", "second"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_with_many_stages_a_part_of_the_local_tasks_comes_before_each(direction, turn, forwards):
    made_calls = calls(made(direction, turn, 6, forwards))
    for stage in range(1, 6):
        first_of_stage = next(
            place
            for place, call in enumerate(made_calls)
            if call.stage == stage and call.keys == "received"
        )
        assert made_calls[first_of_stage - 1].tasks == "local part"
    parts = [call for call in made_calls if call.tasks == "local part"]
    expected = [*range(7 if turn == "alone" else 6)]
    if (direction, turn) == ("backward", "first"):
        expected = [*expected[1:], 0]  # the first part hides what returns at the end
    assert [part.stage for part in parts] == expected
    assert not any(part.first for part in parts)
    whole = frozenset([("local", 0), *calls_of(direction, turn, 6)])
    windowed = calls(made(direction, "first", 6, forwards, windowed=True, calls=whole))
    assert [call.name for call in windowed if call.keys == "local"] == ["local"]


def test_a_forward_written_out():
    q, kv = Transfer("queries", ("q",)), Transfer("keys", ("k", "v"))
    results = Transfer("queries", ("o", "lse"), back=True)
    assert made("forward", "first") == (
        Phase(send=(q, kv), pause=True),
        Phase(run=(KernelCall("local", "local", "local"),)),
        Phase(
            wait=(q, kv), run=(KernelCall("remote-query", "received", "received"),), send=(results,)
        ),
        Phase(
            run=(KernelCall("remote-KV", "local", "received", causal=False, first=False),),
            pause=True,
        ),
        Phase(wait=(results,)),
    )
    # Received queries read whole stages and their own.
    assert calls(made("forward", "alone", 2))[1:3] == [
        KernelCall("remote-query", "received", "received", first=False),
        KernelCall("remote-query prefix", "received", "received", causal=False, first=False),
    ]
    # With a window a received query reads keys of one stage alone, so that nothing is merged with
    # its results.
    windowed = calls(
        made("forward", "alone", 2, windowed=True, calls=calls_of("forward", "alone", 1))
    )
    assert windowed[1] == KernelCall("remote-query", "received", "received")
    # A window makes remote-KV tasks whole.
    assert calls(made("forward", "alone", windowed=True))[-1] == KernelCall(
        "remote-KV", "local", "received", True, True
    )


@pytest.mark.parametrize("forwards", [False, True])
@pytest.mark.parametrize(
    ("direction", "call", "answer"),
    [
        ("forward", "q k v to remote workers", "o lse from remote workers"),
        ("backward", "q do o lse k v to remote workers", "dq dk dv from remote workers"),
    ],
)
def test_remote_workers_are_asked_first_and_waited_for_last(direction, call, answer, forwards):
    served = made(direction, "second", 1, forwards, remote_workers=True)
    unserved = made(direction, "second", 1, forwards, remote_workers=False)
    assert served[0].name == f"{unserved[0].name}, {call}"
    assert served[-1].name == f"{unserved[-1].name}, {answer}"
    assert served[1:-1] == unserved[1:-1]


@pytest.mark.parametrize("turn", ["alone", "first", "second"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_ranks_issue_the_same_transfers_whatever_tasks_they_have(direction, turn):
    all_keys = sorted(calls_of("backward", "alone", 1) | {("local", 0)})
    combinations = (itertools.combinations(all_keys, count) for count in range(6))
    transfers_of_schedules = set()
    for keys in map(frozenset, itertools.chain(*combinations)):
        schedule = made(direction, turn, calls=keys)
        pauses = [0, *itertools.accumulate(phase.pause for phase in schedule)]
        transfers = [
            (pause, verb, operand)
            for pause, phase in zip(pauses, schedule, strict=False)
            for verb, operand in steps(phase)
            if verb != "run"
        ]
        transfers_of_schedules.add((pauses[-1], *transfers))
        parts = {("local part", 0), ("local part", 1)}
        divided = (direction, turn) == ("backward", "alone") and not parts.isdisjoint(keys)
        local = parts if divided else {("local", 0)}
        expected = {*local, ("remote-KV", 0), ("remote-query", 0)}
        assert sorted(call.key for call in calls(schedule)) == sorted(keys & expected)
    ((pause_count, *_),) = transfers_of_schedules
    assert pause_count == 2


def steps(phase):
    """What happens in a phase, one thing after another."""
    return [(verb, operand) for verb in ("wait", "run", "send") for operand in getattr(phase, verb)]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("forwards", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5, 7, 12])
@pytest.mark.parametrize("turn", ["alone", "first", "second"])
def test_rows_take_one_hop_after_another_and_their_memory_is_used_again(
    turn, stages, forwards, direction
):
    schedule = made(direction, turn, stages, forwards, remote_workers=True)
    order = [step for phase in schedule for step in steps(phase)]
    # 1. What is sent is waited for once, and in the order of its group.
    transfers = [(verb, step) for verb, step in order if verb != "run" and step.rows != "remote"]
    sent = [transfer for verb, transfer in transfers if verb == "send"]
    awaited = [transfer for verb, transfer in transfers if verb == "wait"]
    assert len(set(sent)) == len(sent)
    assert sorted(sent, key=str) == sorted(awaited, key=str)
    transfers_a_hop = stages * (2 if direction == "backward" else 1)
    assert sum(transfer.rows == "keys" for transfer in sent) == transfers_a_hop
    assert sum(transfer.rows == "forwarded" for transfer in sent) == transfers_a_hop * forwards
    # 2. Rows go there, perhaps in two hops, are computed with, and their gradients go back.
    lives = []
    for stage in range(stages):
        places = places_of_stage(order, stage, forwards, direction)
        assert len(places["run"]) == (3 if stages > 1 else 2)
        in_turn = [*places["keys"], *places["run"], *places["gradients"]]
        assert in_turn == sorted(in_turn)
        lives.append((in_turn[0], in_turn[-1]))
    # 3. A slot holds one stage after another.
    slots = stage_slots(stages, forwards=forwards)
    buffers = 5 if forwards else 3
    assert max(slots) + 1 == min(stages, buffers)
    for slot in set(slots):
        slot_lives = [life for life, number in zip(lives, slots, strict=True) if number == slot]
        assert all(last < first for (_, last), (first, _) in itertools.pairwise(slot_lives))
    # 4. No slot is to spare: with enough stages all are in use at once.
    if direction == "backward" and stages >= buffers:
        slots_in_use = [
            sum(first <= place <= last for first, last in lives) for place in range(len(order))
        ]
        assert max(slots_in_use) == buffers


def places_of_stage(order, stage, forwards, direction) -> dict[str, list[int]]:
    """Places in a schedule where a stage's keys travel, are computed with, and gradients travel."""
    keys = Transfer("keys", ("k", "v"), stage=stage)
    gradients = Transfer("keys", ("dk", "dv"), True, stage)
    key_hops = [keys, replace(keys, rows="forwarded")] if forwards else [keys]
    gradient_hops = [replace(gradients, rows="forwarded"), gradients] if forwards else [gradients]

    def places_of(hops: list[Transfer]) -> list[int]:
        return [order.index((verb, hop)) for hop in hops for verb in ("send", "wait")]

    runs = [
        place
        for place, (verb, call) in enumerate(order)
        if verb == "run" and call.stage == stage and call.keys == "received"
    ]
    return {
        "keys": places_of(key_hops),
        "run": runs,
        "gradients": places_of(gradient_hops) if direction == "backward" else [],
    }


def test_shares_of_the_parts_of_local_tasks():
    """A rank has four times the local tasks of another: a fourth hides exchanges, at both ends."""
    pairs = np.array([400.0, 100.0, 101.0])
    alone = local_shares("alone", 6, pairs, 100, windowed=False)
    assert [alone[part].tolist() for part in (0, 1, 6)] == [
        pytest.approx([0.125 + 0.75 / 7, 0.5, 0.5]),
        pytest.approx([0.75 / 7, 0, 0]),  # a hundredth is not worth kernel calls
        pytest.approx([0.125 + 0.75 / 7, 0.5, 0.5]),
    ]
    first = local_shares("first", 6, pairs, 100, windowed=False)
    assert [share[0] for share in first.values()] == pytest.approx([0.375, *[0.125] * 5])
    for shares in (alone, first):
        assert sum(shares.values()) == pytest.approx(1)
    for turn, shares in (("alone", [0.5, 0.5]), ("first", [1])):
        assert [*local_shares(turn, 4, pairs[0], 100, windowed=False).values()] == shares
        assert [*local_shares(turn, 6, pairs[0], 100, windowed=True).values()] == shares
