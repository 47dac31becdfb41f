"""What benchmarks share: ranks on this machine, a table for people, one JSON object for programs."""

import json
import os
import platform
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist

PACKAGES = ("torch", "transformers", "accelerate", "flash-attn", "flash-attn-3", "flash-attn-4", "triton", "kernels")
"""Whose versions results depend on."""


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


def median_seconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of a call, after one to warm up; on CUDA by the device's own clock."""
    call()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def machine() -> dict[str, Any]:
    """The GPU, if there is one, and the versions that results belong to."""
    found: dict[str, Any] = {
        "packages": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "commit": _commit(),
        "cuda": torch.version.cuda,
    }
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": gpu.name,
            "capability": f"{gpu.major}.{gpu.minor}",
            "memory_gib": round(gpu.total_memory / 2**30, 1),
            "multiprocessors": gpu.multi_processor_count,
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    commit = _output("git", "rev-parse", "HEAD")
    return f"{commit} with changes" if commit and _output("git", "status", "--porcelain") else commit


def _output(*words: str) -> str | None:
    """What a program prints; None where there is none, or it fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


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
