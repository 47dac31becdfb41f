"""Ranks on this machine: processes with a gloo group among them."""

import ctypes
import os
import signal
import socket
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl: the signal that a process gets when its parent has ended."""
_LIBC = ctypes.CDLL(None)


def end_with_parent() -> None:
    """Have Linux kill this process when the one that started it ends, killed or not, whatever is
    done here then.

    Daemonic processes end with a parent that exits, but not with one that is killed.
    """
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = parent_process()
    if parent is not None and not parent.is_alive():  # it ended while this process was starting
        os._exit(1)


class Ranks:
    """Processes with one thread each and a gloo group, that prepare something once and then take
    rounds of it.

    A context manager; the processes end at once where an error leaves it or this process is killed.

    Args:
        prepare: every process calls it once; returns what a round calls, without arguments.
        enter: every process calls it with its rank before there is a group, whose environment
            variables it may set.
    """

    def __init__(
        self,
        count: int,
        prepare: Callable[..., Callable[[], Any]],
        *args: Any,
        enter: Callable[[int], None] | None = None,
    ) -> None:
        context = get_context("spawn")
        port = free_port()
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, count, port, enter, prepare, args)
            )
            self._connections.append(ours)
            self._processes.append((process, theirs))

    def __enter__(self) -> "Ranks":
        for process, theirs in self._processes:
            process.start()
            theirs.close()  # so that a rank sees the end of this process
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        for connection in self._connections:
            connection.close()
        for process, _ in self._processes:
            if error is None:
                process.join(10)
            process.kill()

    def take(self) -> list[Any]:
        """One round on all ranks; what each returned, by rank.

        RuntimeError has the traceback of a failed rank.
        """
        for connection in self._connections:
            connection.send(None)
        results: dict[int, Any] = {}
        while len(results) < len(self._connections):
            for connection in wait(
                [c for rank, c in enumerate(self._connections) if rank not in results]
            ):
                rank = self._connections.index(connection)
                try:
                    succeeded, results[rank] = connection.recv()
                except EOFError:
                    succeeded, results[rank] = False, "its process ended"
                if not succeeded:  # the others may wait for this rank forever
                    for process, _ in self._processes:
                        process.kill()
                    raise RuntimeError(f"rank {rank} failed: {results[rank]}")
        return [results[rank] for rank in range(len(self._connections))]


def run_ranks(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call a module-level function on each of `ranks` processes; return the results by rank."""
    with Ranks(ranks, partial, function, *args) as started:
        return started.take()


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _serve(
    connection: Connection,
    rank: int,
    ranks: int,
    port: int,
    enter: Callable[[int], None] | None,
    prepare: Callable[..., Callable[[], Any]],
    args: tuple[Any, ...],
) -> None:
    """The life of a rank: until the other end of the connection is closed."""
    end_with_parent()
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # accelerate takes the number of threads from here
    try:
        if enter is not None:
            enter(rank)
        dist.init_process_group("gloo")
        take = prepare(*args)
        while True:
            try:
                connection.recv()
            except EOFError:
                break
            connection.send((True, take()))
        dist.destroy_process_group()
    except Exception:
        connection.send((False, traceback.format_exc()))
