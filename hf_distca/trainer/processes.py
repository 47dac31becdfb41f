"""Processes that read data for a rank.

They have signs of life, time limits, and errors that name them.
"""

import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any
from weakref import WeakSet

import torch

from hf_distca.interpreter import FORK_HANGS, fork_can_hang, start_method

logger = logging.getLogger(__name__)

START_S = 120.0
"""Most seconds within which a process leaves its sign of life."""
ENDED = "DataLoader worker"
"""Beginning of torch's error where a process has ended."""
NONE = "set dataloader_num_workers=0, which starts no process"
AGAIN = (
    "put the script's code under `if __name__ == '__main__':`, because such a process imports the "
    "script again"
)


class Signs:
    """Signs of life of one loader's processes: a `worker_init_fn`.

    Args:
        loader_function: the loader's own `worker_init_fn`.
    """

    def __init__(self, processes: int, loader_function: Callable[[int], None] | None) -> None:
        self._loader_function = loader_function
        self._pids = torch.zeros(processes, dtype=torch.int64).share_memory_()

    def __call__(self, worker_id: int) -> None:
        """Leave the sign of this process."""
        self._pids[worker_id] = os.getpid()
        if self._loader_function is not None:
            self._loader_function(worker_id)

    def pids(self) -> set[int]:
        """Return the ids of the processes that left a sign."""
        return set(self._pids.tolist())


class ReadingProcesses:
    """Watch the processes that read for a rank.

    Args:
        count: processes of each loader.
        rank: rank in the world, which errors name.
        timeout_s: seconds after which ranks give up waiting for each other. Half of it is the limit
            for a batch, so that the rank that lacks a batch is the first to give up, and says why.
        chosen_method: how processes start; None for Python's default.
    """

    def __init__(
        self, count: int, rank: int, timeout_s: float, chosen_method: str | None = None
    ) -> None:
        self._count = count
        self.rank = rank
        self.method = start_method(chosen_method)
        self.batch_s = timeout_s / 2
        self.start_s = min(START_S, self.batch_s)
        self.reason = ""  # why processes were ended
        self._signs: WeakSet[Signs] = WeakSet()  # of all loaders
        if count and rank == 0 and self.can_hang:
            logger.warning(
                "dataloader_num_workers=%s starts processes by fork, but %s, or %s",
                count,
                FORK_HANGS,
                NONE,
            )

    @property
    def can_hang(self) -> bool:
        """Whether the fault of some versions of Python can stop a process at its start."""
        return self.method == "fork" and fork_can_hang()

    def watch(self, loader: Any) -> None:
        """Let the processes of a loader that accelerate has prepared leave signs."""
        base = loader.base_dataloader
        if base.num_workers > 0:
            signs = Signs(base.num_workers, base.worker_init_fn)
            self._signs.add(signs)
            base.worker_init_fn = signs

    def started(self) -> set[int]:
        """Return the ids of all processes that left a sign."""
        return set[int]().union(*(signs.pids() for signs in self._signs))

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Name rank, process and remedy in torch's error about a process.

        It comes at any time, by a signal.
        """
        try:
            yield
        except RuntimeError as error:
            if not str(error).startswith(ENDED):
                raise
            raise RuntimeError(self.explanation(error)) from error

    def explanation(self, error: Exception) -> str:
        """Return why a process failed this rank, and the remedy."""
        remedy = f"{NONE}; {FORK_HANGS}" if self.can_hang else NONE
        if self.method != "fork":
            remedy = f"{AGAIN}, or {remedy}"
        process_ended = "because a process that reads for it has ended"
        reason = self.reason or f"rank {self.rank} lacks data, {process_ended}: {error}"
        return f"{reason}; {remedy}"

    def begin(self) -> "Reading | None":
        """Return the watch of one pass over a loader, before its processes start.

        None without processes.
        """
        return Reading(self) if self._count else None


class Reading:
    """Watch one pass over a loader; a process that leaves no sign of life is ended."""

    def __init__(self, processes: ReadingProcesses) -> None:
        self._processes = processes
        self._earlier_children = set(_children())
        # Processes of this pass, once the first batch has come.
        self._children_of_pass: dict[int, BaseProcess] | None = None
        self._reads = self._expired = False
        self._timer = threading.Timer(processes.start_s, self._expire)
        self._timer.daemon = True
        self._timer.start()

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Read a batch inside the context.

        Raises:
            RuntimeError: A process has not started, sends nothing or has ended; with rank, process
                and remedy.
        """
        # DataLoader's own time limit does not end the wait for a tensor that a stopped process
        # holds.
        limit = threading.Timer(self._processes.batch_s, self._end_late)
        limit.daemon = True
        limit.start()
        try:
            self._reads = True
            if self._expired:
                self._end_silent()
            if self._processes.reason:
                raise RuntimeError(ENDED)
            yield
        except (RuntimeError, OSError, EOFError) as error:
            is_start = self._children_of_pass is None and isinstance(error, OSError | EOFError)
            if not (self._processes.reason or is_start or str(error).startswith(ENDED)):
                raise
            raise RuntimeError(self._processes.explanation(error)) from error
        finally:
            limit.cancel()
            self._reads = False
        if self._children_of_pass is None:
            self._children_of_pass = self._new_children()
        if self._children_of_pass.keys() <= self._processes.started():
            self._timer.cancel()

    def end(self) -> None:
        """Watch no longer."""
        self._timer.cancel()

    def _new_children(self) -> dict[int, BaseProcess]:
        """Return the processes that started since this pass began.

        No other processes start while the first batch of the pass is read.
        """
        children = _children()
        return {
            pid: process for pid, process in children.items() if pid not in self._earlier_children
        }

    def _present_children(self) -> dict[int, BaseProcess]:
        """Return the processes of this pass, as far as they are known."""
        if self._children_of_pass is None:
            return self._new_children()
        return self._children_of_pass

    def _expire(self) -> None:
        """End silent processes while the rank waits for a batch.

        Else the rank does so when it next wants one.
        """
        self._expired = True
        if self._reads:
            self._end_silent()

    def _end_silent(self) -> None:
        """End the processes of this pass that left no sign of life."""
        children = self._present_children()
        started = self._processes.started()
        silent = {
            pid: process
            for pid, process in children.items()
            if pid not in started and process.is_alive()
        }
        if silent:
            self._processes.reason = (
                f"rank {self._processes.rank} started processes that read its data, but "
                f"{_named(silent)} gave no sign of life within {self._processes.start_s:g} s and "
                "was ended"
            )
        for process in silent.values():  # torch notices it, and raises
            process.kill()

    def _end_late(self) -> None:
        """End all processes of this pass.

        Also a stopped process, which would keep the rank from ending.
        """
        children = self._present_children()
        if not children:  # they started in an earlier pass
            started = self._processes.started()
            children = {pid: process for pid, process in _children().items() if pid in started}
        self._processes.reason = (
            f"rank {self._processes.rank} waits for a batch from {_named(children)}, but none has "
            f"come within {self._processes.batch_s:g} s, half of exchange_timeout; raise "
            "exchange_timeout if a batch takes so long"
        )
        for process in children.values():
            process.kill()


def _children() -> dict[int, BaseProcess]:
    """Return this process's children of multiprocessing that have not ended, by their ids."""
    return {
        process.pid: process
        for process in multiprocessing.active_children()
        if process.pid is not None
    }


def _named(pids: Any) -> str:
    return f"process {', '.join(map(str, sorted(pids)))}"
