"""Which ranks share a node: as launchers say it, on ranks that a test places on made-up hosts."""

import logging
import socket

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hf_distca.dispatch.nodes import ranks_per_node

ROUND_ABOUT = "ranks that share a host are not numbered one after another"


def _found(hosts, local_ranks, mesh_shape):
    """What a rank finds, and what it logs, where each rank has this host and this LOCAL_RANK."""
    rank = dist.get_rank()
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("hf_distca.dispatch.nodes")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(socket, "gethostname", lambda: hosts[rank])
            if local_ranks[rank] is None:
                patch.delenv("LOCAL_RANK")
            else:
                patch.setenv("LOCAL_RANK", str(local_ranks[rank]))
            mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp"))["dp"] if mesh_shape else None
            found = ranks_per_node(mesh, 60.0)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return found, messages


@pytest.mark.parametrize(
    ("hosts", "local_ranks", "expected", "logged"),
    [
        ("aaaa", [0, 1, 2, 3], 4, "4"),
        ("aabb", [0, 1, 0, 1], 2, "2, 2"),
        ("abbc", [0, 0, 1, 0], (1, 2, 1), "1, 2, 1"),
        ("abcd", [0, 0, 0, 0], 1, "1, 1, 1, 1"),
        ("aaaa", [0, 1, 0, 1], 2, "2, 2"),  # two launchers on one host, each with a share of its GPUs
        ("aabb", [0, 1, None, None], (2, 1, 1), "2, 1, 1"),
    ],
)
def test_nodes_of_a_launch(rank_pools, hosts, local_ranks, expected, logged):
    results = rank_pools[4].run(_found, hosts, local_ranks, None)
    assert results == [(expected, [f"ranks on each node, as launched: {logged}"]), *[(expected, [])] * 3]


def test_ranks_that_are_numbered_across_hosts(rank_pools):
    # By local ranks alone, rank 2 would be on the node of rank 1.
    (found, messages), *others = rank_pools[4].run(_found, "abaa", [0, 0, 1, 2], None)
    assert found == (1, 1, 2)
    assert [message.startswith(ROUND_ABOUT) for message in messages] == [True, False]
    assert others == [((1, 1, 2), [])] * 3


@pytest.mark.parametrize(
    ("hosts", "local_ranks", "shape", "logged", "expected"),
    [
        ("aabb", [0, 1, 0, 1], (2, 2), ["1, 1"] * 2, [1] * 4),
        ("aaab", [0, 1, 2, 0], (2, 2), ["2", "1, 1"], [2, 1, 2, 1]),
        ("aaab", [0, 1, 2, 0], (4, 1), ["3, 1"], [(3, 1)] * 4),
    ],
)
def test_a_mesh_says_how_many_of_its_ranks_share_a_node(rank_pools, hosts, local_ranks, shape, logged, expected):
    # With tensor parallelism of two, ranks 0 and 2 train together, and so do 1 and 3.
    results = rank_pools[4].run(_found, hosts, local_ranks, shape)
    told = [f"ranks on each node, as launched: {sizes}" for sizes in logged]
    assert [messages for _, messages in results] == [[message] for message in told] + [[]] * (4 - len(told))
    assert [found for found, _ in results] == expected


def test_without_a_world_all_links_are_alike():
    assert ranks_per_node(None, 60.0) == 1
