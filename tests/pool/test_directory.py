"""Servers join and leave a run's directory, by `hf-distca serve` as well."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from hf_distca.cli.main import main
from hf_distca.pool.directory import Directory, join, reachable
from hf_distca.pool.messages import Alive, End, Refused, Reply, ServerHello
from hf_distca.pool.token import make_token, write_token
from hf_distca.pool.wire import LinkLost, MismatchError, PeerLeft, ProtocolError
from tests.pool.ends import TOKEN, wait_until
from tests.ranks import free_port

pytestmark = pytest.mark.timeout(100)  # whoever waits for ever has failed

HELLO = ServerHello(host="", port=4000, device="cpu", pairs_per_second=1e9)


@pytest.fixture
def directory():
    directory = Directory("127.0.0.1", 0, TOKEN, silence_s=60)
    yield directory
    directory.close()


@pytest.fixture
def joined(request):
    """Joins a directory, or a port, and returns the connection and the id; the member leaves after
    the test.
    """

    def joined(directory, token=TOKEN, wait_s=30, give_up=lambda: False, **info):
        port = directory if isinstance(directory, int) else directory.port
        channel, member = join("127.0.0.1", port, token, replace(HELLO, **info), wait_s, give_up)
        request.addfinalizer(channel.close)
        return channel, member

    return joined


def test_servers_join_and_leave_and_come_back_unless_they_are_refused(directory, joined):
    (first, first_id) = joined(directory)
    (second, second_id) = joined(directory, host="10.0.0.7", port=4001)
    assert directory.members() == {
        first_id: replace(HELLO, host="127.0.0.1"),
        second_id: replace(HELLO, host="10.0.0.7", port=4001),
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
    assert wrong.receive(60)[0].reason == "a member sends nothing but Alive, got Reply"
    wait_until(lambda: directory.members() == {})
    member, _ = joined(directory)
    directory.end()
    late, _ = joined(directory)
    assert member.receive(60)[0] == late.receive(60)[0] == End()
    directory.close()
    with pytest.raises(LinkLost):
        member.receive(60)


def test_a_server_may_come_before_the_directory_waits_only_so_long_and_is_dropped_when_silent(
    request, joined
):
    port = free_port()
    tried = threading.Event()
    with ThreadPoolExecutor(1) as beside:
        coming = beside.submit(joined, port, wait_s=60, give_up=tried.set)
        assert tried.wait(60)
        directory = Directory("127.0.0.1", port, TOKEN, silence_s=2)
        request.addfinalizer(directory.close)
        silent, member = coming.result()
    assert list(directory.members()) == [member]
    silent.send(Alive())
    with pytest.raises(PeerLeft):
        silent.receive(30)
    wait_until(lambda: not directory.members())
    with pytest.raises(ProtocolError, match="another token"):  # which is not tried again
        joined(directory, bytes(32))


@pytest.mark.parametrize(
    ("wait_s", "gives_up"),
    [(0, [False]), (6000, [False, True])],
    ids=["time-out", "interrupted"],
)
def test_a_server_gives_up_where_no_training_answers(joined, wait_s, gives_up):
    expected = f"no training run answered within {wait_s} s; the last error: cannot connect"
    with pytest.raises(LinkLost, match=expected):
        joined(free_port(), wait_s=wait_s, give_up=iter(gives_up).__next__)


def test_a_server_that_ranks_could_not_reach_or_that_says_something_else_is_refused():
    with pytest.raises(MismatchError, match=r"such as 10\.0\.0\.7"):
        reachable(replace(HELLO, host="127.0.0.1"), "10.0.0.7")
    assert reachable(HELLO, "10.0.0.7").host == "10.0.0.7"
    assert reachable(replace(HELLO, host="::1"), "::1").host == "::1"
    with pytest.raises(ProtocolError, match="a server begins with its hello, got Alive"):
        reachable(Alive(), "10.0.0.7")


def test_a_server_computes_with_the_threads_that_it_is_given(monkeypatch, tmp_path):
    threads = []
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    write_token(tmp_path / "token", TOKEN)
    options = ["--token-file", str(tmp_path / "token"), "--join", "127.0.0.1:1", "--wait", "0"]
    assert main(["serve", *options]) == 2  # nobody answers
    assert threads == []
    assert main(["serve", *options, "--threads", "3"]) == 2
    assert threads == [3]


def test_wrong_options_are_said_in_a_line(capsys, tmp_path, directory, subtests):
    def refused(token, *options):
        """The error with which `hf-distca serve` ends."""
        write_token(tmp_path / "token", token)
        with pytest.raises(SystemExit, match=r"^2$"):
            raise SystemExit(main(["serve", "--token-file", str(tmp_path / "token"), *options]))
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1
        assert token.hex() not in error
        return error

    with socket.create_server(("127.0.0.1", 0)) as other:
        used = str(other.getsockname()[1])
        assert "--join" in refused(make_token())
        for options, message in [
            (["--join", "127.0.0.1"], "has the form HOST:PORT"),
            (["--join", "127.0.0.1:99999"], "port from 1 to 65535"),
            (["--join", f"127.0.0.1:{directory.port}"], "another token"),
            (
                ["--token-file", "/no/such/file"],
                "token file /no/such/file is named, but",
            ),
            (["--device", "gpu"], "no device 'gpu' on this host; set --device to cpu"),
            (["--device", "cuda:99"], "no device 'cuda:99' on this host"),
            (["--attention-kernel", "fast"], "invalid choice: 'fast' (choose from 'auto', "),
            (
                ["--attention-kernel", "torch_varlen"],
                "is cpu, but kernel 'torch_varlen' computes on CUDA",
            ),
            (["--threads", "0"], "--threads: must be a positive whole number"),
            (["--wait", "nan"], "number of seconds"),
            (["--port", "-1"], "--port: must be 0 or a positive whole number"),
            (["--bind", "192.0.2.1"], "cannot listen on 192.0.2.1:0"),
            (["--port", used], f"cannot listen on 127.0.0.1:{used}"),
            (["--wait", "0"], "cannot connect to 127.0.0.1:1"),
        ]:
            with subtests.test(" ".join(options)):
                assert message in refused(make_token(), "--join", "127.0.0.1:1", *options)
    with ThreadPoolExecutor(1) as beside:
        beside.submit(
            lambda: wait_until(directory.members) or directory.drop(0, "it cannot be used")
        )
        error = refused(TOKEN, "--join", f"127.0.0.1:{directory.port}")
    assert error.endswith("error: the training run cannot use this server: it cannot be used\n")
