"""The schedule of a core attention: what comes when, as data."""

import itertools

import pytest

from hf_distca.dispatch.schedule import KernelCall, Phase, Transfer, make_schedule

ALL = frozenset(["own", "own 1/2", "own 2/2", "prefix", "visiting"])
UNDIVIDED = frozenset(["own", "prefix", "visiting"])


def names(schedule):
    """The phases' names; "|" where the other nano-batch runs."""
    return [part for phase in schedule for part in ([phase.name, "|"] if phase.pause else [phase.name])]


def test_a_forward_written_out():
    q, kv = Transfer("queries", ("q",)), Transfer("keys", ("k", "v"))
    results = Transfer("queries", ("o", "lse"), back=True)
    assert make_schedule("forward", "first", tasks=UNDIVIDED, windowed=False) == (
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
    tasks = ALL if turn == "alone" else UNDIVIDED
    assert " / ".join(names(make_schedule(direction, turn, tasks=tasks, windowed=False))) == expected


def test_own_tasks_that_are_not_divided_are_computed_while_rows_go_there():
    schedule = make_schedule("backward", "alone", tasks=frozenset(["own"]), windowed=False)
    assert [phase.name for phase in schedule if phase.run] == ["run own"]
    assert schedule[1].name == "run own"
    assert schedule[1].pause


def test_a_window_makes_prefix_tasks_whole():
    schedule = make_schedule("forward", "alone", tasks=UNDIVIDED, windowed=True)
    (prefix,) = (call for phase in schedule for call in phase.run if call.tasks == "prefix")
    assert prefix == KernelCall("prefix", "local", "received", causal=True, first=True)


@pytest.mark.parametrize(
    ("kept", "sent"),
    [("nothing", "do o lse q, k v"), ("received", "do o lse"), ("results", "do")],
)
def test_what_was_kept_is_not_sent_again(kept, sent):
    schedule = make_schedule("backward", "first", tasks=UNDIVIDED, windowed=False, kept=kept)
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
        make_schedule(direction, "second", tasks=UNDIVIDED, windowed=False, servers=servers)
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
            for tasks in map(frozenset, itertools.combinations(ALL, count)):
                schedule = make_schedule(direction, turn, tasks=tasks, windowed=False, kept=kept)
                assert sum(phase.pause for phase in schedule) == 2
                order, pauses = [], 0
                for phase in schedule:
                    order += [(pauses, "wait", transfer) for transfer in phase.wait]
                    order += [(pauses, "send", transfer) for transfer in phase.send]
                    pauses += phase.pause
                found.add(tuple(order))
                ran = [call.tasks for phase in schedule for call in phase.run]
                divided = (direction, turn) == ("backward", "alone") and "own 1/2" in tasks
                own = {"own 1/2", "own 2/2"} if divided else {"own"}
                assert sorted(ran) == sorted(tasks & (own | {"prefix", "visiting"}))
        assert len(found) == 1
