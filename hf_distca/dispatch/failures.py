"""Report of the failed rank's error on the surviving ranks."""

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from hf_distca.checks.refusal import SentenceError, told
from hf_distca.dispatch.signs import StoreLine
from hf_distca.dispatch.waits import Waits, says_that_another_is_gone

logger = logging.getLogger(__name__)

WAIT_S = 5.0
"""Seconds to look for the error of a lost partner; the partner leaves the error before its
connections close."""
_PAUSE_S = 0.05


class OtherRankError(SentenceError, RuntimeError):
    """Another rank failed; this rank stops because of it."""


class Failures:
    """Exchange of errors between ranks that train together, through a store that only they share.

    Without this exchange, the ranks that wait for a failed rank report a closed connection and not
    the failed rank's error. One rank alone needs no store.
    """

    def __init__(self, waits: Waits, wait_s: float = WAIT_S) -> None:
        self._waits = waits
        self._wait_s = wait_s
        self._depth = self._begun = 0

    @contextmanager
    def reported(self, place: str = "the training loop") -> Iterator[None]:
        """Leave this rank's error for other ranks.

        Raise OtherRankError with another's if this rank only lost that rank.

        Every rank enters the context at the same point. A nested context belongs to the outermost
        one. A rank that lost a silent rank raises RankLost, which says which rank is silent and
        where it was.

        Args:
            place: Name of the context in messages about waits.
        """
        self._begun += self._depth == 0
        self._depth += 1
        try:
            with self._waits.watched(place, explains=False):
                yield
        except Exception as error:
            if self._depth == 1 and self._waits.line is not None:
                self._raise_for(error, self._waits.line)
            raise
        finally:
            self._depth -= 1

    def _raise_for(self, error: Exception, line: StoreLine) -> None:
        """Raise why another rank failed or is silent.

        Do nothing unless the error only says that another rank is gone, or is one that several
        ranks may have and another one reports.
        """
        others = self._exchanged(error, line)
        if others:  # where this rank lost them says no more
            raise OtherRankError("; ".join(others)) from None
        if says_that_another_is_gone(error):
            raise self._waits.explained(error) from error

    def _exchanged(self, error: Exception, line: StoreLine) -> list[str]:
        """Leave an error of this rank itself.

        Else return other ranks' errors as soon as any rank has one. Of errors such as a full disk,
        which several ranks find, that of the first rank stands for all.
        """
        key = f"failures/{self._begun}/"
        rank = self._waits.rank

        def left_by(store: dist.Store, others: Iterable[int]) -> list[str]:
            return [
                f"rank {other} failed: {store.get(f'{key}{other}').decode()}"
                for other in others
                if other != rank and store.check([f"{key}{other}"])
            ]

        def leave(store: dist.Store) -> list[str]:
            store.set(f"{key}{rank}", told(error))
            if not isinstance(error, SentenceError) or error.is_of_every_rank:
                return []
            return left_by(store, [int(store.compare_set(f"{key}first", "", str(rank)))])

        try:
            if not says_that_another_is_gone(error):
                return line.ask(leave, WAIT_S)
            end = time.monotonic() + self._wait_s
            while True:
                others = line.ask(lambda store: left_by(store, range(self._waits.ranks)), WAIT_S)
                if others or time.monotonic() > end:
                    return others
                time.sleep(_PAUSE_S)
        except Exception as unreachable:  # must not hide the error itself
            logger.debug("cannot exchange errors with other ranks: %s", unreachable)
            return []
