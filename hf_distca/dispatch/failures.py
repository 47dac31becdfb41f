"""Report of the failed rank's error on the surviving ranks."""

import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

logger = logging.getLogger(__name__)

WAIT_S = 5.0
"""Seconds to look for the error of a lost partner; the partner leaves the error before its connections close."""
_PAUSE_S = 0.05
_LOST_PARTNER = re.compile(r"gloo|NCCL|connection (closed|reset) by peer|timed out waiting", re.IGNORECASE)


class Failures:
    """Errors of ranks that train together, exchanged through a store that only they share; one rank needs no store.

    Without them, a failed rank's partners report a closed connection.
    """

    def __init__(self, store: dist.Store | None, rank: int, ranks: int, wait_s: float = WAIT_S) -> None:
        self._store, self._rank, self._ranks, self._wait_s = store, rank, ranks, wait_s
        self._depth = self._begun = 0

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Leave this rank's error for other ranks; raise RuntimeError with another's if this rank only lost that rank.

        Every rank enters the context at the same point. A nested context belongs to the outermost one.
        """
        self._begun += self._depth == 0
        self._depth += 1
        try:
            yield
        except Exception as error:
            others = [] if self._depth > 1 or self._store is None else self._exchanged(error, self._store)
            if not others:
                raise
            raise RuntimeError("; ".join(others)) from error
        finally:
            self._depth -= 1

    def _exchanged(self, error: Exception, store: dist.Store) -> list[str]:
        """Leave an error of this rank itself; else return other ranks' errors as soon as any rank has one."""
        key = f"hf_distca/failures/{self._begun}/"
        only_says_that_another_is_gone = isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and _LOST_PARTNER.search(str(error))
        )
        try:
            if not only_says_that_another_is_gone:
                store.set(f"{key}{self._rank}", f"{type(error).__name__}: {error}")
                return []
            end = time.monotonic() + self._wait_s
            while True:
                found = [rank for rank in range(self._ranks) if rank != self._rank and store.check([f"{key}{rank}"])]
                if found or time.monotonic() > end:
                    return [f"rank {rank} failed: {store.get(f'{key}{rank}').decode()}" for rank in found]
                time.sleep(_PAUSE_S)
        except Exception as unreachable:  # must not hide the error itself
            logger.debug("cannot exchange errors with other ranks: %s", unreachable)
            return []
