"""Training with dedicated attention servers under `accelerate launch`, against one process with "sdpa"."""

import os
import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch.distributed as dist
from accelerate import PartialState
from transformers import TrainerCallback

from hf_distca import DistCATrainingArguments
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.planner.settings import PlanSettings
from hf_distca.pool import launch as launches
from hf_distca.pool import nixl
from hf_distca.pool.launch import TOKEN_FILE, Launch, open_pool, serve_if_server, split_launch
from hf_distca.pool.token import read_token
from tests.launch import LOG, launch
from tests.models_and_batches import small_kinds
from tests.pool.ends import CPU, needs_nixl
from tests.pool.servers import ServeCommand, wait_until
from tests.ranks import free_port
from tests.trainer.launches import ARGUMENTS, LENGTHS, SCRIPT, STEPS, reference_losses
from tests.trainer.small_trainers import make_trainer


def attention_servers(history):
    return [entry["distca/attention_servers"] for entry in history if "distca/attention_servers" in entry]


def test_servers_of_the_same_launch(tmp_path):
    transport = "nixl" if nixl.is_installed() else "tcp"
    arguments = ARGUMENTS | {
        "attention_servers": 2,
        "attention_server_transport": transport,
        "ranks_serve": False,
        "save_strategy": "steps",  # the arguments are saved too
        "dataloader_num_workers": 1,
    }
    killed, again, stopped = (tmp_path / name for name in ("killed", "again", "stopped"))
    pauses = {3: str(killed), 6: str(again), STEPS: str(stopped)}
    options = {"lengths": LENGTHS, "arguments": arguments, "pauses": pauses}

    def log():
        return (tmp_path / LOG).read_text()

    def send(server, number, file):
        """Send a server a signal in the pause that ends with a file."""
        wait_until(file.with_suffix(".reached").exists, 300)
        os.kill(int(re.findall(r"process (\d+) serves and may die", log())[server]), number)
        file.touch()

    with ThreadPoolExecutor(1) as beside:
        training = beside.submit(launch, "zero2", SCRIPT, options, tmp_path, ranks=4)
        send(0, signal.SIGKILL, killed)
        wait_until(lambda: " as server 2" in log(), 300)  # another one in its place
        again.touch()
        send(1, signal.SIGSTOP, stopped)
        result = training.result()
    assert result["world_size"] == 2
    assert result["losses"] == pytest.approx(reference_losses(), rel=2e-5)
    numbers = attention_servers(result["history"])
    assert (len(numbers), numbers[0], min(numbers), numbers[-1]) == (STEPS, 2, 1, 2)
    carried_by = [line.partition("rows travel over ")[2] for line in result["pool_log"] if "takes part" in line]
    assert [name.split()[0] for name in carried_by] == [transport.upper()] * 3


class Coming(TrainerCallback):
    """On rank 0, lets a server join, kills it when it has served, and lets another one join later."""

    def __init__(self, port, folder):
        self._port, self._folder = port, folder
        self.servers = []

    def on_step_begin(self, args, state, control, **_):
        if state.global_step in (1, 5):
            output = self._folder / f"server{state.global_step}"
            self.servers.append(ServeCommand(self._port, read_token(self._folder / TOKEN_FILE), output))
            self.servers[-1].wait_for("joined")
        if state.global_step == 3:
            self.servers[0].close()


def trained_while_servers_come_and_go(folder, port):
    """Losses of a training without servers and of one with servers from outside, and the servers in each step."""
    losses, coming = [], Coming(port, folder)
    serving = {"attention_servers": "external", "attention_server_address": f"127.0.0.1:{port}"}
    for options in ({}, {**serving, "ranks_serve": False, "attention_server_timeout": 77.0}):
        trainer = make_trainer(str(folder), max_steps=8, **options)
        if options:
            assert trainer.pool is trainer.dispatcher.remote
            assert (trainer.pool.ranks_serve, trainer.pool.timeout_s) == (False, 77.0)
            if dist.get_rank() == 0:
                trainer.add_callback(coming)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        trainer.close()
    for server in coming.servers[1:]:
        server.wait_for("training has ended")
        assert server.process.wait(60) == 0
    return losses, attention_servers(trainer.state.log_history)


def test_servers_that_come_and_go(rank_pools, tmp_path):
    (losses, numbers), _ = rank_pools[2].run(trained_while_servers_come_and_go, tmp_path, free_port())
    assert losses[1] == pytest.approx(losses[0], rel=2e-5)
    assert [numbers[step] for step in (0, 2, 4, 7)] == [0, 1, 0, 1]


def opened_where_rank_1_lacks_nixl(port):
    """What `open_pool` says on this rank when it is asked for NIXL."""
    dispatcher = Dispatcher(PlanSettings(dist.get_world_size(), tokens_per_rank=64, kinds=small_kinds(None)), CPU)
    options = {"token_file": "", "ranks_serve": True, "timeout_s": 20, "transport": "nixl"}
    lacking = patch.object(nixl, "_MODULES", ()) if dist.get_rank() == 1 else nullcontext()
    with lacking, pytest.raises(ValueError, match="NIXL") as caught:
        open_pool(dispatcher, Launch(1, None), address=f"127.0.0.1:{port}", **options)
    return str(caught.value)


@needs_nixl
def test_nixl_that_one_rank_lacks_is_an_error_on_every_rank(rank_pools):
    port = free_port()
    for said in rank_pools[2].run(opened_where_rank_1_lacks_nixl, port):
        assert "rank 1: ValueError: attention_server_transport='nixl' cannot be used: NIXL is not installed" in said
        assert "install nixl-cu12" in said
        assert "rank 0" not in said
    socket.create_server(("127.0.0.1", port)).close()  # no directory is left there


@pytest.fixture
def processes(monkeypatch):
    """Runs `split_launch` as if on processes of a launch, on one host with so many GPUs."""
    store = dist.HashStore()
    monkeypatch.setattr(dist, "TCPStore", lambda *args, **kwargs: store)
    monkeypatch.setattr(PartialState, "_shared_state", {})
    monkeypatch.setattr(launches, "is_available", lambda: True)

    def run(rank, world, servers, gpus, cpu=False):
        monkeypatch.setattr(launches, "device_count", lambda: gpus)
        environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "TORCHELASTIC_USE_AGENT_STORE": True}
        for name, value in environment.items():
            monkeypatch.setenv(name, str(value))
        return split_launch(servers, cpu=cpu)

    return run


def test_a_launch_without_a_rank_or_a_server_without_a_gpu_is_refused_on_every_process(processes):
    for rank in range(2):
        with pytest.raises(ValueError, match="attention_servers=2 of 2 processes leaves no rank"):
            processes(rank, 2, 2, gpus=2)
    for rank in (3, 0, 1, 2):  # the server first: the others wait for its word
        with pytest.raises(ValueError, match="server of rank 3 would compute on cuda:3, but its host has 3 GPUs"):
            processes(rank, 4, 1, gpus=3)


@pytest.mark.parametrize(("cpu", "gpus", "device"), [(False, 2, "cuda:1"), (True, 1, "cpu")])
def test_a_server_takes_the_gpu_of_its_number(processes, cpu, gpus, device):
    assert processes(1, 2, 1, gpus, cpu).serves_on == device
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} & set(os.environ)
    launch = processes(0, 2, 1, gpus, cpu)
    assert (launch.servers, launch.serves_on) == (1, None)
    assert (os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]) == ("1", "1")


def test_arguments_are_made_in_a_server_and_whoever_asks_for_its_device_lets_it_serve(tmp_path, monkeypatch):
    served, launch = [], Launch(1, dist.HashStore(), "cpu")
    for name, value in (("address", "10.0.0.1:1"), ("token", "00"), ("transport", "tcp")):
        launch.store.set(name, value)
    monkeypatch.setattr("hf_distca.trainer.arguments.split_launch", lambda servers, cpu: launch)
    monkeypatch.setattr(launches, "serve_from_child", lambda command, text, has_ended: served.append(command[4:]))
    arguments = DistCATrainingArguments(str(tmp_path), attention_servers=1, attention_server_timeout=7.0)
    assert served == []
    for ask in ("serve_if_server", "device", "process_index", "n_gpu"):
        with pytest.raises(SystemExit):
            getattr(arguments, ask)()
    options = ["--join", "10.0.0.1:1", "--token-file", "-", "--device", "cpu", "--wait", "7", "--transport", "tcp"]
    assert served == [options] * 4
    serve_if_server(None, 60)  # a rank does not serve
    serve_if_server(Launch(1, dist.HashStore()), 60)
    assert len(served) == 4
