"""Servers join and leave a run's directory, by `hf-distca serve` as well."""

import re
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from hf_distca.cli.main import main
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.planner.settings import PlanSettings
from hf_distca.pool.directory import Directory, join, reachable
from hf_distca.pool.messages import Alive, End, Refused, Reply, ServerHello
from hf_distca.pool.rank.pool import Pool
from hf_distca.pool.token import make_token, write_token
from hf_distca.pool.transport import Choice
from hf_distca.pool.wire import LinkLost, MismatchError, ProtocolError
from tests.pool.ends import CPU, FULL, TOKEN, FakeRank, memory_of, needs_nixl
from tests.pool.servers import ServeCommand, alike, wait_until
from tests.ranks import free_port

HELLO = ServerHello(host="", port=4000, device="cpu", pairs_per_second=1e9)


@pytest.fixture
def directory():
    directory = Directory("127.0.0.1", 0, TOKEN, silence_s=60)
    yield directory
    directory.close()


@pytest.fixture
def joined():
    """Joins a directory and returns the connection and the id; the member leaves after the test."""
    channels = []

    def joined(directory, token=TOKEN, wait_s=30, give_up=lambda: False, **info):
        port = directory if isinstance(directory, int) else directory.port
        channel, member = join("127.0.0.1", port, token, replace(HELLO, **info), wait_s, give_up)
        channels.append(channel)
        return channel, member

    yield joined
    for channel in channels:
        channel.close()


def test_servers_join_and_leave_and_come_back_unless_they_are_refused(directory, joined):
    (first, first_id), (second, second_id) = joined(directory), joined(directory, host="10.0.0.7", port=4001)
    assert directory.members() == {
        first_id: ServerHello("127.0.0.1", 4000, "cpu", 1e9),
        second_id: ServerHello("10.0.0.7", 4001, "cpu", 1e9),
    }
    first.close()
    wait_until(lambda: list(directory.members()) == [second_id])
    for _ in range(2):
        directory.drop(second_id)
        assert directory.members() == {}
    with pytest.raises(LinkLost):
        second.receive(60)
    refused, refused_id = joined(directory)
    assert refused_id not in (first_id, second_id)
    directory.drop(refused_id, "it cannot be used")
    assert refused.receive(60)[0] == Refused("it cannot be used")
    wrong, _ = joined(directory)
    wrong.send(Reply(0, 0.0, 0))
    assert wrong.receive()[0].reason == "a member sends nothing but Alive, got Reply"
    wait_until(lambda: directory.members() == {})
    member, _ = joined(directory)
    directory.end()
    late, _ = joined(directory)
    assert member.receive(60)[0] == late.receive(60)[0] == End()
    directory.close()
    with pytest.raises(LinkLost):
        member.receive(60)


def test_a_silent_member_is_dropped(joined):
    directory = Directory("127.0.0.1", 0, TOKEN, silence_s=0.3)
    silent, _ = joined(directory)
    silent.send(Alive())
    with pytest.raises(LinkLost):
        silent.receive(60)
    wait_until(lambda: not directory.members())
    directory.close()


def test_a_server_may_come_before_the_directory_and_waits_only_so_long(joined):
    port, tried = free_port(), threading.Event()
    with ThreadPoolExecutor(1) as beside:
        coming = beside.submit(joined, port, wait_s=60, give_up=tried.set)
        assert tried.wait(60)
        directory = Directory("127.0.0.1", port, TOKEN)
        _, member = coming.result()
        assert list(directory.members()) == [member]
    with pytest.raises(ProtocolError, match="another token"):  # which is not tried again
        joined(directory, bytes(32))
    directory.close()
    for wait_s, answers in ((0, [False]), (6000, [False, True])):
        expected = f"no training run answered within {wait_s} s; the last error: cannot connect"
        with pytest.raises(LinkLost, match=expected):
            joined(free_port(), wait_s=wait_s, give_up=iter(answers).__next__)


def test_a_server_that_ranks_could_not_reach_or_that_says_something_else_is_refused():
    with pytest.raises(MismatchError, match=r"such as 10\.0\.0\.7"):
        reachable(replace(HELLO, host="127.0.0.1"), "10.0.0.7")
    assert reachable(HELLO, "10.0.0.7").host == "10.0.0.7"
    assert reachable(replace(HELLO, host="::1"), "::1").host == "::1"
    with pytest.raises(ProtocolError, match="a server begins with its hello, got Alive"):
        reachable(Alive(), "10.0.0.7")


def test_a_signal_stops_a_server_cleanly(directory, tmp_path):
    server = ServeCommand(directory.port, TOKEN, tmp_path / "output")
    try:
        server.wait_for("joined")
        rank = FakeRank(directory.members()[0].port, 0, 1)
        server.process.send_signal(signal.SIGTERM)  # SIGINT is handled alike
        assert server.process.wait(60) == 0
        rank.link.close()
    finally:
        server.close()
    assert server.output.read_text().endswith("stopped\n")
    assert "Traceback" not in server.output.read_text()


@pytest.fixture
def refused(capsys, tmp_path):
    """Runs `hf-distca serve` with a token until it ends with an error, and returns the error."""

    def refused(token, *options):
        path = tmp_path / "token"
        write_token(path, token)
        with pytest.raises(SystemExit) as exit_:
            raise SystemExit(main(["serve", "--token-file", str(path), *options]))
        assert exit_.value.code == 2
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1
        assert token.hex() not in error
        return error

    return refused


def test_wrong_options_are_said_in_a_line(refused, directory):
    with socket.create_server(("127.0.0.1", 0)) as other:
        used = str(other.getsockname()[1])
        for options, said in [
            ([], "--join"),
            (["--join", "127.0.0.1"], "must be HOST:PORT"),
            (["--join", "127.0.0.1:99999"], "port from 1 to 65535"),
            (["--join", "127.0.0.1:1", "--token-file", "/no/such/file"], "cannot read the token file"),
            (["--join", "127.0.0.1:1", "--device", "gpu"], "no device 'gpu' on this host; set --device to cpu"),
            (["--join", "127.0.0.1:1", "--device", "cuda:99"], "no device 'cuda:99' on this host"),
            (["--join", "127.0.0.1:1", "--attention-kernel", "fast"], "no kernel is named 'fast'"),
            (["--join", "127.0.0.1:1", "--threads", "0"], "--threads: must be a positive whole number"),
            (["--join", "127.0.0.1:1", "--wait", "nan"], "number of seconds"),
            (["--join", "127.0.0.1:1", "--port", "-1"], "--port: must be 0 or a positive whole number"),
            (["--join", "127.0.0.1:1", "--bind", "192.0.2.1"], "cannot listen on 192.0.2.1:0"),
            (["--join", "127.0.0.1:1", "--port", used], f"cannot listen on 127.0.0.1:{used}"),
            (["--join", "127.0.0.1:1", "--wait", "0"], "cannot connect to 127.0.0.1:1"),
            (["--join", f"127.0.0.1:{directory.port}"], "another token"),
        ]:
            assert said in refused(make_token(), *options)


@needs_nixl
def test_a_server_with_another_transport_is_told_why_and_ends(refused, caplog, directory, monkeypatch):
    monkeypatch.setattr("hf_distca.pool.server.measure_speed", alike)
    monkeypatch.setattr("hf_distca.pool.rank.pool.measure_speed", alike)
    dispatcher = Dispatcher(PlanSettings(1, 64, (FULL,)), CPU)
    pool = Pool(dispatcher, TOKEN, directory, memory_of(Choice.NIXL), timeout_s=20.0)
    with ThreadPoolExecutor(1) as beside:
        taken_in = beside.submit(lambda: (wait_until(directory.members, 60), pool.refresh()))
        error = refused(TOKEN, "--join", f"127.0.0.1:{directory.port}", "--transport", "tcp")
    taken_in.result()
    assert pool.servers == ()
    why = "the server does not use NIXL: .*; serve with --transport nixl"
    assert re.search(f"error: the training run cannot use this server: .*{why}", error)
    (warning,) = caplog.messages  # of rank 0
    assert re.search(f"cannot take part: .*{why}", warning)
