"""Waits that are never silent.

A wait has a name and a limit, and ends with an error that says what to do.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

logger = logging.getLogger(__name__)

REPORT_S = 60.0
"""Seconds between two lines about the same wait."""
JOIN_S = 120.0
"""Seconds for a thread to end once its connection is closed."""
_SLICE_S = 1.0
Value = TypeVar("Value")


class WaitError(RuntimeError):
    """A wait that failed or reached its limit.

    The message names who waited, for what, and the remedy.
    """


def wait_until(done: Callable[[float], bool], name: str, limit_s: float, remedy: str) -> None:
    """Wait until something is done; log that this process still waits once a minute.

    Args:
        done: gets the seconds for which it may block, and returns whether the wait is over.
        name: what is waited for, and who waits.

    Raises:
        WaitError: The limit is reached.
    """
    begin = time.monotonic()
    report_s = REPORT_S
    while not done(min(_SLICE_S, limit_s)):
        waited_s = time.monotonic() - begin
        if waited_s >= limit_s:
            raise WaitError(f"waited {waited_s:.0f} s for {name}, and it did not come; {remedy}")
        if waited_s >= report_s:
            logger.warning(
                "still waiting for %s (%.0f s of at most %.0f s); %s",
                name,
                waited_s,
                limit_s,
                remedy,
            )
            report_s += REPORT_S


def join(thread: threading.Thread, limit_s: float = JOIN_S) -> None:
    """Wait until a thread whose connection is closed has ended."""

    def has_ended(within_s: float) -> bool:
        thread.join(within_s)
        return not thread.is_alive()

    remedy = (
        "a device or network card does not answer it; `py-spy dump --pid PID` shows where the "
        "thread is"
    )
    wait_until(has_ended, f"the thread {thread.name!r} of this process to end", limit_s, remedy)


def in_thread(call: Callable[[], Value]) -> Future[Value]:
    """Start a call that may block for ever, such as one to a store; return its future result."""
    result: Future[Value] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result
