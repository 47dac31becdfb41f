import threading
from dataclasses import replace

import pytest

from hf_distca.pool import directory as directories
from hf_distca.pool.directory import Directory, Membership, reachable
from hf_distca.pool.messages import Alive, End, Refused, Reply, ServerHello, ServerWelcome
from hf_distca.pool.wire import DIRECTORY, LinkLost, MismatchError, ProtocolError, connect
from tests.pool.servers import TOKEN, wait_until
from tests.ranks import free_port

HELLO = ServerHello(host="", port=4000, device="cpu", pairs_per_second=1e9)


@pytest.fixture
def directory():
    directory = Directory("127.0.0.1", 0, TOKEN, silence_s=60)
    yield directory
    directory.close()


@pytest.fixture
def join(directory):
    """Joins; the member leaves after the test."""
    members = []

    def join(**info):
        members.append(Membership.join("127.0.0.1", directory.port, TOKEN, replace(HELLO, **info), wait_s=30))
        return members[-1]

    yield join
    for member in members:
        member.close()


def test_servers_join_and_leave_and_come_back_unless_they_are_refused(directory, join):
    first, second = join(), join(host="10.0.0.7", port=4001, device="cuda:0")
    assert directory.members() == {
        first.id: ServerHello("127.0.0.1", 4000, "cpu", 1e9),
        second.id: ServerHello("10.0.0.7", 4001, "cuda:0", 1e9),
    }
    first.close()
    wait_until(lambda: list(directory.members()) == [second.id])
    for _ in range(2):
        directory.drop(second.id)
        assert directory.members() == {}
    with pytest.raises(LinkLost):
        second.poll(60)
    again = join()
    assert again.id not in (first.id, second.id)
    directory.drop(again.id, "it cannot be used")
    assert again.poll(60) == Refused("it cannot be used")


def test_the_end_reaches_members_and_later_ones_and_then_the_directory_is_gone(directory, join):
    member = join()
    assert member.poll(0.05) is None
    directory.end()
    late = join()
    assert member.poll(60) == End()
    assert late.poll(60) == End()
    directory.close()
    with pytest.raises(LinkLost):
        member.poll(60)


def test_a_silent_member_is_dropped_and_one_that_is_polled_is_not(monkeypatch):
    monkeypatch.setattr(directories, "ALIVE_S", 0.1)
    directory = Directory("127.0.0.1", 0, TOKEN, silence_s=1.5)
    # Were it taken for silent, the older member would go first.
    alive, silent = (Membership.join("127.0.0.1", directory.port, TOKEN, HELLO, 30) for _ in range(2))
    wait_until(lambda: alive.poll(0.05) is not None or len(directory.members()) < 2)
    assert list(directory.members()) == [alive.id]
    with pytest.raises(LinkLost):
        silent.poll(60)
    assert alive.poll(0) is None
    silent.close()
    alive.close()
    directory.close()


def test_a_server_may_come_before_the_directory_and_waits_only_so_long():
    port, members, tried = free_port(), [], threading.Event()

    def come():
        members.append(Membership.join("127.0.0.1", port, TOKEN, HELLO, 60, give_up=tried.set))

    thread = threading.Thread(target=come)
    thread.start()
    assert tried.wait(60)
    directory = Directory("127.0.0.1", port, TOKEN)
    thread.join()
    assert list(directory.members()) == [members[0].id]
    members[0].close()
    with pytest.raises(ProtocolError, match="another token"):  # which is not tried again
        Membership.join("127.0.0.1", port, bytes(32), HELLO, 60)
    directory.close()
    for wait_s, answers in ((0, [False]), (6000, [False, True])):
        left = iter(answers)
        expected = f"no training run answered within {wait_s} s; the last error: cannot connect"
        with pytest.raises(LinkLost, match=expected):
            Membership.join("127.0.0.1", free_port(), TOKEN, HELLO, wait_s, give_up=lambda left=left: next(left))


def test_a_server_that_ranks_could_not_reach_or_that_says_something_else_is_refused(directory):
    with pytest.raises(MismatchError, match=r"such as 10\.0\.0\.7"):
        reachable(replace(HELLO, host="127.0.0.1"), "10.0.0.7")
    assert reachable(HELLO, "10.0.0.7").host == "10.0.0.7"
    assert reachable(replace(HELLO, host="::1"), "::1").host == "::1"
    with pytest.raises(ProtocolError, match="a server begins with its hello, got Alive"):
        reachable(Alive(), "10.0.0.7")
    channel = connect("127.0.0.1", directory.port, TOKEN, DIRECTORY, 60)
    channel.ask(HELLO, ServerWelcome, 60)
    channel.send(Reply(0, 0.0, 0))
    assert channel.receive()[0].reason == "a member sends nothing but Alive, got Reply"
    wait_until(lambda: directory.members() == {})
    channel.close()
