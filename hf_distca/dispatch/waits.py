"""Waits of a rank for other ranks: they have a name and a limit, and say which rank is stuck.

1. Each rank writes a `Sign` into the run's store once a second: which process it is, where in the
   run it is, and what it waits for.
2. A rank that waits long reads the signs of all ranks. After a minute, and then once a minute, it
   logs a sentence: what it waits for, and which ranks are stuck where.
3. A wait that fails raises OtherRankError with the error that another rank left in the store. If no
   rank left an error, it raises RankLost with that sentence.
4. A process logs that sentence and ends if a wait outlasts its limit. In a collective of others,
   such as DDP's, it ends if a rank or the store is silent for as long.

The limit and silence are counted in signs, not by the clock: a process that was suspended counts
none, and neither ends nor takes other ranks for silent.
"""

import atexit
import faulthandler
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from math import inf
from typing import Any, NamedTuple, cast

import torch.distributed as dist

from hf_distca.checks.refusal import SentenceError, told
from hf_distca.dispatch.threads import REPORT_S, WaitError, in_thread

logger = logging.getLogger(__name__)

SIGN_S = 1.0
"""Seconds between two signs of a rank; a twentieth of a limit below 20 seconds."""
SILENT_SIGNS = 4
"""Signs that must be missing before a rank, or the store, counts as silent."""
STORE_S = 5.0
"""Most seconds for an answer of the store about errors."""
GRACE_S = 30.0
"""Most seconds beyond its limit in which a wait can fail by itself; then its process ends."""
EXIT_S = 30
"""Seconds for a process to exit after a failed wait; pending collectives could hold it."""
NAMED_RANKS = 4
"""Most ranks that a sentence describes."""
LOST_PARTNER = re.compile(
    r"gloo|NCCL|connection (closed|reset) by peer|timed out waiting|wait timeout|timeout caused"
    r" pair closure",
    re.IGNORECASE,
)
"""Messages of torch that only say that another rank did not answer."""


class RankLost(WaitError):  # noqa: N818 - named for the event
    """Another rank did not answer; the message says which one, and where it is stuck."""


class OtherRankError(SentenceError, RuntimeError):
    """Another rank failed; this rank stops because of it."""


class Present(NamedTuple):
    """Place of a rank in its run: the part of the run, a wait in this part, and when it began."""

    place: str  # part of the run, such as "the backward of step 3"; empty where it is not watched
    wait: str  # what the rank waits for there; empty where it is not known to wait
    since: float  # by `time.monotonic`


class Sign(NamedTuple):
    """What a rank writes into the store, each time with another number."""

    number: int
    process: str
    place: str
    wait: str
    seconds: float  # for which the rank has been there
    ended: bool  # whether the rank needs no other rank any more


class Waits:
    """Names and limits of a rank's waits, for the code that waits.

    Args:
        store: that only these ranks share; None for a rank alone, which nothing watches.
        limit_s: seconds of a wait, or of silence, after which a rank is given up.

    Attributes:
        close: ends the threads, and lets other ranks know that this one has ended.
    """

    def __init__(
        self, store: dist.Store | None = None, rank: int = 0, ranks: int = 1, limit_s: float = inf
    ) -> None:
        self.close: Callable[[], object] = lambda: None
        self._watch: _Watch | None = None
        self._entered: Counter[str] = Counter()  # contexts of `watched`, by place
        self._error_key = ""  # in the store, of the context of `watched` that this rank is in
        if store is not None and ranks > 1:
            self._watch = _Watch(store, rank, ranks, limit_s)
            # Called at the latest when the process ends, before Python stops its threads.
            self.close = weakref.finalize(self, self._watch.close)

    @contextmanager
    def watched(self, place: str = "the training loop") -> Iterator[None]:
        """Watch this rank inside of the context, and share its errors with other ranks.

        Every rank enters the context at the same point. A nested context only notes the place.
        Raises what `of` raises.

        Args:
            place: part of the run that begins.
        """
        watch = self._watch
        if watch is None or watch.present is not None:
            self.at(place)
            yield
            return
        self._entered[place] += 1
        self._error_key = f"first error in {place}, {self._entered[place]}"
        watch.present = Present(place, "", time.monotonic())
        try:
            yield
        except (OtherRankError, RankLost):
            raise
        except Exception as error:
            self._explain(error)
            self._leave(error)
            raise
        finally:
            watch.present = None
            self._error_key = ""

    def at(self, place: str) -> None:
        """Note the part of the run that begins now, such as "the backward of step 3"."""
        if self._watch is not None and self._watch.present is not None:
            self._watch.present = Present(place, "", time.monotonic())

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Wait for other ranks inside of the context; a wait inside another one is a part of it.

        OtherRankError: another rank failed first. RankLost: another rank did not answer.
        """
        watch = self._watch
        before = None if watch is None else watch.present
        if watch is None or (before is not None and before.wait):
            yield
            return
        watch.present = Present("" if before is None else before.place, name, time.monotonic())
        try:
            yield
        except Exception as error:
            self._explain(error)
            raise
        finally:
            watch.present = before and before._replace(since=time.monotonic())

    def _explain(self, error: Exception) -> None:
        """Raise why a wait failed, if its error only says that another rank did not answer."""
        watch = self._watch
        is_lost = isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and LOST_PARTNER.search(str(error)) is not None
        )
        if watch is None or watch.present is None or not is_lost:
            return
        store, key = watch.store, self._error_key
        present = watch.present
        seconds = time.monotonic() - present.since
        watch.has_failed = True
        # A rank that has just gone is silent after some signs.
        until = time.monotonic() + 2 * SILENT_SIGNS * watch.sign_s
        while time.monotonic() < until:
            if first_error := _asked(lambda: store.get(key) if store.check([key]) else b""):
                raise OtherRankError(first_error) from None  # where it was lost says no more
            time.sleep(watch.sign_s / 4)
        atexit.register(_end_soon)
        raise RankLost(f"{watch.report(present, seconds)}. The error was: {error}") from error

    def _leave(self, error: Exception) -> None:
        """Leave this rank's own error for other ranks, unless another rank has left one.

        Of an error such as a full disk, which several ranks find, the first stands for all.
        """
        assert self._watch is not None
        store, key = self._watch.store, self._error_key
        own_error = f"rank {self._watch.rank} failed: {told(error)}"
        first_error = _asked(lambda: store.compare_set(key, "", own_error)) or own_error
        is_of_some_ranks = isinstance(error, SentenceError) and not error.is_of_every_rank
        if is_of_some_ranks and first_error != own_error:
            raise OtherRankError(first_error) from None


def _asked(call: Callable[[], bytes]) -> str:
    """Return what a call to the store returns; "" if the store does not answer."""
    try:
        return in_thread(call).result(STORE_S).decode()
    except Exception as error:  # must not hide the error of the rank
        logger.debug("the run's store does not answer: %s", error)
        return ""


def _end_soon() -> None:
    """Let the system end this process soon: at its exit, gloo waits for pending collectives."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(EXIT_S)


class _Watch:
    """Two threads of a rank: one writes and reads signs, one watches how long this rank waits.

    A call to torch's store blocks for ever while the store's process is stopped, whatever the
    store's time-out: only the first thread calls the store, and the second one notices. They do not
    refer to `Waits`, so that they end with it.

    Attributes:
        present: where this rank is; None where it is not watched.
        waits_long, has_failed: reasons to read the signs of other ranks.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: int, limit_s: float) -> None:
        self.store = store
        self.rank = rank
        self.present: Present | None = None
        self.waits_long = self.has_failed = False
        self.sign_s = max(min(SIGN_S, limit_s / 20), 0.05)
        self._limit_s = limit_s
        self._keys = {other: f"sign of rank {other}" for other in range(ranks)}  # in the store
        self._key = self._keys.pop(rank)
        # The last sign of each other rank, and how often in succession it was read unchanged.
        self._seen: dict[int, tuple[Sign, int]] = {}
        self._answered = True  # whether the store has answered since the last look at it
        self._unanswered = 0  # looks in succession between which it has not
        self._ended = threading.Event()
        self._is_connected = threading.Event()  # whether the first thread has its connection
        self._signs = threading.Thread(target=self._exchange_signs, name="signs", daemon=True)
        self._signs.start()
        threading.Thread(target=self._watch_waits, name="watch of waits", daemon=True).start()

    def close(self) -> None:
        """End the threads; the last sign says that this rank has ended."""
        self._ended.set()
        # Python collects garbage in any thread.
        if self._is_connected.is_set() and threading.current_thread() is not self._signs:
            self._signs.join(1.0)

    # The first thread

    def _exchange_signs(self) -> None:
        """Write this rank's sign, and read those of others, until this rank has ended."""
        # A connection of its own: a call to a store waits for all earlier ones. TCPStore sometimes
        # takes five seconds to connect, in which nobody else may wait.
        self.store = cast(Any, self.store).clone()
        self._is_connected.set()
        if self._ended.is_set():  # no other rank has seen a sign
            return
        process = f"process {os.getpid()} on {socket.gethostname()}"
        for number in count():
            has_ended = self._ended.is_set()
            present = self.present or Present("", "", time.monotonic())
            seconds = time.monotonic() - present.since
            sign = Sign(number, process, present.place, present.wait, seconds, has_ended)
            try:
                self.store.set(self._key, json.dumps(sign))
                if self.waits_long or self.has_failed:
                    self._seen = self._read()
                self._answered = True
            except Exception as error:
                logger.debug("the run's store does not answer: %s", error)
            if has_ended:
                return
            self._ended.wait(self.sign_s)

    def _read(self) -> dict[int, tuple[Sign, int]]:
        """Return the signs of other ranks that have come so far."""
        keys = self._keys
        if not self.store.check([*keys.values()]):
            keys = {rank: key for rank, key in keys.items() if self.store.check([key])}
        seen = {}
        for rank, text in zip(keys, self.store.multi_get([*keys.values()]), strict=True):
            sign = Sign(*json.loads(text))
            before, unchanged = self._seen.get(rank, (None, 0))
            seen[rank] = sign, unchanged + 1 if sign == before else 0
        return seen

    # The second thread

    def _watch_waits(self) -> None:
        """Log long waits, and end a process that would wait for ever."""
        report_s = min(REPORT_S, self._limit_s / 2)
        last: Present | None = None
        waited_s = reported_s = 0.0
        while not self._ended.wait(self.sign_s):
            self._unanswered = 0 if self._answered else self._unanswered + 1
            self._answered = False
            waited_s += self.sign_s
            if self.present is not last:
                last = self.present
                waited_s = reported_s = 0.0
            # Long before the report: silence is only seen after some signs.
            self.waits_long = last is not None and waited_s > report_s / 4
            if last is None:
                continue
            if self._must_end(last, waited_s):
                self._end_process(last, waited_s)
            if waited_s >= reported_s + report_s:
                reported_s = waited_s
                # The lowest rank alive reports for all that wait for the same.
                if not any(
                    rank < self.rank and unchanged < SILENT_SIGNS and _is_at(sign, last)
                    for rank, (sign, unchanged) in self._seen.items()
                ):
                    logger.warning("%s", self._sentence(last, waited_s))

    def _must_end(self, present: Present, waited_s: float) -> bool:
        """Return whether this process would wait for ever.

        A named wait would have failed by now; other code may just take long.
        """
        if waited_s <= self._limit_s + min(self._limit_s, GRACE_S):
            return False
        unchanged = [unchanged for sign, unchanged in self._seen.values() if not sign.ended]
        silent_s = max(self._unanswered, *unchanged, 0) * self.sign_s
        return bool(present.wait) or silent_s > self._limit_s

    def _end_process(self, present: Present, seconds: float) -> None:
        """End this process with a message; a launcher then ends the others."""
        logger.critical("%s. This process ends", self.report(present, seconds))
        faulthandler.dump_traceback(2)  # sys.stderr may be no file
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(1)

    # What is said

    def report(self, present: Present, seconds: float) -> str:
        """Return why a wait failed, and a remedy."""
        return (
            f"{self._sentence(present, seconds)}. Look at that process and its host: it may be "
            "stopped, hung or gone, and `py-spy dump --pid PID` shows where it is. Where ranks are "
            f"only slow, raise exchange_timeout ({self._limit_s:g} s), and ddp_timeout for "
            "collectives of DDP, FSDP and DeepSpeed"
        )

    def _sentence(self, present: Present, seconds: float) -> str:
        """Return what this rank waits for, since when, and which ranks are stuck."""
        activity = f"waited for {present.wait}" if present.wait else "been"
        place = f" in {present.place}" if present.place else ""
        begin = f"rank {self.rank} has {activity}{place} for {seconds:.0f} s"
        if self._unanswered >= SILENT_SIGNS:
            return (
                f"{begin}: the run's store, in the process of the launcher or of rank 0, has not "
                f"answered for {self._unanswered * self.sign_s:.0f} s"
            )
        stuck = self._stuck(present)
        if len(stuck) > NAMED_RANKS:
            stuck[NAMED_RANKS:] = [f"so it is with {len(stuck) - NAMED_RANKS} more ranks"]
        return f"{begin}: {'; '.join(stuck) or 'all ranks are alive and in the same place'}"

    def _stuck(self, present: Present) -> list[str]:
        """Return a description of each rank that is missing, else of each that is elsewhere."""
        seen = self._seen
        missing = []
        elsewhere = []
        for rank in self._keys:
            if rank not in seen:
                missing.append(f"rank {rank} has not come so far")
                continue
            sign, unchanged = seen[rank]
            name = f"rank {rank} ({sign.process})"
            place = sign.place and f"in {sign.place}"
            wait = sign.wait and f"waiting for {sign.wait}"
            where = ", ".join(filter(None, (place, wait))) or "outside of hf_distca"
            if sign.ended:
                missing.append(f"{name} has ended")
            elif unchanged >= SILENT_SIGNS:
                missing.append(
                    f"{name} has given no sign of life for {unchanged * self.sign_s:.0f} s, and "
                    f"was last seen {where}"
                )
            elif not _is_at(sign, present):
                elsewhere.append(f"{name} is alive and has been {where} for {sign.seconds:.0f} s")
        return missing or elsewhere


def _is_at(sign: Sign, present: Present) -> bool:
    return (sign.place, sign.wait) == (present.place, present.wait)
