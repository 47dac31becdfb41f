import threading
from dataclasses import replace

import pytest

from hf_distca.pool import directory as directories
from hf_distca.pool.directory import Directory, Membership, ServerInfo, server_info
from hf_distca.pool.messages import Alive, End, Refused, Reply, ServerHello, ServerWelcome
from hf_distca.pool.token import make_token
from hf_distca.pool.wire import DIRECTORY, AuthenticationError, LinkLost, MismatchError, ProtocolError, connect
from tests.pool.servers import wait_until
from tests.ranks import free_port

HELLO = ServerHello(host="", port=4000, device="cpu", pairs_per_second=1e9)


@pytest.fixture
def token():
    return make_token()


@pytest.fixture
def directory(token):
    directory = Directory("127.0.0.1", 0, token, silence_s=60)
    yield directory
    directory.close()


@pytest.fixture
def join(directory, token):
    """Joins; the member leaves after the test."""
    members = []

    def join(**info):
        members.append(Membership.join("127.0.0.1", directory.port, token, replace(HELLO, **info), wait_s=30))
        return members[-1]

    yield join
    for member in members:
        member.close()


def test_servers_join_and_leave_and_ids_are_not_used_again(directory, join):
    first = join()
    second = join(host="10.0.0.7", port=4001, device="cuda:0")
    assert directory.members() == (
        ServerInfo(first.id, "127.0.0.1", 4000, "cpu", 1e9),
        ServerInfo(second.id, "10.0.0.7", 4001, "cuda:0", 1e9),
    )
    first.close()
    wait_until(lambda: [info.id for info in directory.members()] == [second.id])
    assert join().id not in (first.id, second.id)


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


def test_a_dropped_server_can_come_back_unless_it_is_refused(directory, join):
    member = join()
    directory.drop(member.id)
    assert directory.members() == ()
    directory.drop(member.id)
    with pytest.raises(LinkLost):
        member.poll(60)
    again = join()
    assert again.id != member.id
    directory.drop(again.id, "it cannot be used")
    assert again.poll(60) == Refused("it cannot be used")


def test_a_silent_member_is_dropped_and_one_that_is_polled_is_not(token, monkeypatch):
    monkeypatch.setattr(directories, "ALIVE_S", 0.1)
    directory = Directory("127.0.0.1", 0, token, silence_s=1.5)
    # Were it taken for silent, the older member would go first.
    alive, silent = (Membership.join("127.0.0.1", directory.port, token, HELLO, 30) for _ in range(2))
    wait_until(lambda: alive.poll(0.05) is not None or len(directory.members()) < 2)
    assert [info.id for info in directory.members()] == [alive.id]
    with pytest.raises(LinkLost):
        silent.poll(60)
    assert alive.poll(0) is None
    silent.close()
    alive.close()
    directory.close()


def test_a_server_may_come_before_the_directory(token):
    port, members, tried = free_port(), [], threading.Event()

    def come():
        members.append(Membership.join("127.0.0.1", port, token, HELLO, 60, give_up=tried.set))

    thread = threading.Thread(target=come)
    thread.start()
    assert tried.wait(60)
    directory = Directory("127.0.0.1", port, token)
    thread.join()
    assert [info.id for info in directory.members()] == [members[0].id]
    members[0].close()
    directory.close()


def test_waiting_for_a_directory_ends(token):
    for wait_s, answers in ((0, [False]), (6000, [False, True])):
        left = iter(answers)
        expected = f"no training run answered within {wait_s} s; the last error: cannot connect"
        with pytest.raises(LinkLost, match=expected):
            Membership.join("127.0.0.1", free_port(), token, HELLO, wait_s, give_up=lambda left=left: next(left))


def test_a_wrong_token_is_not_tried_again(directory):
    with pytest.raises(AuthenticationError, match="another token"):
        Membership.join("127.0.0.1", directory.port, make_token(), HELLO, 60)


def test_a_server_that_ranks_could_not_reach_is_refused():
    with pytest.raises(MismatchError, match=r"such as 10\.0\.0\.7"):
        server_info(replace(HELLO, host="127.0.0.1"), 0, "10.0.0.7")
    assert server_info(HELLO, 0, "10.0.0.7").host == "10.0.0.7"
    assert server_info(replace(HELLO, host="::1"), 0, "::1").host == "::1"
    with pytest.raises(ProtocolError, match="a server begins with its hello, got Alive"):
        server_info(Alive(), 0, "10.0.0.7")


def test_a_member_that_sends_something_else_is_dropped(directory, token):
    channel = connect("127.0.0.1", directory.port, token, DIRECTORY, 60)
    channel.ask(HELLO, ServerWelcome, 60)
    channel.send(Reply(0, 0.0, 0))
    assert channel.receive()[0].reason == "a member sends nothing but Alive, got Reply"
    wait_until(lambda: directory.members() == ())
    channel.close()
