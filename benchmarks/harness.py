"""What benchmarks share: ranks on this machine, a table for people, one JSON object for programs."""

import json
import os
import socket
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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with get_context("spawn").Pool(ranks) as pool:
        jobs = [pool.apply_async(_on_rank, (rank, ranks, port, function, args)) for rank in range(ranks)]
        return [job.get() for job in jobs]


def _on_rank(rank: int, ranks: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        return function(*args)
    finally:
        dist.destroy_process_group()


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
