"""Measure links between ranks, with the exchange that training uses, and agree on one profile of all ranks."""

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hf_distca.dispatch.exchange import Exchange, ExchangeBuffer, Route
from hf_distca.dispatch.groups import Groups
from hf_distca.measure.device import REPEATS, seconds_of
from hf_distca.planner.nodes import node_sizes
from hf_distca.planner.seconds import FloatArray, KernelCost, LinkCost, Links
from hf_distca.sim.costs import DeviceProfile

ROW_BYTES = 1024
EXCHANGED_ROWS = (64, 512, 4096, 16384, 65536)
"""Numbers of exchanged rows: 64 KiB to 64 MiB."""
FEWEST = 2
"""Minimum number of measured sizes, whatever their time: the fit needs them."""
RATE_S = 0.05
"""Seconds for each pair of ranks in `link_rates`, after which no larger size is begun."""
OVERLAP_ROWS = 4096
"""Rows of the exchange that is measured beside computation."""


def measured_link(
    groups: Groups,
    device: torch.device,
    peers: Sequence[int],
    *,
    alone: bool = False,
    limit_s: float = inf,
) -> LinkCost:
    """Measure an exchange in which every rank sends to another rank. A collective of the world.

    Args:
        peers: [ranks] receiver of each rank's rows.
        alone: use the default group, which may use all of a link and leaves no room for attention.
        limit_s: seconds after which no larger size is begun.
    """
    sizes, by_rank = _timed(groups, device, peers, alone=alone, limit_s=limit_s)
    # With equal weights, small exchanges would set the bandwidth: networks buffer them, so they
    # return early.
    return LinkCost.fitted(sizes, seconds := by_rank.max(1), weights=seconds)


def link_rates(groups: Groups, device: torch.device) -> dict[tuple[int, int], float]:
    """Return GB/s from each rank to each other rank, all sending at a time.

    A collective of the world.
    """
    ranks = groups.ranks
    rates: dict[tuple[int, int], float] = {}
    for shift in range(1, ranks):
        sizes, by_rank = _timed(
            groups, device, [(rank + shift) % ranks for rank in range(ranks)], limit_s=RATE_S
        )
        # A rank's time covers its sending and receiving; it counts for the link over which the rank
        # receives.
        rates |= {
            ((rank - shift) % ranks, rank): float(sizes[-1] / by_rank[-1, rank] / 1e9)
            for rank in range(ranks)
        }
    return rates


def _timed(
    groups: Groups,
    device: torch.device,
    peers: Sequence[int],
    *,
    alone: bool = False,
    limit_s: float = inf,
) -> tuple[FloatArray, FloatArray]:
    """Return [sizes] bytes and [sizes, ranks] seconds of exchanges, for arguments see `measured_link`."""
    exchange, times, spent = Exchange(groups), [], 0.0

    def seconds(rows: int) -> float:
        buffer, route = _buffer(exchange, groups, peers, rows, device)
        if not alone:
            return seconds_of(lambda: buffer.send().wait(), device)
        given, taken = (
            torch.empty(rows, ROW_BYTES, dtype=torch.uint8, device=device) for _ in range(2)
        )
        return seconds_of(
            lambda: dist.all_to_all_single(taken, given, route.received, route.sent), device
        )

    for number, rows in enumerate(EXCHANGED_ROWS):
        if number >= FEWEST and spent > limit_s:
            break
        times.append(groups.all_gather(seconds(rows)))
        spent += (1 + REPEATS) * max(times[-1])
    return np.array(EXCHANGED_ROWS[: len(times)], np.float64) * ROW_BYTES, np.array(times)


def _buffer(
    exchange: Exchange, groups: Groups, peers: Sequence[int], rows: int, device: torch.device
) -> tuple[ExchangeBuffer, Route]:
    """Return a buffer for rows of ROW_BYTES from each rank to its peer, and their route."""
    receiver, sender = peers[groups.rank], peers.index(groups.rank)
    sent, received = (
        [rows * (rank == other) for rank in range(groups.ranks)] for other in (receiver, sender)
    )
    route, column = (
        Route(sent, received, crossing=True),
        torch.empty((0, ROW_BYTES), dtype=torch.uint8, device=device),
    )
    return exchange.buffer("links", route, [column]), route


def peers_of(ranks: int, ranks_per_node: int | tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return for each rank the next rank of its node, and the same rank of the next node, each [ranks].

    Both lists are the same if all links are alike, or if nodes of different sizes have no such
    pairs.
    """
    sizes = node_sizes(ranks, ranks_per_node)
    inside, across, first = [], [], 0
    for size in sizes:
        inside += [first + (rank + 1) % size for rank in range(size)]
        across += [(first + size + rank) % ranks for rank in range(size)]
        first += size
    if len(sizes) in (1, ranks):
        inside = across = [(rank + 1) % ranks for rank in range(ranks)]
    elif sorted(across) != list(range(ranks)):
        across = inside
    return inside, across


def _beside_computation(
    groups: Groups, device: torch.device, peers: Sequence[int]
) -> tuple[float, float]:
    """Measure a rank's own time for an exchange: seconds to start it, and per byte while the rank computes."""
    exchange = Exchange(groups)
    (buffer, _), (smallest, _) = (
        _buffer(exchange, groups, peers, rows, device) for rows in (OVERLAP_ROWS, EXCHANGED_ROWS[0])
    )
    x = torch.randn(256, 256, device=device)
    starts, alone = [], []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        smallest.send()
        starts.append(time.perf_counter() - began)
        smallest.wait()
        began = time.perf_counter()
        buffer.send().wait()
        alone.append(time.perf_counter() - began)
    one = max(groups.all_gather(seconds_of(lambda: x @ x, device)))
    count = min(max(int(2 * max(groups.all_gather(median(alone[1:]))) / one), 1), 10_000)

    def compute() -> None:
        for _ in range(count):
            x @ x

    def compute_beside() -> None:
        buffer.send()
        compute()
        buffer.wait()

    lost = seconds_of(compute_beside, device) - seconds_of(compute, device)
    lost = max(0.0, float(np.mean(groups.all_gather(lost))))
    return float(np.mean(groups.all_gather(median(starts[1:])))), lost / (OVERLAP_ROWS * ROW_BYTES)


def with_links(
    profile: DeviceProfile,
    groups: Groups,
    device: torch.device,
    ranks_per_node: int | tuple[int, ...],
    *,
    collectives: bool = True,
    limit_s: float = inf,
) -> DeviceProfile:
    """Return the mean of all ranks' profiles, with links inside and between nodes measured by all ranks. A collective.

    Args:
        collectives: also measure torch's own collectives over the default group; else they count as
            fast as exchanges. Over gloo both are the same.
        limit_s: for the exchanges of each kind of link, see `measured_link`.
    """
    profiles: list[DeviceProfile] = groups.all_gather(profile)
    inside, across = peers_of(groups.ranks, ranks_per_node)

    def measured(*, alone: bool, limit_s: float) -> tuple[LinkCost, LinkCost]:
        within = measured_link(groups, device, inside, alone=alone, limit_s=limit_s)
        if across == inside:
            return within, within
        return within, measured_link(groups, device, across, alone=alone, limit_s=limit_s)

    within, between = measured(alone=False, limit_s=limit_s)
    slower = inside if within.bandwidth < between.bandwidth else across
    exchange = links = Links(within, between, *_beside_computation(groups, device, slower))
    if collectives and device.type == "cuda":
        links = Links(*measured(alone=True, limit_s=inf))
    sharing = ranks_per_core(groups) if device.type == "cpu" else 1.0
    changes: dict[str, Any] = {}
    for name in ("flops_per_second", "bytes_per_second", "launches"):
        changes[name] = float(np.mean([getattr(each, name) for each in profiles]))
    for name in ("forward", "backward"):
        costs = [list(vars(getattr(each, name)).values()) for each in profiles]
        changes[name] = KernelCost(*np.mean(costs, axis=0).tolist())
    return replace(profiles[0], **changes, links=links, exchange=exchange, ranks_per_core=sharing)


def ranks_per_core(groups: Groups) -> float:
    """Return the threads of all processes per core, at least 1, on the host with the fewest.

    A collective.
    """
    here = (socket.gethostname(), torch.get_num_threads(), os.sched_getaffinity(0))
    threads: dict[str, int] = {}
    cores: dict[str, set[int]] = {}
    for host, count, allowed in groups.all_gather(here, in_world=True):
        threads[host] = threads.get(host, 0) + count
        cores[host] = cores.get(host, set()) | allowed
    return max(min(threads[host] / len(cores[host]) for host in threads), 1.0)
