import socket
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hf_distca.pool.directory import SERVICE, Directory, Membership, ServerInfo, server_info
from hf_distca.pool.messages import Alive, End, Refused, Reply, ServerHello, ServerWelcome
from hf_distca.pool.token import make_token
from hf_distca.pool.wire import AuthenticationError, LinkLost, MismatchError, ProtocolError, connect
from tests.pool.servers import wait_until
from tests.pool.strangers import Strangers, message

HELLO = ServerHello(host="", port=4000, device="cpu", pairs_per_second=1e9)


@pytest.fixture
def token():
    return make_token()


@pytest.fixture
def directory(token):
    directory = Directory("127.0.0.1", 0, token, silence_s=60)
    yield directory
    directory.close()


def join(directory, token, **info):
    return Membership.join("127.0.0.1", directory.port, token, replace(HELLO, **info), wait_s=30)


def test_servers_join_and_leave_and_ids_are_not_used_again(directory, token):
    first = join(directory, token)
    second = join(directory, token, host="10.0.0.7", port=4001, device="cuda:0")
    assert directory.members() == (
        ServerInfo(first.id, "127.0.0.1", 4000, "cpu", 1e9),
        ServerInfo(second.id, "10.0.0.7", 4001, "cuda:0", 1e9),
    )
    first.close()
    wait_until(lambda: [info.id for info in directory.members()] == [second.id])
    third = join(directory, token)
    assert len({first.id, second.id, third.id}) == 3
    assert third.poll(0) is None
    second.close()
    third.close()


def test_the_end_is_told_to_members_and_to_those_that_come_later(directory, token):
    member = join(directory, token)
    assert member.poll(0.05) is None
    directory.end()
    late = join(directory, token)
    assert member.poll(60) == End()
    assert late.poll(60) == End()
    member.close()
    late.close()


def test_a_dropped_server_notices_and_can_come_back_unless_it_is_told_why_not(directory, token):
    member = join(directory, token)
    directory.drop(member.id)
    assert directory.members() == ()
    directory.drop(member.id)
    with pytest.raises(LinkLost):
        member.poll(60)
    again = join(directory, token)
    assert again.id != member.id
    directory.drop(again.id, "it cannot be used")
    assert again.poll(60) == Refused("it cannot be used")
    member.close()
    again.close()


def test_a_directory_that_is_gone_is_noticed(directory, token):
    member = join(directory, token)
    directory.close()
    with pytest.raises(LinkLost):
        member.poll(60)
    member.close()


def test_a_silent_member_is_dropped_and_one_that_is_polled_is_not(token, monkeypatch):
    monkeypatch.setattr("hf_distca.pool.directory.ALIVE_S", 0.1)
    directory = Directory("127.0.0.1", 0, token, silence_s=3)
    # Were it taken for silent, the older member would go first.
    alive, silent = join(directory, token), join(directory, token)
    wait_until(lambda: alive.poll(0.05) is not None or len(directory.members()) < 2)
    assert [info.id for info in directory.members()] == [alive.id]
    with pytest.raises(LinkLost):
        silent.poll(60)
    assert alive.poll(0) is None
    silent.close()
    alive.close()
    directory.close()


def test_a_member_says_now_and_then_that_it_is_alive(directory, token, monkeypatch):
    member = join(directory, token)
    now = member._said_alive
    monkeypatch.setattr("hf_distca.pool.directory.time", SimpleNamespace(monotonic=lambda: now))
    sent = []
    monkeypatch.setattr(member._channel, "send", lambda message, timeout_s: sent.append((now, message)))
    begin = now
    for _ in range(9):
        assert member.poll(0) is None
        now += 0.75
    assert sent == [(begin + after, Alive()) for after in (2.25, 4.5)]
    member.close()


def test_a_server_may_come_before_the_directory(token):
    with socket.create_server(("127.0.0.1", 0)) as there:
        port = there.getsockname()[1]
    members, tried = [], threading.Event()

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
    with socket.create_server(("127.0.0.1", 0)) as there:
        port = there.getsockname()[1]
    with pytest.raises(LinkLost, match="no training run answered within 1 s; the last error: cannot connect"):
        Membership.join("127.0.0.1", port, token, HELLO, 1)
    answers = iter([False, True])
    with pytest.raises(LinkLost, match="no training run answered within 6000 s; the last error: cannot connect"):
        Membership.join("127.0.0.1", port, token, HELLO, 6000, give_up=lambda: next(answers))


def test_a_wrong_token_is_not_tried_again(directory):
    with pytest.raises(AuthenticationError, match="another token"):
        Membership.join("127.0.0.1", directory.port, make_token(), HELLO, 60)


def test_a_server_that_ranks_could_not_reach_is_told_so():
    with pytest.raises(MismatchError, match=r"such as 10\.0\.0\.7"):
        server_info(replace(HELLO, host="127.0.0.1"), 0, "10.0.0.7")
    assert server_info(HELLO, 0, "10.0.0.7").host == "10.0.0.7"
    assert server_info(replace(HELLO, host="::1"), 0, "::1").host == "::1"


def test_a_member_that_sends_something_else_is_dropped(directory, token):
    with pytest.raises(ProtocolError, match="a server begins with its hello, got Alive"):
        server_info(Alive(), 0, "10.0.0.7")
    channel = connect("127.0.0.1", directory.port, token, SERVICE, 60)
    channel.ask(HELLO, ServerWelcome, 60)
    channel.send(Reply(0, 0.0, 0))
    assert channel.receive().message.reason == "a member sends nothing but Alive, got Reply"
    wait_until(lambda: directory.members() == ())
    channel.close()


def test_strangers_do_not_disturb_the_members(token, caplog):
    directory = Directory("127.0.0.1", 0, token)
    member = join(directory, token)
    hello = message(replace(HELLO, port=4007))
    valid = [
        message(Alive()),
        message(Alive(), bytes(8)),
        message(Alive(), payload_bytes=2**50),
        message(End()),
        hello,
    ]
    strangers = Strangers(directory.port, token, SERVICE, hello, valid, seed=0)
    threads = threading.active_count()
    for _ in range(2_000):
        strangers()
        member.poll(0)
    # Some joined for a while: they know the token and say nothing wrong.
    assert all(info.port == 4007 for info in directory.members() if info.id != member.id)
    strangers.close()
    wait_until(lambda: [info.id for info in directory.members()] == [member.id])
    wait_until(lambda: threading.active_count() == threads)
    late = join(directory, token, port=4001)
    directory.end()
    assert member.poll(60) == End()
    assert late.poll(60) == End()
    member.close()
    late.close()
    directory.close()
    assert "refused" in caplog.text
    assert "refusals so far" in caplog.text
    assert "Traceback" not in caplog.text
    assert len(caplog.text) < 100_000
