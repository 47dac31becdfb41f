"""Signs of life that ranks leave in the run's store.

A sign says which process a rank is, and where in the run it is.
"""

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

SIGN_S = 1.0
"""Seconds between two signs of life of a rank; a twentieth of the limit where the limit is below 20
seconds."""
SILENT_SIGNS = 4
"""Signs that must be missing before a rank counts as silent."""
Value = TypeVar("Value")


class Present(NamedTuple):
    """Place of a rank in its run: the part of the run, a wait in this part, and when it began."""

    place: str  # part of the run, such as "the backward of step 3"
    wait: str  # what the rank waits for there; empty where it is not known to wait
    since: float  # by `time.monotonic`


class Sign(NamedTuple):
    """A sign of life of a rank, each with another number."""

    number: int
    process: str
    place: str = ""  # empty outside of what is watched
    wait: str = ""
    seconds: float = 0.0  # for which the rank has been there
    ended: bool = False


class StoreLine:
    """A connection of its own to a store, used by a thread.

    A call to torch's store blocks for ever while the store's process is stopped, whatever the
    store's time-out. Here such a call blocks the thread alone.
    """

    def __init__(self, store: dist.Store) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[dist.Store], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(
            target=self._run, args=(store,), name="store of signs", daemon=True
        )
        self._thread.start()

    def post(self, call: Callable[[dist.Store], Value]) -> "Future[Value]":
        """Queue a function that gets the store."""
        future: Future[Value] = Future()
        self._calls.put((future, call))
        return future

    def ask(self, call: Callable[[dist.Store], Value], within_s: float) -> Value:
        """Return the result of a function that gets the store.

        TimeoutError: the store does not answer in time.
        """
        try:
            return self.post(call).result(within_s)
        except NoAnswer as error:
            raise TimeoutError(f"the run's store does not answer within {within_s:g} s") from error

    def close(self, within_s: float) -> None:
        """End the thread after the queued calls.

        Leave it to itself where the store does not answer in time.
        """
        self._calls.put(None)
        if threading.current_thread() is not self._thread:  # Python collects garbage in any thread
            self._thread.join(within_s)

    def _run(self, store: Any) -> None:
        connection = None  # of this thread alone
        while (queued := self._calls.get()) is not None:
            future, call = queued
            try:
                connection = connection or store.clone()
                future.set_result(call(connection))
            except Exception as error:
                future.set_exception(error)


class Signs:
    """Signs of life of all ranks, as one rank sees them.

    Attributes:
        sign_s: seconds between two signs of a rank.
        silent_s: seconds without a sign after which a rank, or the store, counts as silent.
    """

    def __init__(self, line: StoreLine, rank: int, ranks: int, limit_s: float) -> None:
        self.line = line
        self.rank = rank
        self.others = [other for other in range(ranks) if other != rank]
        self.sign_s = max(min(SIGN_S, limit_s / 20), 0.05)
        self.silent_s = SILENT_SIGNS * self.sign_s
        self._process = f"process {os.getpid()} on {socket.gethostname()}"
        self._number = 0
        self._lock = threading.Lock()  # of `exchange`
        self._asked: Future[dict[int, Sign]] | None = None
        # The latest sign of a rank, and when it was first seen.
        self._seen: dict[int, tuple[Sign, float]] = {}
        self._answered_at = time.monotonic()  # the store
        self._looked_at = self._answered_at  # at the signs of other ranks

    def exchange(self, present: Present | None, *, look: bool) -> None:
        """Take in what the store has answered, and ask it again.

        It takes this rank's sign. If asked to `look`, it also returns the signs of others.
        """
        with self._lock:
            if self._asked is not None and not self._asked.done():
                return
            # 1. What the last request brought. A rank is seen when its sign changes.
            now = time.monotonic()
            if self._asked is not None and self._asked.exception() is None:
                self._answered_at = now
                signs = self._asked.result()
                if signs:
                    self._looked_at = now
                for rank, sign in signs.items():
                    if rank not in self._seen or self._seen[rank][0] != sign:
                        self._seen[rank] = sign, now
            # 2. The next request.
            read_ranks = self.others if look else []
            own_sign = json.dumps(self._sign(present))
            self._asked = self.line.post(
                partial(_exchange, rank=self.rank, sign=own_sign, read_ranks=read_ranks)
            )

    def end(self) -> None:
        """Leave the sign that this rank needs no other rank any more."""
        sign = json.dumps(self._sign(None)._replace(ended=True))
        self.line.post(lambda store: store.set(_key(self.rank), sign))

    def forget(self) -> None:
        """Forget when signs were seen: this process itself was stopped for a while."""
        with self._lock:
            self._seen.clear()
            self._answered_at = self._looked_at = time.monotonic()

    def store_silent_s(self) -> float:
        """Return the seconds for which the store has not answered; 0 while it answers."""
        seconds = time.monotonic() - self._answered_at
        return seconds if seconds > self.silent_s else 0.0

    def silent_ranks(self, more_than_s: float) -> dict[int, float]:
        """Return the seconds of silence of ranks that have been silent for so long.

        Ranks that have ended are left out.
        """
        return {
            rank: time.monotonic() - seen_at
            for rank, (sign, seen_at) in sorted(self._seen.items())
            if not sign.ended and self._looked_at - seen_at > more_than_s
        }

    def ended_ranks(self) -> list[int]:
        """Return the ranks that have ended."""
        return [rank for rank, (sign, _) in sorted(self._seen.items()) if sign.ended]

    def ranks_at(self, present: Present) -> list[int]:
        """Return the ranks that are alive and wait for the same at the same place."""
        silent = self.silent_ranks(self.silent_s)
        return [
            rank
            for rank, (sign, _) in sorted(self._seen.items())
            if rank not in silent and (sign.place, sign.wait) == (present.place, present.wait)
        ]

    def stuck(self, present: Present) -> dict[int, str]:
        """Return a description of each rank for which a rank waits.

        These are silent ranks, else ranks that are elsewhere.
        """
        silent = self.silent_ranks(self.silent_s)
        ended = self.ended_ranks()
        absent = [rank for rank in self.others if rank not in self._seen]
        ranks_here = set(self.ranks_at(present))
        descriptions = {rank: f"rank {rank} has not come so far" for rank in absent}
        for rank, (sign, seen_at) in self._seen.items():
            name = f"rank {rank} ({sign.process})"
            place = _place(sign)
            if sign.ended:
                descriptions[rank] = f"{name} has ended"
            elif rank in silent:
                descriptions[rank] = (
                    f"{name} has given no sign of life for {silent[rank]:.0f} s, and was last seen "
                    f"{place}"
                )
            # A rank that is elsewhere explains the wait only if no rank is missing altogether.
            elif not (silent or ended or absent or rank in ranks_here):
                seconds = sign.seconds + time.monotonic() - seen_at
                descriptions[rank] = f"{name} is alive and has been {place} for {seconds:.0f} s"
        return dict(sorted(descriptions.items()))

    def _sign(self, present: Present | None) -> Sign:
        self._number += 1
        sign = Sign(self._number, self._process)
        if present is None:
            return sign
        return sign._replace(
            place=present.place, wait=present.wait, seconds=time.monotonic() - present.since
        )


def _place(sign: Sign) -> str:
    """Return where a rank is and what it waits for, in words."""
    if sign.place and sign.wait:
        return f"in {sign.place}, waiting for {sign.wait}"
    if sign.place or sign.wait:
        return f"in {sign.place}" if sign.place else f"waiting for {sign.wait}"
    return "outside of hf_distca"


def _key(rank: int) -> str:
    return f"sign of life of rank {rank}"


def _exchange(
    store: dist.Store, rank: int, sign: str, read_ranks: Sequence[int]
) -> dict[int, Sign]:
    """Leave a rank's sign of life in the store, and return the latest signs of other ranks.

    Ranks that have left none are missing.
    """
    store.set(_key(rank), sign)
    return {
        read_rank: Sign(*json.loads(store.get(_key(read_rank))))
        for read_rank in read_ranks
        if store.check([_key(read_rank)])
    }
