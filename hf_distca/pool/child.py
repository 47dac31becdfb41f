"""A server of the launch in a child process, whose death the launcher does not see.

The launcher ends all ranks when a process that it watches fails. So the process that it watches serves from a child:
it survives the child, starts another one, and ends the last one when training ends. The standard library only.
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


class ChildServer:
    """Serves from a child process, and from another one where a child dies.

    Args:
        text: standard input of the child; no more than a pipe holds.
        has_ended: whether training has ended; asked twice a second, until it has.
    """

    def __init__(self, command: Sequence[str], text: str, has_ended: Callable[[], bool]) -> None:
        self._command, self._text, self._has_ended = command, text, has_ended
        self._child: subprocess.Popen[bytes] | None = None
        self._over = False

    def run(self) -> None:
        """Serve until training ends, this process gets SIGINT or SIGTERM, or no child can serve any more."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: self._forward(number))
        for left in reversed(range(STARTS)):
            code, why = self._serve()
            if code == 0 or self._is_over():
                return
            if code == CANNOT_SERVE or not left:
                _report(f"{why}; training goes on without it")
                return
            _report(f"{why}; training goes on, and another one starts in {AGAIN_S:g} s")
            again = time.monotonic() + AGAIN_S
            while time.monotonic() < again:
                if self._is_over():
                    return
                time.sleep(min(_POLL_S, AGAIN_S))

    def _serve(self) -> tuple[int, str]:
        """Start a child and wait for its end; return its exit code, and the same in words."""
        source, sink = os.pipe()
        os.write(sink, self._text.encode())
        os.close(sink)
        try:
            child = self._child = subprocess.Popen(self._command, stdin=source, preexec_fn=_die_with_parent)
        except OSError as error:
            return 1, f"could not be started ({error})"
        finally:
            os.close(source)
        _report(f"process {child.pid} serves and may die; the launcher watches its parent, process {os.getpid()}")
        kill_at = float("inf")
        while child.returncode is None:
            if self._is_over():
                kill_at = min(kill_at, time.monotonic() + END_S)
            if time.monotonic() > kill_at:
                child.kill()
            with suppress(subprocess.TimeoutExpired):
                child.wait(_POLL_S)
        code = child.returncode
        return code, f"process {child.pid} {f'was killed by signal {-code}' if code < 0 else f'ended with {code}'}"

    def _is_over(self) -> bool:
        self._over = self._over or self._has_ended()
        return self._over

    def _forward(self, number: int) -> None:
        self._over = True
        if self._child is not None:
            self._child.send_signal(number)


def _die_with_parent() -> None:
    """Let the system kill this process when its parent dies, which could not end it any more."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _report(line: str) -> None:
    print(f"attention server: {line}", file=sys.stderr, flush=True)
