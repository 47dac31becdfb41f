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
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def serve_from_child(command: Sequence[str], text: str, has_ended: Callable[[], bool]) -> None:
    """Serve from a child process until training ends, a SIGINT or SIGTERM comes, or no child can serve any more.

    Args:
        command: of the child, which calls `end_with_parent` with the id of this process.
        text: standard input of the child; no more than a pipe holds.
        has_ended: whether training has ended; asked twice a second, until it has.
    """
    child: subprocess.Popen[bytes] | None = None
    over = False

    def is_over() -> bool:
        nonlocal over
        over = over or has_ended()
        return over

    def forward(number: int, _: object) -> None:
        nonlocal over
        over = True
        if child is not None:
            child.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward)
    for left in reversed(range(STARTS)):
        source, sink = os.pipe()
        os.write(sink, text.encode())
        os.close(sink)
        try:
            child = subprocess.Popen(
                command, stdin=source
            )  # without code between fork and exec, which can hang
        except OSError as error:
            code, why = 1, f"could not be started ({error})"
        else:
            _report(
                f"process {child.pid} serves and may die; the launcher watches its parent, process "
                f"{os.getpid()}"
            )
            kill_at = float("inf")
            while child.returncode is None:
                if is_over():
                    kill_at = min(kill_at, time.monotonic() + END_S)
                if time.monotonic() > kill_at:
                    child.kill()
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_POLL_S)
            code = child.returncode
            why = (
                f"process {child.pid} "
                f"{f'was killed by signal {-code}' if code < 0 else f'ended with {code}'}"
            )
        os.close(source)
        if code == 0 or is_over():
            return
        if code == CANNOT_SERVE or not left:
            _report(f"{why}; training goes on without it")
            return
        _report(f"{why}; training goes on, and another one starts in {AGAIN_S:g} s")
        again = time.monotonic() + AGAIN_S
        while time.monotonic() < again:
            if is_over():
                return
            time.sleep(min(_POLL_S, AGAIN_S))


def end_with_parent(parent: int) -> None:
    """Let the system kill this process when its parent dies, which could not end it any more.

    SystemExit: the parent has died already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(f"process {parent}, which started this server, has ended")


def _report(line: str) -> None:
    print(f"attention server: {line}", file=sys.stderr, flush=True)
