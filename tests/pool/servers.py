"""Attention servers for tests: processes that join a run, and may fail at a moment that a test chooses."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

from hf_distca.kernels.cpu import CpuKernel
from hf_distca.pool.server import AttentionServer
from tests.pool.ends import CPU, TOKEN
from tests.ranks import forkserver

SIGNALS = {"killed": signal.SIGKILL, "hung": signal.SIGSTOP, "cut off": signal.SIGUSR1}
"""By which a `ServerProcess` fails. One that is cut off loses all its connections and lives on."""


def state_of(pid):
    """The letter that ps shows of a process, or a task of one; X where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"


def cut_off(*_):
    """End every TCP connection of this process; what it listens on stays."""
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(number))) as connection:
            if connection.family == socket.AF_INET:
                connection.getpeername()  # fails for a socket that listens
                connection.shutdown(socket.SHUT_RDWR)


class FaultyKernel(CpuKernel):
    """The CPU kernel, in the first of whose calls in a direction a fault comes once the file `trigger` is there."""

    def __init__(self, fault, direction, trigger):
        self._fault, self._trigger = fault, trigger
        setattr(self, direction, partial(self._strike, getattr(self, direction)))

    def _strike(self, compute, *args):
        if self._fault and self._trigger.exists():
            fault, self._fault = self._fault, None  # a server that is only cut off comes back
            if fault == "cut off":
                cut_off()
            else:
                os.kill(os.getpid(), SIGNALS[fault])
        return compute(*args)


def serve(port, transport, fault=None, join_when=None):
    """Be a server that joins the directory at a port of this machine, once the file `join_when` is there."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, cut_off)
    if join_when is not None:
        wait_until(join_when.exists, 60)
    server = AttentionServer(TOKEN, CPU, FaultyKernel(*fault) if fault else CpuKernel(), transport=transport)
    with patch("hf_distca.pool.server.measure_speed", alike):
        server.run("127.0.0.1", port, 60, lambda line: None)
    server.close()


def start_server(*args):
    """The process of a server, see `serve`."""
    process = forkserver().Process(target=serve, args=args, daemon=True)
    process.start()
    return process


class ServeCommand:
    """`hf-distca serve` for a directory at a port of this machine; its output and errors go to the file `output`."""

    def __init__(self, port, token_file, output, *options):
        self.output = output
        command = [sys.executable, "-m", "hf_distca.cli.main", "serve", "--join", f"127.0.0.1:{port}"]
        command += ["--token-file", str(token_file), "--threads", "1", *options]
        with output.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)

    def wait_for(self, words):
        """Wait until it has said something."""
        wait_until(lambda: words in self.output.read_text() or self.process.poll() is not None, 100)
        assert words in self.output.read_text(), self.output.read_text()

    def memory(self):
        """Bytes of memory that it uses."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) * 1024

    def close(self):
        """End it, whatever it does."""
        self.process.kill()
        self.process.wait()


def wait_until(condition, timeout_s=30):
    """Wait until a function returns something true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def alike(*_):
    """In place of `measure_speed`, which takes most of a second: all workers compute a million pairs a second."""
    return 1e6
