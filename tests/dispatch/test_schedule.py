"""The schedule of a core attention: what comes when, as data."""

import itertools

import pytest

from hf_distca.dispatch.schedule import IN_USE, KernelCall, Phase, Transfer, make_schedule

ALL = frozenset((tasks, 0) for tasks in ("own", "own 1/2", "own 2/2", "prefix", "visiting"))
UNDIVIDED = frozenset((tasks, 0) for tasks in ("own", "prefix", "visiting"))


def names(schedule):
    """The phases' names; "|" where the other nano-batch runs."""
    return [part for phase in schedule for part in ([phase.name, "|"] if phase.pause else [phase.name])]


def test_a_forward_written_out():
    q, kv = Transfer("queries", ("q",)), Transfer("keys", ("k", "v"))
    results = Transfer("queries", ("o", "lse"), back=True)
    assert make_schedule("forward", "first", groups=UNDIVIDED, windowed=False) == (
        Phase(send=(q, kv), pause=True),
        Phase(run=(KernelCall("own", "local", "local"),)),
        Phase(wait=(q, kv), run=(KernelCall("visiting", "received", "received"),), send=(results,)),
        Phase(run=(KernelCall("prefix", "local", "received", causal=False, first=False),), pause=True),
        Phase(wait=(results,)),
    )


@pytest.mark.parametrize(
    ("direction", "turn", "expected"),
    [
        (
            "forward",
            "alone",
            "send q, k v / run own / | / wait q, k v; run visiting; send o lse / run prefix / | / wait o lse",
        ),
        (
            "forward",
            "first",
            "send q, k v / | / run own / wait q, k v; run visiting; send o lse / run prefix / | / wait o lse",
        ),
        (
            "forward",
            "second",
            "send q, k v / run own / | / wait q, k v; run visiting; send o lse / run prefix / | / wait o lse",
        ),
        (
            "backward",
            "alone",
            "send do o lse q, k v / run own 1/2 / | / wait do o lse q, k v; run visiting; send dq / "
            "run prefix; send dk dv / run own 2/2 / | / wait dq, dk dv",
        ),
        (
            "backward",
            "second",
            "send do o lse q, k v / | / run own / wait do o lse q, k v; run visiting; send dq / "
            "run prefix; send dk dv / | / wait dq, dk dv",
        ),
        (
            "backward",
            "first",
            "send do o lse q, k v / | / wait do o lse q, k v; run visiting; send dq / "
            "run prefix; send dk dv / run own / | / wait dq, dk dv",
        ),
    ],
)
def test_phases_in_order(direction, turn, expected):
    groups = ALL if turn == "alone" else UNDIVIDED
    assert " / ".join(names(make_schedule(direction, turn, groups=groups, windowed=False))) == expected


def test_own_tasks_that_are_not_divided_are_computed_while_rows_go_there():
    schedule = make_schedule("backward", "alone", groups=frozenset([("own", 0)]), windowed=False)
    assert [phase.name for phase in schedule if phase.run] == ["run own"]
    assert schedule[1].name == "run own"
    assert schedule[1].pause


def test_a_window_makes_prefix_tasks_whole():
    schedule = make_schedule("forward", "alone", groups=UNDIVIDED, windowed=True)
    (prefix,) = (call for phase in schedule for call in phase.run if call.tasks == "prefix")
    assert prefix == KernelCall("prefix", "local", "received", causal=True, first=True)


@pytest.mark.parametrize(
    ("kept", "sent"),
    [("nothing", "do o lse q, k v"), ("received", "do o lse"), ("results", "do")],
)
def test_what_was_kept_is_not_sent_again(kept, sent):
    schedule = make_schedule("backward", "first", groups=UNDIVIDED, windowed=False, kept=kept)
    assert schedule[0].name == f"send {sent}"
    assert next(phase for phase in schedule if phase.wait).name == f"wait {sent}; run visiting; send dq"


@pytest.mark.parametrize(
    ("direction", "asked", "answered"),
    [
        ("forward", "q k v to servers", "o lse from servers"),
        ("backward", "q do o lse k v to servers", "dq dk dv from servers"),
    ],
)
def test_servers_are_asked_first_and_waited_for_last(direction, asked, answered):
    with_servers, without = (
        make_schedule(direction, "second", groups=UNDIVIDED, windowed=False, servers=servers)
        for servers in (True, False)
    )
    assert with_servers[0].name == f"{without[0].name}, {asked}"
    assert with_servers[-1].name == f"{without[-1].name}, {answered}"
    assert with_servers[1:-1] == without[1:-1]


def test_ranks_issue_the_same_transfers_whatever_tasks_they_have():
    for direction, turn, kept in itertools.product(
        ("forward", "backward"), ("alone", "first", "second"), ("nothing", "received", "results")
    ):
        found = set()
        for count in range(len(ALL) + 1):
            for groups in map(frozenset, itertools.combinations(ALL, count)):
                schedule = make_schedule(direction, turn, groups=groups, windowed=False, kept=kept)
                assert sum(phase.pause for phase in schedule) == 2
                order, pauses = [], 0
                for phase in schedule:
                    order += [(pauses, "wait", transfer) for transfer in phase.wait]
                    order += [(pauses, "send", transfer) for transfer in phase.send]
                    pauses += phase.pause
                found.add(tuple(order))
                ran = [call.group for phase in schedule for call in phase.run]
                divided = (direction, turn) == ("backward", "alone") and ("own 1/2", 0) in groups
                own = {"own 1/2", "own 2/2"} if divided else {"own"}
                expected = {(tasks, 0) for tasks in own | {"prefix", "visiting"}}
                assert sorted(ran) == sorted(groups & expected)
        assert len(found) == 1


DIVIDED = frozenset(
    [("own", 0), *((tasks, stage) for tasks in ("prefix", "visiting", "visiting prefix") for stage in range(4))]
)


def test_stages_of_a_forward_written_out():
    """Two stages are on their way or in use; a further one is sent where one has been computed with."""
    schedule = make_schedule("forward", "alone", groups=DIVIDED, windowed=False, stages=4)
    assert names(schedule) == [
        *["send q, k v, k v [1]", "run own", "|"],
        *["wait q, k v; run visiting, visiting prefix", "run prefix; send k v [2]"],
        *["wait k v [1]; run visiting [1], visiting prefix [1]", "run prefix [1]; send k v [3]"],
        *["wait k v [2]; run visiting [2], visiting prefix [2]", "run prefix [2]"],
        *["wait k v [3]; run visiting [3], visiting prefix [3]; send o lse", "run prefix [3]", "|"],
        "wait o lse",
    ]
    visiting = schedule[2].run
    assert visiting == (
        KernelCall("visiting", "received", "received", first=False),
        KernelCall("visiting prefix", "received", "received", causal=False, first=False),
    )


def test_stages_of_a_backward_written_out():
    schedule = make_schedule("backward", "first", groups=DIVIDED, windowed=False, stages=4)
    assert names(schedule) == [
        *["send do o lse q, k v, k v [1]", "|"],
        *["wait do o lse q, k v; run visiting, visiting prefix", "run prefix; send dk dv, k v [2]"],
        *["wait k v [1]; run visiting [1], visiting prefix [1]", "run prefix [1]"],
        *["wait dk dv; send dk dv [1], k v [3]", "wait k v [2]; run visiting [2], visiting prefix [2]"],
        *["run prefix [2]", "wait dk dv [1]; send dk dv [2]"],
        *["wait k v [3]; run visiting [3], visiting prefix [3]; send dq", "run prefix [3]"],
        *["wait dk dv [2]; send dk dv [3]", "run own", "|", "wait dq, dk dv [3]"],
    ]


@pytest.mark.parametrize("kept", ["received", "results"])
def test_kept_keys_are_not_sent_again_in_any_stage(kept):
    schedule = make_schedule("backward", "first", groups=DIVIDED, windowed=False, stages=4, kept=kept)
    sent = [transfer.name for phase in schedule for transfer in phase.send]
    assert sent[1:] == ["dk dv", "dk dv [1]", "dk dv [2]", "dq", "dk dv [3]"]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_is_sent_is_waited_for_and_its_memory_used_again_after_that(direction):
    for turn, stages in itertools.product(("alone", "first", "second"), (1, 2, 3, 7)):
        schedule = make_schedule(direction, turn, groups=frozenset(), windowed=False, stages=stages, servers=True)
        under_way, sent = set(), []
        for phase in schedule:
            under_way -= set(phase.wait)
            for transfer in phase.send:
                place = (transfer.rows, transfer.stage % IN_USE)
                assert place not in {(other.rows, other.stage % IN_USE) for other in under_way}
                under_way.add(transfer)
                sent.append(transfer)
        waited = {transfer for phase in schedule for transfer in phase.wait}
        # A call to servers begins with one transfer and ends with another.
        assert {transfer for transfer in sent if transfer.rows != "servers"} == {
            transfer for transfer in waited if transfer.rows != "servers"
        }
        assert len([transfer for transfer in sent if transfer.rows == "keys"]) == stages * (
            1 + (direction == "backward")
        )
