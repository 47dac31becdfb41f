"""Waits of a rank for other ranks: a wait has a name and a limit.

A rank that waits long logs what it waits for, and which rank is stuck where. A wait that fails ends
with the same sentence and a remedy. A rank that waits for a silent rank beyond the limit, in a
collective that does not fail by itself, logs the sentence and ends its process.
"""

import atexit
import faulthandler
import logging
import os
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from types import TracebackType

import torch.distributed as dist

from hf_distca.dispatch.signs import Present, Signs, StoreLine
from hf_distca.waiting import REPORT_S, WaitError

logger = logging.getLogger(__name__)

GRACE_S = 30.0
"""Most seconds beyond its limit in which a wait can fail by itself; then its process is ended."""
EXIT_S = 30
"""Seconds for a process to exit after a failed wait: collectives that are still pending could hold
it for hours."""
NAMED_RANKS = 4
"""Most ranks that a sentence describes."""

_LOST_PARTNER = re.compile(
    r"gloo|NCCL|connection (closed|reset) by peer|timed out waiting|wait timeout|timeout caused"
    r" pair closure",
    re.IGNORECASE,
)


class RankLost(WaitError):  # noqa: N818 - named for the event
    """Another rank did not answer; the message says which one, and where it is stuck."""


def says_that_another_is_gone(error: BaseException) -> bool:
    """Return whether an error only says that another rank did not answer."""
    if isinstance(error, dist.DistError | RankLost):
        return True
    return isinstance(error, RuntimeError) and _LOST_PARTNER.search(str(error)) is not None


class Waits:
    """Names and limits of a rank's waits, and the thread that watches them.

    A single rank has no thread.

    A rank is watched inside of `of` and `watched`, and nowhere else.

    Args:
        store: that only these ranks share; not used for one rank.
        limit_s: seconds without a sign of life after which a rank is given up.
    """

    def __init__(self, store: dist.Store | None, rank: int, ranks: int, limit_s: float) -> None:
        self.rank = rank
        self.ranks = ranks
        self.line: StoreLine | None = None
        self._watch = _Watch(rank, limit_s)
        if store is not None and ranks > 1:
            self.line = StoreLine(store)
            self._watch.start(Signs(self.line, rank, ranks, limit_s))
            # Called at the latest when the process ends, before Python stops its threads.
            self._close: Callable[[], object] = weakref.finalize(self, self._watch.close)

    @classmethod
    def alone(cls) -> "Waits":
        """Return the waits of a rank that waits for nobody."""
        return cls(None, 0, 1, inf)

    def of(self, name: str) -> "_Wait":
        """Return the context of a wait for other ranks.

        RankLost: another rank did not answer. Inside of `watched` that context raises it instead.
        """
        return _Wait(self._watch, name)

    def at(self, place: str) -> None:
        """Note the part of the run that begins now, such as "the backward of step 3"."""
        watch = self._watch
        if watch.present is not None:
            watch.present = Present(place, "", time.monotonic())
            watch.failed = None

    @contextmanager
    def watched(self, place: str, *, explains: bool = True) -> Iterator[None]:
        """Watch this rank inside of the context, at this place first.

        A nested context only notes the place.

        RankLost: another rank did not answer, unless the context `explains` nothing.
        """
        watch = self._watch
        if watch.present is not None:
            self.at(place)
            yield
            return
        watch.present = Present(place, "", time.monotonic())
        watch.failed = None
        try:
            yield
        except Exception as error:
            watch.failed = watch.failed or watch.present
            watch.present = None
            if explains and says_that_another_is_gone(error) and self.line is not None:
                raise self.explained(error) from error
            raise
        finally:
            watch.present = None

    def explained(self, error: BaseException) -> RankLost:
        """Return the error of the last context of `watched`.

        The context failed because another rank did not answer.
        """
        return self._watch.explained(self._watch.failed or Present("", "", time.monotonic()), error)

    def close(self) -> None:
        """End the thread."""
        if self.line is not None:
            self._close()


class _Wait:
    """Context of a wait, which costs about a microsecond."""

    __slots__ = ("_before", "_name", "_watch")

    def __init__(self, watch: "_Watch", name: str) -> None:
        self._watch = watch
        self._name = name

    def __enter__(self) -> None:
        self._before = before = self._watch.present
        if before is None:
            self._watch.failed = None
        self._watch.present = Present(
            "" if before is None else before.place, self._name, time.monotonic()
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        watch, before = self._watch, self._before
        present = watch.present
        now = time.monotonic()
        watch.present = before and before._replace(since=now)
        if (
            error is None
            or present is None
            or isinstance(error, RankLost)
            or not says_that_another_is_gone(error)
        ):
            return
        if before is not None:  # `watched` explains it, or the wait that this one is a part of
            watch.failed = watch.failed or present
        if before is None and watch.signs is not None:
            raise watch.explained(watch.failed or present, error) from error


class _Watch:
    """Thread that leaves signs of life and logs long waits.

    It ends a process that would wait for ever.

    It does not refer to `Waits`, so that it ends with them.
    """

    def __init__(self, rank: int, limit_s: float) -> None:
        self.present: Present | None = None  # None: not watched
        self.failed: Present | None = (
            None  # the wait that failed in this context of `Waits.watched`
        )
        self.signs: Signs | None = None
        self._rank = rank
        self._limit_s = limit_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch of waits", daemon=True)

    def start(self, signs: Signs) -> None:
        """Watch this rank from now on."""
        self.signs = signs
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        assert self.signs is not None
        self._stop.set()
        if threading.current_thread() is not self._thread:  # Python collects garbage in any thread
            self._thread.join(self.signs.silent_s)
        self.signs.end()
        self.signs.line.close(1.0)

    def explained(self, present: Present, error: BaseException) -> RankLost:
        """Return the error that says why a wait failed."""
        atexit.register(_end_soon)
        seconds = time.monotonic() - present.since
        signs = self.signs
        if signs is not None:  # a rank that has just gone is silent from now on
            until = time.monotonic() + signs.silent_s + 3 * signs.sign_s
            while (
                not signs.silent_ranks(signs.silent_s)
                and not signs.ended_ranks()
                and time.monotonic() < until
            ):
                signs.exchange(None, look=True)
                time.sleep(signs.sign_s / 2)
        return RankLost(
            f"{self._sentence(present, seconds)}. {self._remedy()}. The error was: {error}"
        )

    def _run(self) -> None:
        assert self.signs is not None
        signs = self.signs
        reported_s = 0.0
        last_check = resumed = time.monotonic()
        while not self._stop.wait(signs.sign_s):
            now = time.monotonic()
            if now - last_check > signs.silent_s:  # this process itself was stopped
                signs.forget()
                resumed = now
            last_check = now
            present = self.present
            seconds = 0.0 if present is None else now - max(present.since, resumed)
            signs.exchange(present, look=seconds > signs.sign_s)
            if present is None:
                continue
            if self._must_end(signs, present, seconds):
                self._end_process(present, seconds)
            if seconds < reported_s:  # another wait
                reported_s = 0.0
            due_s = reported_s + REPORT_S if reported_s else min(REPORT_S, self._limit_s / 2)
            if seconds >= due_s:
                reported_s = seconds
                # The lowest rank reports for all ranks at the same place.
                if all(self._rank < rank for rank in signs.ranks_at(present)):
                    logger.warning("%s", self._sentence(present, seconds))

    def _must_end(self, signs: Signs, present: Present, seconds: float) -> bool:
        """Return whether this process should end by itself.

        It should if a named wait has not failed at its limit, or if any place waits for a rank
        given up.
        """
        if present.wait:
            return seconds > self._limit_s + min(self._limit_s, GRACE_S)
        is_lost = signs.store_silent_s() > self._limit_s or bool(signs.silent_ranks(self._limit_s))
        return seconds > self._limit_s and is_lost

    def _end_process(self, present: Present, seconds: float) -> None:
        """End this process with a message; a launcher then ends the others."""
        message = f"{self._sentence(present, seconds)}. {self._remedy()}. This process ends"
        logger.critical("%s", message)
        with suppress(Exception):  # stderr may be no file
            faulthandler.dump_traceback(sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(1)

    def _sentence(self, present: Present, seconds: float) -> str:
        """Return what this rank waits for, since when, and which ranks are stuck."""
        activity = f"waited for {present.wait}" if present.wait else "been"
        place = f" in {present.place}" if present.place else ""
        begin = f"rank {self._rank} has {activity}{place} for {seconds:.0f} s"
        signs = self.signs
        if signs is None:
            return begin
        silent_s = signs.store_silent_s()
        if silent_s:
            return (
                f"{begin}: the run's store, in the process of the launcher or of rank 0, has not "
                f"answered for {silent_s:.0f} s"
            )
        stuck = list(signs.stuck(present).values())
        if len(stuck) > NAMED_RANKS:
            stuck[NAMED_RANKS:] = [f"so it is with {len(stuck) - NAMED_RANKS} more ranks"]
        return f"{begin}: {'; '.join(stuck) or 'all ranks are alive and in the same place'}"

    def _remedy(self) -> str:
        return (
            "Look at that process and its host: it may be stopped, hung or gone, and `py-spy dump "
            "--pid PID` shows where it is. Where ranks are only slow, raise exchange_timeout "
            f"({self._limit_s:g} s), and ddp_timeout for collectives of DDP, FSDP and DeepSpeed"
        )


def _end_soon() -> None:
    """Let the system end this process soon.

    At its exit, gloo waits for collectives that are still pending.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(EXIT_S)
