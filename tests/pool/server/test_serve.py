import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from hf_distca.cli.main import main
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.planner.settings import PlanSettings
from hf_distca.pool.directory import Directory
from hf_distca.pool.rank.pool import Pool
from hf_distca.pool.token import make_token, write_token
from hf_distca.pool.transport import Choice
from tests.pool.server.fake_ranks import FULL, FakeRank
from tests.pool.servers import ServeCommand, alike, wait_until
from tests.pool.transport.ends import CPU, memory_of, needs_nixl


@pytest.fixture
def token():
    return make_token()


@pytest.fixture
def directory(token):
    directory = Directory("127.0.0.1", 0, token)
    yield directory
    directory.close()


def test_a_signal_stops_it_cleanly(directory, token, tmp_path):
    server = ServeCommand(directory.port, token, tmp_path / "output")
    try:
        server.wait_for("joined")
        rank = FakeRank(directory.members()[0].port, token, 0, 1, 1)
        server.process.send_signal(signal.SIGTERM)  # SIGINT is handled alike
        assert server.process.wait(60) == 0
        rank.link.close()
    finally:
        server.close()
    assert server.output.read_text().endswith("stopped\n")
    assert "Traceback" not in server.output.read_text()


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
        ([*good, "--device", "gpu"], "no device 'gpu' on this host; set --device to cpu"),
        ([*good, "--device", "cuda:99"], "no device 'cuda:99' on this host"),
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


def test_another_token_and_a_port_in_use_are_said(capsys, tmp_path, directory):
    path = tmp_path / "token"
    write_token(path, make_token())
    options = ["--join", f"127.0.0.1:{directory.port}", "--token-file", str(path)]
    assert "another token" in refused(options, capsys)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert f"cannot listen on 127.0.0.1:{port}" in refused([*options, "--port", port], capsys)


@needs_nixl
def test_a_server_with_another_transport_is_told_why_and_ends(capsys, caplog, tmp_path, directory, token, monkeypatch):
    monkeypatch.setattr("hf_distca.pool.server.measure_speed", alike)
    monkeypatch.setattr("hf_distca.pool.rank.pool.measure_speed", alike)
    dispatcher = Dispatcher(PlanSettings(1, 64, (FULL,)), CPU)
    pool = Pool(dispatcher, token, directory, memory_of(Choice.NIXL, "rank"), timeout_s=20.0)
    path = tmp_path / "token"
    write_token(path, token)

    def take_in():
        wait_until(directory.members, 60)
        pool.refresh()

    with ThreadPoolExecutor(1) as beside:
        taken_in = beside.submit(take_in)
        options = ["--join", f"127.0.0.1:{directory.port}", "--token-file", str(path), "--transport", "tcp"]
        error = refused(options, capsys)
    taken_in.result()
    assert pool.servers == ()
    assert len(error.splitlines()) == 1
    why = "the server does not use NIXL: .*; serve with --transport nixl"
    assert re.search(f"error: the training run cannot use this server: .*{why}", error)
    (warning,) = caplog.messages  # of rank 0
    assert re.search(f"cannot take part: .*{why}", warning)
