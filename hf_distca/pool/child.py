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

CANNOT_SERVE = 2
"""Exit status of a server that would end alike if it were started again."""
STARTS = 10
"""Most children, one after another."""

_POLL_S = 0.5
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


class ChildServer:
    """Serves from a child process, and from another one where a child dies.

    Args:
        command: the child's.
        text: standard input of the child; no more than a pipe holds.
        has_ended: whether training has ended; asked twice a second, until it has.
        again_s: from the death of a child to the start of the next.
        end_s: how long a child may take to end when training has; then it is killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        text: str,
        has_ended: Callable[[], bool],
        *,
        again_s: float = 5.0,
        end_s: float = 5.0,
    ) -> None:
        self._command, self._text, self._has_ended = command, text, has_ended
        self._again_s, self._end_s = again_s, end_s
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
            _report(f"{why}; training goes on, and another one starts in {self._again_s:g} s")
            again = time.monotonic() + self._again_s
            while time.monotonic() < again:
                if self._is_over():
                    return
                time.sleep(min(_POLL_S, self._again_s))

    def _serve(self) -> tuple[int, str]:
        """Start a child and wait for its end; return its exit code, and the same in words."""
        source, sink = os.pipe()
        os.write(sink, self._text.encode())
        os.close(sink)
        try:
            child = subprocess.Popen(self._command, stdin=source, preexec_fn=_die_with_parent)
        except OSError as error:
            return 1, f"could not be started ({error})"
        finally:
            os.close(source)
        self._child = child
        _report(f"process {child.pid} serves and may die; the launcher watches its parent, process {os.getpid()}")
        kill_at = float("inf")
        while True:
            try:
                code = child.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                if self._is_over():
                    kill_at = min(kill_at, time.monotonic() + self._end_s)
                if time.monotonic() > kill_at:
                    child.kill()
            else:
                return code, f"process {child.pid} " + (
                    f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
                )

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
