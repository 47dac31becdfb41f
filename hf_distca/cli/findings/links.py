"""How fast rows go from rank to rank, measured by the exchange that training uses."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from hf_distca.cli.findings.finding import Finding
from hf_distca.dispatch.exchange import Exchange
from hf_distca.dispatch.groups import Groups
from hf_distca.measure.links import ROW_BYTES, message_of_rows

FIRST_ROWS, MOST_ROWS = 1024, 64 * 1024
"""1 MiB to find out how fast a link is, and at most 64 MiB to measure it."""
AIM_S = 0.05
"""How long a message is to take."""
REPEATS = 3
SLOW = 1 / 3
"""A link is told as slow if it has less of the median of its kind."""


@dataclass(frozen=True)
class Link:
    """One way between two ranks.

    Attributes:
        sender, receiver: the ranks.
        rate: GB/s.
    """

    sender: int
    receiver: int
    rate: float


def measured_links(groups: Groups, device: torch.device) -> list[Link]:
    """Measure each way between any two ranks. A collective.

    All ranks send at a time, each to one other and at last to every other in turn, as all do in an exchange.

    Args:
        groups: more than one rank.
        device: where rows are.
    """
    exchange, ranks, rank = Exchange(groups), groups.ranks, groups.rank
    links = []
    for shift in range(1, ranks):
        to, of = (rank + shift) % ranks, (rank - shift) % ranks
        first = max(groups.all_gather(_seconds(exchange, to, of, ranks, FIRST_ROWS, device)))
        rows = int(min(max(FIRST_ROWS * AIM_S / first, FIRST_ROWS), MOST_ROWS))
        times = [_seconds(exchange, to, of, ranks, rows, device) for _ in range(REPEATS)]
        rates = groups.all_gather(rows * ROW_BYTES / median(times) / 1e9)
        links += [Link((at - shift) % ranks, at, rate) for at, rate in enumerate(rates)]
    return links


def _seconds(exchange: Exchange, to: int, of: int, ranks: int, rows: int, device: torch.device) -> float:
    """Time of one message to a rank while one of another comes in."""
    message = message_of_rows(exchange, to, of, ranks, rows, device)
    _come_to_rest(device)
    began = time.perf_counter()
    message.send().wait()
    _come_to_rest(device)
    return time.perf_counter() - began


def _come_to_rest(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def link_findings(links: Sequence[Link], nodes: Sequence[int] | None) -> list[Finding]:
    """Bandwidth between ranks, within nodes and between them.

    Args:
        links: as measured.
        nodes: [ranks] the node of each; None where all links are alike.
    """
    if nodes is None:
        return [_finding("links between ranks", links)]
    within = [link for link in links if nodes[link.sender] == nodes[link.receiver]]
    between = [link for link in links if nodes[link.sender] != nodes[link.receiver]]
    kinds = {"links within nodes": within, "links between nodes": between}
    return [_finding(name, of_kind) for name, of_kind in kinds.items() if of_kind]


def _finding(name: str, links: Sequence[Link]) -> Finding:
    middle = median(link.rate for link in links)
    slowest = min(links, key=lambda link: link.rate)
    found = f"{middle:.2f} GB/s; the slowest, rank {slowest.sender} to {slowest.receiver}, {slowest.rate:.2f}"
    if slowest.rate < SLOW * middle:
        return Finding(name, found, "look at what is between these two: every exchange waits for the slowest")
    return Finding(name, found)
