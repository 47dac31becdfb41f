"""Attention servers for tests: processes that join a run, and may be told to die in the middle of a call."""

import multiprocessing
import os
import signal
import threading
from typing import Any

TOKEN = bytes(range(32))


class FaultyKernel:
    """The CPU kernel, which sends its own process a signal before one of its calls.

    Args:
        direction: "forward" or "backward".
        call: the signal comes before this call of the direction, counted from 0 after the speed was measured.
        number: of the signal.
    """

    def __init__(self, direction: str, call: int, number: int) -> None:
        from hf_distca.kernels.cpu import CpuKernel

        self._kernel, self._direction, self._left, self._number = CpuKernel(), direction, call, number
        self.name, self.check = "cpu", self._kernel.check
        self.armed = threading.Event()

    def forward(self, *args: Any) -> Any:
        self._count("forward")
        return self._kernel.forward(*args)

    def backward(self, *args: Any) -> Any:
        self._count("backward")
        return self._kernel.backward(*args)

    def _count(self, direction: str) -> None:
        if direction != self._direction or not self.armed.is_set():
            return
        if self._left == 0:
            os.kill(os.getpid(), self._number)
        self._left -= 1


class ServerProcess:
    """A server that joins the directory at a port of this machine.

    Args:
        port: of the directory.
        fault: arguments of a FaultyKernel; None: it works.
    """

    def __init__(self, port: int, fault: tuple[str, int, int] | None = None) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "transformers", "hf_distca"])
        self._process = context.Process(target=_serve, args=(port, fault), daemon=True)
        self._process.start()

    def signal(self, number: int) -> None:
        """Send the process a signal."""
        os.kill(self._process.pid, number)

    def exit_code(self, timeout_s: float) -> int | None:
        """Its exit code, None if it has not ended in time."""
        self._process.join(timeout_s)
        return self._process.exitcode

    def close(self) -> None:
        """End the process whatever it does."""
        self._process.kill()
        self._process.join()


def _serve(port: int, fault: tuple[str, int, int] | None) -> None:
    import torch

    from hf_distca.kernels import get_kernel
    from hf_distca.server.server import AttentionServer

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    device = torch.device("cpu")
    kernel = get_kernel("cpu", device) if fault is None else FaultyKernel(*fault)
    server = AttentionServer(TOKEN, device, kernel)

    def report(line: str) -> None:
        if fault is not None and line.startswith("joined"):
            kernel.armed.set()

    server.run("127.0.0.1", port, 60, report)
    server.close()
