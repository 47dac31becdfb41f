import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hf_distca.cli.main import main
from hf_distca.dispatch.groups import Groups
from hf_distca.pool.directory import Directory
from hf_distca.pool.memory import Choice
from hf_distca.pool.rank.members import Members
from hf_distca.pool.token import make_token, write_token
from hf_distca.pool.wire import LinkLost
from tests.pool.server.fake_ranks import FULL, Data, FakeRank, make_call, make_nano_batch, run_calls
from tests.pool.server.processes import ServerProcess
from tests.pool.servers import alike, wait_until
from tests.pool.transport.ends import CPU, memory_of, needs_nixl


@pytest.fixture
def token():
    return make_token()


@pytest.fixture
def directory(token):
    directory = Directory("127.0.0.1", 0, token)
    yield directory
    directory.close()


@pytest.fixture
def serve(directory, token, tmp_path):
    """Start a server process; ended after the test."""
    started = []

    def start(*options):
        started.append(ServerProcess(directory, token, tmp_path, *options))
        return started[-1]

    yield start
    for server in started:
        server.close()


def test_a_process_serves_two_trainers_and_ends_with_training(serve, directory, token):
    server = serve()
    member = server.joined()
    ranks = [FakeRank(member.port, token, rank, 2, 2) for rank in range(2)]
    nano_batches = [make_nano_batch([300, 37, 1, 255], 2, 1, seed) for seed in (1, 2)]
    ranks[0].send_plan(0, nano_batches)
    run_calls(ranks, 0, nano_batches)
    directory.end()
    assert server.process.wait(60) == 0
    for rank in ranks:
        rank.link.close()
    assert "joined" in server.text()
    assert server.text().endswith("training has ended\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_cleanly(serve, token, directory, number):
    server = serve()
    rank = FakeRank(server.joined().port, token, 0, 1, 1)
    nano_batches = [make_nano_batch([64], 1, 1, 0)]
    rank.send_plan(0, nano_batches)
    run_calls([rank], 0, nano_batches)
    server.process.send_signal(number)
    assert server.process.wait(60) == 0
    rank.link.close()
    assert server.text().endswith("stopped\n")
    assert "Traceback" not in server.text()


def stopped(pid):
    """Whether every thread of a process is: a signal takes its time."""
    states = [stat.read_text().rpartition(")")[2].split()[0] for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    return set(states) == {"T"}


def test_a_server_that_hangs_or_dies_is_noticed_and_one_that_wakes_up_joins_again(serve, directory, token):
    server = serve()
    first = server.joined()
    nano_batches = [make_nano_batch([64], 1, 1, 0)]
    rank = FakeRank(first.port, token, 0, 1, 1)
    rank.send_plan(0, nano_batches)
    number = run_calls([rank], 0, nano_batches)
    server.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: stopped(server.process.pid))
    plan = nano_batches[0].plans[FULL]
    call = make_call(0, number, 0, FULL, "forward")
    with pytest.raises(LinkLost, match="no reply within"):
        rank.finish(rank.start(call, plan, Data(plan, call, 1)), 0, timeout_s=0.5)
    directory.drop(first.id)
    server.process.send_signal(signal.SIGCONT)
    second = server.joined()
    assert second.id != first.id
    rank = FakeRank(second.port, token, 0, 1, 1)
    rank.send_plan(0, nano_batches)
    number = run_calls([rank], 0, nano_batches, number)
    server.process.kill()
    # While one starts the call, the other thread of its link may already have noticed.
    with pytest.raises(LinkLost, match=r"closed|reset|Broken pipe"):
        rank.finish(rank.start(call, plan, Data(plan, call, 1)), 0)
    wait_until(lambda: not directory.members())


def test_a_run_that_is_gone_is_waited_for_and_then_given_up(serve, directory):
    server = serve("--wait", "1")
    server.joined()
    directory.close()
    assert server.process.wait(60) == 2
    assert "no training run answered within 1 s" in server.text()
    assert "Traceback" not in server.text()


def refused(options, capsys):
    with pytest.raises(SystemExit) as exit_:
        raise SystemExit(main(["serve", *options]))
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_wrong_options_are_said_in_a_line(capsys, tmp_path, token):
    path = tmp_path / "token"
    write_token(path, token)
    good = ["--join", "127.0.0.1:1", "--token-file", str(path)]
    for options, said in [
        (["--token-file", "x"], "--join"),
        (["--join", "127.0.0.1", "--token-file", "x"], "must be HOST:PORT"),
        (["--join", "127.0.0.1:99999", "--token-file", "x"], "port from 1 to 65535"),
        (["--join", "127.0.0.1:1", "--token-file", str(tmp_path / "none")], "cannot read the token file"),
        ([*good, "--device", "gpu"], "'gpu' is not a device"),
        ([*good, "--device", "meta"], "cannot serve"),
        ([*good, "--device", "cuda:99"], "device 'cuda:99' does not exist"),
        ([*good, "--attention-kernel", "fast"], "no kernel is named 'fast'"),
        ([*good, "--threads", "0"], "--threads: must be a positive whole number"),
        ([*good, "--wait", "nan"], "number of seconds"),
        ([*good, "--port", "-1"], "--port: must be 0 or a positive whole number"),
        ([*good, "--bind", "192.0.2.1"], "cannot listen on 192.0.2.1:0"),
        ([*good, "--wait", "0"], "cannot connect to 127.0.0.1:1"),
    ]:
        error = refused(options, capsys)
        assert said in error
        assert len(error.splitlines()) == 1
        assert token.hex() not in error
    path.chmod(0o644)
    assert "chmod 600" in refused(good, capsys)


def test_another_token_is_said(capsys, tmp_path, directory):
    path = tmp_path / "token"
    write_token(path, make_token())
    options = ["--join", f"127.0.0.1:{directory.port}", "--token-file", str(path)]
    assert "another token" in refused(options, capsys)


def test_a_port_in_use_is_said(capsys, tmp_path, token):
    path = tmp_path / "token"
    write_token(path, token)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        error = refused(["--join", "127.0.0.1:1", "--token-file", str(path), "--port", port], capsys)
    assert f"cannot listen on 127.0.0.1:{port}" in error


@needs_nixl
@pytest.mark.parametrize(
    ("rank", "server", "why"),
    [
        (
            Choice.TCP,
            "nixl",
            r"the server uses NIXL only, but this rank cannot: the rank does not use NIXL; .* or set attention_",
        ),
        (Choice.NIXL, "tcp", r"the server does not use NIXL: .*; serve with --transport nixl"),
    ],
)
def test_a_server_with_another_transport_is_told_why_and_ends(
    rank, server, why, capsys, caplog, tmp_path, directory, token, monkeypatch
):
    monkeypatch.setattr("hf_distca.pool.server.server.measure_speed", alike)
    members = Members(Groups(CPU, 60), memory_of(rank, "rank"), token, directory, 20.0)
    path = tmp_path / "token"
    write_token(path, token)

    def take_in():
        wait_until(directory.members, 60)
        return members.update([members.news()])

    with ThreadPoolExecutor(1) as beside:
        taken_in = beside.submit(take_in)
        options = ["--join", f"127.0.0.1:{directory.port}", "--token-file", str(path), "--transport", server]
        error = refused(options, capsys)
    assert taken_in.result() == []
    assert len(error.splitlines()) == 1
    assert re.search(f"error: the training run cannot use this server: .*{why}", error)
    (warning,) = caplog.messages  # of rank 0
    assert re.search(f"cannot take part: .*{why}", warning)
