"""What benchmarks share: ranks on this machine, a table for people, one JSON object for programs."""

import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call a module-level function on `ranks` processes with a gloo group and one thread each.

    Returns:
        What each returned, by rank.
    """
    port = free_port()
    with get_context("spawn").Pool(ranks) as pool:
        jobs = [pool.apply_async(_on_rank, (rank, ranks, port, function, args)) for rank in range(ranks)]
        return [job.get() for job in jobs]


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _on_rank(rank: int, ranks: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        return function(*args)
    finally:
        dist.destroy_process_group()


class Probe:
    """A small kernel, whose time says how fast a core is at the moment."""

    def __init__(self) -> None:
        self._qkv = torch.randn(3, 1, 4, 512, 64)

    def take(self) -> float:
        """Median seconds of the kernel."""
        times = []
        for _ in range(7):
            begin = time.perf_counter()
            torch.nn.functional.scaled_dot_product_attention(*self._qkv, is_causal=True)
            times.append(time.perf_counter() - begin)
        return statistics.median(times)


class CalmSteps:
    """Times steps, and keeps of each way the half that other users of the machine disturbed least.

    A virtual core shares its processor with strangers: the same kernel was seen to run at one speed for seconds and
    at two thirds of it for the next ones. A step waits for its slowest rank, so balanced work suffers most. All ranks
    time a small kernel together before and after a step; the slower reading tells how calm the machine was. The step's
    own time plays no part in that.

    Every rank makes one and calls it with the same steps in the same order.
    """

    def __init__(self) -> None:
        self._probe = Probe()
        self._steps: dict[str, list[tuple[float, float]]] = {}  # (reading, seconds)

    def run(self, way: str, step: Callable[[], Any]) -> None:
        """Run a step on all ranks and note its time until all are done."""
        before = self._reading()
        begin = time.perf_counter()
        step()
        dist.barrier()
        seconds = time.perf_counter() - begin
        self._steps.setdefault(way, []).append((max(before, self._reading()), seconds))

    def _reading(self) -> float:
        """Seconds that the small kernel takes on the slowest rank, all ranks at once."""
        dist.barrier()
        reading = torch.tensor(self._probe.take())
        dist.all_reduce(reading, dist.ReduceOp.MAX)
        return reading.item()

    def seconds(self) -> dict[str, list[float]]:
        """Times of the calmest half of the steps, by way."""
        return {
            way: [time for _, time in sorted(steps)[: (len(steps) + 1) // 2]] for way, steps in self._steps.items()
        }

    def all_seconds(self) -> dict[str, list[float]]:
        """Times of all steps, by way."""
        return {way: [time for _, time in steps] for way, steps in self._steps.items()}


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of text in columns."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, *rows]:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def print_json(**figures: Any) -> None:
    """Print figures as one JSON object on one line, numbers to four digits."""
    print(
        json.dumps(
            {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in figures.items()}
        )
    )
