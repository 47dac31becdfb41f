"""Training with dedicated attention servers as `accelerate launch` makes them, against one process
with "sdpa".

    test_launch.py FOLDER

is the script that is launched.
"""

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import nullcontext, suppress
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch.distributed as dist
import transformers
from accelerate import PartialState
from transformers import TrainerCallback

from hf_distca import DistCATrainingArguments
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.threads import in_thread
from hf_distca.planner.settings import PlanSettings
from hf_distca.pool import child, nixl
from hf_distca.pool import launch as launches
from hf_distca.pool.child import STARTS, serve_from_child
from hf_distca.pool.launch import TOKEN_FILE, Launch, open_pool, serve_if_server, split_launch
from hf_distca.server_settings import AttentionServers
from tests.launch import run_in_forks
from tests.models_and_batches import small_kinds
from tests.pool.ends import CPU, ServeCommand, needs_nixl, wait_until
from tests.ranks import free_port
from tests.trainer.small_trainers import make_trainer

pytestmark = pytest.mark.timeout(100)  # a child that is never killed would be waited for

STEPS = 10
TRANSPORT = "nixl" if nixl.is_installed() else "tcp"


def attention_servers(history):
    return [
        entry["distca/attention_servers"]
        for entry in history
        if "distca/attention_servers" in entry
    ]


def printed(folder):
    """What all processes of the launch have printed."""
    return "".join(output.read_text() for output in sorted(folder.glob("output-*")))


class Failing(TrainerCallback):
    """Kills the first server, waits for another one in its place, and stops the second at the end
    of training.
    """

    def __init__(self, folder):
        self._folder = folder

    def on_step_end(self, args, state, control, **_):
        first, second, *_ = re.findall(r"process (\d+) serves and may die", printed(self._folder))
        if state.global_step == 3:
            os.kill(int(first), signal.SIGKILL)
        elif state.global_step == 6:
            wait_until(lambda: " as server 2" in printed(self._folder), 100)
        elif state.global_step == STEPS:
            os.kill(int(second), signal.SIGSTOP)


def train(folder):
    """What every process of the launch runs; servers end where the arguments are made.

    The arguments are saved too.
    """
    logging.basicConfig(level=logging.INFO)
    transformers.training_args.is_torch_bf16_gpu_available = lambda: (
        True
    )  # with use_cpu there is no DeepSpeed
    trainer = make_trainer(
        str(folder), environment={}, **json.loads((folder / "options").read_text())
    )
    if trainer.args.process_index == 0:
        trainer.add_callback(Failing(folder))
    trainer.train()
    if trainer.args.process_index == 0:
        (folder / "history").write_text(
            json.dumps([trainer.args.world_size, trainer.state.log_history])
        )
    # A gloo thread that still lets go of its last tensors would abort the process on its way out,
    # or never end.
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.timeout(300)
@pytest.mark.launches
def test_servers_of_the_same_launch(tmp_path):
    # Not for what is launched: it takes seconds to import.
    from tests.trainer.comparison import LENGTHS, PLANNED, Run, train_alone

    trained = {
        "max_steps": STEPS,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "optim": "adamw_torch",
    }
    options = {"train_sampling_strategy": "sequential", "bf16": False, "dataloader_num_workers": 1}
    options |= {
        "attention_servers": {"count": 2, "transport": TRANSPORT, "ranks_serve": False},
    }
    (tmp_path / "options").write_text(
        json.dumps({"lengths": LENGTHS, **PLANNED, **trained, **options})
    )
    codes = run_in_forks("zero2", Path(__file__), [str(tmp_path)], tmp_path, ranks=4)
    lines = printed(tmp_path)
    assert set(codes) == {0}, lines[-6000:]
    world_size, history = json.loads((tmp_path / "history").read_text())
    assert world_size == 2
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert losses == pytest.approx(
        train_alone(str(tmp_path / "alone"), Run(trained))["logged"]["loss"], rel=2e-5
    )
    numbers = attention_servers(history)
    assert len(numbers) == STEPS
    assert numbers[0] == 2
    assert min(numbers) == 1
    assert numbers[-1] == 2
    assert re.findall(r"takes part: .* rows travel over (\w+)", lines) == [TRANSPORT.upper()] * 3


class Coming(TrainerCallback):
    """Lets a server join, kills it when it has served, and lets another one join; on rank 0."""

    def __init__(self, port, folder):
        self._port = port
        self._folder = folder
        self.servers = []

    def on_step_begin(self, args, state, control, **_):
        if state.global_step in (1, 5):
            output = self._folder / f"server{state.global_step}"
            self.servers.append(ServeCommand(self._port, self._folder / TOKEN_FILE, output))
            self.servers[-1].wait_for("joined")
        if state.global_step == 3:
            self.servers[0].close()


def trained_while_servers_come_and_go(folder, port):
    """Losses of a training without servers and of one with servers from outside; the latter's
    servers by step.
    """
    losses = []
    coming = Coming(port, folder)
    servers = {"count": "external", "address": f"127.0.0.1:{port}"}
    serving = {"attention_servers": {**servers, "ranks_serve": False, "timeout": 77.0}}
    for options in ({}, serving):
        trainer = make_trainer(str(folder), max_steps=8, **options)
        if options:
            assert trainer.dispatcher.remote.ranks_serve is False
            assert trainer.dispatcher.remote.timeout_s == 77.0
            if dist.get_rank() == 0:
                trainer.add_callback(coming)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        trainer.close()
    for server in coming.servers[1:]:
        server.wait_for("training has ended")
        assert server.process.wait(60) == 0
    return losses, attention_servers(trainer.state.log_history)


@pytest.mark.timeout(300)
def test_servers_that_come_and_go(rank_pools, tmp_path):
    (losses, numbers), _ = rank_pools[2].run(
        trained_while_servers_come_and_go, tmp_path, free_port()
    )
    assert losses[1] == pytest.approx(losses[0], rel=2e-5)
    assert [numbers[step] for step in (0, 2, 4, 7)] == [0, 1, 0, 1]


def opened_where_rank_1_lacks_nixl(port):
    """What `open_pool` says on this rank when it is asked for NIXL."""
    dispatcher = Dispatcher(
        PlanSettings(dist.get_world_size(), rows_per_rank=64, kinds=small_kinds(None)), CPU
    )
    servers = AttentionServers(1, address=f"127.0.0.1:{port}", transport="nixl")
    lacking = patch.object(nixl, "_MODULES", ()) if dist.get_rank() == 1 else nullcontext()
    with lacking, pytest.raises(ValueError, match="NIXL") as caught:
        open_pool(dispatcher, servers, Launch(None), Path())
    return str(caught.value)


@needs_nixl
def test_nixl_that_one_rank_lacks_is_an_error_on_every_rank(rank_pools):
    port = free_port()
    for message in rank_pools[2].run(opened_where_rank_1_lacks_nixl, port):
        assert (
            "rank 1: attention_servers={'transport': 'nixl'} is set, but it cannot be used: NIXL "
            "is not installed" in message
        )
        assert "install nixl-cu12" in message
        assert "rank 0" not in message
    socket.create_server(("127.0.0.1", port)).close()  # no directory is left there


@pytest.fixture
def divide(monkeypatch):
    """Divide a launch as on one of its processes, on hosts with so many GPUs."""
    store = dist.HashStore()
    monkeypatch.setattr(dist, "TCPStore", lambda *args, **kwargs: store)
    monkeypatch.setattr(PartialState, "_shared_state", {})
    monkeypatch.setattr(launches, "is_available", lambda: True)

    def divide(rank, world, servers, gpus, cpu=False, hosts=1):
        monkeypatch.setattr(launches, "device_count", lambda: gpus)
        on_a_host = world // hosts
        environment = {
            "RANK": rank,
            "LOCAL_RANK": rank % on_a_host,
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": on_a_host,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": 1,
            "TORCHELASTIC_USE_AGENT_STORE": True,
        }
        for name, value in environment.items():
            monkeypatch.setenv(name, str(value))
        return split_launch(servers, cpu=cpu)

    return divide


@pytest.mark.parametrize("rank", range(2))
def test_a_launch_that_leaves_no_rank_is_refused_on_every_process(divide, rank):
    with pytest.raises(ValueError, match="attention_servers=2 of 2 processes leaves no rank"):
        divide(rank, 2, 2, gpus=2)


def test_a_server_without_a_gpu_is_refused_on_every_process(divide, subtests):
    message = "server of rank 3 would compute on cuda:3, and its host has 3 GPUs"
    for rank in (3, 0, 1, 2):  # the server first: the others wait for its word
        with subtests.test(rank=rank), pytest.raises(ValueError, match=message):
            divide(rank, 4, 1, gpus=3)


@pytest.mark.parametrize(
    ("cpu", "gpus", "device"), [(False, 2, "cuda:1"), (True, 1, "cpu")], ids=["GPUs", "CPU"]
)
def test_a_launch_is_divided(divide, monkeypatch, cpu, gpus, device):
    assert divide(1, 2, 1, gpus, cpu).serves_on == device
    assert {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} & set(os.environ) == set()
    launch = divide(0, 2, 1, gpus, cpu)
    assert launch.serves_on is None
    assert os.environ["WORLD_SIZE"] == "1"
    assert os.environ["LOCAL_WORLD_SIZE"] == "1"
    # What was left before a restart counts no more.
    launch.store.set("ended", "")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not divide(1, 2, 1, gpus, cpu).store.check(["ended"])


def test_a_launch_on_two_hosts_is_divided(divide):
    """The second of two hosts with two processes each has a rank and a server."""
    assert divide(3, 4, 1, gpus=2, hosts=2).serves_on == "cuda:1"
    ranks_on_host = []
    for rank in range(3):
        divide(rank, 4, 1, gpus=2, hosts=2)
        assert os.environ["WORLD_SIZE"] == "3"
        ranks_on_host.append(os.environ["LOCAL_WORLD_SIZE"])
    assert ranks_on_host == ["2", "2", "1"]


def test_arguments_are_made_in_a_server_and_whoever_asks_for_its_device_lets_it_serve(
    tmp_path, monkeypatch, subtests
):
    served = []
    ends = []
    launch = Launch(dist.HashStore(), "cpu")
    for name, value in (("address", "10.0.0.1:1"), ("token", "00"), ("transport", "tcp")):
        launch.store.set(name, value)
    monkeypatch.setattr("hf_distca.trainer.arguments.split_launch", lambda servers, cpu: launch)

    def serve(command, text, has_ended):
        served.append(command[4:])
        ends.append(has_ended)

    monkeypatch.setattr(launches, "serve_from_child", serve)
    options = {
        "attention_servers": {"count": 1, "timeout": 7.0},
        "attention_kernel": "reference",
    }
    arguments = DistCATrainingArguments(str(tmp_path), **options)
    assert served == []
    for name in ("serve_if_server", "device", "process_index", "n_gpu"):
        with subtests.test(name), pytest.raises(SystemExit):
            getattr(arguments, name)()
    options = [
        "--join",
        "10.0.0.1:1",
        "--token-file",
        "-",
        "--device",
        "cpu",
        "--wait",
        "7",
        "--transport",
        "tcp",
    ]
    options += ["--attention-kernel", "reference", "--parent", str(os.getpid())]
    assert served == [options] * 4
    serve_if_server(None, 60, "auto")  # a rank does not serve
    serve_if_server(Launch(dist.HashStore()), 60, "auto")
    assert len(served) == 4
    # Training has ended where rank 0 says so, or its store is gone; a store that is stopped may go
    # on.
    assert not ends[0]()
    launch.store.set("ended", "")
    assert ends[0]()
    monkeypatch.setattr(launches, "STORE_S", 0.05)
    goes_on = threading.Event()
    monkeypatch.setattr(launches, "in_thread", lambda call: in_thread(lambda: goes_on.wait(60)))
    before = threading.active_count()
    assert [ends[1]() for _ in range(3)] == 3 * [False]
    assert threading.active_count() == before + 1  # one question, however often it is asked
    goes_on.set()
    assert ends[1]()
    gone = Mock(side_effect=dist.DistError)
    monkeypatch.setattr(launches, "in_thread", lambda call: in_thread(gone))
    assert ends[2]() is True


@pytest.fixture
def reported(monkeypatch, capfd):
    """Serves with short pauses; what a parent reports until it returns.

    This process keeps its own handlers.
    """
    for name, seconds in (("AGAIN_S", 0.01), ("END_S", 0.1), ("_POLL_S", 0.05)):
        monkeypatch.setattr(child, name, seconds)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def reported(command, has_ended=lambda: False):
        serve_from_child(command, "the token\n", has_ended)
        return [
            line for line in capfd.readouterr().err.splitlines() if "serves and may die" not in line
        ]

    yield reported
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_server_that_dies_is_followed_by_another(tmp_path, reported):
    starts = tmp_path / "starts"
    # The third leaves by itself.
    script = (
        f'read -r token; echo "$token" >> {starts}; [ $(wc -l < {starts}) -lt 3 ] && kill -9 $$;'
        " exit 0"
    )
    lines = reported(["sh", "-c", script])
    assert starts.read_text() == "the token\n" * 3
    message = (
        r"process \d+ was killed by signal 9; training goes on, and another one starts in 0.01 s"
    )
    assert len(lines) == 2
    assert re.search(message, lines[0])
    assert re.search(message, lines[1])


@pytest.mark.parametrize(
    ("command", "starts"),
    [(["false"], STARTS), (["/no/such/program"], STARTS), (["sh", "-c", "exit 2"], 1)],
    ids=["status 1", "no such program", "status 2"],
)
def test_a_server_that_cannot_serve_is_given_up(reported, command, starts):
    lines = reported(command)
    assert len(lines) == starts
    assert lines[-1].endswith("; training goes on without it")


def test_a_server_that_does_not_end_with_training_is_killed(capfd, reported):
    servers = []

    def has_ended():
        servers.extend(map(int, re.findall(r"process (\d+) serves", capfd.readouterr().err)))
        os.kill(servers[0], signal.SIGSTOP)  # nothing but SIGKILL ends it then
        return True

    try:
        assert reported(["sleep", "infinity"], has_ended) == []
        with pytest.raises(ProcessLookupError):
            os.kill(servers[0], 0)
    finally:
        with suppress(ProcessLookupError):
            os.kill(servers[0], signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_with_its_parent(number):
    # The file alone: the package takes seconds to import.
    imports = f"import os, sys, time, runpy; child = runpy.run_path({child.__file__!r})"
    served = f"{imports}; child['end_with_parent'](PARENT); time.sleep(100)"
    command = f"[sys.executable, '-c', {served!r}.replace('PARENT', str(os.getpid()))]"
    program = [
        sys.executable,
        "-c",
        f"{imports}; child['serve_from_child']({command}, '', lambda: False)",
    ]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as parent:
        lines = iter(parent.stderr.readline, "")
        pid = next(
            int(match[1]) for line in lines if (match := re.search(r"process (\d+) serves", line))
        )
        parent.send_signal(number)
        assert parent.wait(20) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{pid}").exists())


if __name__ == "__main__":
    train(Path(sys.argv[1]))
