"""Training with dedicated attention servers under `accelerate launch`, against one process with "sdpa"."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hf_distca.wire.token import make_token, write_token
from tests.launch import ROOT, launch, run_launch
from tests.ranks import free_port
from tests.servers import wait_until
from tests.trainer.test_launch import ARGUMENTS, LENGTHS, SCRIPT, STEPS, reference_losses


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return reference_losses()


def attention_servers(result: dict) -> list[int]:
    return [entry["attention_servers"] for entry in result["history"] if "attention_servers" in entry]


@pytest.mark.parametrize(("strategy", "servers", "serve"), [("ddp", 2, False), ("zero2", 1, True)])
def test_servers_of_the_same_launch(strategy, servers, serve, expected, tmp_path):
    arguments = ARGUMENTS | {
        "attention_servers": servers,
        "trainers_serve": serve,
        "save_strategy": "steps",  # the arguments are saved too
        "dataloader_num_workers": servers - 1,
    }
    result = launch(strategy, SCRIPT, {"lengths": LENGTHS, "arguments": arguments}, tmp_path, ranks=2 + servers)
    assert result["world_size"] == 2
    assert result["losses"] == pytest.approx(expected, rel=2e-5)
    assert attention_servers(result) == [servers] * STEPS


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
        first.wait_for("trainers")  # it serves
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
    process = run_launch(
        "ddp", SCRIPT, {"lengths": LENGTHS, "arguments": ARGUMENTS | {"attention_servers": 2}}, tmp_path
    )
    assert process.returncode != 0
    assert "attention_servers=2 of 2 processes leaves no trainer" in process.stdout
