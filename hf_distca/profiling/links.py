"""Measure links between ranks, and agree on one profile of all ranks.

Rows travel by the exchange that training uses.

The exchange is described by protocols: `hf_distca/dispatch/peers.py` has it.
"""

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from statistics import median
from typing import Any, Protocol

import numpy as np
import torch

from hf_distca.plan.arrays import FloatArray
from hf_distca.plan.nodes import node_sizes
from hf_distca.predict.device_profile import DeviceProfile
from hf_distca.predict.seconds import KernelCost, LinkCost, Links
from hf_distca.profiling.device import REPEATS, median_seconds

EXCHANGED_ROWS = (64, 512, 4096, 16384, 65536)
"""Numbers of exchanged rows: 64 KiB to 64 MiB."""
FEWEST = 2
"""Minimum number of measured sizes, whatever their time: the fit needs them."""
RATE_S = 0.05
"""Seconds for each pair of ranks in `link_rates`, after which no larger size is begun."""
OVERLAP_ROWS = 4096
"""Rows of the exchange that is measured beside computation."""


class RankGroup(Protocol):
    """Ranks that measure their links together."""

    rank: int  # of this process
    ranks: int  # number of ranks

    def all_gather(self, value: Any, *, in_world: bool = False) -> list[Any]:
        """Return the values of all ranks, by rank."""


class Buffer(Protocol):
    """Rows that can be sent to other ranks again and again."""

    def send(self) -> "Buffer":
        """Begin the exchange, and return the buffer."""

    def wait(self) -> object:
        """Wait for the end of the exchange."""


class Exchanges(Protocol):
    """Exchanges in which every rank sends rows to one other rank."""

    device: torch.device
    row_bytes: int

    @property
    def groups(self) -> RankGroup:
        """Ranks that take part."""

    def buffer(self, peers: Sequence[int], rows: int) -> Buffer:
        """Return a buffer of the exchange that training uses.

        It holds rows from each rank to its peer.
        """

    def collective(self, peers: Sequence[int], rows: int) -> Callable[[], object]:
        """Return the same exchange by a collective that may use all of a link."""


def measured_link(
    exchanges: Exchanges,
    peers: Sequence[int],
    *,
    alone: bool = False,
    limit_s: float = inf,
) -> LinkCost:
    """Measure an exchange in which every rank sends to another rank. A collective of the world.

    Args:
        peers: [ranks] receiver of each rank's rows.
        alone: use the collective, which may use all of a link and leaves no room for attention.
        limit_s: seconds after which no larger size is begun.
    """
    sizes, rank_seconds = _timed(exchanges, peers, alone=alone, limit_s=limit_s)
    # With equal weights, small exchanges would set the bandwidth: networks buffer them, so they
    # return early.
    slowest = rank_seconds.max(axis=1)
    return LinkCost.fitted(sizes, slowest, weights=slowest)


def link_rates(exchanges: Exchanges) -> dict[tuple[int, int], float]:
    """Return GB/s from each rank to each other rank, all sending at a time.

    A collective of the world.
    """
    ranks = exchanges.groups.ranks
    rates: dict[tuple[int, int], float] = {}
    for shift in range(1, ranks):
        sizes, rank_seconds = _timed(
            exchanges, [(rank + shift) % ranks for rank in range(ranks)], limit_s=RATE_S
        )
        # A rank's time covers its sending and receiving; it counts for the link over which the rank
        # receives.
        rates |= {
            ((rank - shift) % ranks, rank): float(sizes[-1] / rank_seconds[-1, rank] / 1e9)
            for rank in range(ranks)
        }
    return rates


def _timed(
    exchanges: Exchanges,
    peers: Sequence[int],
    *,
    alone: bool = False,
    limit_s: float = inf,
) -> tuple[FloatArray, FloatArray]:
    """Return [sizes] bytes and [sizes, ranks] seconds of exchanges.

    The arguments are those of `measured_link`.
    """
    times: list[list[float]] = []
    spent = 0.0

    def seconds(rows: int) -> float:
        if alone:
            return median_seconds(exchanges.collective(peers, rows), exchanges.device)
        buffer = exchanges.buffer(peers, rows)
        return median_seconds(lambda: buffer.send().wait(), exchanges.device)

    for number, rows in enumerate(EXCHANGED_ROWS):
        if number >= FEWEST and spent > limit_s:
            break
        times.append(exchanges.groups.all_gather(seconds(rows)))
        spent += (1 + REPEATS) * max(times[-1])
    sizes = np.array(EXCHANGED_ROWS[: len(times)], np.float64) * exchanges.row_bytes
    return sizes, np.array(times)


def peers_of(ranks: int, ranks_per_node: int | tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return the next rank of each rank's node, and the same rank of the next node.

    Returns:
        Two lists [ranks]. They are the same if all links are alike, or if nodes of different sizes
        have no such pairs.
    """
    sizes = node_sizes(ranks, ranks_per_node)
    next_in_node = []
    next_node = []
    first_rank = 0
    for size in sizes:
        next_in_node += [first_rank + (rank + 1) % size for rank in range(size)]
        next_node += [(first_rank + size + rank) % ranks for rank in range(size)]
        first_rank += size
    # Alike links have one list. Of nodes of different sizes some rank would have two peers.
    if len(sizes) in (1, ranks):
        next_in_node = next_node = [(rank + 1) % ranks for rank in range(ranks)]
    elif sorted(next_node) != list(range(ranks)):
        next_node = next_in_node
    return next_in_node, next_node


def _beside_computation(exchanges: Exchanges, peers: Sequence[int]) -> tuple[float, float]:
    """Measure a rank's own time for an exchange.

    The rank needs seconds to start it, and seconds per byte while it computes.
    """
    groups, device = exchanges.groups, exchanges.device
    buffer = exchanges.buffer(peers, OVERLAP_ROWS)
    smallest = exchanges.buffer(peers, EXCHANGED_ROWS[0])
    x = torch.randn(256, 256, device=device)
    # 1. Seconds to start an exchange of the fewest rows, and seconds of an exchange of many.
    starts = []
    exchange_times = []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        smallest.send()
        starts.append(time.perf_counter() - began)
        smallest.wait()
        began = time.perf_counter()
        buffer.send().wait()
        exchange_times.append(time.perf_counter() - began)
    # 2. Computation that takes twice as long as the exchange, alone and beside it. Its loss is the
    #    rank's own time for the exchange. The first repetition warms up.
    product_s = max(groups.all_gather(median_seconds(lambda: x @ x, device)))
    exchange_s = max(groups.all_gather(median(exchange_times[1:])))
    products = min(max(int(2 * exchange_s / product_s), 1), 10_000)

    def compute() -> None:
        for _ in range(products):
            x @ x

    def compute_beside() -> None:
        buffer.send()
        compute()
        buffer.wait()

    lost_s = median_seconds(compute_beside, device) - median_seconds(compute, device)
    mean_lost_s = max(0.0, float(np.mean(groups.all_gather(lost_s))))
    start_s = float(np.mean(groups.all_gather(median(starts[1:]))))
    return start_s, mean_lost_s / (OVERLAP_ROWS * exchanges.row_bytes)


def with_links(
    profile: DeviceProfile,
    exchanges: Exchanges,
    ranks_per_node: int | tuple[int, ...],
    *,
    collectives: bool = True,
    limit_s: float = inf,
) -> DeviceProfile:
    """Return the mean of all ranks' profiles, with measured links. A collective.

    All ranks measure the links inside and between nodes.

    Args:
        collectives: also measure torch's own collectives over the default group; else they count as
            fast as exchanges. Over gloo both are the same.
        limit_s: for the exchanges of each kind of link, see `measured_link`.
    """
    groups = exchanges.groups
    profiles: list[DeviceProfile] = groups.all_gather(profile)
    next_in_node, next_node = peers_of(groups.ranks, ranks_per_node)

    def measured(*, alone: bool, limit_s: float) -> tuple[LinkCost, LinkCost]:
        within = measured_link(exchanges, next_in_node, alone=alone, limit_s=limit_s)
        if next_node == next_in_node:
            return within, within
        return within, measured_link(exchanges, next_node, alone=alone, limit_s=limit_s)

    # 1. The exchange, beside computation too, and torch's collectives where they differ.
    within, between = measured(alone=False, limit_s=limit_s)
    slower = next_in_node if within.bandwidth < between.bandwidth else next_node
    exchange = links = Links(within, between, *_beside_computation(exchanges, slower))
    if collectives and exchanges.device.type == "cuda":
        links = Links(*measured(alone=True, limit_s=inf))
    # 2. The mean of what the ranks measured of their devices.
    sharing = ranks_per_core(groups) if exchanges.device.type == "cpu" else 1.0
    changes: dict[str, Any] = {}
    for name in ("flops_per_second", "bytes_per_second", "launches"):
        values = [getattr(rank_profile, name) for rank_profile in profiles]
        changes[name] = float(np.mean(values))
    for name in ("forward", "backward"):
        costs = [list(vars(getattr(rank_profile, name)).values()) for rank_profile in profiles]
        changes[name] = KernelCost(*np.mean(costs, axis=0).tolist())
    return replace(profiles[0], **changes, links=links, exchange=exchange, ranks_per_core=sharing)


def ranks_per_core(groups: RankGroup) -> float:
    """Return the threads of all processes per core, at least 1, on the host with the fewest.

    A collective.
    """
    this_process = (socket.gethostname(), torch.get_num_threads(), os.sched_getaffinity(0))
    threads: dict[str, int] = {}
    cores: dict[str, set[int]] = {}
    for host, count, allowed in groups.all_gather(this_process, in_world=True):
        threads[host] = threads.get(host, 0) + count
        cores[host] = cores.get(host, set()) | allowed
    return max(min(threads[host] / len(cores[host]) for host in threads), 1.0)
