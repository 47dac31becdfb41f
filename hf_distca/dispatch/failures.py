"""Why another rank failed, told by the rank that only notices that it is gone."""

import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch.distributed as dist

logger = logging.getLogger(__name__)

WAIT_S = 5.0
"""How long a rank that lost its partners looks for their errors. A partner's is there before its connections close."""
_PAUSE_S = 0.05
_LOST_PARTNER = re.compile(r"gloo|NCCL|connection (closed|reset) by peer|timed out waiting", re.IGNORECASE)


class Store(Protocol):
    """What is used of a store of torch.distributed."""

    def set(self, key: str, value: str, /) -> None:
        """Leave a value."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all the keys have values."""

    def get(self, key: str, /) -> bytes:
        """The value, once there is one."""


class Failures:
    """Errors of the ranks that train together, left where every rank can read them.

    Without it a rank whose partner failed reports what its exchange made of that: a connection that was closed.

    Args:
        store: reached by every rank, and with keys of these ranks alone; None where there is one rank.
        rank: this rank.
        ranks: how many.
        wait_s: how long a rank that lost its partners looks for their errors.
    """

    def __init__(self, store: Store | None, rank: int, ranks: int, wait_s: float = WAIT_S) -> None:
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._wait_s = wait_s
        self._depth = self._begun = 0

    @contextmanager
    def told(self) -> Iterator[None]:
        """Leave an error of what is done inside for the other ranks; say theirs where this rank only lost them.

        Every rank enters it at the same point; inside another, it is part of that one.

        Raises:
            RuntimeError: another rank failed, and therefore this one; says which and why.
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
        except Exception as unreachable:  # must not take the place of the error itself
            logger.debug("cannot report the error to other ranks: %s", unreachable)

    def _others(self) -> dict[int, str]:
        """What other ranks left, as soon as any has; none where none does in time."""
        assert self._store is not None
        end = time.monotonic() + self._wait_s
        try:
            while True:
                keys = {rank: self._key(rank) for rank in range(self._ranks) if rank != self._rank}
                found = {rank: key for rank, key in keys.items() if self._store.check([key])}
                if found or time.monotonic() > end:
                    return {rank: self._store.get(key).decode() for rank, key in found.items()}
                time.sleep(_PAUSE_S)
        except Exception as unreachable:  # must not take the place of the error itself
            logger.debug("cannot read the errors of other ranks: %s", unreachable)
            return {}


def _lost_partner(error: Exception) -> bool:
    """Whether an error says no more than that another rank does not answer."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and _LOST_PARTNER.search(str(error)) is not None
    )
