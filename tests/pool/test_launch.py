"""Training with dedicated attention servers under `accelerate launch`, against one process with "sdpa"."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState

from hf_distca import DistCATrainingArguments
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.planner.settings import PlanSettings
from hf_distca.pool import launch as launches
from hf_distca.pool import nixl as nixl_agent
from hf_distca.pool.launch import TOKEN_FILE, Launch, open_pool, serve_if_server, split_launch
from hf_distca.pool.token import make_token, write_token
from tests.launch import LOG, ROOT, launch
from tests.models_and_batches import small_kinds
from tests.pool.servers import wait_until
from tests.pool.transport.ends import needs_nixl
from tests.ranks import free_port
from tests.trainer.launches import ARGUMENTS, LENGTHS, SCRIPT, STEPS, reference_losses
from tests.trainer.small_trainers import make_trainer


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return reference_losses()


def attention_servers(result: dict) -> list[int]:
    return [entry["distca/attention_servers"] for entry in result["history"] if "distca/attention_servers" in entry]


class Struck:
    """Servers of a launch, one of which is killed and one stopped.

    Args:
        folder: of the launch.
    """

    def __init__(self, folder: Path) -> None:
        self._log = folder / LOG
        self._moments = {3: folder / "killed", 6: folder / "again", STEPS: folder / "stopped"}
        self.pauses = {step: str(file) for step, file in self._moments.items()}

    def strike(self) -> None:
        """Kill the first server, wait until another has joined in its place, and stop the second one at the end."""
        killed, again, stopped = self._moments.values()
        self._strike(0, signal.SIGKILL, killed)
        wait_until(lambda: " as server 2" in self._log.read_text(), 100)
        again.touch()
        self._strike(1, signal.SIGSTOP, stopped)

    def _strike(self, server: int, number: signal.Signals, file: Path) -> None:
        wait_until(file.with_suffix(".reached").exists, 100)
        pids = re.findall(r"process (\d+) serves and may die", self._log.read_text())
        os.kill(int(pids[server]), number)
        file.touch()


@pytest.mark.parametrize(
    ("strategy", "servers", "serve", "transport"),
    [("ddp", 2, False, "auto"), pytest.param("zero2", 1, True, "nixl", marks=needs_nixl)],
)
def test_servers_of_the_same_launch(strategy, servers, serve, transport, expected, tmp_path):
    arguments = ARGUMENTS | {
        "attention_servers": servers,
        "attention_server_transport": transport,
        "ranks_serve": serve,
        "save_strategy": "steps",  # the arguments are saved too
        "dataloader_num_workers": servers - 1,
    }
    struck = Struck(tmp_path) if servers == 2 else None
    options = {"lengths": LENGTHS, "arguments": arguments, "pauses": struck.pauses if struck else {}}
    with ThreadPoolExecutor(1) as beside:
        training = beside.submit(launch, strategy, SCRIPT, options, tmp_path, ranks=2 + servers)
        if struck:
            struck.strike()
        result = training.result()
    assert result["world_size"] == 2
    assert result["losses"] == pytest.approx(expected, rel=2e-5)
    numbers = attention_servers(result)
    assert (len(numbers), numbers[0], numbers[-1]) == (STEPS, servers, servers)
    assert min(numbers) == (1 if struck else servers)
    carried_by = [line.partition("rows travel over ")[2] for line in result["pool_log"] if "takes part" in line]
    assert len(carried_by) == servers + bool(struck)
    if transport == "nixl":
        assert carried_by == ["NIXL (both ends have it)"]


class Served:
    """A server started apart, with what it prints."""

    def __init__(self, port: int, token_file: Path) -> None:
        join = ["--join", f"127.0.0.1:{port}", "--token-file", str(token_file), "--threads", "1"]
        command = [sys.executable, "-m", "hf_distca.cli.main", "serve", *join]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def wait_for(self, words: str) -> None:
        for line in self.process.stdout:
            if words in line:
                return
        raise AssertionError(f"the server never said {words!r}")


def test_servers_that_come_and_go(expected, tmp_path):
    names = ("token", "both", "killed", "alone", "again")
    port, (token_file, both, killed, alone, again) = free_port(), (tmp_path / name for name in names)
    write_token(token_file, make_token())
    arguments = ARGUMENTS | {
        "attention_servers": "external",
        "attention_server_address": f"127.0.0.1:{port}",
        "attention_server_token_file": str(token_file),
    }
    options = {
        "lengths": LENGTHS,
        "arguments": arguments,
        "pauses": {1: str(both), 3: str(killed), 4: str(alone), STEPS // 2: str(again)},
    }
    first, second = Served(port, token_file), Served(port, token_file)
    third, results = second, []
    training = threading.Thread(target=lambda: results.append(launch("ddp", SCRIPT, options, tmp_path)))
    try:
        training.start()
        for server in (first, second):
            server.wait_for("joined")
        both.touch()
        first.wait_for("ranks;")  # it serves
        wait_until(killed.with_suffix(".reached").exists, 100)
        first.process.kill()
        killed.touch()
        wait_until(alone.with_suffix(".reached").exists, 100)
        alone.touch()
        third = Served(port, token_file)
        third.wait_for("joined")
        again.touch()
        training.join()
        (result,) = results
        assert result["losses"] == pytest.approx(expected, rel=2e-5)
        numbers = attention_servers(result)
        assert (numbers[1:4], numbers[-1]) == ([2, 2, 1], 2)
        for server in (second, third):
            server.wait_for("training has ended")
            assert server.process.wait(60) == 0
    finally:
        for server in (first, second, third):
            server.process.kill()


def test_more_servers_than_processes(tmp_path):
    arguments = ARGUMENTS | {"attention_servers": 2}
    result = launch("ddp", SCRIPT, {"lengths": LENGTHS, "arguments": arguments}, tmp_path)
    assert "attention_servers=2 of 2 processes leaves no rank" in result["error"]


def opened_where_rank_1_lacks_nixl(port: int) -> str | None:
    """What `open_pool` says on this rank when it is asked for NIXL."""
    settings = PlanSettings(dist.get_world_size(), tokens_per_rank=64, kinds=small_kinds(None))
    dispatcher = Dispatcher(settings, torch.device("cpu"))
    options = {"token_file": "", "ranks_serve": True, "timeout_s": 20, "transport": "nixl"}
    lacking = patch.object(nixl_agent, "_MODULES", ()) if dist.get_rank() == 1 else nullcontext()
    try:
        with lacking:
            open_pool(dispatcher, Launch(1, None), address=f"127.0.0.1:{port}", **options)
    except ValueError as error:
        return str(error)
    return None


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

    def run(rank: int, world: int, servers: int, gpus: int, cpu: bool = False) -> Launch:
        monkeypatch.setattr(launches, "device_count", lambda: gpus)
        environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "TORCHELASTIC_USE_AGENT_STORE": True}
        for name, value in environment.items():
            monkeypatch.setenv(name, str(value))
        return split_launch(servers, cpu=cpu)

    return run


def test_a_server_without_a_gpu_is_refused_on_every_process(processes):
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
    served = []
    launch = Launch(1, dist.HashStore(), "cpu")
    monkeypatch.setattr("hf_distca.trainer.arguments.split_launch", lambda servers, cpu: launch)
    monkeypatch.setattr(launches, "_serve", lambda store, timeout_s, device: served.append((timeout_s, device)))
    arguments = DistCATrainingArguments(str(tmp_path), attention_servers=1, attention_server_timeout=7.0)
    assert served == []
    with pytest.raises(SystemExit):
        arguments.serve_if_server()
    for ask in (lambda: arguments.device, lambda: arguments.process_index, lambda: arguments.n_gpu):
        with pytest.raises(SystemExit):
            ask()
    assert served == [(7.0, "cpu")] * 4


def test_a_rank_does_not_serve(monkeypatch):
    monkeypatch.setattr(launches, "_serve", lambda *args: pytest.fail("it served"))
    serve_if_server(None, 60)
    serve_if_server(Launch(1, dist.HashStore()), 60)


def test_settings_reach_the_pool(tmp_path):
    trainer = make_trainer(
        str(tmp_path), attention_servers="external", ranks_serve=False, attention_server_timeout=7.0
    )
    try:
        assert trainer.pool is trainer.dispatcher.remote
        assert (trainer.pool.ranks_serve, trainer.pool.members.timeout_s) == (False, 7.0)
        assert (tmp_path / TOKEN_FILE).exists()
    finally:
        trainer.pool.close()
