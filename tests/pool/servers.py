"""Attention servers for tests: processes that join a run, and may fail at a moment that a test chooses."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

from tests.ranks import forkserver

TOKEN = bytes(range(32))


@dataclass(frozen=True)
class Fault:
    """How and when a server fails.

    Attributes:
        kind: killed (SIGKILL), hung (SIGSTOP), or cut off: all its connections end while the process lives.
        where: at the beginning of a forward or a backward, or by itself.
        trigger: file; the fault comes once it is there.
    """

    kind: Literal["killed", "hung", "cut off"]
    where: Literal["forward", "backward", "by itself"]
    trigger: Path

    def strike(self) -> None:
        """Let it happen to this process."""
        if self.kind == "cut off":
            cut_off()
        else:
            os.kill(os.getpid(), signal.SIGKILL if self.kind == "killed" else signal.SIGSTOP)

    def strike_when_told(self) -> None:
        """Wait for the trigger, then let it happen."""
        wait_until(self.trigger.exists, 600)
        if self.kind == "cut off":
            self.strike()
        self._done.write_text(str(os.getpid()))
        if self.kind != "cut off":
            self.strike()

    def has_struck(self) -> bool:
        """Whether a server that fails by itself has done so."""
        if not self._done.exists() or not (pid := self._done.read_text()):
            return False
        return self.kind == "cut off" or state_of(int(pid)) in "TZX"

    @property
    def _done(self) -> Path:
        return self.trigger.with_name(self.trigger.name + ".done")


def state_of(pid: int | str) -> str:
    """The letter that ps shows of a process, or a task of one; X where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"


def cut_off() -> None:
    """End every TCP connection of this process; what it listens on stays."""
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(number))) as connection:
            if connection.family == socket.AF_INET:
                connection.getpeername()  # fails for a socket that listens
                connection.shutdown(socket.SHUT_RDWR)


class FaultyKernel:
    """The CPU kernel, in the first of whose calls after the trigger the fault comes."""

    def __init__(self, fault: Fault) -> None:
        from hf_distca.kernels.cpu import CpuKernel

        self._kernel, self._fault, self._struck = CpuKernel(), fault, False
        self.name, self.check = "cpu", self._kernel.check

    def forward(self, *args: Any) -> Any:
        return self._call("forward", *args)

    def backward(self, *args: Any) -> Any:
        return self._call("backward", *args)

    def _call(self, direction: str, *args: Any) -> Any:
        if direction == self._fault.where and self._fault.trigger.exists() and not self._struck:
            self._struck = True  # a server that is only cut off comes back
            self._fault.strike()
        return getattr(self._kernel, direction)(*args)


class ServerProcess:
    """A server that joins the directory at a port of this machine once the file `join_when` is there."""

    def __init__(
        self, port: int, fault: Fault | None = None, join_when: Path | None = None, transport: str = "tcp"
    ) -> None:
        self._process = forkserver().Process(target=_serve, args=(port, fault, join_when, transport), daemon=True)
        self._process.start()

    def exit_code(self, timeout_s: float) -> int | None:
        """Its exit code, None if it has not ended in time."""
        self._process.join(timeout_s)
        return self._process.exitcode

    def close(self) -> None:
        """End the process whatever it does."""
        self._process.kill()
        self._process.join()


class ServeCommand:
    """`hf-distca serve` for a directory at a port of this machine; its output and errors go to the file `output`."""

    def __init__(self, port: int, token: bytes, output: Path, *options: str) -> None:
        self.output = output
        command = [sys.executable, "-m", "hf_distca.cli.main", "serve", "--join", f"127.0.0.1:{port}"]
        command += ["--token-file", "-", "--threads", "1", *options]
        with output.open("w") as file:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT, text=True
            )
        assert self.process.stdin is not None
        self.process.stdin.write(token.hex() + "\n")
        self.process.stdin.close()

    def wait_for(self, words: str) -> None:
        """Wait until it has said something."""
        wait_until(lambda: words in self.output.read_text() or self.process.poll() is not None, 100)
        assert words in self.output.read_text(), self.output.read_text()

    def memory(self) -> int:
        """Bytes of memory that it uses."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) * 1024

    def close(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.wait()


def wait_until(condition: Any, timeout_s: float = 30) -> None:
    """Wait until a function returns something true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def alike(*_: Any) -> float:
    """In place of `measure_speed`, which takes most of a second: all workers compute a million pairs a second."""
    return 1e6


def _serve(port: int, fault: Fault | None, join_when: Path | None, transport: str) -> None:
    import torch

    from hf_distca.kernels import get_kernel
    from hf_distca.pool.server import AttentionServer
    from hf_distca.pool.transport import Choice

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if join_when is not None:
        wait_until(join_when.exists, 60)
    device = torch.device("cpu")
    in_a_call = fault is not None and fault.where != "by itself"
    kernel = FaultyKernel(fault) if in_a_call else get_kernel("cpu", device)
    server = AttentionServer(TOKEN, device, kernel, transport=Choice(transport))
    if fault is not None and not in_a_call:
        threading.Thread(target=fault.strike_when_told, daemon=True).start()
    with patch("hf_distca.pool.server.measure_speed", alike):
        server.run("127.0.0.1", port, 60, lambda line: None)
    server.close()
