"""Measure links between ranks, with the exchange that training uses, and agree on one profile of all ranks."""

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
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
    groups: Groups, device: torch.device, peers: Sequence[int], *, alone: bool = False, limit_s: float = inf
) -> LinkCost:
    """Measure an exchange in which every rank sends to another rank. A collective of the world.

    Args:
        peers: [ranks] receiver of each rank's rows.
        alone: use the default group, which may use all of a link and leaves no room for attention; else the exchange's
            group.
        limit_s: seconds after which no larger size is begun.
    """
    sizes, by_rank = _timed(groups, device, peers, alone=alone, limit_s=limit_s)
    return LinkCost.fitted(sizes, by_rank.max(1))


def link_rates(groups: Groups, device: torch.device) -> dict[tuple[int, int], float]:
    """Return GB/s from each rank to each other rank, all sending at a time. A collective of the world."""
    ranks = groups.ranks
    rates: dict[tuple[int, int], float] = {}
    for shift in range(1, ranks):
        sizes, by_rank = _timed(groups, device, [(rank + shift) % ranks for rank in range(ranks)], limit_s=RATE_S)
        # A rank's time covers its sending and receiving; it counts for the link over which the rank receives.
        rates |= {((rank - shift) % ranks, rank): float(sizes[-1] / by_rank[-1, rank] / 1e9) for rank in range(ranks)}
    return rates


def _timed(
    groups: Groups, device: torch.device, peers: Sequence[int], *, alone: bool = False, limit_s: float = inf
) -> tuple[FloatArray, FloatArray]:
    """Return [sizes] bytes and [sizes, ranks] seconds of exchanges, for arguments see `measured_link`."""
    exchange, sizes, times, spent = Exchange(groups), [], [], 0.0
    for number, rows in enumerate(EXCHANGED_ROWS):
        if number >= FEWEST and spent > limit_s:
            break
        buffer, route = _buffer(exchange, groups, peers, rows, device)
        if alone:
            given, taken = (torch.empty(rows, ROW_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
            run: Callable[[], object] = partial(dist.all_to_all_single, taken, given, route.received, route.sent)
        else:
            run = partial(_there, buffer)
        times.append(groups.all_gather(seconds_of(run, device)))
        spent += (1 + REPEATS) * max(times[-1])
        sizes.append(float(rows * ROW_BYTES))
    return np.array(sizes), np.array(times)


def _there(buffer: ExchangeBuffer) -> None:
    buffer.send().wait()


def _buffer(
    exchange: Exchange, groups: Groups, peers: Sequence[int], rows: int, device: torch.device
) -> tuple[ExchangeBuffer, Route]:
    """Return a buffer for rows of ROW_BYTES from each rank to its peer, and their route."""
    receiver, sender = peers[groups.rank], peers.index(groups.rank)
    sent, received = ([rows * (rank == other) for rank in range(groups.ranks)] for other in (receiver, sender))
    route, column = Route(sent, received, crossing=True), torch.empty((0, ROW_BYTES), dtype=torch.uint8, device=device)
    return exchange.buffer("links", route, [column]), route


def measured_exchange(
    groups: Groups, device: torch.device, ranks_per_node: int | tuple[int, ...], *, limit_s: float = inf
) -> Links:
    """Measure exchanges inside nodes, between nodes, and beside computation. A collective of the world.

    `limit_s` is for each kind of link, see `measured_link`.
    """
    inside, across = peers_of(groups.ranks, ranks_per_node)
    within = measured_link(groups, device, inside, limit_s=limit_s)
    between = within if across == inside else measured_link(groups, device, across, limit_s=limit_s)
    slower = inside if within.bandwidth < between.bandwidth else across
    start, busy = _beside_computation(groups, device, slower)
    return Links(within, between, start, busy)


def peers_of(ranks: int, ranks_per_node: int | tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return for each rank the next rank of its node, and the same rank of the next node, each [ranks].

    Both lists are the same if all links are alike, or if nodes of different sizes have no such pairs.
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


def _beside_computation(groups: Groups, device: torch.device, peers: Sequence[int]) -> tuple[float, float]:
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
    """Return the mean of all ranks' profiles, with links measured by all ranks together. A collective.

    Args:
        collectives: also measure torch's own collectives over the default group; else they count as fast as exchanges.
            Over gloo both are the same.
    """
    profiles: list[DeviceProfile] = groups.all_gather(profile)
    exchange = links = measured_exchange(groups, device, ranks_per_node, limit_s=limit_s)
    if collectives and device.type == "cuda":
        inside, across = peers_of(groups.ranks, ranks_per_node)
        within = measured_link(groups, device, inside, alone=True)
        links = Links(within, within if across == inside else measured_link(groups, device, across, alone=True))
    sharing = ranks_per_core(groups) if device.type == "cpu" else 1.0
    changes: dict[str, Any] = {}
    for name in ("flops_per_second", "bytes_per_second", "launches"):
        changes[name] = float(np.mean([getattr(each, name) for each in profiles]))
    for name in ("forward", "backward"):
        costs = [list(vars(getattr(each, name)).values()) for each in profiles]
        changes[name] = KernelCost(*np.mean(costs, axis=0).tolist())
    return replace(profiles[0], **changes, links=links, exchange=exchange, ranks_per_core=sharing)


def ranks_per_core(groups: Groups) -> float:
    """Return the threads per core, at least 1, of the host with the fewest. A collective.

    All processes of the world count.
    """
    here = (socket.gethostname(), torch.get_num_threads(), os.sched_getaffinity(0))
    threads: dict[str, int] = {}
    cores: dict[str, set[int]] = {}
    for host, count, allowed in groups.all_gather(here, in_world=True):
        threads[host] = threads.get(host, 0) + count
        cores[host] = cores.get(host, set()) | allowed
    return max(min(threads[host] / len(cores[host]) for host in threads), 1.0)
