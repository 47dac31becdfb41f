"""Devices and links, measured with few and short calls, or by a clock that counts pairs."""

import os
import socket
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from hf_distca.dispatch.peers import PeerExchanges
from hf_distca.dispatch.process_groups import Groups
from hf_distca.plan import AttentionKind
from hf_distca.predict.device_profile import Accuracy, DeviceProfile
from hf_distca.predict.seconds import KernelCost, LinkCost, Links, Tasks
from hf_distca.profiling import device, links
from hf_distca.profiling.links import (
    link_rates,
    measured_link,
    peers_of,
    ranks_per_core,
    with_links,
)

CPU = torch.device("cpu")


class CountedCalls:
    """Kernel by whose clock a pair of the forward takes 2 ns, a task 3 µs, a call 10 µs, and a
    backward 100 µs.
    """

    def __init__(self) -> None:
        self.now, self.widths = 0.0, set()

    def forward(self, q, k, v, shapes, params):
        self.widths.add((q.shape[-1], k.shape[-1], v.shape[-1]))
        self.now += 1e-5
        for rows, keys in zip(shapes.q_lens, shapes.k_lens, strict=True):
            self.now += 3e-6 + 2e-9 * (rows * (keys - rows) + rows * (rows + 1) / 2)
        return q.new_empty(*q.shape[:2], v.shape[-1]), q[..., 0]

    def backward(self, do, q, k, v, o, lse, shapes, params):
        assert do.shape == o.shape
        self.now += 1e-4
        return q, k, v


def test_costs_follow_the_time_of_calls(monkeypatch):
    kernel = CountedCalls()
    monkeypatch.setattr(device.time, "perf_counter", lambda: kernel.now)
    kind = AttentionKind(None, 1, 1, 12, 8)
    forward, backward, accuracy = device.measured_kernel(kernel, kind, torch.float32, CPU)
    assert (forward.pair, forward.call, forward.task) == pytest.approx((2e-9, 1e-5, 3e-6), rel=1e-6)
    assert (backward.pair, backward.call, backward.task) == pytest.approx(
        (0.0, 1e-4, 0.0), abs=1e-15
    )
    assert accuracy.worst_ratio == pytest.approx(1.0)
    assert kernel.widths == {(12, 12, 8)}  # values may have another width


def test_short_calls_do_not_distort_the_costs_of_long_calls():
    """A pair takes 3 s in short calls, and 1 s in long ones."""
    rows = np.array([8.0, 16.0, 32.0, 512.0, 1024.0, 2048.0])
    tasks = Tasks(rows, rows, rows * rows, np.ones(6), np.zeros(6), np.zeros(6))
    seconds = tasks.pairs * np.array([3.0, 3.0, 3.0, 1.0, 1.0, 1.0])
    assert device.fitted_cost(tasks, seconds).seconds(tasks)[3:] == pytest.approx(
        seconds[3:], rel=0.05
    )


def test_short_tasks_have_few_rows_beside_many_keys_and_fit_into_a_document():
    assert device.short_calls("cpu", 2048)[-1] == ([64] * 4, [1024, 1025, 1026, 1027])
    assert device.short_calls("cpu", 32) == [([32] * 4, [32, 33, 34, 35])] * 3
    of_gpus = device.short_calls("cuda", np.inf)
    assert [(q_lens[0], k_lens[0]) for q_lens, k_lens in of_gpus] == [
        (64, 2048), (64, 8192), (128, 2048), (128, 8192), (256, 2048), (256, 8192)
    ]  # fmt: skip
    # Rows, keys, pairs, one call, rows times the rows of their tasks, and tasks.
    assert device.counted_call([2, 3], [4, 5]) == (5, 9, 3 + 4 + 3 + 4 + 5, 1, 4 + 9, 2)


def _links():
    exchanges = PeerExchanges(Groups(CPU, 60.0), CPU)
    links = [
        measured_link(exchanges, [1, 2, 0], alone=alone, limit_s=0.5) for alone in (False, True)
    ]
    return links, link_rates(exchanges)


def test_ranks_measure_the_same_links_in_both_directions(rank_pools):
    measured = rank_pools[3].run(_links)
    assert measured[0] == measured[1] == measured[2]
    links, rates = measured[0]
    for link in links:
        assert link.latency >= 0
        assert 1e6 < link.bandwidth < np.inf
    assert sorted(rates) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert all(0 < rate < 1000 for rate in rates.values())


def test_a_rate_counts_for_the_link_over_which_a_rank_receives(monkeypatch):
    """8 GB: ranks 0, 1 and 2 take 1, 2 and 4 s from the rank before them, 10, 20 and 40 s from the
    one after.
    """
    seconds = {
        (1, 2, 0): [1.0, 2.0, 4.0],
        (2, 0, 1): [10.0, 20.0, 40.0],
    }  # by the ranks that receive
    monkeypatch.setattr(
        links,
        "_timed",
        lambda _, peers, **__: (
            np.array([1.0, 8e9]),
            np.array([[9.0] * 3, seconds[tuple(peers)]]),
        ),
    )
    rates = link_rates(SimpleNamespace(groups=SimpleNamespace(ranks=3)))
    assert rates == pytest.approx(
        {(2, 0): 8, (0, 1): 4, (1, 2): 2, (1, 0): 0.8, (2, 1): 0.4, (0, 2): 0.2}
    )


def test_small_exchanges_that_a_network_buffers_do_not_set_the_bandwidth(monkeypatch):
    measured = np.array([64.0, 512.0, 4096.0]), np.array([[0.2], [11.0], [157.0]])
    monkeypatch.setattr(links, "_timed", lambda *_, **__: measured)
    assert measured_link(None, []).bandwidth == pytest.approx(4096 / 157, rel=0.3)


def _per_core(hosts: tuple[str, str], cores: tuple[int, int]) -> float:
    """Six threads a rank, on these hosts with so many cores."""
    groups = Groups(CPU, 60.0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(socket, "gethostname", lambda: hosts[groups.rank])
        patched.setattr(os, "sched_getaffinity", lambda _: set(range(cores[groups.rank])))
        patched.setattr(torch, "get_num_threads", lambda: 6)
        return ranks_per_core(groups)


@pytest.mark.parametrize(
    ("hosts", "cores", "expected"),
    [
        (("a", "a"), (3, 3), 4.0),
        (("a", "a"), (9, 9), 4 / 3),
        (("a", "a"), (24, 24), 1.0),
        (("a", "a"), (9, 2), 4 / 3),  # the cores of a host are those of any rank
        (("a", "b"), (1, 3), 2.0),  # six threads a core on one host, two on the other
        (("a", "b"), (24, 3), 1.0),
    ],
)
def test_threads_of_ranks_per_core(rank_pools, hosts, cores, expected):
    assert rank_pools[2].run(_per_core, hosts, cores) == [expected] * 2


def test_products_and_memory_are_counted_in_operations_and_bytes_there_and_back(monkeypatch):
    """Every call takes two seconds: matrices of 1024 and 32 rows of 8 numbers, and a norm that
    reads and writes.
    """
    kind, cost = AttentionKind(None, 1, 1, 8, 8), KernelCost(0.0, 0.0, 0.0, 1.0)
    monkeypatch.setattr(device, "median_seconds", lambda *_: 2.0)
    monkeypatch.setattr(
        device, "measured_kernel", lambda *_, **__: (cost, cost, Accuracy(1.0, 1.0, 0))
    )
    profile = device.measured_profile(SimpleNamespace(name="none"), kind, 8, torch.float32, CPU)
    assert profile.flops_per_second == 2 * 1024 * 32 * 8 / 2
    assert profile.bytes_per_second == 2 * (1024 * 8 * 4) / 2


@pytest.mark.parametrize(
    ("ranks", "per_node", "inside", "across"),
    [
        (4, 2, [1, 0, 3, 2], [2, 3, 0, 1]),
        (
            4,
            4,
            [1, 2, 3, 0],
            [1, 2, 3, 0],
        ),  # one node, and below as many nodes as ranks: links alike
        (4, 1, [1, 2, 3, 0], [1, 2, 3, 0]),
        (3, (1, 2), [0, 2, 1], [0, 2, 1]),  # no pairs between nodes of different sizes
        (6, 3, [1, 2, 0, 4, 5, 3], [3, 4, 5, 0, 1, 2]),
    ],
)
def test_peers_in_the_node_and_in_the_next_one(ranks, per_node, inside, across):
    assert peers_of(ranks, per_node) == (inside, across)


@pytest.mark.parametrize("slow", ["inside", "across"])
def test_ranks_agree_on_the_mean_of_their_profiles_and_on_the_links_that_they_measured(
    monkeypatch, slow
):
    mine, other = (
        replace(
            DeviceProfile.load("cpu"),
            forward=KernelCost(*(scale * np.arange(1.0, 7.0))),
            backward=KernelCost(*(scale * np.arange(2.0, 8.0))),
            flops_per_second=scale * 10.0, bytes_per_second=scale * 20.0, launches=scale * 30.0,
        )
        for scale in (1.0, 3.0)
    )  # fmt: skip
    inside, across = peers_of(4, 2)
    links_of = {
        tuple(inside): LinkCost(1.0, 5.0),
        tuple(across): LinkCost(2.0, 50.0 if slow == "inside" else 0.5),
    }
    beside: list[list[int]] = []

    def beside_computation(_, peers):
        beside.append(peers)
        return 0.25, 0.125

    monkeypatch.setattr(links, "measured_link", lambda _, peers, **__: links_of[tuple(peers)])
    monkeypatch.setattr(links, "_beside_computation", beside_computation)
    monkeypatch.setattr(links, "ranks_per_core", lambda _: 7.0)
    groups = SimpleNamespace(ranks=4, all_gather=lambda _: [mine, other])
    agreed = with_links(mine, SimpleNamespace(groups=groups, device=CPU), 2)
    assert beside == [inside if slow == "inside" else across]
    assert agreed.exchange == agreed.links == Links(*links_of.values(), 0.25, 0.125)
    assert (agreed.flops_per_second, agreed.bytes_per_second, agreed.launches) == (20, 40, 60)
    assert (agreed.forward, agreed.backward) == (
        KernelCost(2, 4, 6, 8, 10, 12),
        KernelCost(4, 6, 8, 10, 12, 14),
    )
    assert agreed.ranks_per_core == 7.0


def test_the_own_time_of_an_exchange_is_what_computation_beside_it_takes_longer(monkeypatch):
    # A product, then the products beside the exchange, and the products alone.
    seconds = iter([0.001, 0.5, 0.3])
    monkeypatch.setattr(links, "median_seconds", lambda *_: next(seconds))
    exchanges = MagicMock(device=CPU, row_bytes=8)
    exchanges.groups.all_gather = lambda value: [value, value]
    start_s, lost_s_per_byte = links._beside_computation(exchanges, [0])
    assert start_s >= 0
    assert lost_s_per_byte == pytest.approx(0.2 / (links.OVERLAP_ROWS * 8))
