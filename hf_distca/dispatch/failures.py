"""Report of the failed rank's error on the surviving ranks."""

import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch.distributed as dist

logger = logging.getLogger(__name__)

WAIT_S = 5.0
"""Seconds to look for a partner's error after losing the partner, which leaves its error before its connections close.
"""
_PAUSE_S = 0.05
_LOST_PARTNER = re.compile(r"gloo|NCCL|connection (closed|reset) by peer|timed out waiting", re.IGNORECASE)


class Store(Protocol):
    """Used part of a store of torch.distributed."""

    def set(self, key: str, value: str, /) -> None:
        """Set a value."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys have values."""

    def get(self, key: str, /) -> bytes:
        """Wait for the value and return it."""


class Failures:
    """Errors of the ranks that train together, readable by every rank.

    Without these errors, a rank whose partner failed would report only a closed connection.

    Args:
        store: a store that every rank reaches, with keys of these ranks alone; None with one rank.
    """

    def __init__(self, store: Store | None, rank: int, ranks: int, wait_s: float = WAIT_S) -> None:
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._wait_s = wait_s
        self._depth = self._begun = 0

    @contextmanager
    def told(self) -> Iterator[None]:
        """Leave this rank's error for other ranks; raise another rank's error if this rank only lost that rank.

        Every rank enters the context at the same point. A nested context belongs to the outermost one.

        Raises:
            RuntimeError: another rank failed; the message names the rank and its error.
        """
        if self._depth == 0:
            self._begun += 1
        self._depth += 1
        try:
            yield
        except Exception as error:
            if self._depth > 1 or self._store is None:
                raise
            if not _lost_partner(error):
                self._leave(error)
                raise
            others = self._others()
            if not others:
                raise
            raise RuntimeError("; ".join(f"rank {rank} failed: {why}" for rank, why in others.items())) from error
        finally:
            self._depth -= 1

    def _key(self, rank: int) -> str:
        return f"hf_distca/failures/{self._begun}/{rank}"

    def _leave(self, error: Exception) -> None:
        assert self._store is not None
        try:
            self._store.set(self._key(self._rank), f"{type(error).__name__}: {error}")
        except Exception as unreachable:  # must not hide the error itself
            logger.debug("other ranks are not told: %s", unreachable)

    def _others(self) -> dict[int, str]:
        """Return other ranks' errors, by rank, as soon as there are any; empty after `wait_s`."""
        assert self._store is not None
        end = time.monotonic() + self._wait_s
        try:
            while True:
                keys = {rank: self._key(rank) for rank in range(self._ranks) if rank != self._rank}
                found = {rank: key for rank, key in keys.items() if self._store.check([key])}
                if found or time.monotonic() > end:
                    return {rank: self._store.get(key).decode() for rank, key in found.items()}
                time.sleep(_PAUSE_S)
        except Exception as unreachable:  # must not hide the error itself
            logger.debug("errors of other ranks cannot be read: %s", unreachable)
            return {}


def _lost_partner(error: Exception) -> bool:
    """Return whether an error only says that another rank does not answer."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and _LOST_PARTNER.search(str(error)) is not None
    )
