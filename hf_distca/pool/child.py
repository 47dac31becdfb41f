"""A server of the launch in a child process, whose death the launcher does not see.

The launcher ends all ranks when a process that it watches fails. So the process that it watches
serves from a child: it survives the child, starts another one, and ends the last one when training
ends. The standard library only.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

CANNOT_SERVE = 2
"""Exit status of a server that would end alike if it were started again."""
STARTS = 10
"""Most children, one after another."""
AGAIN_S = 5.0
"""Seconds from the death of a child to the start of the next."""
END_S = 5.0
"""Seconds that a child may take to end when training has; then it is killed."""

_POLL_S = 0.5
"""Seconds between two looks at the child and at the end of training."""
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def serve_from_child(command: Sequence[str], text: str, has_ended: Callable[[], bool]) -> None:
    """Serve from one child process after another, until training ends or no child can serve.

    A SIGINT or SIGTERM to this process ends serving too.

    Args:
        command: of the child, which calls `end_with_parent` with the id of this process.
        text: standard input of the child; no more than a pipe holds.
        has_ended: whether training has ended; asked twice a second, until it has.
    """
    parent = _Parent(command, text, has_ended)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, parent.forward)
    for starts_left in reversed(range(STARTS)):
        status, description = parent.run_child()
        if status == 0 or parent.is_over():
            return
        if status == CANNOT_SERVE or starts_left == 0:
            _report(f"{description}; training goes on without it")
            return
        _report(f"{description}; training goes on, and another one starts in {AGAIN_S:g} s")
        parent.wait_before_restart()
        if parent.is_over():
            return


class _Parent:
    """The process that starts children and outlives them."""

    def __init__(self, command: Sequence[str], text: str, has_ended: Callable[[], bool]) -> None:
        self._command = command
        self._text = text
        self._has_ended = has_ended
        self._over = False
        self._child: subprocess.Popen[bytes] | None = None

    def is_over(self) -> bool:
        """Return whether training has ended, or a signal has asked this process to end."""
        self._over = self._over or self._has_ended()
        return self._over

    def forward(self, number: int, _: object) -> None:
        """Pass a signal on to the child, and start no other child."""
        self._over = True
        if self._child is not None:
            self._child.send_signal(number)

    def run_child(self) -> tuple[int, str]:
        """Start a child and wait for its end; return its exit status and a description of the end.

        A child that cannot be started has the status 1.
        """
        source, sink = os.pipe()
        os.write(sink, self._text.encode())
        os.close(sink)
        try:
            # No `preexec_fn`: Python code between fork and exec can hang.
            self._child = subprocess.Popen(self._command, stdin=source)
        except OSError as error:
            return 1, f"could not be started ({error})"
        finally:
            # The child has its own copy of the pipe's end.
            os.close(source)
        _report(
            f"process {self._child.pid} serves and may die; the launcher watches its parent, "
            f"process {os.getpid()}"
        )
        status = self._wait_for_end(self._child)
        end = f"was killed by signal {-status}" if status < 0 else f"ended with {status}"
        return status, f"process {self._child.pid} {end}"

    def _wait_for_end(self, child: "subprocess.Popen[bytes]") -> int:
        """Wait until a child ends, and return its exit status.

        After the end of training a child has `END_S` seconds; then this process kills it.
        """
        kill_at = float("inf")
        while child.returncode is None:
            if self.is_over():
                kill_at = min(kill_at, time.monotonic() + END_S)
            if time.monotonic() > kill_at:
                child.kill()
            with suppress(subprocess.TimeoutExpired):
                child.wait(_POLL_S)
        return child.returncode

    def wait_before_restart(self) -> None:
        """Sleep for `AGAIN_S` seconds, or until training ends."""
        restart_at = time.monotonic() + AGAIN_S
        while time.monotonic() < restart_at and not self.is_over():
            time.sleep(min(_POLL_S, AGAIN_S))


def end_with_parent(parent: int) -> None:
    """Let the system kill this process when its parent dies.

    A parent that is dead can no longer end its child. SystemExit: the parent has died already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(f"process {parent}, which started this server, has ended")


def _report(line: str) -> None:
    print(f"attention server: {line}", file=sys.stderr, flush=True)
